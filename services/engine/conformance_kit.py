"""What the checks of the conformance suite share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pelagos.engine.v1 import engine_control_pb2 as control
from pelagos.engine.v1 import engine_control_pb2_grpc as control_rpc

from services.common.rpc_client import Channels, stream_call


class CheckFailed(Exception):
    """The engine breaks an invariant; the text says which, with the numbers."""


class NotDriven(Exception):
    """This check needs what the engine does not claim, or what cannot be had from outside."""


@dataclass(frozen=True)
class Target:
    """The engine under test."""

    channels: Channels
    address: str
    about: control.DescribeResponse
    service: control_rpc.EngineControlServiceStub
    settle_s: float  # how long an engine may take to let go of what was aborted

    async def loads(self) -> list[control.RankLoad]:
        """The load of its ranks, now."""
        request = control.WatchLoadRequest(interval_ms=1000)
        async with stream_call(self.service.WatchLoad, request, timeout_s=5) as stream:
            report = await stream.read()
        if report is None:
            raise CheckFailed("WatchLoad ended without a report")
        return list(report.ranks)


Check = Callable[[Target], Awaitable[None]]


def require(condition: bool, text: str) -> None:
    """Raises CheckFailed(text) unless the condition holds."""
    if not condition:
        raise CheckFailed(text)
