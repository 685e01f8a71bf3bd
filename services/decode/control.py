"""What a decode engine tells about itself, and what may be changed while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from pelagos.engine.v1 import engine_control_pb2 as pb

from services.common.errors import Failure, Reason
from services.decode import drain as drain_core
from services.decode.engine import DecodeEngine
from services.engine.control import cost_model_to_proto, grammar_features
from services.engine.records import layout_to_proto
from services.lb.decode.client import LoadReport, RankLoad

_DRAIN_STATES = {
    drain_core.Phase.SERVING: pb.DRAIN_STATE_SERVING,
    drain_core.Phase.DRAINING: pb.DRAIN_STATE_DRAINING,
    drain_core.Phase.FORWARDING: pb.DRAIN_STATE_FORWARDING,
    drain_core.Phase.STOPPED: pb.DRAIN_STATE_STOPPED,
}
_MODES = ("", "none", "fixed", "variable")
_MAX_WAIT_S = 24 * 3600.0


class DecodeControl:
    """The engine as EngineControlService and the balancer see it."""

    def __init__(self, engine: DecodeEngine, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        self._engine = engine
        self._set_ready = set_ready

    def describe(self) -> pb.DescribeResponse:
        engine, config = self._engine, self._engine.config
        model = config.model
        return pb.DescribeResponse(
            instance_id=engine.identity.instance_id,
            boot_id=engine.identity.boot_id,
            role=pb.ENGINE_ROLE_DECODE,
            engine=model.engine,
            model_id=model.model_id,
            weights_id=engine.layout.weights_id,
            tokenizer_id=model.vocabulary_id,
            ep_size=len(engine.ranks),
            dp_size=len(engine.ranks),
            cp_size=1,
            ranks=[
                pb.RankCapacity(
                    blocks=rank.blocks.num_blocks - 1,
                    state_slots=rank.slots.num_slots - 1,
                    max_seqs=rank.max_seqs,
                )
                for rank in engine.ranks
            ],
            max_model_len=model.max_model_len,
            cost_model=cost_model_to_proto(model.cost),
            decode_curve=self._curve(),
            features=self._features(),
            kv_layout=layout_to_proto(engine.layout),
            layout_signature=engine.layout.signature,
            vocab_size=model.vocab_size,
        )

    def _features(self) -> list[str]:
        config = self._engine.config
        features = [f"dspark_{config.dspark}", "swa_copy_a", "transport_grpc"]
        features += grammar_features(config.model)
        if config.async_steps:
            features.append("async")
        if self._engine.mover is not None:
            features.append("migrate")
        return sorted(features)

    def _curve(self) -> list[pb.CurvePoint]:
        curve = self._engine.ranks[0].curve
        return [
            pb.CurvePoint(rows=rows, base_ms=base_ms)
            for rows, base_ms in zip(curve.sizes, curve.base_ms, strict=True)
        ]

    def rank_loads(self) -> list[pb.RankLoad]:
        engine = self._engine
        loads = []
        for rank in engine.ranks:
            held = engine.reserved_on(rank)
            loads.append(
                pb.RankLoad(
                    rank=rank.rank,
                    accepting=engine.accepting,
                    waiting=len(held),
                    running=len(rank.running),
                    running_tokens=rank.num_kv_tokens,
                    blocks_free=rank.blocks.num_free,
                    blocks_total=rank.blocks.num_blocks - 1,
                    state_free=rank.slots.num_free,
                    state_total=rank.slots.num_slots - 1,
                    blocks_reserved=sum(len(h.table) for h in held),
                    step_ms_p50=rank.counts.step_ms_p50,
                    steps=rank.counts.steps,
                    max_seqs=rank.max_seqs,
                )
            )
        return loads

    def balancer_report(self) -> LoadReport:
        """The report that the decode balancer expects every 100 ms; takes the list of seen ids."""
        engine = self._engine
        block = engine.layout.geometry.block_tokens
        ranks = []
        for rank in engine.ranks:
            held = engine.reserved_on(rank)
            ranks.append(
                RankLoad(
                    rank=rank.rank,
                    num_kv_tokens=rank.num_kv_tokens + sum(h.num_tokens for h in held),
                    num_requests=len(rank.running) + len(held),
                    num_free_tokens=rank.blocks.num_free * block,
                    max_requests=rank.max_seqs,
                    num_steps=rank.counts.steps,
                )
            )
        seen, engine.seen = engine.seen, []
        return LoadReport(
            instance_id=engine.identity.instance_id,
            boot_id=engine.identity.boot_id,
            address=engine.identity.address,
            accepting=engine.accepting,
            ranks=tuple(ranks),
            layout_signature=engine.layout.signature,
            seen_request_ids=tuple(seen),
        )

    async def start_drain(self, grace_s: float, hard_s: float, policy: int) -> None:
        if policy == pb.DRAIN_POLICY_WAIT:
            grace_s, hard_s = min(grace_s + hard_s, _MAX_WAIT_S), 0.0
        await self._set_ready(False)
        migrate = policy != pb.DRAIN_POLICY_REQUEUE and self._engine.mover is not None
        if policy == pb.DRAIN_POLICY_REQUEUE:
            grace_s = 0.0
        self._engine.start_drain(grace_s, hard_s, migrate)

    def drain_progress(self) -> pb.DrainResponse:
        engine = self._engine
        return pb.DrainResponse(
            state=_DRAIN_STATES[engine.drain_state.phase],
            running=engine.num_running,
            exported=engine.num_moved,
            moved=engine.num_moved,
            resumed=engine.num_resumed,
            lost=engine.num_lost,
        )

    def configure(self, request: pb.ConfigureRequest) -> None:
        """A decode engine takes the speculation mode; the rest belongs to other engines."""
        if request.dspark_mode not in _MODES:
            raise Failure(Reason.INVALID_REQUEST, "dspark_mode is none, fixed or variable")
        if request.persist not in ("", "none", "decode", "both"):
            raise Failure(Reason.INVALID_REQUEST, "persist is none, decode or both")
        for rank in self._engine.ranks:
            rank.dspark = request.dspark_mode or rank.dspark
        if request.persist:
            self._engine.persist_mode = request.persist

    async def profile(self, what: str) -> AsyncIterator[pb.ProfileResponse]:
        if what != "decode_curve":
            raise Failure(Reason.UNSUPPORTED_FEATURE, "a decode engine measures decode_curve")
        if self._engine.num_in_flight():
            raise Failure(Reason.ENGINE_FULL, "the engine is serving requests")
        points = self._curve()
        for done in range(1, len(points) + 1):
            yield pb.ProfileResponse(
                points_done=done,
                points_total=len(points),
                decode_curve=points if done == len(points) else [],
            )
