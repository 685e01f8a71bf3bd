"""EngineControlService, the same for every kind of engine.

Source: engine.md, sections 7.1 to 7.3; protos/pelagos/engine/v1/engine_control.proto.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from pelagos.engine.v1 import engine_control_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.cost_model import CostModel
from services.common.errors import Failure, Reason
from services.engine.config import ModelConfig

_MIN_INTERVAL_S = 0.02
_DEFAULT_INTERVAL_S = 0.5
_DRAIN_POLL_S = 0.1


class Controlled(Protocol):
    """What an engine tells and lets be changed."""

    def describe(self) -> pb.DescribeResponse: ...

    def rank_loads(self) -> list[pb.RankLoad]: ...

    async def start_drain(self, grace_s: float, hard_s: float, policy: int) -> None: ...

    def drain_progress(self) -> pb.DrainResponse: ...

    def configure(self, request: pb.ConfigureRequest) -> None:
        """Checks everything, then changes everything. Raises: Failure, and nothing has changed."""

    def profile(self, what: str) -> AsyncIterator[pb.ProfileResponse]: ...


class EngineControlServicer:
    """The RPCs over one engine. The version of Configure only ever rises."""

    def __init__(
        self, engine: Controlled, instance_id: str, boot_id: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._engine = engine
        self._instance_id = instance_id
        self._boot_id = boot_id
        self._clock = clock
        self._config_version = 0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return self._engine.describe()

    async def WatchLoad(
        self, request: pb.WatchLoadRequest, context: Any
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        interval_s = (request.interval_ms or 1e3 * _DEFAULT_INTERVAL_S) / 1e3
        version, last, sent_s = 0, b"", -interval_s
        while True:
            ranks = self._engine.rank_loads()
            now_s = self._clock.now_s()
            state = b"".join(rank.SerializeToString() for rank in ranks)
            if state != last or now_s - sent_s >= interval_s:
                version, last, sent_s = version + 1, state, now_s
                yield pb.WatchLoadResponse(
                    instance_id=self._instance_id,
                    boot_id=self._boot_id,
                    version=version,
                    monotonic_ms=round(1e3 * now_s),
                    ranks=ranks,
                )
            await asyncio.sleep(_MIN_INTERVAL_S)

    async def Drain(
        self, request: pb.DrainRequest, context: Any
    ) -> AsyncIterator[pb.DrainResponse]:
        await self._engine.start_drain(
            (request.grace_ms or 60_000) / 1e3, (request.hard_ms or 30_000) / 1e3, request.policy
        )
        last = pb.DrainResponse()
        while True:
            progress = self._engine.drain_progress()
            if progress != last:
                last = progress
                yield progress
            if progress.state == pb.DRAIN_STATE_STOPPED:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    async def Configure(self, request: pb.ConfigureRequest, context: Any) -> pb.ConfigureResponse:
        if request.version < self._config_version:
            raise Failure(
                Reason.CONFLICT,
                f"version {request.version} is older than {self._config_version}",
                {"version": str(self._config_version)},
            )
        if request.version > self._config_version:
            self._engine.configure(request)
            self._config_version = request.version
        return pb.ConfigureResponse(version=self._config_version)

    async def Profile(
        self, request: pb.ProfileRequest, context: Any
    ) -> AsyncIterator[pb.ProfileResponse]:
        async for report in self._engine.profile(request.what):
            yield report


def grammar_features(model: ModelConfig) -> list[str]:
    """Feature names of the constraints that this process can apply."""
    if not model.grammar_library().available:
        return []
    return ["grammar_ebnf", "grammar_json", "grammar_regex"]


def cost_model_to_proto(model: CostModel) -> pb.CostModel:
    return pb.CostModel(
        k0_ns=model.k0_ns,
        k1_ns=model.k1_ns,
        k2_ns=model.k2_ns,
        k3_ns=model.k3_ns,
        step0_ns=model.step0_ns,
    )


def cost_model_from_proto(message: pb.CostModel) -> CostModel:
    return CostModel(message.k0_ns, message.k1_ns, message.k2_ns, message.k3_ns, message.step0_ns)
