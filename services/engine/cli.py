"""`pelagos engine conformance ADDRESS`: runs the engine suite against any engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from services.common.errors import Failure
from services.common.rpc_client import Channels
from services.engine.conformance import Outcome, run_conformance

_USAGE = "usage: pelagos engine conformance ADDRESS"
_MARKS = {"passed": "pass", "failed": "FAIL", "not driven": "skip"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every driven check passed, 1 when one failed, 2 for a wrong call."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 2 or args[0] != "conformance":
        print(_USAGE, file=sys.stderr)
        return 2
    try:
        outcomes = asyncio.run(_run(args[1]))
    except Failure as failure:
        print(f"pelagos engine: {args[1]} does not answer: {failure}", file=sys.stderr)
        return 2
    for outcome in outcomes:
        detail = f": {outcome.detail}" if outcome.detail else ""
        print(f"{_MARKS[outcome.result]}  {outcome.name}{detail}")
    failed = sum(outcome.result == "failed" for outcome in outcomes)
    passed = sum(outcome.result == "passed" for outcome in outcomes)
    skipped = len(outcomes) - passed - failed
    print(f"{passed} passed, {failed} failed, {skipped} not driven")
    return 1 if failed else 0


async def _run(address: str) -> list[Outcome]:
    channels = Channels()
    try:
        return await run_conformance(channels, address)
    finally:
        await channels.close()
