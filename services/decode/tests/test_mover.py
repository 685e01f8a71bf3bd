"""Moves between decode engines: what names their picks at the balancer."""

from __future__ import annotations

import pytest
from pelagos.engine.v1 import records_pb2

from services.common.errors import Failure, Reason
from services.decode.mover import BalancedMover, pick_number
from services.lb.decode.client import PickedRank, PickRequest, pick_to_proto

# As entrypoints choose them: a request's first epoch counts quarters of seconds.
OF_NOW = 400_000_000


class NoRank:
    """A balancer that has nothing, and keeps what it was asked, as it is on the wire."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def pick(self, request: PickRequest) -> PickedRank:
        self.asked.append(pick_to_proto(request).attempt)
        raise Failure(Reason.ENGINE_FULL, "no rank has room")


@pytest.mark.parametrize("epoch", [1, OF_NOW, (1 << 31) - 1, (1 << 32) - 1])
async def test_2_8_a_move_can_be_asked_for_under_any_epoch(epoch: int) -> None:
    ranks = NoRank()
    mover = BalancedMover(None, ranks, "decode-own", "layout")  # type: ignore[arg-type]
    key = records_pb2.RequestKey(request_id="r", attempt=1, epoch=epoch)
    with pytest.raises(Failure) as caught:
        await mover.move(records_pb2.HandoffRecord(key=key), [], None, 100)
    assert caught.value.reason is Reason.ENGINE_FULL
    assert ranks.asked == [pick_number(epoch, 1)]


def test_2_8_every_pick_of_a_moving_request_has_a_number_of_its_own() -> None:
    moves = {pick_number(OF_NOW + move, tries) for move in range(64) for tries in (1, 2, 3)}
    hand_offs = {attempt * 1000 + pick for attempt in range(1, 10) for pick in range(10)}
    assert len(moves) == 64 * 3
    assert not moves & hand_offs
