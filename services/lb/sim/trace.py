"""Reads public request traces: when a request came, how long it was, what its prefix shared."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.cost_model import CostModel

TOKENS_PER_HASH_ID = 512
MIN_RECOMPUTED = 134  # the hit rule never covers the last ring of a prompt


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace. `hash_ids` name the prompt's blocks of 512 tokens, in order."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]


def data_folder() -> Path:
    """Returns the folder with the shared data sets: $PELAGOS_DATA, else ../shared/data."""
    configured = os.environ.get("PELAGOS_DATA")
    return Path(configured) if configured else Path(__file__).parents[4] / "shared" / "data"


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    """Returns the requests of a JSON-lines trace, in order of arrival.

    Raises: FileNotFoundError; ValueError for a line that is no request.
    """
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if max_requests is not None and len(requests) >= max_requests:
                break
            try:
                record = json.loads(line)
                request = TraceRequest(
                    record["timestamp"] / 1_000,
                    int(record["input_length"]),
                    int(record["output_length"]),
                    tuple(record["hash_ids"]),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from error
            requests.append(request)
    return requests


def cold_work_ns(trace: Sequence[TraceRequest], model: CostModel) -> list[float]:
    """Returns each request's prefill cost when every earlier request's blocks are cached."""
    seen: set[int] = set()
    work: list[float] = []
    for request in trace:
        num_leading = 0
        for hash_id in request.hash_ids:
            if hash_id not in seen:
                break
            num_leading += 1
        seen.update(request.hash_ids)
        length = request.num_prompt_tokens
        present = max(0, min(TOKENS_PER_HASH_ID * num_leading, length - MIN_RECOMPUTED))
        work.append(model.cost(length - present, present))
    return work
