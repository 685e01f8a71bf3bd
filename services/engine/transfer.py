"""Life cycles of reservations and transfers, as tables of (state, event).

    reservation  FREE -> HELD(lease) -> COMMITTED -> RELEASED; a lapsed lease goes through its
                 transfer's fence before its blocks are free
    transfer     OPENED -> WRITING -> SEALED -> VERIFIED -> COMMITTED, or ABORTING -> STOPPED

Destination blocks belong to the transfer, then to the request. They return to the pool only from
STOPPED, or COMMITTED and finished: a timeout alone never frees a block that a peer may still write
(P-36, UR-31, UR-32). An unlisted pair raises `UnexpectedEvent`.
Source: engine.md, sections 7.4 and 7.5.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


class UnexpectedEvent(ValueError):
    """A pair of state and event that the table does not list."""


class Reservation(enum.Enum):
    HELD = "held"
    COMMITTED = "committed"
    FENCING = "fencing"  # lease lapsed or released while a peer may still write
    RELEASED = "released"


class ReservationEvent(enum.Enum):
    RENEW = "renew"
    COMMIT = "commit"
    RELEASE = "release"  # by the caller, by an abort, or at the request's end
    LAPSE = "lapse"
    FENCED = "fenced"  # the transfer's writes have stopped


_RESERVATION: Mapping[tuple[Reservation, ReservationEvent, bool], tuple[Reservation, bool]] = {
    # (state, event, peer may write) -> (state, free the blocks now)
    (Reservation.HELD, ReservationEvent.RENEW, False): (Reservation.HELD, False),
    (Reservation.HELD, ReservationEvent.RENEW, True): (Reservation.HELD, False),
    (Reservation.HELD, ReservationEvent.COMMIT, False): (Reservation.COMMITTED, False),
    (Reservation.HELD, ReservationEvent.RELEASE, False): (Reservation.RELEASED, True),
    (Reservation.HELD, ReservationEvent.RELEASE, True): (Reservation.FENCING, False),
    (Reservation.HELD, ReservationEvent.LAPSE, False): (Reservation.RELEASED, True),
    (Reservation.HELD, ReservationEvent.LAPSE, True): (Reservation.FENCING, False),
    (Reservation.HELD, ReservationEvent.FENCED, False): (Reservation.HELD, False),
    (Reservation.FENCING, ReservationEvent.FENCED, False): (Reservation.RELEASED, True),
    (Reservation.FENCING, ReservationEvent.RELEASE, False): (Reservation.FENCING, False),
    (Reservation.FENCING, ReservationEvent.RELEASE, True): (Reservation.FENCING, False),
    (Reservation.FENCING, ReservationEvent.LAPSE, True): (Reservation.FENCING, False),
    (Reservation.COMMITTED, ReservationEvent.RELEASE, False): (Reservation.RELEASED, True),
    (Reservation.RELEASED, ReservationEvent.RELEASE, False): (Reservation.RELEASED, False),
}


def on_reservation(
    state: Reservation, event: ReservationEvent, peer_may_write: bool
) -> tuple[Reservation, bool]:
    """Next state, and whether the blocks and slots go back to their pools now."""
    try:
        return _RESERVATION[state, event, peer_may_write]
    except KeyError:
        raise UnexpectedEvent(
            f"{event.value} in {state.value}, peer may write: {peer_may_write}"
        ) from None


class Phase(enum.Enum):
    OPENED = "opened"
    WRITING = "writing"
    SEALED = "sealed"
    VERIFIED = "verified"
    COMMITTED = "committed"
    ABORTING = "aborting"
    STOPPED = "stopped"


class TransferError(enum.Enum):
    """Why a transfer failed; every one ends in a re-run, never in decoding (7.5)."""

    STALE_EPOCH = "stale_epoch"
    WRONG_KEY = "wrong_key"
    OUT_OF_RANGE = "out_of_range"
    CHECKSUM = "checksum"
    COVERAGE = "coverage"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class Piece:
    """One unit of a transfer: a whole block, or a region of the state."""

    kind: str  # "block", "tail" or "state"
    index: int


@dataclass(frozen=True)
class Transfer:
    """One transfer as its receiver sees it. `epoch` fences writers of an earlier life."""

    transfer_id: str
    request_key: str
    epoch: int
    expected: frozenset[Piece]
    phase: Phase = Phase.OPENED
    received: frozenset[Piece] = field(default_factory=frozenset)
    next_seq: int = 0
    error: TransferError | None = None

    @property
    def peer_may_write(self) -> bool:
        return self.phase in (Phase.OPENED, Phase.WRITING, Phase.ABORTING)

    @property
    def missing(self) -> frozenset[Piece]:
        return self.expected - self.received


def on_chunk(
    transfer: Transfer, seq: int, key: str, epoch: int, pieces: frozenset[Piece], crc_ok: bool
) -> Transfer:
    """Accounts for one chunk. A refused chunk moves the transfer to ABORTING with its reason.

    A chunk for a transfer that is no longer written to is dropped by the caller: see `accepts`.
    """
    error = None
    if epoch != transfer.epoch:
        error = TransferError.STALE_EPOCH
    elif key != transfer.request_key:
        error = TransferError.WRONG_KEY
    elif seq != transfer.next_seq:
        error = TransferError.SEQUENCE
    elif not crc_ok:
        error = TransferError.CHECKSUM
    elif not pieces <= transfer.expected or pieces & transfer.received:
        error = TransferError.OUT_OF_RANGE
    if error is not None:
        return replace(transfer, phase=Phase.ABORTING, error=error)
    return replace(
        transfer,
        phase=Phase.WRITING,
        received=transfer.received | pieces,
        next_seq=seq + 1,
    )


def accepts(transfer: Transfer, epoch: int) -> bool:
    """Whether bytes of a writer with this epoch may touch the destination at all."""
    return transfer.phase in (Phase.OPENED, Phase.WRITING) and epoch == transfer.epoch


def on_last(transfer: Transfer) -> Transfer:
    """The sender says it has sent everything and writes no more."""
    if transfer.phase not in (Phase.OPENED, Phase.WRITING):
        raise UnexpectedEvent(f"last chunk in {transfer.phase.value}")
    if transfer.missing:
        return replace(transfer, phase=Phase.STOPPED, error=TransferError.COVERAGE)
    return replace(transfer, phase=Phase.SEALED)


def on_verify(transfer: Transfer, checksum_matches: bool) -> Transfer:
    """The receiver compared the checksum of all bytes with the hand-off record's."""
    if transfer.phase is not Phase.SEALED:
        raise UnexpectedEvent(f"verify in {transfer.phase.value}")
    if not checksum_matches:
        return replace(transfer, phase=Phase.STOPPED, error=TransferError.CHECKSUM)
    return replace(transfer, phase=Phase.VERIFIED)


def on_commit(transfer: Transfer) -> Transfer:
    """The request takes the blocks over."""
    if transfer.phase is not Phase.VERIFIED:
        raise UnexpectedEvent(f"commit in {transfer.phase.value}")
    return replace(transfer, phase=Phase.COMMITTED)


def on_abort(transfer: Transfer) -> Transfer:
    """Either side gives up. Blocks stay owned until `on_stopped`, unless nobody writes."""
    if transfer.phase in (Phase.OPENED, Phase.WRITING):
        return replace(transfer, phase=Phase.ABORTING)
    if transfer.phase in (Phase.SEALED, Phase.VERIFIED):
        return replace(transfer, phase=Phase.STOPPED)  # the sender has said it writes no more
    return transfer


def on_stopped(transfer: Transfer) -> Transfer:
    """Writes are known to have stopped: acknowledged, or the stream is torn down."""
    if transfer.phase in (Phase.OPENED, Phase.WRITING, Phase.ABORTING):
        return replace(transfer, phase=Phase.STOPPED)
    return transfer
