"""Log-probabilities through the stack against the network alone: what words cannot show.

Words catch lost or foreign state; a small error moves the log-probability of a right answer by
1e-4 or less and changes none. Two correct runs in fp32 differ by about 1e-6, so 2e-5 parts them.
Source: small-model.md, section 6.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from services.common.errors import Failure
from services.engine.evaluation.modes import Cache, Mode
from services.engine.evaluation.probes import Probe
from services.engine.evaluation.tokens import Output, TokenStack, until_stored

TOLERANCE: Final = 2e-5
MAX_TOKENS: Final = 16
STOP_IDS: Final = (1,)


@dataclass(frozen=True)
class Difference:
    """One answer against the network's own. `moved`: largest step of a log-probability."""

    changed: bool
    moved: float
    error: str = ""
    came: bool = True  # it took the way that was asked for


def compare(plain: Output, found: Output) -> Difference:
    """Returns how an answer differs; log-probabilities count as far as the words agree."""
    agreed = 0
    for one, other in zip(plain.token_ids, found.token_ids, strict=False):
        if one != other:
            break
        agreed += 1
    moved = max(
        (abs(plain.logprobs[at] - found.logprobs[at]) for at in range(agreed)),
        default=0.0,
    )
    return Difference(plain.token_ids != found.token_ids, moved, found.error)


@dataclass(frozen=True)
class Finding:
    """What a way of running, or a fault, did to all probes."""

    name: str
    differences: tuple[Difference, ...]

    @property
    def num_changed(self) -> int:
        """Returns how many answers have other words."""
        return sum(item.changed for item in self.differences if not item.error)

    @property
    def num_refused(self) -> int:
        """Returns how many requests failed: the engines themselves found the fault."""
        return sum(bool(item.error) for item in self.differences)

    @property
    def num_moved(self) -> int:
        """Returns how many answers left the tolerance, in words or in numbers."""
        return sum(
            item.changed or item.moved > TOLERANCE for item in self.differences if not item.error
        )

    @property
    def median(self) -> float:
        """Returns the median step of a log-probability, over answers whose words agree."""
        kept = [item.moved for item in self.differences if not item.changed and not item.error]
        return statistics.median(kept) if kept else math.nan

    @property
    def largest(self) -> float:
        """Returns the largest step of a log-probability, over answers whose words agree."""
        kept = [item.moved for item in self.differences if not item.changed and not item.error]
        return max(kept, default=math.nan)

    @property
    def num_astray(self) -> int:
        """Returns how many requests did not come the way that was asked for."""
        return sum(not item.came for item in self.differences if not item.error)

    @property
    def caught_by(self) -> str:
        """Returns what shows the fault in most answers, else what shows it at all."""
        answered = len(self.differences) - self.num_refused
        if 2 * self.num_changed > answered:
            return "words"
        if self.num_moved:
            return "log-probabilities"
        if self.num_refused:
            return "the engine refuses it"
        return "no trace"


class Measuring:
    """Runs probes through one stack, against answers of the network alone."""

    def __init__(
        self, tokens: TokenStack, probes: Sequence[Probe], run_id: str, parallel: int = 4
    ) -> None:
        self._tokens = tokens
        self._probes = probes
        self._run_id = run_id
        self._turns = asyncio.Semaphore(parallel)
        self._num_runs = 0

    async def mode(self, mode: Mode, expected: Mapping[str, Output]) -> Finding:
        """Runs every probe in one way. `expected`: by probe name."""
        await self._tokens.set_dspark(mode.dspark)
        try:
            found = await self._all(mode.name, mode.cache, expected, None, mode.moves)
        finally:
            await self._tokens.set_dspark("variable")
        return Finding(mode.name, found)

    async def fault(
        self, name: str, cache: Cache, expected: Mapping[str, Output], file: Path
    ) -> Finding:
        """Runs every probe with a fault; what it starts from is stored before, without one."""
        return Finding(name, await self._all(name, cache, expected, file))

    async def _all(
        self,
        name: str,
        cache: Cache,
        expected: Mapping[str, Output],
        file: Path | None,
        moves: bool = False,
    ) -> tuple[Difference, ...]:
        self._num_runs += 1
        salts = {p.name: f"{self._run_id}/{self._num_runs}/{p.name}" for p in self._probes}
        if cache is not Cache.NOTHING:
            await self._each(lambda probe: self._prime(probe, cache, salts[probe.name]))
        if file is not None:
            write_fault(
                file, name, {self._request_id(p): list(p.fact_blocks) for p in self._probes}
            )
        try:
            outputs = await self._each(lambda probe: self._ask(probe, salts[probe.name], moves))
        finally:
            if file is not None:
                write_fault(file, "", {})
        return tuple(
            _judged(compare(expected[probe.name], output), cache, probe, output, moves)
            for probe, output in zip(self._probes, outputs, strict=True)
        )

    async def _each(self, work: Callable[[Probe], Awaitable[Output]]) -> list[Output]:
        async def one(probe: Probe) -> Output:
            async with self._turns:
                return await work(probe)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(probe)) for probe in self._probes]
        return [task.result() for task in tasks]

    async def _prime(self, probe: Probe, cache: Cache, salt: str) -> Output:
        """Stores what the probe is to start from, and waits until it shows."""
        end = probe.position if cache is Cache.WITH_WINDOW else len(probe.prompt) - 1
        await self._tokens.prime(probe.prompt, end, salt)

        async def look() -> Output:
            # A prompt that differs behind the hit, so that it leaves no window state there.
            return await self._tokens.run(
                [*probe.prompt[: probe.position], *probe.prompt[: _tail(probe)]],
                salt=salt,
                max_tokens=1,
            )

        return await until_stored(look, lambda out: out.cached_tokens > 0)

    async def _ask(self, probe: Probe, salt: str, moves: bool) -> Output:
        work = self._tokens.run(
            probe.prompt,
            salt=salt,
            max_tokens=MAX_TOKENS,
            stop_ids=STOP_IDS,
            request_id=self._request_id(probe),
        )
        try:
            if not moves:
                return await work
            output, moved = await self._tokens.moving(self._request_id(probe), work)
            return replace(output, moved=moved)
        except Failure as failure:
            return Output((), (), error=str(failure))

    def _request_id(self, probe: Probe) -> str:
        return f"{self._run_id}-{self._num_runs}-{self._probes.index(probe)}"


def write_fault(file: Path, name: str, blocks: Mapping[str, Sequence[int]]) -> None:
    """Names the fault that the engines put into what they take in from now on."""
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps({"fault": name, "blocks": blocks}), encoding="utf-8")
    temporary.replace(file)


def _tail(probe: Probe) -> int:
    return len(probe.prompt) - probe.position


def _judged(
    difference: Difference, cache: Cache, probe: Probe, output: Output, moves: bool
) -> Difference:
    start = output.cached_tokens
    came = {
        Cache.NOTHING: start == 0,
        Cache.WITH_WINDOW: start == probe.position and output.replayed_tokens == 0,
        Cache.WITHOUT_WINDOW: start < probe.position and output.replayed_tokens > 0,
    }[cache] and output.moved == moves
    return Difference(difference.changed, difference.moved, difference.error, came)
