"""`make bench-kv`: the KV cache store beside the packages that do parts of the same.

The peers live in a virtual environment of their own (`peers.py`); one that is missing is left out
with a message. The measurements against them run there, contenders taking turns in one process;
the match RPC runs between this checkout's own processes. Medians in processor time, ratios turn by
turn: on a busy machine the clock measures the neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from services.kvstore.benchmarks import part_rpc, peers, report
from services.kvstore.benchmarks.measure import DEADLINE_S
from services.kvstore.benchmarks.timing import Section

REPORT: Final = peers.ROOT / "docs" / "performance" / "kvstore.md"
# Past its own deadline a part says where it stood and ends; this is for one that cannot.
_PART_S: Final = DEADLINE_S + 60


def main(argv: Sequence[str] | None = None) -> int:
    """Installs the peers, measures, writes the report."""
    parser = argparse.ArgumentParser(description="Benchmarks the KV cache store.")
    parser.add_argument("--quick", action="store_true", help="fewer turns, smaller tables")
    parser.add_argument("--no-peers", action="store_true", help="ours alone, nothing to install")
    parser.add_argument("--report", type=Path, default=REPORT, help="where the tables go")
    args = parser.parse_args(argv)
    python = Path(sys.executable) if args.no_peers else peers.install()
    sections, left_out = measure(python, args.quick)
    try:
        sections += [section.to_json() for section in asyncio.run(_rpc(args.quick))]
    except TimeoutError:
        left_out.append(f"the part `rpc`: not done in {_PART_S:.0f} s")
    command = " ".join(["make bench-kv", *(["ARGS=--quick"] if args.quick else [])])
    text = report.to_markdown(sections, left_out, command)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(report.splice(args.report, text), "utf-8")
    print(text)
    return 0


async def _rpc(quick: bool) -> list[Section]:
    async with asyncio.timeout(_PART_S):
        return await part_rpc.run(quick)


def measure(python: Path, quick: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs the parts that have peers with this Python; returns sections and what is missing."""
    sections: list[dict[str, Any]] = []
    left_out: list[str] = []
    environment = {**os.environ, "PYTHONPATH": str(peers.ROOT), "OMP_NUM_THREADS": "1"}
    for part in ("match", "blocks", "codes"):
        with tempfile.NamedTemporaryFile(suffix=".json") as output:
            command = [str(python), "-m", "services.kvstore.benchmarks.measure", output.name, part]
            command += ["--quick"] if quick else []
            try:
                subprocess.run(
                    command, env=environment, cwd=peers.ROOT, check=True, timeout=_PART_S
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                left_out.append(f"the part `{part}`: {error}")
                continue
            found = json.loads(Path(output.name).read_text("utf-8"))
        sections += found["sections"]
        left_out += found["left_out"]
    return sections, left_out


if __name__ == "__main__":
    sys.exit(main())
