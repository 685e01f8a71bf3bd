import random

import pytest

from services.engine.transfer import (
    Phase,
    Piece,
    Reservation,
    ReservationEvent,
    Transfer,
    TransferError,
    UnexpectedEvent,
    accepts,
    on_abort,
    on_chunk,
    on_commit,
    on_last,
    on_reservation,
    on_stopped,
    on_verify,
)

A, B, STATE = Piece("block", 0), Piece("block", 1), Piece("state", 0)


def opened():
    return Transfer("t", "req", epoch=3, expected=frozenset({A, B, STATE}))


def feed(transfer, *pieces, epoch=3, key="req", crc_ok=True):
    for piece in pieces:
        transfer = on_chunk(
            transfer, transfer.next_seq, key, epoch, frozenset({piece}), crc_ok=crc_ok
        )
    return transfer


def test_a_complete_transfer_is_sealed_verified_and_committed():
    transfer = on_last(feed(opened(), A, B, STATE))
    assert transfer.phase is Phase.SEALED
    assert not transfer.peer_may_write
    transfer = on_commit(on_verify(transfer, checksum_matches=True))
    assert transfer.phase is Phase.COMMITTED


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (lambda t: feed(t, A, epoch=2), TransferError.STALE_EPOCH),
        (lambda t: feed(t, A, key="other"), TransferError.WRONG_KEY),
        (lambda t: feed(t, A, crc_ok=False), TransferError.CHECKSUM),
        (lambda t: feed(t, A, A), TransferError.OUT_OF_RANGE),
        (lambda t: feed(t, Piece("block", 9)), TransferError.OUT_OF_RANGE),
        (lambda t: on_chunk(t, 5, "req", 3, frozenset({A}), True), TransferError.SEQUENCE),
        (lambda t: on_last(feed(t, A, B)), TransferError.COVERAGE),
        (lambda t: on_verify(on_last(feed(t, A, B, STATE)), False), TransferError.CHECKSUM),
    ],
)
def test_a_transfer_that_is_not_what_was_announced_is_never_decoded(broken, error):
    transfer = broken(opened())
    assert transfer.error is error
    assert transfer.phase in (Phase.ABORTING, Phase.STOPPED)
    with pytest.raises(UnexpectedEvent):
        on_commit(transfer)


def test_ur_31_a_late_write_is_refused_by_its_epoch():
    transfer = on_abort(feed(opened(), A))
    assert transfer.peer_may_write  # still owned: the writer has not confirmed
    assert not accepts(transfer, 3)
    assert not accepts(opened(), 2)
    transfer = on_stopped(transfer)
    assert transfer.phase is Phase.STOPPED
    assert not transfer.peer_may_write


def test_ur_32_a_lapsed_lease_frees_blocks_only_after_the_writer_is_fenced():
    state, free = on_reservation(Reservation.HELD, ReservationEvent.LAPSE, True)
    assert (state, free) == (Reservation.FENCING, False)
    assert on_reservation(state, ReservationEvent.FENCED, False) == (Reservation.RELEASED, True)


def test_a_reservation_nobody_writes_to_is_free_at_once():
    assert on_reservation(Reservation.HELD, ReservationEvent.LAPSE, False)[1]
    assert on_reservation(Reservation.HELD, ReservationEvent.RELEASE, False)[1]


def test_releasing_twice_frees_once():
    state, free = on_reservation(Reservation.HELD, ReservationEvent.RELEASE, False)
    assert free
    assert on_reservation(state, ReservationEvent.RELEASE, False) == (state, False)


def test_unlisted_pairs_are_errors():
    with pytest.raises(UnexpectedEvent):
        on_reservation(Reservation.COMMITTED, ReservationEvent.RENEW, False)
    with pytest.raises(UnexpectedEvent):
        # Committing while the peer may still write would decode unfinished bytes.
        on_reservation(Reservation.HELD, ReservationEvent.COMMIT, True)


@pytest.mark.parametrize("seed", range(50))
def test_p_36_blocks_are_freed_exactly_once_and_never_under_a_writer(seed):
    rng = random.Random(seed)
    transfer, state, freed = opened(), Reservation.HELD, 0
    pieces = [A, B, STATE]
    for _ in range(30):
        choice = rng.random()
        event = None
        if choice < 0.4 and accepts(transfer, 3) and pieces:
            transfer = feed(transfer, pieces.pop(0), crc_ok=rng.random() < 0.9)
        elif choice < 0.5 and transfer.phase in (Phase.OPENED, Phase.WRITING):
            transfer = on_last(transfer)
        elif choice < 0.6 and transfer.phase is Phase.SEALED:
            transfer = on_verify(transfer, rng.random() < 0.8)
        elif choice < 0.7 and transfer.phase is Phase.VERIFIED and state is Reservation.HELD:
            transfer, event = on_commit(transfer), ReservationEvent.COMMIT
        elif choice < 0.8:
            transfer = on_abort(transfer)
        elif choice < 0.9:
            event = ReservationEvent.LAPSE if state is Reservation.HELD else None
            event = event or ReservationEvent.RELEASE
        else:
            transfer = on_stopped(transfer)
            if state is Reservation.FENCING:
                event = ReservationEvent.FENCED
        if event is not None:
            state, free = on_reservation(state, event, transfer.peer_may_write)
            if free:
                assert not transfer.peer_may_write
                freed += 1
    transfer = on_stopped(on_abort(transfer))
    if state is Reservation.FENCING:
        state, free = on_reservation(state, ReservationEvent.FENCED, transfer.peer_may_write)
        freed += free
    state, free = on_reservation(state, ReservationEvent.RELEASE, transfer.peer_may_write)
    freed += free
    assert freed == 1
    assert state is Reservation.RELEASED
