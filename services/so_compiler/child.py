"""The child that compiles: reads a job, answers, reads the next; ends with its parent.

Frames on stdin and stdout: u32 length, then JSON; an answer is preceded by a frame that says the
child has the job. Before each job the process gives itself the job's CPU seconds, and once its
memory bound; what goes over is killed by the kernel, and the parent reports GRAMMAR_BUDGET. One
nasty grammar can thus hurt nothing but its own request (S-06, UR-64).
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import struct
import sys
import time
from dataclasses import replace
from typing import Any, BinaryIO

from services.common.errors import Failure, Reason
from services.so_compiler.config import GrammarLimits

_MAX_FRAME_BYTES = 1 << 26


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answers jobs until the parent closes the pipe."""
    from services.so_compiler.grammar import build_grammar

    bounded = False
    while (frame := read_frame(source)) is not None:
        job = json.loads(frame)
        limits = replace(GrammarLimits(), **job["limits"])
        if not bounded:
            bounded = True
            _bound_memory(limits.memory_bytes)
        _bound_cpu(limits.cpu_s)
        write_frame(sink, b'{"has_job": true}')  # from here on an end is the grammar's doing
        started_s = time.process_time()
        answer: dict[str, Any]
        try:
            compiled = build_grammar(job["type"], job["source"], job["special_ids"], limits)
            answer = {
                "data": base64.b64encode(compiled.data).decode("ascii"),
                "warnings": compiled.warnings,
            }
        except Failure as failure:
            answer = _failed(failure.reason, failure.message, failure.metadata)
        except (MemoryError, RecursionError):
            answer = _failed(Reason.GRAMMAR_BUDGET, "the grammar needs too much memory", {})
        except Exception as error:
            answer = _failed(Reason.INTERNAL, type(error).__name__, {})
        answer["cpu_ms"] = round(1000 * (time.process_time() - started_s))
        write_frame(sink, json.dumps(answer).encode())


def read_frame(source: BinaryIO) -> bytes | None:
    """Returns the next frame, None at the end."""
    head = source.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    if length > _MAX_FRAME_BYTES:
        return None
    data = source.read(length)
    return data if len(data) == length else None


def write_frame(sink: BinaryIO, data: bytes) -> None:
    """Writes one frame."""
    sink.write(struct.pack("<I", len(data)) + data)
    sink.flush()


def _failed(reason: Reason, message: str, metadata: dict[str, str]) -> dict[str, Any]:
    return {"reason": reason.value, "message": message, "metadata": metadata}


def _bound_cpu(cpu_s: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = math.ceil(usage.ru_utime + usage.ru_stime + cpu_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))


def _bound_memory(extra_bytes: int) -> None:
    """Allows so much beyond what the interpreter and the backend take already."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = size + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold the tenant's schema


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
