"""What an encoder engine tells about itself, and what may be changed while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from pelagos.engine.v1 import engine_control_pb2 as pb

from services.common.errors import Failure, Reason
from services.encoder.engine import EncoderEngine


class EncoderControl:
    """The card as EngineControlService sees it."""

    def __init__(
        self,
        engine: EncoderEngine,
        instance_id: str,
        boot_id: str,
        set_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._instance_id = instance_id
        self._boot_id = boot_id
        self._set_ready = set_ready

    def describe(self) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            instance_id=self._instance_id,
            boot_id=self._boot_id,
            role=pb.ENGINE_ROLE_VISION,
            engine=self._engine.config.model.engine,
            model_id=self._engine.config.model.model_id,
            weights_id=self._engine.config.model.weights_id,
            ep_size=1,
            dp_size=1,
            cp_size=1,
        )

    def rank_loads(self) -> list[pb.RankLoad]:
        engine = self._engine
        return [
            pb.RankLoad(
                rank=0,
                accepting=engine.accepting,
                running=engine.num_in_progress,
                running_tokens=engine.patches_in_progress,
                steps=engine.num_forwards,
            )
        ]

    async def start_drain(self, grace_s: float, hard_s: float, policy: int) -> None:
        """New images are refused; those here are finished, each within its own time limit."""
        self._engine.accepting = False
        await self._set_ready(False)

    def drain_progress(self) -> pb.DrainResponse:
        engine = self._engine
        state = pb.DRAIN_STATE_SERVING
        if not engine.accepting:
            busy = engine.num_in_progress
            state = pb.DRAIN_STATE_DRAINING if busy else pb.DRAIN_STATE_STOPPED
        return pb.DrainResponse(state=state, running=engine.num_in_progress)

    def configure(self, request: pb.ConfigureRequest) -> None:
        """Nothing of a card is tunable while it runs; a version is taken note of all the same."""

    async def profile(self, what: str) -> AsyncIterator[pb.ProfileResponse]:
        raise Failure(Reason.UNSUPPORTED_FEATURE, "an encoder engine measures nothing")
        yield  # makes this a stream
