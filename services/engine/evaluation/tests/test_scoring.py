"""Which answers count as given the way that a mode names."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import Failure, Reason
from services.engine.evaluation.modes import MODES, Mode
from services.engine.evaluation.questions import Said, pick
from services.engine.evaluation.scoring import Asker
from services.engine.evaluation.tokens import TokenStack


class Tokens(TokenStack):
    """Moves a request as told."""

    def __init__(self, result: Exception | bool) -> None:
        self._result = result
        self.asked: list[str] = []

    async def set_dspark(self, mode: str) -> None:
        pass

    async def _move(self, request_id: str) -> None:
        self.asked.append(request_id)
        if isinstance(self._result, Exception):
            raise self._result
        if not self._result:
            await asyncio.Event().wait()


class Http:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, body, *, salt, request_id):
        self.asked.append(request_id)
        return Said("hello", finish="stop")


@pytest.mark.parametrize(
    ("result", "counts"), [(True, True), (False, False), (Failure(Reason.INTERNAL, "x"), False)]
)
async def test_an_answer_counts_as_moved_only_where_its_request_was(result, counts):
    http, tokens = Http(), Tokens(result)
    asked = pick(1, kinds=("talk", "fact"))
    found = await Asker(http, tokens, "run").run(Mode("moved", "", moves=True), asked)
    assert [graded.counts for graded in found.values()] == [counts] * 2
    assert sorted(tokens.asked) == sorted(http.asked)
    found = await Asker(http, tokens, "run").run(Mode("cold", ""), asked)
    assert all(graded.counts for graded in found.values())
    assert len(tokens.asked) == 2


def test_modes_that_move_requests_need_two_decode_engines():
    assert {mode.stack for mode in MODES} == {(1, 1), (1, 2), (2, 1)}
