"""Asks the same questions in every way of running, and sets the answers side by side."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import Failure
from services.engine.evaluation.modes import Cache, Mode, hit_end
from services.engine.evaluation.questions import Asked, Said, is_right
from services.engine.evaluation.stack import HttpStack
from services.engine.evaluation.statistics import Interval, paired_difference, share
from services.engine.evaluation.tokens import TokenStack, until_stored


@dataclass(frozen=True)
class Graded:
    """One answer. `counts`: it came the way the mode says, so it may be compared."""

    said: Said
    right: bool
    counts: bool


@dataclass
class Scores:
    """Every mode's answers by question number."""

    asked: Sequence[Asked]
    by_mode: dict[str, dict[int, Graded]] = field(default_factory=dict)

    def kinds(self) -> list[str]:
        """Returns the kinds, in the order of the questions."""
        return list(dict.fromkeys(item.kind for item in self.asked))

    def share(self, mode: str, kind: str = "") -> tuple[int, Interval]:
        """Returns how many answers of a mode count, and the share of right ones."""
        right = [graded.right for graded in self._counted(mode, kind).values()]
        return len(right), share(sum(right), len(right))

    def difference(self, base: str, mode: str) -> tuple[int, Interval]:
        """Returns how many questions both have answers to, and share(mode) - share(base)."""
        first, second = self._counted(base), self._counted(mode)
        both = sorted(first.keys() & second.keys())
        return len(both), paired_difference(
            [first[number].right for number in both], [second[number].right for number in both]
        )

    def changed(self, base: str, mode: str) -> list[int]:
        """Returns the numbers of the questions whose answers differ in any way."""
        first, second = self._counted(base), self._counted(mode)
        return [
            number
            for number in sorted(first.keys() & second.keys())
            if _words(first[number].said) != _words(second[number].said)
        ]

    def errors(self) -> Counter[str]:
        """Returns the failures by their words."""
        return Counter(
            f"{mode}: {graded.said.error}"
            for mode, answers in self.by_mode.items()
            for graded in answers.values()
            if graded.said.error
        )

    def _counted(self, mode: str, kind: str = "") -> dict[int, Graded]:
        answers = self.by_mode.get(mode, {})
        return {
            item.number: answers[item.number]
            for item in self.asked
            if item.number in answers and answers[item.number].counts and kind in ("", item.kind)
        }


class Asker:
    """Asks one stack. `run_id` makes the cache salts of a run its own."""

    def __init__(
        self,
        http: HttpStack,
        tokens: TokenStack | None,
        run_id: str,
        *,
        parallel: int = 8,
        max_tokens: int = 160,
        on_answer: Callable[[str, int], None] = lambda mode, done: None,
    ) -> None:
        self._http = http
        self._tokens = tokens
        self._run_id = run_id
        self._turns = asyncio.Semaphore(parallel)
        self._max_tokens = max_tokens
        self._on_answer = on_answer
        self._num_asked = 0

    async def run(self, mode: Mode, asked: Sequence[Asked]) -> dict[int, Graded]:
        """Asks every question in one way; returns the answers by number."""
        if self._tokens is not None:
            await self._tokens.set_dspark(mode.dspark)
        done: dict[int, Graded] = {}

        async def one(item: Asked) -> None:
            async with self._turns:
                done[item.number] = await self._ask(mode, item)
            self._on_answer(mode.name, len(done))

        try:
            async with asyncio.TaskGroup() as group:
                for item in asked:
                    group.create_task(one(item))
        finally:
            if self._tokens is not None and mode.dspark != "variable":
                await self._tokens.set_dspark("variable")
        return done

    async def _ask(self, mode: Mode, item: Asked) -> Graded:
        salt = f"{self._run_id}/{mode.name}/{item.number}"
        body = {
            **item.question.body(),
            "temperature": 0,
            "seed": item.number,  # where the API draws, as in thinking, it draws alike in all modes
            "max_tokens": self._max_tokens,
        }

        moved = not mode.moves

        async def once() -> Said:
            nonlocal moved
            self._num_asked += 1
            request_id = f"{self._run_id}-{self._num_asked}"
            work = asyncio.to_thread(self._http.ask, body, salt=salt, request_id=request_id)
            if not mode.moves or self._tokens is None:
                return await work
            said, moved = await self._tokens.moving(request_id, work)
            return said

        try:
            if mode.cache is Cache.NOTHING or self._tokens is None:
                said = await once()
                counts = mode.cache is Cache.NOTHING and said.cached_tokens == 0
            else:
                position = await self._prime(mode.cache, body, salt)
                if position == 0:
                    return Graded(await once(), right=False, counts=False)
                said = await until_stored(once, lambda said: _came(said, mode.cache, position))
                counts = _came(said, mode.cache, position)
        except Failure as failure:
            return Graded(Said(error=str(failure)), right=False, counts=False)
        right = not said.error and is_right(item.question, said)
        return Graded(said, right, (counts and moved) or bool(said.error))

    async def _prime(self, cache: Cache, body: dict[str, Any], salt: str) -> int:
        """Stores what the mode wants of a question's prompt; returns where the hit must end."""
        assert self._tokens is not None
        prompt = await self._tokens.prompt(body)
        block, ring, _ = await self._tokens.geometry()
        position = hit_end(len(prompt), block, ring)
        if cache is Cache.WITH_WINDOW and position:
            await self._tokens.prime(prompt, position, salt)
        elif cache is Cache.WITHOUT_WINDOW and position > block:
            # The window of a whole prompt lies behind the place where a hit may end.
            await self._tokens.prime(prompt, len(prompt) - 1, salt)
            return position - block
        elif cache is Cache.WITHOUT_WINDOW:
            return 0
        return position


def _came(said: Said, cache: Cache, position: int) -> bool:
    """Returns whether an answer used what was stored for it."""
    replayed = said.replayed_tokens > 0
    return said.cached_tokens == position and replayed == (cache is Cache.WITHOUT_WINDOW)


def _words(said: Said) -> str:
    return json.dumps([said.reasoning, said.content, said.calls])
