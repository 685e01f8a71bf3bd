"""Crash seeds over erasure-coded nodes: six nodes with 4+2 in one process that is killed at once.

What two nodes lose, their whole disks included, no acknowledged block may lose: there is no excuse
as the embedded store has one. Between two lives that hurt different nodes the store must have
repaired itself; a life that is killed before that is followed by damage to the same two.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.kvstore.client import Block
from services.kvstore.tests.cluster_kit import ROOT, Cluster, cluster
from services.kvstore.tests.kit import LAYOUT, blocks_of, token_ids
from tests.campaign.kv_crash import Report, lines_of
from tests.campaign.kv_damage import damage
from tests.campaign.kv_ledger import Ledger
from tests.campaign.kv_plan import Fault

NUM_NODES = 6
_DEADLINE_S = 240.0
_NUM_CHAINS = 5
_TRIES = 50


@dataclass(frozen=True)
class NodesLife:
    """What is put, when it dies, and which disks suffer how."""

    chains: tuple[int, ...]
    kill_after: int
    hurt: tuple[int, ...]
    fault: Fault | None  # None: the disks are empty afterwards


def lives_of(seed: int) -> list[NodesLife]:
    """Returns the lives of a seed."""
    rng = random.Random(f"kv-crash nodes {seed}")
    faults: tuple[Fault | None, ...] = ("kill", "truncate", "flip", "torn", None)
    lives = []
    for _ in range(rng.choice((1, 2))):
        chains = tuple(rng.sample(range(_NUM_CHAINS), 3))
        hurt = tuple(rng.sample(range(NUM_NODES), rng.choice((1, 2, 2))))
        lives.append(NodesLife(chains, rng.randrange(1, 12), hurt, rng.choice(faults)))
    return lives


def run_nodes_seed(seed: int, parent: Path | None = None, is_verbose: bool = False) -> Report:
    """Runs one seed in a folder of its own and returns what it showed."""
    folder = Path(tempfile.mkdtemp(prefix=f"pelagos-kv-nodes-{seed}-", dir=parent))
    try:
        return _NodesSeed(seed, folder, is_verbose).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _NodesSeed:
    def __init__(self, seed: int, folder: Path, is_verbose: bool) -> None:
        self._folder = folder
        self._is_verbose = is_verbose
        self._lives = lives_of(seed)
        self._blocks = {n: blocks_of(ROOT, token_ids(seed * 10 + n, 512)) for n in range(5)}
        self._ledger = Ledger(durable=True)
        self._report = Report(seed)
        self._rng = random.Random(f"kv-crash nodes damage {seed}")

    def run(self) -> Report:
        hurt: tuple[int, ...] = ()
        for life in (*self._lives, None):
            was_whole = self._live(life)
            if self._report.problems:
                break
            if life is None:
                continue
            hurt = life.hurt if was_whole or not hurt else hurt
            self._report.faults.append(f"nodes-{life.fault or 'empty'}")
            for number in hurt:
                self._hurt(self._folder / f"node-{number}", life.fault)
        self._report.num_acknowledged = self._ledger.num_acknowledged
        self._report.num_checked = self._ledger.num_checked
        return self._report

    def _hurt(self, node: Path, fault: Fault | None) -> None:
        if fault is None:
            shutil.rmtree(node)
        elif fault != "kill":
            damage(node, fault, self._rng)

    def _live(self, life: NodesLife | None) -> bool:
        """Runs one process until it is killed; returns whether the store had become whole."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _be_a_store(self._folder, self._blocks, life, writing)
        os.close(writing)
        num_answered = 0
        is_whole = has_checked = False
        try:
            for line in lines_of(reading):
                if self._is_verbose:
                    print(f"  {line}", flush=True)
                self._hear(line)
                is_whole |= "whole" in line
                has_checked |= "checked" in line
                num_answered += "answered" in line
                if life is not None and num_answered == life.kill_after:
                    os.kill(child, signal.SIGKILL)
        finally:
            os.close(reading)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not has_checked:
            self._report.problems.append("it did not open")
        self._ledger.died()
        return is_whole

    def _hear(self, line: dict[str, Any]) -> None:
        if "failed" in line:
            self._report.problems.append(line["failed"])
        elif "seen" in line:
            wrong = self._ledger.check(bytes.fromhex(line["seen"]), line["as_"])
            if wrong:
                self._report.problems.append(wrong)
        elif "begins" in line:
            self._ledger.put_begins(bytes.fromhex(line["begins"]))
        elif "answered" in line:
            key = bytes.fromhex(line["answered"])
            self._ledger.put_answered(key, line["result"], True)


def _be_a_store(
    folder: Path, blocks: dict[int, list[Block]], life: NodesLife | None, out: int
) -> None:
    """The child: never returns."""
    status = 1
    try:
        logging.disable()
        os.environ["GRPC_VERBOSITY"] = "NONE"  # of connections that are lost on purpose
        asyncio.run(_work(folder, blocks, life, out))
        status = 0
    except BaseException as error:
        _say(out, failed=repr(error)[-2000:])
    finally:
        os._exit(status)


def _say(out: int, **what: Any) -> None:
    os.write(out, json.dumps(what).encode() + b"\n")


async def _work(
    folder: Path, blocks: dict[int, list[Block]], life: NodesLife | None, out: int
) -> None:
    async with (
        asyncio.timeout(_DEADLINE_S),
        cluster(folder, NUM_NODES, {"put_ack": "durable"}, profile="4+2") as c,
    ):
        await _check(c, blocks, out)
        await c.repaired()
        _say(out, whole=True)
        if life is None:
            await _check(c, blocks, out)
            return

        async def put_chain(number: int) -> None:
            for block in blocks[number]:
                _say(out, begins=block.key.hex())
                status = await c.store.put(block)
                _say(out, answered=block.key.hex(), result=status.name.lower())

        await asyncio.gather(*(put_chain(number) for number in life.chains))
        # Killed from outside, at the latest now.
        os.kill(os.getpid(), signal.SIGKILL)


async def _check(c: Cluster, blocks: dict[int, list[Block]], out: int) -> None:
    """Reads everything, as engines do. What the index promises and a busy machine did not read in
    time is read again: late is not lost."""
    for some in blocks.values():
        seen = ["miss"] * len(some)
        for _ in range(_TRIES):
            await _read(c, some, seen)
            promised = [c.index.find(block.key[:16]) is not None for block in some]
            if not any(p and s == "miss" for p, s in zip(promised, seen, strict=True)):
                break
            await asyncio.sleep(0.2)
        for block, what in zip(some, seen, strict=True):
            _say(out, seen=block.key.hex(), as_=what)
    _say(out, checked=True)


async def _read(c: Cluster, some: list[Block], seen: list[str]) -> None:
    async with c.store.fetch(b"".join(block.key for block in some), LAYOUT) as parts:
        async for part in parts:
            if part.is_ok:
                is_right = part.payload == some[part.index].payload
                seen[part.index] = "exact" if is_right else "wrong"
