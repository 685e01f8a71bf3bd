"""`pelagos sim`: replays a trace over the balancers' policies and prints how they fare.

pelagos sim [all|prefill|decode] [--trace FILE] [--engines N] [--load X] [--ranks N] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.cost_model import CostModel
from services.lb.prefill.policy import Steal
from services.lb.sim import decode_sim, prefill_sim
from services.lb.sim.decode_sim import DecodeSetup
from services.lb.sim.prefill_sim import PrefillSetup
from services.lb.sim.trace import TraceRequest, data_folder, read_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 2 for what it cannot do."""
    args = _parser().parse_args(argv)
    path = args.trace or data_folder() / "kv-traces" / "conversation_trace.jsonl"
    try:
        trace = read_trace(path)
        if not trace:
            raise ValueError(f"{path.name} holds no request")
        tables = _tables(args, trace)
    except FileNotFoundError:
        print(f"pelagos sim: no trace at {path}; give one with --trace", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"pelagos sim: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"trace": path.name, "requests": len(trace), **tables}, indent=2))
        return 0
    print(f"trace {path.name}, {len(trace)} requests")
    for name, rows in tables.items():
        print(f"\n{name}")
        _print_table(rows)
    return 0


def prefill_table(trace: Sequence[TraceRequest], setup: PrefillSetup) -> list[dict[str, Any]]:
    """Returns waits and imbalance of each way to queue (T-PRE-5)."""
    jobs = prefill_sim.jobs_of(trace, setup, CostModel())
    outcomes = {
        "one shared FIFO": prefill_sim.replay(jobs, setup, Steal.OFF, buckets=False),
        "buckets, steal any": prefill_sim.replay(jobs, setup, Steal.ANY),
        "buckets, steal shorter": prefill_sim.replay(jobs, setup, Steal.SHORTER),
        "buckets, steal off": prefill_sim.replay(jobs, setup, Steal.OFF),
        "round-robin": prefill_sim.replay_round_robin(jobs, setup.num_engines),
    }
    return [
        {
            "policy": name,
            "mean wait s": round(outcome.mean_wait_s, 2),
            "p95 wait s": round(outcome.p95_wait_s, 2),
            "busiest/mean": round(outcome.imbalance, 3),
        }
        for name, outcome in outcomes.items()
    ]


def decode_table(trace: Sequence[TraceRequest], setup: DecodeSetup) -> list[dict[str, Any]]:
    """Returns the imbalance of each rule to choose a rank (T-DEC-2)."""
    results = {
        name: decode_sim.imbalance(trace, setup, rule) for name, rule in decode_sim.RULES.items()
    }
    return [
        {
            "policy": name,
            "KV max/mean": round(result.kv_tokens, 3),
            "requests max/mean": round(result.requests, 3),
        }
        for name, result in results.items()
    ]


def _tables(args: argparse.Namespace, trace: list[TraceRequest]) -> dict[str, list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {}
    if args.what in ("all", "prefill"):
        # Engines start spread as T-PRE-5 has them, 10 : 4 : 2.
        if args.engines < 3:
            raise ValueError("--engines must be at least 3, one per bucket")
        if not 0 < args.load < 1:
            raise ValueError("--load must be between 0 and 1")
        middle = max(1, round(args.engines * 4 / 16))
        longest = max(1, round(args.engines * 2 / 16))
        lanes = (args.engines - middle - longest, middle, longest)
        setup = PrefillSetup(num_engines=args.engines, start_lanes=lanes, load=args.load)
        tables[f"prefill, {args.engines} engines, load {args.load}"] = prefill_table(trace, setup)
    if args.what in ("all", "decode"):
        if args.ranks < 1:
            raise ValueError("--ranks must be at least 1")
        decode = DecodeSetup(num_ranks=args.ranks)
        tables[f"decode, {args.ranks} ranks"] = decode_table(trace, decode)
    return tables


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pelagos sim", description="Replays a trace over the balancers' policies."
    )
    parser.add_argument("what", nargs="?", choices=("all", "prefill", "decode"), default="all")
    parser.add_argument("--trace", type=Path, help="JSON lines; the conversation trace if absent")
    parser.add_argument("--engines", type=int, default=16, help="prefill engines")
    parser.add_argument("--load", type=float, default=0.85, help="share of their time that is used")
    parser.add_argument("--ranks", type=int, default=64, help="decode ranks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _print_table(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])
    widths = [max(len(n), *(len(str(row[n])) for row in rows)) for n in names]
    for line in (dict(zip(names, names, strict=True)), *rows):
        cells = [
            str(line[n]).ljust(w) if i == 0 else str(line[n]).rjust(w)
            for i, (n, w) in enumerate(zip(names, widths, strict=True))
        ]
        print("  " + "  ".join(cells))


if __name__ == "__main__":
    sys.exit(main())
