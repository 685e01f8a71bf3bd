"""A decode instance: reservations, running requests, moves, drain. No gRPC in here.

What a request holds - blocks, a state slot, a transfer, a stream - is given back on every path by
two functions: `Reservations.let_go` for what never ran, `_released` for what did.
Source: engine.md, sections 2.1, 2.5, 2.8, 7.4 and 7.5.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from pelagos.engine.v1 import records_pb2

from services.common import tracing
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.decode import drain as drain_core
from services.decode import scheduler
from services.decode.config import DecodeConfig
from services.decode.rank_loop import DecodeRank, Hooks
from services.decode.reservations import Held, Reservations
from services.decode.sequence import Sequence
from services.decode.speculation import Curve
from services.decode.transfers import Transfers
from services.engine import records
from services.engine import transfer as transfer_core
from services.engine.grammar import Constraint
from services.engine.grammars import Grammars
from services.engine.handoff import outgoing_pieces, request_without_pixels
from services.engine.layout import KvLayout
from services.engine.persister import FullBlock, Persister
from services.engine.requests import FinishReason, RequestKey, u32_array
from services.engine.runner import ModelRunner, Start, StateFault
from services.engine.sim.config import CURVE_MS, CURVE_ROWS
from services.engine.stop import StopRules
from services.engine.streams import StreamHub
from services.engine.tasks import TaskSet
from services.engine.transfer import Reservation, ReservationEvent
from services.engine.transfer_client import Outgoing, checksum

log = logging.getLogger(__name__)

_MAX_EXPORTS_AT_ONCE = 8


@dataclass(frozen=True)
class Target:
    """Where a request goes on."""

    instance_id: str
    address: str


class Mover(Protocol):
    """Delivers a request to another decode engine. Raises Failure when nobody takes it."""

    async def move(
        self,
        record: records_pb2.HandoffRecord,
        pieces: list[Outgoing],
        address: str | None,
        num_tokens: int,
    ) -> Target: ...


@dataclass(frozen=True)
class Identity:
    """Who this instance is, as it signs records with."""

    instance_id: str
    boot_id: str
    address: str


class DecodeEngine:
    """All ranks of an instance, and everything that is not a step."""

    def __init__(
        self,
        config: DecodeConfig,
        runners: list[ModelRunner],
        identity: Identity,
        *,
        persister: Persister,
        mover: Mover | None = None,
        keep_window: Callable[[bytes, int, bytes, bool], None] = lambda *_: None,
        tasks: TaskSet | None = None,
        grammars: Grammars | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.config = config
        self.layout: KvLayout = runners[0].layout
        self.identity = identity
        self.drain_state = drain_core.State()
        self.mover = mover
        self.grammars = grammars
        self.persister = persister
        self.transfers = Transfers(
            self.layout, config.max_chunk_bytes, config.transfer_credit_bytes
        )
        self.reservations = Reservations(config, self.layout.geometry, self.transfers, clock)
        self.hub = StreamHub(
            config.streams,
            on_unread=self._on_unread,
            on_abort=lambda key: void(self.abort(key)),
            on_room=self._on_room,
            clock=clock,
        )
        self.tasks = tasks or TaskSet()
        self.seen: list[str] = []  # picked requests that arrived, for the balancer's report
        self.num_moved = self.num_resumed = self.num_lost = 0
        self.stopped = asyncio.Event()
        self.refusing = False
        self.persist_mode = config.persist
        self._keep_window = keep_window
        self._clock = clock
        self._geometry = self.layout.geometry
        self._sequences: dict[tuple[str, int], tuple[DecodeRank, Sequence]] = {}
        self._seq_ids = itertools.count(1)
        self._exports = asyncio.Semaphore(_MAX_EXPORTS_AT_ONCE)
        hooks = Hooks(self._persist, self._released, self._preempt)
        self.ranks = [
            DecodeRank(
                index,
                runner,
                num_blocks=config.num_blocks,
                max_seqs=config.max_seqs,
                hooks=hooks,
                curve=Curve(CURVE_ROWS, CURVE_MS),
                dspark=config.dspark,
                async_steps=config.async_steps,
                # The simulation's times are the guess that they follow; a network's are measured.
                learns_curve=config.model.engine != "sim",
                clock=clock,
            )
            for index, runner in enumerate(runners)
        ]

    # --- counts ---------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._sequences)

    @property
    def num_held(self) -> int:
        return len(self.reservations)

    @property
    def num_lapsed(self) -> int:
        return self.reservations.num_lapsed

    @property
    def num_blocks_used(self) -> int:
        return sum(rank.blocks.num_used for rank in self.ranks)

    @property
    def num_slots_used(self) -> int:
        return sum(rank.slots.num_slots - 1 - rank.slots.num_free for rank in self.ranks)

    def num_in_flight(self) -> int:
        """What a drain waits for."""
        return len(self._sequences) + len(self.reservations)

    def reserved_on(self, rank: DecodeRank) -> list[Held]:
        return self.reservations.on_rank(rank)

    @property
    def accepting(self) -> bool:
        return self.drain_state.accepts_reservations and not self.refusing

    # --- reservations ---------------------------------------------------------------------------

    def reserve(
        self,
        key: RequestKey,
        num_tokens: int,
        expected_output: int,
        layout_signature: str,
        rank_index: int,
        lease_ms: int,
    ) -> Held:
        """Holds room for a sequence, at once or not at all. Idempotent per attempt and epoch.

        Raises: Failure with DRAINING, LAYOUT_MISMATCH, NOT_FITTING or ENGINE_FULL.
        """
        self.seen.append(key.request_id)
        if not self.accepting:
            raise Failure(Reason.DRAINING, "the engine takes no new requests")
        if layout_signature != self.layout.signature:
            raise Failure(Reason.LAYOUT_MISMATCH, "the two engines lay out KV differently")
        if not 0 <= rank_index < len(self.ranks):
            raise Failure(Reason.INVALID_REQUEST, f"there is no rank {rank_index}")
        rank = self.ranks[rank_index]
        return self.reservations.reserve(key, num_tokens, expected_output, rank, lease_ms)

    def renew(self, reservation_id: str, lease_ms: int) -> float:
        """Prolongs a lease; returns its seconds. Raises: Failure(NOT_FOUND)."""
        return self.reservations.renew(reservation_id, lease_ms)

    def release(self, reservation_id: str) -> bool:
        """Gives a reservation back; False when it was not held any more."""
        return self.reservations.release(reservation_id)

    # --- commit ---------------------------------------------------------------------------------

    def commit(
        self,
        reservation_id: str,
        record: records_pb2.HandoffRecord,
        transfer_id: str,
        constraint: Constraint | None = None,
    ) -> Sequence:
        """Verifies what was delivered and starts to decode.

        Raises: Failure with NOT_FOUND, HANDOFF_MISMATCH, LAYOUT_MISMATCH, CONFLICT or DRAINING; the
        reservation is given back unless it was not found.
        """
        held = self.reservations.find(reservation_id)
        try:
            return self._commit(held, record, transfer_id, constraint)
        except Failure:
            if held.state is Reservation.HELD:
                self.reservations.let_go(held, ReservationEvent.RELEASE)
            raise

    def _commit(
        self,
        held: Held,
        record: records_pb2.HandoffRecord,
        transfer_id: str,
        constraint: Constraint | None,
    ) -> Sequence:
        if not self.drain_state.accepts_commits:
            raise Failure(Reason.DRAINING, "the grace for reservations is over")
        if record.layout_signature != self.layout.signature:
            raise Failure(Reason.LAYOUT_MISMATCH, "the two engines lay out KV differently")
        incoming = held.incoming
        if incoming is None or incoming.core.transfer_id != transfer_id:
            raise Failure(Reason.HANDOFF_MISMATCH, "the transfer does not belong to this request")
        if incoming.core.phase is not transfer_core.Phase.SEALED:
            raise Failure(Reason.HANDOFF_MISMATCH, "the transfer is not complete")
        key = records.key_from_proto(record.key)
        self._check_coverage(held, record, key)
        incoming.core = transfer_core.on_verify(
            incoming.core, incoming.checksum == record.kv_checksum
        )
        if incoming.core.error is not None:
            raise Failure(Reason.HANDOFF_MISMATCH, "the bytes are not those that were sent")
        self._supersede(key)
        sequence = self._sequence_of(held, record, key)
        sequence.constraint = constraint
        start = Start(
            sequence.seq_id,
            key.request_id,
            sequence.tokens,
            sequence.sampling,
            sequence.num_prompt,
            sequence.num_cached,
            held.slot,
        )
        try:
            held.rank.runner.open(start)
            held.rank.runner.write_state(sequence.seq_id, incoming.state, sequence.num_cached)
            held.rank.runner.verify(sequence.seq_id, sequence.num_cached, held.table)
        except (StateFault, ValueError) as fault:
            held.rank.runner.close(sequence.seq_id)
            failure = Failure(Reason.HANDOFF_MISMATCH, "the bytes are not those of the sequence")
            sequence.stream.fail(failure)
            raise failure from fault
        incoming.core = transfer_core.on_commit(incoming.core)
        held.state, _ = transfer_core.on_reservation(
            held.state, ReservationEvent.COMMIT, peer_may_write=False
        )
        self.reservations.committed(held)
        self.transfers.forget(incoming)
        sequence.stream.accepted(held.rank.rank, self.identity.instance_id)
        sequence.span = tracing.start_span(
            "decode.request",
            {tracing.REQUEST_ID: key.request_id, "num_tokens": len(sequence.tokens)},
            traceparent=record.spec.traceparent,
        )
        self._sequences[key.stream] = (held.rank, sequence)
        self._on_drain(drain_core.Started(_name(key)))
        held.rank.add(sequence)
        self._persist(held.rank, sequence)
        if constraint is not None and constraint.dead:
            held.rank.finish(sequence, FinishReason.GRAMMAR_ERROR)
        return sequence

    def _check_coverage(
        self, held: Held, record: records_pb2.HandoffRecord, key: RequestKey
    ) -> None:
        num_output = len(record.output_tokens) // 4
        num_tokens = len(record.spec.prompt_tokens) // 4 + num_output
        agree = (
            key.stream == held.key.stream
            and record.coverage_tokens == record.num_cached == held.num_tokens
            and record.state_position == record.num_cached
            and num_output >= 1
            and num_tokens == record.num_cached + 1
        )
        if not agree:
            raise Failure(Reason.HANDOFF_MISMATCH, "the record and the reservation differ")

    def _sequence_of(
        self, held: Held, record: records_pb2.HandoffRecord, key: RequestKey
    ) -> Sequence:
        spec = record.spec
        tokens = records.tokens_from_spec(spec, self._geometry)
        said = records.output_of_record(record)
        num_resumed = spec.num_resumed_tokens
        num_prompt = len(tokens) - num_resumed
        tokens.append([token.token_id for token in said])
        sampling = records.sampling_from_proto(spec.sampling)
        stream = self.hub.open(key, num_resumed, sampling.logprobs)
        stream.preload(said)
        sequence = Sequence(
            seq_id=next(self._seq_ids),
            key=key,
            spec=spec,
            tokens=tokens,
            sampling=sampling,
            rules=StopRules(
                sampling.stop_token_ids, sampling.max_tokens, self.config.model.max_model_len
            ),
            stream=stream,
            table=held.table,
            slot=held.slot,
            num_cached=record.num_cached,
            num_prompt=num_prompt,
            usage=records.usage_from_proto(record.usage),
            deadline_s=self._deadline_s(spec.deadline_unix_ms),
            durable=record.durable_blocks,
            approximate_from=record.approximate_from,
            said=said,
        )
        block = self._geometry.block_tokens
        # The prefill has stored the window at this boundary; only later ones are copied here.
        sequence.attached = (record.num_cached - 1) // block * block
        sequence.num_persisted = len(record.durable_blocks.split(b"\0", 1)[0])
        ended = any(t.token_id == sampling.end_of_thinking_id for t in said)
        resumed = tokens.ids[num_prompt : num_prompt + num_resumed]
        ended = ended or sampling.end_of_thinking_id in resumed
        sequence.in_reasoning = sampling.starts_in_reasoning and not ended
        return sequence

    def _deadline_s(self, deadline_unix_ms: int) -> float:
        if deadline_unix_ms == 0:
            return math.inf
        return self._clock.now_s() + deadline_unix_ms / 1e3 - self._clock.wall_s()

    def _supersede(self, key: RequestKey) -> None:
        """A newer attempt ends an older one that is still alive here."""
        known = self._sequences.get(key.stream)
        if known is not None:
            rank, sequence = known
            if (key.attempt, key.epoch) <= (sequence.key.attempt, sequence.key.epoch):
                raise Failure(Reason.CONFLICT, "the request runs here already")
            rank.finish(sequence, FinishReason.ABORT)

    # --- ends -----------------------------------------------------------------------------------

    def abort(self, key: RequestKey) -> bool:
        """Ends a request in any state; False when it is not here. Idempotent."""
        found = False
        for held in [h for h in self.reservations.all() if _matches(key, h.key)]:
            if held.state is Reservation.HELD:
                self.reservations.let_go(held, ReservationEvent.RELEASE)
                found = True
        known = self._sequences.get(key.stream)
        if known is not None and _matches(key, known[1].key) and not known[1].finished:
            rank, sequence = known
            rank.finish(sequence, FinishReason.ABORT)
            found = True
        return found

    def _on_unread(self, key: RequestKey) -> None:
        log.info("nobody reads the request", extra={"request_id": key.request_id})
        self.abort(key)

    def _on_room(self, key: RequestKey) -> None:
        known = self._sequences.get(key.stream)
        if known is not None:
            known[0].wake()

    def _released(self, rank: DecodeRank, sequence: Sequence) -> None:
        """Last moment of a sequence on the device: its window goes to this machine's pool."""
        if sequence.span is not None:
            sequence.span.set_attribute("output_tokens", sequence.usage.output_tokens)
            sequence.span.end()
        if self._sequences.get(sequence.key.stream) == (rank, sequence):
            del self._sequences[sequence.key.stream]
        if sequence.copy is not None and self._may_store(sequence):
            window = rank.runner.read_window(sequence.seq_id, sequence.attached, sequence.copy)
            block_key = sequence.tokens.key(sequence.attached // self._geometry.block_tokens - 1)
            approximate = sequence.approximate_from > 0
            self._keep_window(block_key, sequence.attached, window, approximate)
        self._on_drain(drain_core.Gone(_name(sequence.key)))

    def _may_store(self, sequence: Sequence) -> bool:
        namespace = sequence.spec.namespace
        return (
            len(namespace.root) == 32
            and namespace.store_policy != records_pb2.STORE_POLICY_NONE
            and self.persist_mode != "none"
        )

    def _persist(self, rank: DecodeRank, sequence: Sequence) -> None:
        """Offers every block that has become full to the store, once."""
        due = scheduler.persist_range(sequence.num_persisted, sequence.num_cached, self._geometry)
        if not due:
            return
        sequence.num_persisted = due.stop
        if not self._may_store(sequence):
            return
        for index in due:
            if index < len(sequence.durable) and sequence.durable[index]:
                continue
            block = sequence.table[index]
            tokens = sequence.tokens
            start = index * self._geometry.block_tokens
            approximate = 0 < sequence.approximate_from <= start
            full = FullBlock(
                tokens.key(index),
                tokens.parent(index),
                index,
                tokens.block_ids(index),
                tokens.extra(index),
                sequence.spec.namespace.ttl_class,
                approximate,
                sequence.key.request_id,
                sequence.spec.namespace.tenant,
            )
            self.persister.offer(
                full, partial(_pinned, rank, block), partial(rank.runner.read_block, block)
            )

    # --- moves ----------------------------------------------------------------------------------

    def _preempt(self, rank: DecodeRank, sequence: Sequence) -> None:
        """No block is free: this victim goes elsewhere, or back to prefill (2.5)."""
        policy = self.config.preempt
        if policy == "stop":
            rank.finish(sequence, FinishReason.INSUFFICIENT_SYSTEM_RESOURCE)
        elif policy == "requeue" or self.mover is None:
            rank.finish(sequence, FinishReason.PREEMPTED_RESUMABLE)
        else:
            self.tasks.start(self._move_or_resume(rank, sequence), "preempt")

    async def _move_or_resume(self, rank: DecodeRank, sequence: Sequence) -> None:
        try:
            await self.export(sequence.key, None)
        except Failure as failure:
            log.info(
                "no other engine takes the request",
                extra={"request_id": sequence.key.request_id, "reason": failure.reason.value},
            )
            self.end_resumable(rank, sequence)

    def end_resumable(self, rank: DecodeRank, sequence: Sequence) -> None:
        """Ends a request so that its caller runs prompt and output again elsewhere (2.5)."""
        if not sequence.finished:
            self.num_resumed += 1
            rank.finish(sequence, FinishReason.PREEMPTED_RESUMABLE)

    def find(self, key: RequestKey) -> tuple[DecodeRank, Sequence]:
        """Raises: Failure(NOT_FOUND)."""
        known = self._sequences.get(key.stream)
        if known is None or known[1].finished:
            raise Failure(Reason.NOT_FOUND, "the request does not run here")
        return known

    async def export(self, key: RequestKey, address: str | None) -> Target:
        """Moves a running request to another engine, KV and all, and ends its stream as moved.

        Raises: Failure; the request is then still here, and paused: see `resume`.
        """
        if self.mover is None:
            raise Failure(Reason.UNSUPPORTED_FEATURE, "this engine moves no requests")
        rank, sequence = self.find(key)
        sequence.paused = True
        async with self._exports:
            await rank.settled(sequence)
            if sequence.finished:
                raise Failure(Reason.NOT_FOUND, "the request has ended")
            try:
                record, pieces = self.record_of(rank, sequence)
                target = await self.mover.move(record, pieces, address, sequence.num_cached)
            except Failure:
                raise
            except Exception as error:
                # Unseen by our callers the request would stay paused for good, with its blocks.
                log.exception("a move broke", extra={"request_id": key.request_id})
                raise Failure(Reason.INTERNAL, "the move broke") from error
        if sequence.finished:
            raise Failure(Reason.NOT_FOUND, "the request has ended")
        sequence.stream.moved(target.instance_id, target.address, record.key.epoch)
        self.num_moved += 1
        rank.leave(sequence)
        return target

    def resume(self, key: RequestKey) -> None:
        """Lets a request that could not be moved go on here."""
        rank, sequence = self.find(key)
        sequence.paused = False
        rank.wake()

    def record_of(
        self, rank: DecodeRank, sequence: Sequence
    ) -> tuple[records_pb2.HandoffRecord, list[Outgoing]]:
        """The record of a settled request and the bytes that go with it."""
        pieces = outgoing_pieces(rank.runner, sequence.seq_id, sequence.num_cached, sequence.table)
        said = records.tokens_event(0, sequence.said, sequence.sampling.logprobs)
        num_full = sequence.num_cached // self._geometry.block_tokens
        durable = sequence.durable[:num_full]
        record = records_pb2.HandoffRecord(
            key=records.key_to_proto(replace(sequence.key, epoch=sequence.key.epoch + 1)),
            spec=request_without_pixels(sequence.spec),
            output_tokens=said.token_ids,
            output_logprobs=said.logprobs,
            output_top=said.top,
            num_cached=sequence.num_cached,
            usage=records.usage_to_proto(sequence.usage),
            block_keys=b"".join(sequence.tokens.key(i) for i in range(num_full)),
            durable_blocks=durable + bytes(num_full - len(durable)),
            state_bytes=self.layout.state_bytes,
            state_position=sequence.num_cached,
            layout_signature=self.layout.signature,
            kv_checksum=checksum(pieces),
            coverage_tokens=sequence.num_cached,
            created_by_instance=self.identity.instance_id,
            created_by_boot=self.identity.boot_id,
            approximate_from=sequence.approximate_from,
        )
        return record, pieces

    # --- drain and housekeeping -----------------------------------------------------------------

    def start_drain(self, grace_s: float, hard_s: float, migrate: bool) -> None:
        """Begins, or joins, the drain of 2.8."""
        self._on_drain(drain_core.Drain(grace_s, hard_s, migrate))

    def _on_drain(self, event: drain_core.Event) -> None:
        try:
            state, actions = drain_core.on_event(self.drain_state, event, self._clock.now_s())
        except drain_core.UnexpectedEvent:
            log.error("unexpected drain event", extra={"event": type(event).__name__})
            return
        self.drain_state = state
        for action in actions:
            match action:
                case drain_core.SetNotReady():
                    self.refusing = True
                case drain_core.Export(name):
                    self.tasks.start(self._export_named(name), "drain export")
                case drain_core.EndResumable(name):
                    self._end_named(name)
                case drain_core.Stopped():
                    self.stopped.set()
                case drain_core.Flush():
                    pass  # `export` waits for what is in flight, request by request

    async def _export_named(self, name: str) -> None:
        found = self._named(name)
        if found is None:
            return
        try:
            await self.export(found[1].key, None)
        except Failure as failure:
            log.info("export failed", extra={"reason": failure.reason.value})
            if self._named(name) is not None:
                self._on_drain(drain_core.ExportFailed(name))

    def _end_named(self, name: str) -> None:
        found = self._named(name)
        if found is not None:
            self.end_resumable(*found)

    def _named(self, name: str) -> tuple[DecodeRank, Sequence] | None:
        for rank, sequence in self._sequences.values():
            if _name(sequence.key) == name and not sequence.finished:
                return rank, sequence
        return None

    def sweep(self) -> None:
        """Leases, deadlines, readers, drain: what time alone brings about."""
        now_s = self._clock.now_s()
        self.reservations.sweep(now_s)
        for rank in self.ranks:
            rank.expire(now_s)
        self.hub.sweep()
        self._on_drain(drain_core.Tick())

    def stalled_for_s(self) -> float:
        """How long no rank with work has completed a step."""
        now_s = self._clock.now_s()
        busy = [now_s - rank.last_progress_s for rank in self.ranks if rank.is_busy]
        return max(busy, default=0.0)

    async def run(self) -> None:
        """Runs every rank's loop, the persister and the sweep until cancelled."""
        async with asyncio.TaskGroup() as group:
            for rank in self.ranks:
                group.create_task(rank.run(), name=f"rank {rank.rank}")
            group.create_task(self.persister.run(), name="persister")
            group.create_task(self._sweep_forever(), name="sweep")

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(0.2)
            self.sweep()

    async def constraint_of(self, record: records_pb2.HandoffRecord) -> Constraint | None:
        """The constraint of a sequence, its output replayed; None when it has none.

        Raises: Failure; nothing has been committed then.
        """
        spec = record.spec
        if not spec.grammar.artifact_key:
            return None
        if self.grammars is None or not self.grammars.available:
            raise Failure(Reason.UNSUPPORTED_FEATURE, "this engine cannot constrain its output")
        prompt = u32_array(spec.prompt_tokens)
        said = prompt[len(prompt) - spec.num_resumed_tokens :] + u32_array(record.output_tokens)
        sampling = records.sampling_from_proto(spec.sampling)
        return await self.grammars.constraint(spec.grammar, sampling, said)

    async def close(self) -> None:
        await self.tasks.close()


def void(_: object) -> None:
    """Drops a result where a callback must return nothing."""


def _pinned(rank: DecodeRank, block: int) -> Callable[[], None]:
    rank.blocks.pin([block])

    def unpin() -> None:
        rank.blocks.free([block])
        rank.wake()

    return unpin


def _name(key: RequestKey) -> str:
    return f"{key.request_id}/{key.branch}/{key.attempt}/{key.epoch}"


def _matches(wanted: RequestKey, key: RequestKey) -> bool:
    """Whether an abort is meant for this owner; epoch and attempt both 0 mean any."""
    any_ = (wanted.attempt, wanted.epoch) == (0, 0)
    return wanted.stream == key.stream and (any_ or wanted == key)
