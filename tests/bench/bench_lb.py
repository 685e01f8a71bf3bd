"""What a decision of the balancers costs, against the budgets of kvcache-and-balancing.md, 20.

    python -m tests.bench.bench_lb [--repeat N] [--json]

Median and best of N runs (on a busy machine only the best says something); budgets are those for
pure Python on the reference machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from services.common.cost_model import CostModel
from services.lb.decode import balancer as dec
from services.lb.decode.policy import level_of, pick_rank
from services.lb.expert import policy as experts
from services.lb.prefill import events as ev
from services.lb.prefill.balancer import PrefillBalancer
from services.lb.prefill.state import BalancerConfig

# Name -> (microseconds allowed, how to measure one run in seconds, operations in it).
Case = tuple[float | None, Callable[[], float], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="bench_lb", description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = []
    for name, (budget_us, run, operations) in CASES.items():
        run()  # warm
        runs = [1e6 * run() / operations for _ in range(args.repeat)]
        rows.append(
            {
                "operation": name,
                "median_us": round(statistics.median(runs), 2),
                "best_us": round(min(runs), 2),
                "budget_us": budget_us,
            }
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    facts = {"python": platform.python_version(), "machine": platform.machine(), "commit": commit}
    if args.json:
        print(json.dumps({**facts, "rows": rows}, indent=2))
        return 0
    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    for row in rows:
        budget = "-" if row["budget_us"] is None else f"{row['budget_us']:g}"
        print(
            f"  {row['operation']:<50} median {row['median_us']:>10} us"
            f"   best {row['best_us']:>10}   budget {budget}"
        )
    return 0


def _timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _decode_table() -> dec.DecodeBalancer:
    balancer = dec.DecodeBalancer(dec.BalancerConfig(max_waiting_requests=10**6), 0.0)
    for instance in range(16):
        ranks = tuple(
            dec.RankReport(rank, 1_000 * rank + 100 * instance, rank, 10**9, 10**6)
            for rank in range(8)
        )
        report = dec.Report(f"d{instance:02}", "boot", "h:1", True, ranks, 1)
        balancer.on_event(report, 0.0)
    return balancer


def _decode_decision() -> float:
    ranks = _decode_table().rank_loads(0.0)

    def decide() -> None:
        for _ in range(500):
            pick_rank(ranks, 1_000, level_of([1_000], ranks))

    return _timed(decide)


def _decode_pick() -> float:
    balancer = _decode_table()
    picks = [dec.Pick(f"r{i}", f"r{i}", 1_000, 10.0) for i in range(500)]
    return _timed(lambda: [balancer.on_event(pick, 0.0) for pick in picks] and None)


def _inversion() -> float:
    model = CostModel()

    def invert() -> None:
        for present in range(0, 500_000, 100):
            model.invert(300_000_000, present, 1 << 20)

    return _timed(invert)


def _prefill(backlog: int) -> Callable[[], float]:
    def run() -> float:
        rules = BalancerConfig(rebuild_s=0.0, max_tenant_share=1.0, max_waiting_requests=10**6)
        balancer = PrefillBalancer(rules, 0.0)
        for engine in range(16):
            quota_ns = 1 if backlog else 10**15
            balancer.on_event(ev.EngineJoined(f"e{engine}", "boot", "h:1", quota_ns), 0.0)
        for index in range(backlog):
            key = f"b{index}"
            balancer.on_event(ev.Submitted(ev.Work(key, key, "acme", 1_000, 0, 1e9)), 0.0)
        works = [ev.Work(f"r{i}", f"r{i}", "acme", 3_000, 0, 1e9) for i in range(500)]
        return _timed(
            lambda: [balancer.on_event(ev.Submitted(work), 0.0) for work in works] and None
        )

    return run


def _expert_layer(num_steps: int, num_slots: int, num_ranks: int) -> Callable[[], float]:
    loads = np.random.default_rng(1).poisson(100, size=(num_steps, 384)).astype(float)
    return lambda: _timed(lambda: experts.place(loads, num_slots, num_ranks) and None)


CASES: dict[str, Case] = {
    "decode: rank choice, 128 ranks": (50.0, _decode_decision, 500),
    "decode: a pick with all bookkeeping, 128 ranks": (None, _decode_pick, 500),
    "chunk inversion": (3.0, _inversion, 5_000),
    "prefill: submit and offer, 16 engines": (None, _prefill(0), 500),
    "prefill: submit behind 1,500 others, 16 engines": (None, _prefill(1_500), 500),
    "expert: one layer, 100 steps, 400 slots, EP4": (None, _expert_layer(100, 400, 4), 1),
    "expert: one layer, 1,000 steps, 448 slots, EP64": (None, _expert_layer(1_000, 448, 64), 1),
}


if __name__ == "__main__":
    sys.exit(main())
