"""What a prefill engine tells about itself, and what may be changed while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from pelagos.engine.v1 import engine_control_pb2 as pb

from services.common import cost_model as costs
from services.common.errors import Failure, Reason
from services.engine.control import cost_model_to_proto, grammar_features
from services.engine.records import layout_to_proto
from services.prefill.engine import PrefillEngine
from services.prefill.work import Phase

_GRID_Q = (64, 256, 1024, 2048, 4096, 8192)
_GRID_C = (0, 4096, 16384, 65536)


class PrefillControl:
    """The engine as EngineControlService sees it."""

    def __init__(
        self,
        engine: PrefillEngine,
        boot_id: str,
        set_ready: Callable[[bool], Awaitable[None]],
        now_s: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._boot_id = boot_id
        self._set_ready = set_ready
        self._now_s = now_s
        self._drains = False
        self._drained_by_s = 0.0

    def describe(self) -> pb.DescribeResponse:
        engine, config = self._engine, self._engine.config
        model = config.model
        return pb.DescribeResponse(
            instance_id=engine.instance_id,
            boot_id=self._boot_id,
            role=pb.ENGINE_ROLE_PREFILL,
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
                    max_seqs=config.max_seqs,
                    max_batched_tokens=config.max_batched_tokens,
                )
                for rank in engine.ranks
            ],
            max_model_len=model.max_model_len,
            cost_model=cost_model_to_proto(engine.cost_model),
            features=["transport_grpc", "truncation_compact", *grammar_features(model)],
            kv_layout=layout_to_proto(engine.layout),
            layout_signature=engine.layout.signature,
            vocab_size=model.vocab_size,
        )

    def rank_loads(self) -> list[pb.RankLoad]:
        engine = self._engine
        now_s = self._now_s()
        loads = []
        for rank in engine.ranks:
            waiting = [work for work in rank.fifo if work.slot is None]
            running = engine.works_of(rank.rank, Phase.RUNNING, Phase.HANDOFF)
            cost = engine.cost_model
            loads.append(
                pb.RankLoad(
                    rank=rank.rank,
                    accepting=engine.accepting,
                    waiting=len(waiting),
                    waiting_deps=len(engine.works_of(rank.rank, Phase.WAIT_DEPS)),
                    running=len(running),
                    running_tokens=sum(work.num_tokens for work in running),
                    outstanding_ns=engine.ledger.outstanding_ns[rank.rank],
                    waiting_ns=sum(
                        cost.charge(work.num_tokens - work.position, work.position)
                        for work in waiting
                    ),
                    oldest_wait_ms=round(
                        max((1e3 * (now_s - work.arrived_s) for work in waiting), default=0)
                    ),
                    blocks_free=rank.blocks.num_free,
                    blocks_total=rank.blocks.num_blocks - 1,
                    state_free=rank.slots.num_free,
                    state_total=rank.slots.num_slots - 1,
                    step_ms_p50=rank.counts.step_ms_p50,
                    steps=rank.counts.steps,
                    max_seqs=engine.config.max_seqs,
                )
            )
        return loads

    async def start_drain(self, grace_s: float, hard_s: float, policy: int) -> None:
        """New work is refused; what is here is handed on as always, then nothing is left."""
        await self._set_ready(False)
        self._engine.accepting = False
        self._engine.on_load()
        if not self._drains:
            self._drains, self._drained_by_s = True, self._now_s() + grace_s + hard_s

    def drain_progress(self) -> pb.DrainResponse:
        num = self._engine.num_requests
        if self._drains and num and self._now_s() >= self._drained_by_s:
            self._engine.end_all()
        state = pb.DRAIN_STATE_SERVING
        if self._drains:
            state = pb.DRAIN_STATE_DRAINING if num else pb.DRAIN_STATE_STOPPED
        return pb.DrainResponse(
            state=state, running=num, moved=self._engine.counts.handed_off, lost=0
        )

    def configure(self, request: pb.ConfigureRequest) -> None:
        """Step budget, buckets and persistence; the rest belongs to other engines."""
        if request.persist not in ("", "none", "decode", "both"):
            raise Failure(Reason.INVALID_REQUEST, "persist is none, decode or both")
        engine = self._engine
        engine.step_budget_ns = request.step_budget_ns or engine.step_budget_ns
        engine.accept_buckets = request.accept_buckets or engine.accept_buckets
        engine.persist_mode = request.persist or engine.persist_mode
        engine.on_load()

    async def profile(self, what: str) -> AsyncIterator[pb.ProfileResponse]:
        """Measures the grid of 1.5 on one rank and fits the constants again."""
        if what != "cost_model":
            raise Failure(Reason.UNSUPPORTED_FEATURE, "a prefill engine measures cost_model")
        if self._engine.num_requests:
            raise Failure(Reason.ENGINE_FULL, "the engine is serving requests")
        grid = [(q, c) for q in _GRID_Q for c in _GRID_C]
        samples = []
        for done, (q, c) in enumerate(grid, start=1):
            # The simulated device takes the time that its model says; a network is timed here.
            samples.append(costs.Sample(q, c, self._engine.cost_model.cost(q, c)))
            if done < len(grid):
                yield pb.ProfileResponse(points_done=done, points_total=len(grid))
        fitted = costs.fit(samples)
        last = pb.ProfileResponse(points_done=len(grid), points_total=len(grid))
        if fitted is not None:
            last.cost_model.CopyFrom(cost_model_to_proto(fitted.model))
            last.cost_model.degenerate = fitted.degenerate
        yield last
