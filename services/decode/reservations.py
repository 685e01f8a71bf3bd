"""Reservations of a decode instance: room under a lease, and who may write into it.

What is held goes back by one function, `let_go`: at once, or when the writer of its transfer is
fenced. Source: engine.md, sections 2.1 and 7.5; P-36, UR-30 to UR-32.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from pelagos.engine.v1 import kv_transfer_pb2

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.decode import scheduler
from services.decode.config import DecodeConfig
from services.decode.rank_loop import DecodeRank
from services.decode.transfers import Incoming, Transfers
from services.engine import records
from services.engine import transfer as transfer_core
from services.engine.blocks import Fit
from services.engine.layout import Geometry
from services.engine.requests import RequestKey
from services.engine.transfer import Reservation, ReservationEvent

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Held:
    """A reservation: room of one rank under a lease."""

    reservation_id: str
    key: RequestKey
    rank: DecodeRank
    num_tokens: int
    table: list[int]
    slot: int
    lease_until_s: float
    state: Reservation = Reservation.HELD
    incoming: Incoming | None = None

    @property
    def peer_may_write(self) -> bool:
        return self.incoming is not None and self.incoming.core.peer_may_write


class Reservations:
    """All that is held and does not run."""

    def __init__(
        self, config: DecodeConfig, geometry: Geometry, transfers: Transfers, clock: Clock
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._transfers = transfers
        self._clock = clock
        self._held: dict[str, Held] = {}
        self.num_lapsed = 0
        transfers.find_destination = self.destination

    def __len__(self) -> int:
        return len(self._held)

    def on_rank(self, rank: DecodeRank) -> list[Held]:
        return [held for held in self._held.values() if held.rank is rank]

    def all(self) -> list[Held]:
        return list(self._held.values())

    def committed(self, held: Held) -> None:
        """Takes a reservation out that runs now: its memory is the sequence's."""
        del self._held[held.reservation_id]

    def sweep(self, now_s: float) -> None:
        """Ends what was not renewed in time."""
        for held in self.all():
            if held.state is Reservation.HELD and now_s >= held.lease_until_s:
                self.num_lapsed += 1
                log.info("lease lapsed", extra={"request_id": held.key.request_id})
                self.let_go(held, ReservationEvent.LAPSE)

    def reserve(
        self,
        key: RequestKey,
        num_tokens: int,
        expected_output: int,
        rank: DecodeRank,
        lease_ms: int,
    ) -> Held:
        """Holds room for a sequence, at once or not at all. Idempotent per attempt and epoch.

        Raises: Failure with NOT_FITTING or ENGINE_FULL.
        """
        for held in self._held.values():
            if held.key == key and held.state is Reservation.HELD:
                self.renew(held.reservation_id, lease_ms)
                return held
        limit = min(num_tokens + expected_output, self._config.model.max_model_len)
        at_its_end = scheduler.blocks_reserved(limit, self._geometry)
        if rank.blocks.fit(at_its_end) is Fit.NEVER:
            raise Failure(
                Reason.NOT_FITTING,
                f"at its end the request needs {at_its_end} blocks of {rank.blocks.num_blocks - 1}",
                {"num_blocks": str(at_its_end), "max_blocks": str(rank.blocks.num_blocks - 1)},
            )
        needed = scheduler.blocks_reserved(num_tokens, self._geometry)
        seats = len(rank.running) + len(self.on_rank(rank))
        idle = rank.blocks.num_used == 0
        if (
            seats >= rank.max_seqs
            or rank.blocks.fit(needed) is not Fit.OK
            or (rank.blocks.usage >= self._config.admit_below and not idle)
        ):
            raise Failure(Reason.ENGINE_FULL, "no room on this rank", retry_after_s=0.1)
        slot = rank.slots.allocate()
        if slot is None:
            raise Failure(Reason.ENGINE_FULL, "no state slot on this rank", retry_after_s=0.1)
        held = Held(
            f"rsv-{secrets.token_hex(8)}",
            key,
            rank,
            num_tokens,
            rank.blocks.allocate(needed),
            slot,
            self._clock.now_s() + self._lease_s(lease_ms),
        )
        self._held[held.reservation_id] = held
        return held

    def _lease_s(self, lease_ms: int) -> float:
        return min(lease_ms or self._config.lease_ms, self._config.max_lease_ms) / 1e3

    def renew(self, reservation_id: str, lease_ms: int) -> float:
        """Prolongs a lease; returns its seconds. Raises: Failure(NOT_FOUND)."""
        held = self.find(reservation_id)
        seconds = self._lease_s(lease_ms)
        held.lease_until_s = self._clock.now_s() + seconds
        return seconds

    def find(self, reservation_id: str) -> Held:
        held = self._held.get(reservation_id)
        if held is None or held.state is not Reservation.HELD:
            raise Failure(Reason.NOT_FOUND, "no reservation of this id is held")
        return held

    def release(self, reservation_id: str) -> bool:
        """Gives a reservation back; False when it was not held any more."""
        held = self._held.get(reservation_id)
        if held is None or held.state is not Reservation.HELD:
            return False
        self.let_go(held, ReservationEvent.RELEASE)
        return True

    def let_go(self, held: Held, event: ReservationEvent) -> None:
        """Ends a reservation that did not run: at once, or when its writer is fenced."""
        held.state, free = transfer_core.on_reservation(held.state, event, held.peer_may_write)
        if held.state is Reservation.FENCING:
            held.rank.blocks.quarantine(held.table)
            if held.incoming is not None:
                self._transfers.abort(held.incoming)
            return
        if free:
            self._free(held)

    def _free(self, held: Held) -> None:
        self._held.pop(held.reservation_id, None)
        if held.incoming is not None:
            self._transfers.forget(held.incoming)
        held.rank.blocks.release(held.table)
        held.rank.slots.free(held.slot)
        held.rank.wake()

    def _writes_stopped(self, incoming: Incoming) -> None:
        """The writer of a transfer is down; what waited for that goes on."""
        held = self._held.get(incoming.reservation_id)
        if held is None or held.incoming is not incoming:
            self._transfers.forget(incoming)
            return
        if held.state is Reservation.FENCING:
            held.state, free = transfer_core.on_reservation(
                held.state, ReservationEvent.FENCED, incoming.core.peer_may_write
            )
            if free:
                self._free(held)

    def destination(self, request: kv_transfer_pb2.OpenRequest) -> Incoming:
        """The transfer for an Open: the running one again, or a new one after a failed one."""
        held = self.find(request.reservation_id)
        key = records.key_from_proto(request.key)
        if key.stream != held.key.stream or request.to_position != held.num_tokens:
            raise Failure(Reason.HANDOFF_MISMATCH, "the reservation is for another sequence")
        if held.incoming is not None:
            if held.incoming.core.phase is transfer_core.Phase.OPENED:
                return held.incoming
            if held.incoming.core.phase is not transfer_core.Phase.STOPPED:
                raise Failure(Reason.CONFLICT, "a transfer for this reservation is under way")
            self._transfers.forget(held.incoming)
        held.incoming = self._transfers.make(
            key,
            held.reservation_id,
            held.num_tokens,
            held.table,
            held.rank.runner.write_block,
            self._writes_stopped,
        )
        return held.incoming
