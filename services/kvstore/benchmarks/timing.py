"""Turns of several cases in one run, in processor time and by the clock.

On a busy machine the clock says how busy it was; processor time of everything that works for a case
(all threads of this process, and helper processes such as a server) says what the case costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


def helper_cpu_s(pid: int) -> float:
    """Returns the processor time of all threads of a process, in seconds to the nanosecond."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_text().split()[0])
        except (OSError, ValueError):  # a thread that ended between the two looks
            continue
    return total_ns / 1e9


@dataclass(frozen=True)
class Case:
    """One contender: `run(turn)` does the work once; `helpers` are processes that work for it."""

    name: str
    run: Callable[[int], Any]
    helpers: Sequence[int] = ()


@dataclass
class Times:
    """What a case took, turn by turn."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    @property
    def cpu(self) -> float:
        """Returns the median processor time."""
        return statistics.median(self.cpu_s)


def take_turns(cases: Sequence[Case], num_turns: int, num_warm: int = 2) -> dict[str, Times]:
    """Runs the cases one after the other, in another order each turn, so that none always finds
    the caches as the same neighbour left them. The first turns are not counted."""
    times = {case.name: Times() for case in cases}
    for turn in range(num_warm + num_turns):
        first = turn % len(cases)
        for case in [*cases[first:], *cases[:first]]:
            helpers_s = sum(map(helper_cpu_s, case.helpers))
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            case.run(turn)
            cpu_s = time.process_time() - cpu_s
            wall_s = time.perf_counter() - wall_s
            cpu_s += sum(map(helper_cpu_s, case.helpers)) - helpers_s
            if turn >= num_warm:
                times[case.name].cpu_s.append(cpu_s)
                times[case.name].wall_s.append(wall_s)
    return times


def ratio(times: Mapping[str, Times], above: str, below: str) -> float:
    """Returns the median over the turns of one case's processor time over another's."""
    pairs = zip(times[above].cpu_s, times[below].cpu_s, strict=True)
    return statistics.median(a / b for a, b in pairs)


@dataclass(frozen=True)
class Row:
    """One contender's line of a table. `scale` of the time is what `unit` counts."""

    name: str
    cpu: float
    wall: float
    unit: str


@dataclass(frozen=True)
class Claim:
    """A target and what was measured. `met` is None when a peer is missing."""

    what: str
    target: str
    measured: str
    met: bool | None


@dataclass
class Section:
    """A table of the report, its claims, and what the reader must know."""

    title: str
    note: str
    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def add(self, times: Mapping[str, Times], value: Callable[[float], float], unit: str) -> None:
        """Adds a line per case; `value` makes of the median seconds what the unit says."""
        for name, of in times.items():
            wall = statistics.median(of.wall_s)
            self.rows.append(Row(name, value(of.cpu), value(wall), unit))

    def claim_at_most(self, what: str, limit: float, measured: float | None, unit: str) -> None:
        """Adds a claim that something is at most so much."""
        self._claim(what, f"<= {limit:g}{unit}", measured, unit, lambda value: value <= limit)

    def claim_at_least(self, what: str, limit: float, measured: float | None, unit: str) -> None:
        """Adds a claim that something is at least so much."""
        self._claim(what, f">= {limit:g}{unit}", measured, unit, lambda value: value >= limit)

    def _claim(
        self,
        what: str,
        target: str,
        measured: float | None,
        unit: str,
        is_met: Callable[[float], bool],
    ) -> None:
        if measured is None:
            self.claims.append(Claim(what, target, "peer missing", None))
        else:
            self.claims.append(Claim(what, target, f"{measured:.3g}{unit}", is_met(measured)))

    def to_json(self) -> dict[str, Any]:
        """Returns the section as plain values."""
        return asdict(self)
