"""Twelve storage nodes as processes: two killed, both back, one that stalls; under verified load.

    python -m tests.campaign.kv_cluster            # what `make campaign-cluster` runs

Reads go through a real STORE process to real nodes with 10+2. Every payload is compared with what
was put. The stall is SIGSTOP for 500 ms out of every second; its tail is compared with that of the
same cluster unharmed, in rounds that take turns, so that a busy machine harms both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.kvstore.client import Block
from services.kvstore.tests.kit import blocks_of, token_ids
from services.kvstore.tests.process_kit import ROOT, NodeProcesses, loaded, node_processes
from tests.campaign import results

_STALL_S: Final = 0.5
_READS_A_ROUND: Final = 250
# No wait is without an end, so that a run that stands still says where. A busy machine needs most.
_STEP_S: Final = 600.0


@dataclass
class Outcome:
    """What was seen."""

    num_right: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    gap_s: list[float] = field(default_factory=list)
    puts: Counter[str] = field(default_factory=Counter)
    puts_again_s: list[float] = field(default_factory=list)
    backfill_s: list[float] = field(default_factory=list)
    p99_calm_s: list[float] = field(default_factory=list)
    p99_stalling_s: list[float] = field(default_factory=list)
    p50_calm_s: list[float] = field(default_factory=list)
    p50_stalling_s: list[float] = field(default_factory=list)


async def kill_two(
    n: NodeProcesses, blocks: list[Block], pair: tuple[int, int], out: Outcome
) -> None:
    """Kills two nodes under load, puts until all groups take puts again, brings both back."""
    async with loaded(n, blocks) as load:
        async with n.within(_STEP_S, "reads before the kill"):
            await load.progress(100, may_miss=True)
        load.forget()
        started_s = time.monotonic()
        for number in pair:
            await n.nodes[number].kill()
        before = await n.rebuilt()
        fresh = blocks_of(ROOT, token_ids(1000 + pair[0], 128 * 24))
        again_s = 0.0
        async with n.within(_STEP_S, "puts with two nodes away"):
            for block in fresh:
                while True:
                    status = await n.client.put(block)
                    out.puts[status.name.lower()] += 1
                    if status.is_stored:
                        break
                    again_s = time.monotonic() - started_s
                    await asyncio.sleep(0.1)
        out.puts_again_s.append(again_s)
        async with n.within(_STEP_S, "reads with two nodes away"):
            await load.progress(200, may_miss=True)
        out.gap_s.append(load.longest_gap_s)
        for number in pair:
            await n.nodes[number].start()
        await asyncio.gather(*(n.nodes[number].ready() for number in pair))
        back_s = time.monotonic()
        async with n.within(_STEP_S, "all nodes answer again"):
            await n.whole()
        # Two shards of each block that was put meanwhile.
        async with n.within(_STEP_S, "what was put meanwhile is whole"):
            await n.repaired(before + 2 * len(fresh))
        out.backfill_s.append(time.monotonic() - back_s)
        blocks += fresh
        async with n.within(_STEP_S, "reads of what was put meanwhile"):
            await load.progress(100, may_miss=True)
        out.misses.update(load.misses)
        out.num_right += load.num_right


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


async def stall(n: NodeProcesses, blocks: Sequence[Block], rounds: int, out: Outcome) -> None:
    """Reads in rounds, by turns with all nodes well and with one that stalls."""
    async with loaded(n, blocks, batch=1) as load:
        async with n.within(_STEP_S, "reads before the first round"):
            await load.progress(100, may_miss=True)
        for number in range(rounds):
            _say(f"round {number + 1} of {rounds}")
            load.forget()
            async with n.within(_STEP_S, "reads with all nodes well"):
                await load.progress(_READS_A_ROUND, may_miss=True)
            _add(out.p50_calm_s, out.p99_calm_s, load.read_s)
            pulses = asyncio.create_task(_pulse(n, number % len(n.nodes)))
            try:
                load.forget()
                async with n.within(_STEP_S, "reads with one node stalling"):
                    await load.progress(_READS_A_ROUND, may_miss=True)
                _add(out.p50_stalling_s, out.p99_stalling_s, load.read_s)
            finally:
                pulses.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pulses
        out.misses.update(load.misses)
        out.num_right += load.num_right


async def _pulse(n: NodeProcesses, number: int) -> None:
    try:
        while True:
            n.nodes[number].signal(signal.SIGSTOP)
            await asyncio.sleep(_STALL_S)
            n.nodes[number].signal(signal.SIGCONT)
            await asyncio.sleep(_STALL_S)
    finally:
        n.nodes[number].signal(signal.SIGCONT)


def _add(halves: list[float], tails: list[float], read_s: Sequence[float]) -> None:
    ordered = sorted(read_s)
    halves.append(statistics.median(ordered))
    tails.append(ordered[int(len(ordered) * 0.99)])


async def run(folder: Path, rounds: int, out: Outcome) -> None:
    """Runs all of it."""
    async with node_processes(folder, read_timeout_ms=5_000, put_timeout_ms=5_000) as n:
        blocks = blocks_of(ROOT, token_ids(1, 128 * 60))
        async with n.within(_STEP_S, "first puts"):
            await n.put_all(blocks)
        n.capacity = (await n.counts())[0]
        _say("all nodes are up, and blocks are put")
        await stall(n, blocks, rounds, out)
        for pair in ((2, 9), (0, 5)):
            _say(f"nodes {pair} are killed")
            await kill_two(n, blocks, pair, out)


def table(out: Outcome, spent_s: float, command: str) -> str:
    """Returns the result."""
    calm, stalling = statistics.median(out.p99_calm_s), statistics.median(out.p99_stalling_s)
    tails = statistics.median(
        stalled / well for well, stalled in zip(out.p99_calm_s, out.p99_stalling_s, strict=True)
    )
    halves = statistics.median(out.p50_stalling_s) / statistics.median(out.p50_calm_s)
    refused = sum(count for name, count in out.puts.items() if name == "dropped")
    rows = [
        ("command", f"`{command}`"),
        ("blocks read and compared", f"{out.num_right:,}"),
        ("misses", ", ".join(f"{why} {num}" for why, num in out.misses.items()) or "0"),
        ("two nodes killed: longest time without a right block",
         ", ".join(f"{gap:.2f} s" for gap in out.gap_s)),
        ("puts refused meanwhile (groups whose primary was killed)", str(refused)),
        ("last put refused after the kill", ", ".join(f"{s:.1f} s" for s in out.puts_again_s)),
        ("both back: until every block put meanwhile had its twelve shards",
         ", ".join(f"{s:.1f} s" for s in out.backfill_s)),
        ("one node stalling 500 ms of each second: p99 of a read, against all well",
         f"{tails:.2f} x (median of {len(out.p99_calm_s)} rounds; {stalling * 1e3:.0f} ms "
         f"against {calm * 1e3:.0f} ms)"),
        ("the same: median of a read", f"{halves:.2f} x"),
        ("load of the machine meanwhile", f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"),
        ("took", f"{spent_s / 60:.1f} min"),
    ]  # fmt: skip
    return results.table(("", ""), rows)


def main(argv: list[str] | None = None) -> int:
    """Runs the campaign and says what it showed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--write", action="store_true", help="put the result into docs/campaigns.md"
    )
    args = parser.parse_args(argv)
    logging.disable()
    out = Outcome()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pelagos-kv-cluster-") as folder:
        asyncio.run(run(Path(folder), args.rounds, out))
    text = table(
        out,
        time.monotonic() - started_s,
        f"python -m tests.campaign.kv_cluster --rounds {args.rounds}",
    )
    print(text)
    if args.write:
        results.write("kv-cluster", text)
    return int(bool(out.misses) or max(out.gap_s) > 1.0)


if __name__ == "__main__":
    sys.exit(main())
