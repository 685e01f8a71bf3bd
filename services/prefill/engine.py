"""A prefill instance: intake, dependencies, the step loop, first tokens, hand-off. No gRPC here.

Whatever a request holds is given back by `_end`, on every path.
Source: engine.md, section 1.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pelagos.engine.v1 import records_pb2 as pb

from services.common import tracing
from services.common.call import Call, calling
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.engine import records
from services.engine.layout import KvLayout
from services.engine.persister import FullBlock, Persister
from services.engine.requests import (
    FinishReason,
    Limits,
    RequestKey,
    Sampling,
    TokenOut,
    Tokens,
    Usage,
    check_intake,
)
from services.engine.runner import ModelRunner, PrefillResult
from services.engine.stop import Stop, StopRules, stop_after
from services.engine.streams import StreamHub
from services.engine.tasks import TaskSet
from services.prefill import deps, scheduler
from services.prefill.config import PrefillConfig
from services.prefill.handoff import Handoff, Room, as_final, blames_the_instance
from services.prefill.rank import PrefillRank
from services.prefill.scheduler import Ledger, StepLimits, StepPlan
from services.prefill.work import Phase, Work

log = logging.getLogger(__name__)


@dataclass
class Counts:
    """Requests by how they ended."""

    received: int = 0
    handed_off: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class PrefillEngine:
    """All ranks of an instance; they step together."""

    def __init__(
        self,
        config: PrefillConfig,
        runners: list[ModelRunner],
        instance_id: str,
        *,
        peers: deps.Peers,
        handoff: Handoff,
        persister: Persister,
        keep_window: Callable[[bytes, int, bytes, bool], None] = lambda *_: None,
        on_ended: Callable[[Work], None] = lambda work: None,
        tasks: TaskSet | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.config = config
        self.layout: KvLayout = runners[0].layout
        self.instance_id = instance_id
        self.counts = Counts()
        self.persister = persister
        self.cost_model = config.model.cost
        self.step_budget_ns = round(1e6 * config.step_budget_ms)
        self.persist_mode = config.persist
        self.accept_buckets = config.accept_buckets
        self.accepting = True
        self.on_ended = on_ended
        self.on_load: Callable[[], None] = lambda: None
        self.ledger = Ledger(len(runners))
        self.hub = StreamHub(
            config.streams, on_unread=self._on_unread, on_abort=self._abort_quietly, clock=clock
        )
        self.tasks = tasks or TaskSet()
        self.ranks = [
            PrefillRank(i, runner, config.num_blocks, config.num_state_slots, self.cost_model)
            for i, runner in enumerate(runners)
        ]
        self.last_progress_s = clock.now_s()
        self._peers = peers
        self._handoff = handoff
        self._keep_window = keep_window
        self._clock = clock
        self._geometry = self.layout.geometry
        self._works: dict[tuple[str, int], Work] = {}
        self._ids = itertools.count(1)
        self._wake = asyncio.Event()

    # --- counts ---------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        return len(self._works)

    @property
    def num_blocks_used(self) -> int:
        return sum(rank.blocks.num_used for rank in self.ranks)

    @property
    def num_slots_used(self) -> int:
        return sum(rank.slots.num_slots - 1 - rank.slots.num_free for rank in self.ranks)

    def works_of(self, rank: int, *phases: Phase) -> list[Work]:
        return [w for w in self._works.values() if w.rank == rank and w.phase in phases]

    def request_keys(self) -> list[RequestKey]:
        """Requests that are here, for a balancer that has lost its memory."""
        return [work.key for work in self._works.values()]

    @property
    def remaining_ns(self) -> int:
        """Quota left; below 0 when a dear request was taken while idle."""
        return self.config.quota_ns - self.ledger.total_ns

    # --- intake ---------------------------------------------------------------------------------

    def submit(self, spec: pb.RequestSpec) -> Work:
        """Takes a request: checks, rank, stream; the rest happens by itself.

        Raises: Failure (INVALID_REQUEST, CONTEXT_LENGTH, NOT_FITTING, LAYOUT_MISMATCH, DEADLINE,
        ENGINE_FULL, DRAINING, CONFLICT); nothing is held then.
        """
        if not self.accepting:
            raise Failure(Reason.DRAINING, "the engine takes no new requests")
        if len(self._works) >= self.config.max_waiting:
            raise Failure(Reason.ENGINE_FULL, "the engine's queue is full", retry_after_s=0.5)
        key = records.key_from_proto(spec.key)
        now_s = self._clock.now_s()
        deadline_s = self._deadline_s(spec.deadline_unix_ms)
        if now_s >= deadline_s:
            raise Failure(Reason.DEADLINE, "the deadline has passed")
        tokens = records.tokens_from_spec(spec, self._geometry)
        sampling = records.sampling_from_proto(spec.sampling)
        self._check(spec, tokens, sampling)
        known = self._works.get(key.stream)
        if known is not None and (key.attempt, key.epoch) > (known.key.attempt, known.key.epoch):
            self._end(known, FinishReason.ABORT)
        stream = self.hub.open(key, spec.num_resumed_tokens, sampling.logprobs)
        number = next(self._ids)
        rank = scheduler.pick_rank(self.ledger.outstanding_ns)
        work = Work(
            seq_id=number,
            arrival=number,
            key=key,
            spec=spec,
            tokens=tokens,
            sampling=sampling,
            images=records.images_from_proto(spec),
            stream=stream,
            rank=rank,
            arrived_s=now_s,
            deadline_s=deadline_s,
        )
        work.usage = Usage(
            prompt_tokens=work.num_tokens - work.num_resumed, output_tokens=work.num_resumed
        )
        work.usage.reasoning_tokens = _resumed_reasoning(work)
        self._works[key.stream] = work
        self.counts.received += 1
        self._charge(work, deps.claimed_resume(work).start)
        work.span = tracing.start_span(
            "prefill.request",
            {tracing.REQUEST_ID: key.request_id, "num_tokens": work.num_tokens},
            traceparent=spec.traceparent,
        )
        stream.accepted(rank, self.instance_id)
        work.task = self.tasks.start(
            self._wait_deps(work), "wait for dependencies", partial(self._fail_by, work)
        )
        return work

    def _check(self, spec: pb.RequestSpec, tokens: Tokens, sampling: Sampling) -> None:
        model = self.config.model
        limits = Limits(
            model.max_model_len, model.vocab_size, self.config.num_blocks, model.image_token_id
        )
        check_intake(
            tokens.ids, sampling, tokens.media, limits, self._geometry, spec.num_resumed_tokens
        )
        if spec.grammar.artifact_key and not self._peers.can_constrain:
            raise Failure(Reason.UNSUPPORTED_FEATURE, "this engine cannot constrain its output")
        claims = spec.hit.stored_tokens > 0
        if claims and spec.layout_signature != self.layout.signature:
            raise Failure(Reason.LAYOUT_MISMATCH, "the cache hit was matched under another layout")

    def _deadline_s(self, deadline_unix_ms: int) -> float:
        if deadline_unix_ms == 0:
            return math.inf
        return self._clock.now_s() + deadline_unix_ms / 1e3 - self._clock.wall_s()

    def _charge(self, work: Work, start: int) -> None:
        cost_ns = self.cost_model.charge(work.num_tokens - start, start)
        self.ledger.settle(str(work.seq_id))
        self.ledger.charge(str(work.seq_id), work.rank, cost_ns)
        self.on_load()

    async def _wait_deps(self, work: Work) -> None:
        call_ = Call(work.key.request_id, work.spec.namespace.tenant, _traceparent(work))
        with calling(call_), tracing.span("prefill.wait_deps", traceparent=_traceparent(work)):
            try:
                await deps.resolve(work, self._peers, self.config)
            except ExceptionGroup as group:
                raise _first_failure(group) from group
        work.task = None
        if work.ended:
            return
        if work.constraint is not None and work.constraint.dead:
            self._end(work, FinishReason.GRAMMAR_ERROR)
            return
        work.usage.cached_tokens = work.resume.hit
        work.usage.replayed_tokens = work.resume.num_replayed
        self._charge(work, work.resume.start)
        self.ranks[work.rank].enqueue(work)
        work.stream.progress(0, work.resume.hit, work.resume.num_replayed)
        self._wake.set()

    # --- the step loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Steps while there is work; runs the persister and the sweep. Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._step_forever(), name="steps")
            group.create_task(self.persister.run(), name="persister")
            group.create_task(self._sweep_forever(), name="sweep")

    async def _step_forever(self) -> None:
        while True:
            self._wake.clear()
            if not await self._step():
                await self._wake.wait()

    async def _step(self) -> bool:
        """One step of all ranks; False when there was nothing to compute."""
        self._drop_expired()
        planned = []
        for rank in self.ranks:
            plan = rank.plan(self._limits(rank))
            self._drop(rank, plan)
            planned.append((rank, *rank.batch(plan), plan))
        if not any(works for _, _, works, _ in planned):
            # A hit that was thrown away while it was admitted runs at once, in the next step.
            return any(plan.chunks for *_, plan in planned)
        started_s = self._clock.now_s()
        for _, _, works, plan in planned:
            self._reserve_early(works, plan)
        results = await asyncio.gather(
            *(rank.runner.prefill(batch) for rank, batch, _, _ in planned)
        )
        step_ms = 1e3 * (self._clock.now_s() - started_s)
        for (rank, _, works, plan), result in zip(planned, results, strict=True):
            self._apply(rank, works, plan, result, step_ms)
        self.last_progress_s = self._clock.now_s()
        self.on_load()
        return True

    def _limits(self, rank: PrefillRank) -> StepLimits:
        config = self.config
        return StepLimits(
            self.step_budget_ns,
            config.max_batched_tokens,
            config.max_seqs,
            config.max_sum_k,
            config.min_chunk,
            scale=rank.scale(),
        )

    def _drop_expired(self) -> None:
        """Expired work is never started, and stops if it runs (P-05, UR-61)."""
        now_s = self._clock.now_s()
        for work in list(self._works.values()):
            if now_s >= work.deadline_s and not work.ended:
                self._end(work, Failure(Reason.DEADLINE, "the deadline has passed"))

    def _drop(self, rank: PrefillRank, plan: StepPlan) -> None:
        for key in [*plan.dropped, *plan.rejected]:
            work = next(w for w in rank.fifo if str(w.seq_id) == key)
            rank.fifo.remove(work)
            if key in plan.rejected:
                self._end(work, Failure(Reason.NOT_FITTING, "the prompt never fits the pool"))

    def _reserve_early(self, works: list[Work], plan: StepPlan) -> None:
        """Asks for decode room while the last chunk runs (1.10 a)."""
        last = {chunk.key for chunk in plan.chunks if chunk.last}
        for work in works:
            may_go_on = work.sampling.max_tokens - work.num_resumed > 1
            if str(work.seq_id) in last and work.reservation is None and may_go_on:
                work.reservation = self.tasks.start(
                    self._reserve(work, []), "reserve", on_error=_leave_to_the_reader
                )

    async def _reserve(self, work: Work, excluded: list[str]) -> Room:
        call_ = Call(
            work.key.request_id, work.spec.namespace.tenant, _traceparent(work), work.deadline_s
        )
        with calling(call_), tracing.span("prefill.reserve", traceparent=_traceparent(work)):
            room = await self._handoff.reserve(work, self.layout.signature, excluded)
        if not work.ended:
            work.keeper = self.tasks.start(self._keep_room(room), "keep room")
        return room

    async def _keep_room(self, room: Room) -> None:
        """Holds on to a room while steps complete: a device that hangs keeps nobody's."""
        await self._handoff.keep(room, lambda: self.stalled_for_s() < self.config.stall_limit_s)

    def _apply(
        self,
        rank: PrefillRank,
        works: list[Work],
        plan: StepPlan,
        result: PrefillResult,
        step_ms: float,
    ) -> None:
        if not works:
            return
        rank.counts.steps += 1
        rank.counts.step_ms.append(step_ms)
        predicted_ms = sum(chunk.cost_ns for chunk in plan.chunks) / 1e6
        scaled_ms = (predicted_ms + self.cost_model.step0_ns / 1e6) * self.config.model.time_scale
        if scaled_ms > 0:
            rank.counts.ratios.append(step_ms / scaled_ms)
        chunks = {chunk.key: chunk for chunk in plan.chunks}
        for work in works:
            work.in_step = False
            chunk = chunks[str(work.seq_id)]
            if work.ended:  # aborted while the step ran: its results are not looked at
                self._release(work)
                continue
            if work.seq_id in result.faults:
                self._on_fault(rank, work, result.faults[work.seq_id].what)
                continue
            rank.counts.computed_tokens += chunk.num_tokens
            work.position = chunk.start + chunk.num_tokens
            self.ledger.paid(str(work.seq_id), chunk.cost_ns)
            work.stream.progress(work.position, work.resume.hit, work.resume.num_replayed)
            if chunk.last:
                rank.fifo.remove(work)
                self._on_first_token(rank, work, result.first[work.seq_id])

    def _on_fault(self, rank: PrefillRank, work: Work, what: str) -> None:
        """Foreign bytes: a hit is thrown away and computed; without a hit the device is wrong."""
        log.error("foreign bytes", extra={"request_id": work.key.request_id, "what": what})
        if work.resume.write_from > 0:
            rank.restart(work)
            work.usage.cached_tokens = work.usage.replayed_tokens = 0
            self._charge(work, work.resume.start)
            return
        work.engine_fault = True
        self._end(work, Failure(Reason.BLOCK_CORRUPT, "the prompt's state is lost"))

    # --- after the prompt -----------------------------------------------------------------------

    def _on_first_token(self, rank: PrefillRank, work: Work, token: TokenOut) -> None:
        self.ledger.settle(str(work.seq_id))
        work.first = token
        sampling = work.sampling
        rules = StopRules(
            sampling.stop_token_ids, sampling.max_tokens, self.config.model.max_model_len
        )
        num_output = work.num_resumed + 1
        stop = stop_after(token.token_id, work.num_tokens + 1, num_output, rules)
        if work.constraint is not None and not work.constraint.advance(token.token_id):
            self._end(work, FinishReason.GRAMMAR_ERROR)
            return
        if stop is not Stop.STOP:
            work.usage.output_tokens += 1
            if sampling.starts_in_reasoning and not _reasoning_is_over(work):
                work.usage.reasoning_tokens += 1
            work.stream.emit([token], work.usage)
        self._store_window(rank, work)
        if stop is not None:
            self._persist_prompt(rank, work)
            self._end(work, FinishReason.STOP if stop is Stop.STOP else FinishReason.LENGTH)
            return
        work.phase = Phase.HANDOFF
        work.task = self.tasks.start(
            self._hand_off(rank, work), "hand off", partial(self._fail_by, work)
        )

    def _store_window(self, rank: PrefillRank, work: Work) -> None:
        """The window at the last boundary goes to this machine's pool (1.8)."""
        position = scheduler.swa_store_position(work.num_tokens, self._geometry)
        if position == 0 or not self._may_store(work):
            return
        window = rank.runner.read_window(work.seq_id, position, None)
        block_key = work.tokens.key(position // self._geometry.block_tokens - 1)
        self._keep_window(block_key, position, window, work.approximate_from > 0)

    def _may_store(self, work: Work) -> bool:
        namespace = work.spec.namespace
        allowed = namespace.store_policy != pb.STORE_POLICY_NONE
        return allowed and len(namespace.root) == 32 and self.persist_mode != "none"

    def _persist_prompt(self, rank: PrefillRank, work: Work) -> None:
        """Full prompt blocks of a request that ends here: no decode engine will store them."""
        if not self._may_store(work) or self.persist_mode != "both":
            return
        size = self._geometry.block_tokens
        for index in range(work.resume.write_from // size, work.num_tokens // size):
            block = work.table[index]
            full = FullBlock(
                work.tokens.key(index),
                work.tokens.parent(index),
                index,
                work.tokens.block_ids(index),
                work.tokens.extra(index),
                work.spec.namespace.ttl_class,
                0 < work.approximate_from <= index * size,
                work.key.request_id,
                work.spec.namespace.tenant,
            )
            self.persister.offer(
                full,
                partial(rank.pinned, block, self._wake.set),
                partial(rank.runner.read_block, block),
            )
        work.committed = True

    async def _hand_off(self, rank: PrefillRank, work: Work) -> None:
        """Moves the sequence to a decode engine; tries again elsewhere when one is lost."""
        call_ = Call(
            work.key.request_id, work.spec.namespace.tenant, _traceparent(work), work.deadline_s
        )
        excluded: list[str] = []
        with calling(call_), tracing.span("prefill.hand_off", traceparent=_traceparent(work)):
            async with asyncio.timeout(self.config.handoff_timeout_s):
                for attempt in itertools.count(1):
                    room = await self._room(work, excluded)
                    try:
                        await self._handoff.deliver(work, rank.runner, room)
                        break
                    except Failure as failure:
                        self._stop_keeping(work)
                        log.info(
                            "hand-off failed",
                            extra={
                                "request_id": work.key.request_id,
                                "reason": failure.reason.value,
                            },
                        )
                        if attempt == self.config.handoff_attempts:
                            raise as_final(failure) from failure
                        if blames_the_instance(failure):
                            excluded.append(room.instance_id)
        work.task = None
        work.committed = True  # the decode engine persists the prompt
        self._end(work, room)

    async def _room(self, work: Work, excluded: list[str]) -> Room:
        """The room that was asked for early, or another one when that came to nothing."""
        if work.reservation is not None:
            # Shielded, and kept until it has answered: `_end` returns what a cancelled
            # hand-off had been promised.
            try:
                return await asyncio.shield(work.reservation)
            except Failure as failure:
                if failure.reason is Reason.NOT_FITTING:
                    raise
            finally:
                if work.reservation is not None and work.reservation.done():
                    work.reservation = None
        return await self._reserve(work, excluded)

    def _stop_keeping(self, work: Work) -> None:
        if work.keeper is not None:
            work.keeper.cancel()
            work.keeper = None

    # --- ends -----------------------------------------------------------------------------------

    def abort(self, key: RequestKey) -> bool:
        """Ends a request in any state; False when it is not here. Idempotent."""
        work = self._works.get(key.stream)
        if work is None or work.ended:
            return False
        if (key.attempt, key.epoch) != (0, 0) and key != work.key:
            return False  # meant for another attempt; both 0 mean any
        self._end(work, FinishReason.ABORT)
        return True

    def _abort_quietly(self, key: RequestKey) -> None:
        self.abort(key)

    def _on_unread(self, key: RequestKey) -> None:
        log.info("nobody reads the request", extra={"request_id": key.request_id})
        self.abort(key)

    def _fail_by(self, work: Work, error: BaseException) -> None:
        """Ends a request whose background task failed; the engine goes on."""
        if work.ended:
            return
        if isinstance(error, Failure):
            self._end(work, error)
        elif isinstance(error, TimeoutError):
            self._end(work, Failure(Reason.BACKEND_LOST, "the hand-off took too long"))
        else:
            log.error("request failed", exc_info=error, extra={"request_id": work.key.request_id})
            work.engine_fault = True
            self._end(work, Failure(Reason.INTERNAL, "unforeseen"))

    def _end(self, work: Work, how: FinishReason | Failure | Room) -> None:
        """Ends a request, once: its reader knows now; its memory follows the running step."""
        if work.ended:
            return
        work.ended = True
        self._stop_keeping(work)
        if isinstance(how, Room):
            self.counts.handed_off += 1
            work.stream.moved(how.instance_id, how.address, how.key.epoch)
        elif isinstance(how, Failure):
            self.counts.failed += 1
            work.stream.fail(how, work.usage)
        else:
            aborted = how is FinishReason.ABORT
            self.counts.aborted += aborted
            self.counts.finished += not aborted
            work.stream.finish(how, work.usage)
        self.ledger.settle(str(work.seq_id))
        rank = self.ranks[work.rank]
        if work in rank.fifo:
            rank.fifo.remove(work)
        if work.task is not None and work.task is not asyncio.current_task():
            work.task.cancel()
        if work.reservation is not None:
            self.tasks.start(self._return_room(work.reservation), "return room")
            work.reservation = None
        if not work.in_step:
            self._release(work)
        self._wake.set()
        self.on_load()

    async def _return_room(self, reservation: asyncio.Task[Room]) -> None:
        """Gives back a reservation that was made, or is being made, for a request that ended."""
        try:
            room = await reservation
        except Failure:
            return
        await self._handoff.give_back(room)

    def _release(self, work: Work) -> None:
        """Last step of every path: memory back, the balancer told."""
        if work.task is not None and not work.task.done() and work.phase is Phase.HANDOFF:
            # The sender may be reading these blocks: they follow once it has stopped.
            work.task.add_done_callback(lambda _: self._release(work))
            work.task.cancel()
            work.task = None
            return
        self.ranks[work.rank].free(work)
        work.phase = Phase.DONE
        if self._works.get(work.key.stream) is work:
            del self._works[work.key.stream]
        if work.span is not None:
            work.span.end()
            work.span = None
        self.on_ended(work)
        self._wake.set()

    def end_all(self) -> None:
        """Ends what a drain could not wait for: its callers run it elsewhere."""
        for work in list(self._works.values()):
            self._end(work, Failure(Reason.DRAINING, "the engine is going away"))

    # --- housekeeping ---------------------------------------------------------------------------

    def is_busy(self) -> bool:
        """Whether a step is due."""
        return any(rank.fifo for rank in self.ranks)

    def stalled_for_s(self) -> float:
        return self._clock.now_s() - self.last_progress_s if self.is_busy() else 0.0

    def sweep(self) -> None:
        """Deadlines and readers: what time alone brings about."""
        self._drop_expired()
        self.hub.sweep()
        if not self.is_busy():
            self.last_progress_s = self._clock.now_s()

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(0.2)
            self.sweep()

    async def close(self) -> None:
        await self.tasks.close()


def _first_failure(group: ExceptionGroup[Exception]) -> Exception:
    failures, rest = group.split(Failure)
    found: BaseException = rest or failures or group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, Exception) else group


def _leave_to_the_reader(error: BaseException) -> None:
    """A failed early reservation is looked at, and tried again, by the hand-off itself."""


def _traceparent(work: Work) -> str:
    return tracing.traceparent_of(work.span) or work.spec.traceparent


def _resumed_reasoning(work: Work) -> int:
    """Reasoning tokens among the output of earlier attempts."""
    if not work.sampling.starts_in_reasoning:
        return 0
    resumed, end = work.resumed, work.sampling.end_of_thinking_id
    return resumed.index(end) + 1 if end in resumed else len(resumed)


def _reasoning_is_over(work: Work) -> bool:
    return work.sampling.end_of_thinking_id in work.resumed
