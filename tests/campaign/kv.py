"""The crash campaign of the KV store as one command.

    python -m tests.campaign.kv                         # 1,000 seeds; `make campaign-kv`
    python -m tests.campaign.kv --seed 417 --verbose    # one seed again, with what happened
    python -m tests.campaign.kv --seeds 50 --first 7000 # other seeds

Most seeds run lives of the embedded store (`kv_crash`); one of a hundred runs erasure-coded nodes
(`kv_crash_nodes`). Exit status 1 when any seed shows wrong bytes, a lost block that was
acknowledged, an erased one that is back, or a store that does not open.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tests.campaign import results
from tests.campaign.kv_crash import Report, run_seed
from tests.campaign.kv_crash_nodes import run_nodes_seed

NODES_EVERY: Final = 100


def run_any(seed: int, parent: Path | None = None, is_verbose: bool = False) -> Report:
    """Runs a seed of either kind."""
    run = run_nodes_seed if seed % NODES_EVERY == 7 else run_seed
    return run(seed, parent, is_verbose)


@dataclass
class Totals:
    """What many seeds showed."""

    num_seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    num_acknowledged: int = 0
    num_checked: int = 0
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Counts one seed in."""
        self.num_seeds += 1
        self.faults.update(report.faults)
        self.num_acknowledged += report.num_acknowledged
        self.num_checked += report.num_checked
        if report.problems:
            self.failed[report.seed] = report.problems


def run_all(seeds: Iterable[int], num_jobs: int, parent: Path | None) -> Iterator[Report]:
    """Yields the report of every seed, from workers that share them out."""
    shares: list[list[int]] = [[] for _ in range(num_jobs)]
    for number, seed in enumerate(seeds):
        shares[number % num_jobs].append(seed)
    workers = dict(reversed(_worker(share, parent)) for share in shares)
    rest = dict.fromkeys(workers, b"")
    while rest:
        ready, _, _ = select.select(list(rest), [], [])
        for said in ready:
            piece = os.read(said, 1 << 16)
            if not piece:
                os.close(said)
                del rest[said]
                if os.waitpid(workers[said], 0)[1]:
                    raise RuntimeError("a worker of the campaign failed")
                continue
            *whole, rest[said] = (rest[said] + piece).split(b"\n")
            for line in whole:
                yield Report(**json.loads(line))


def _worker(seeds: list[int], parent: Path | None) -> tuple[int, int]:
    # A fork from a process without threads: each worker forks lives in its turn.
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        for seed in seeds:
            os.write(writing, json.dumps(asdict(run_any(seed, parent))).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def _table(totals: Totals, spent_s: float, command: str) -> str:
    faults = ", ".join(f"{name} {count:,}" for name, count in sorted(totals.faults.items()))
    wrong = sum("wrong" in p for problems in totals.failed.values() for p in problems)
    lost = sum("lost" in p for problems in totals.failed.values() for p in problems)
    other = sum(len(problems) for problems in totals.failed.values()) - wrong - lost
    rows = [
        ("command", f"`{command}`"),
        ("seeds", f"{totals.num_seeds:,}"),
        ("lives ended by", faults),
        ("puts acknowledged", f"{totals.num_acknowledged:,}"),
        ("blocks read back and checked", f"{totals.num_checked:,}"),
        ("wrong bytes", str(wrong)),
        ("acknowledged and lost", str(lost)),
        ("anything else", str(other)),
        ("failing seeds", ", ".join(map(str, sorted(totals.failed))) or "none"),
        ("took", f"{spent_s / 60:.1f} min"),
    ]
    return results.table(("", ""), rows)


def main(argv: list[str] | None = None) -> int:
    """Runs seeds and says what they showed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where the stores lie; default: the temporary folder"
    )
    parser.add_argument(
        "--write", action="store_true", help="put the result into docs/campaigns.md"
    )
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args(argv)
    parent = args.folder or Path(tempfile.gettempdir())
    if args.seed is not None:
        report = run_any(args.seed, parent, args.verbose)
        print(json.dumps(asdict(report)))
        return bool(report.problems)
    started_s = time.monotonic()
    totals = Totals()
    for report in run_all(range(args.first, args.first + args.seeds), args.jobs, parent):
        totals.add(report)
        if report.problems:
            print(f"seed {report.seed}: {report.problems[:3]}", flush=True)
    command = f"python -m tests.campaign.kv --seeds {args.seeds} --first {args.first}"
    text = _table(totals, time.monotonic() - started_s, command)
    print(text)
    if args.write:
        results.write("kv-crash", text)
    return bool(totals.failed)


if __name__ == "__main__":
    sys.exit(main())
