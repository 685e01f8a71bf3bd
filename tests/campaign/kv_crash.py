"""The crash campaign of the KV store: seeded lives of a real process over real files.

    python -m tests.campaign.kv_crash --seeds 1000        # all of it; what `make campaign-kv` runs
    python -m tests.campaign.kv_crash --seed 417 -v       # one seed again, with what happened

Each life ends by SIGKILL, from outside or in the middle of a write; then files lose what was not
flushed (power), are cut, flipped or torn, or a full disk had refused writes meanwhile. After each,
every block is read: never wrong bytes, and with `put_ack = durable` nothing acknowledged is lost
unless the damage hit its own bytes: the embedded store keeps one copy. The seeds over nodes
(`kv_crash_nodes`) know no such excuse. What a kill interrupts is a race, so a seed repeats its plan
exactly and its timing nearly.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign.kv_damage import INDEX_LOG, META_LOG, damage, lose_power
from tests.campaign.kv_ledger import Ledger
from tests.campaign.kv_plan import NUM_CHAINS, Life, Op, Plan, block_of, keys_of, plan_of, tenant_of
from tests.campaign.kv_writer import fork_life


@dataclass
class Report:
    """What a seed showed."""

    seed: int
    faults: list[str] = field(default_factory=list)
    num_acknowledged: int = 0
    num_checked: int = 0
    problems: list[str] = field(default_factory=list)


def run_seed(seed: int, parent: Path | None = None, is_verbose: bool = False) -> Report:
    """Runs one seed in a folder of its own and returns what it showed."""
    plan = plan_of(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"pelagos-kv-crash-{seed}-", dir=parent))
    try:
        return _Seed(plan, folder, is_verbose).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Seed:
    def __init__(self, plan: Plan, folder: Path, is_verbose: bool) -> None:
        self._plan = plan
        self._folder = folder
        self._is_verbose = is_verbose
        self._ledger = Ledger(plan.durable)
        self._report = Report(plan.seed)
        self._rng = random.Random(f"kv-crash damage {plan.seed}")

    def run(self) -> Report:
        self._tell(f"{self._plan.num_slots} slots, {self._plan.segment_slots} a segment, "
                   f"durable {self._plan.durable}, twin {self._plan.plain}")  # fmt: skip
        for number, life in enumerate((*self._plan.lives, None)):
            self._live(life)
            if self._report.problems:
                self._report.problems = [f"life {number}: {p}" for p in self._report.problems]
                break
            if life is not None:
                self._end(life)
        self._report.num_acknowledged = self._ledger.num_acknowledged
        self._report.num_checked = self._ledger.num_checked
        return self._report

    def _live(self, life: Life | None) -> None:
        """Runs one process until it is killed, and takes note of all it said."""
        child, said = fork_life(self._plan, life, self._folder)
        num_answered = 0
        has_checked = has_ended = False
        try:
            for line in lines_of(said):
                self._hear(life, line)
                has_checked |= "checked" in line
                has_ended |= "ended" in line
                num_answered += "answered" in line
                if life is not None and (has_ended or num_answered == life.kill_after):
                    os.kill(child, signal.SIGKILL)
        finally:
            os.close(said)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        may_die_early = life is not None and life.torn_write > 0
        if not (has_ended if life is None else has_checked or may_die_early):
            self._report.problems.append("it did not open")
        self._ledger.died()

    def _hear(self, life: Life | None, line: dict[str, Any]) -> None:
        ledger, problems = self._ledger, self._report.problems
        if self._is_verbose and "seen" not in line:
            what = life.ops[line["begins"]] if life is not None and "begins" in line else ""
            self._tell(f"{line} {what}")
        if "failed" in line:
            problems.append(line["failed"])
        elif "seen" in line:
            wrong = ledger.check(bytes.fromhex(line["seen"]), line["as_"])
            if wrong:
                self._tell(wrong)
                problems.append(wrong)
        elif "checked" in line:
            ledger.reopened()
        elif "leaving" in line:
            ledger.removal_begins(map(bytes.fromhex, line["leaving"]))
        elif life is not None and "begins" in line:
            self._begins(life.ops[line["begins"]], line["begins"])
        elif life is not None and "answered" in line:
            self._answered(life.ops[line["answered"]], line["answered"], line["result"])

    def _begins(self, op: Op, number: int) -> None:
        if op.kind == "put":
            self._ledger.put_begins(block_of(op, self._plan.seed).key)
        elif op.kind == "erase":
            tenant = tenant_of(op.chain)
            chains = [n for n in range(NUM_CHAINS) if tenant_of(n) == tenant]
            keys = [key for n in chains for key in keys_of(n, self._plan.seed)[1:]]
            self._ledger.erasure_begins(number, keys)

    def _answered(self, op: Op, number: int, result: str) -> None:
        if op.kind == "put":
            key = block_of(op, self._plan.seed).key
            self._ledger.put_answered(key, result, not op.variant)
        elif op.kind == "erase":
            self._ledger.erasure_ended(number, result == "done")
        elif result == "wrong":
            self._report.problems.append(f"wrong bytes while it worked: {op}")
        elif op.kind == "scrub" and result != "0 bad" and not self._report.faults:
            self._report.problems.append(f"scrub found {result} on an undamaged disk")

    def _end(self, life: Life) -> None:
        """Does to the files what the life's fault says."""
        self._report.faults.append(life.fault)
        store, ledger = self._folder / "store", self._ledger
        if life.fault == "power" and (self._folder / "flushed").exists():
            lose_power(store, self._folder / "flushed", self._rng)
            ledger.power_lost()
        elif life.fault in ("truncate", "flip", "torn"):
            hurt = damage(store, life.fault, self._rng)
            self._tell(f"{life.fault}: {hurt.files}")
            ledger.damaged(hurt.keys16)
            if META_LOG in hurt.files:
                ledger.order_lost()
                if INDEX_LOG in hurt.files:
                    ledger.logs_damaged()
        shutil.rmtree(self._folder / "flushed", ignore_errors=True)

    def _tell(self, what: str) -> None:
        if self._is_verbose:
            print(f"  {what}", flush=True)


def lines_of(file: int) -> Iterator[dict[str, Any]]:
    """Yields what a process says, until it is dead and all of it is read."""
    rest = b""
    while piece := os.read(file, 1 << 16):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield json.loads(line)
