"""Indices and epochs: whatever emitters do, the client sees each index once, in order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from pelagos.engine.v1 import records_pb2 as records

from services.common.errors import Failure, Reason
from services.entrypoint.token_stream import (
    EPOCHS_PER_ATTEMPT,
    Broken,
    Delivered,
    Ended,
    Follow,
    Place,
    TokenStream,
    first_epoch,
)


def tokens(first: int, num: int, epoch: int = 0) -> records.RequestEvent:
    ids = b"".join((1000 + first + i).to_bytes(4, "little") for i in range(num))
    return records.RequestEvent(
        epoch=epoch, tokens=records.Tokens(first_index=first, token_ids=ids)
    )


def delivered(stream: TokenStream) -> list[int]:
    return [i - 1000 for i in memoryview(bytes(stream.output_tokens)).cast("I")]


def test_repeats_are_cut_off_and_gaps_break_the_attempt() -> None:
    stream = TokenStream()
    stream.on_event(tokens(0, 3))
    assert stream.on_event(tokens(1, 2)) == []
    (action,) = stream.on_event(tokens(2, 3))
    assert isinstance(action, Delivered)
    assert len(action.token_ids) == 8
    assert delivered(stream) == [0, 1, 2, 3, 4]
    (broken,) = stream.on_event(tokens(7, 1))
    assert isinstance(broken, Broken)
    assert broken.failure.reason is Reason.BACKEND_LOST
    assert delivered(stream) == [0, 1, 2, 3, 4]


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    stream = TokenStream()
    stream.on_event(tokens(0, 2))
    event = tokens(1, 2)
    event.tokens.logprobs = b"aaaabbbb"
    event.tokens.top.add(token_ids=b"1")
    event.tokens.top.add(token_ids=b"2")
    (action,) = stream.on_event(event)
    assert isinstance(action, Delivered)
    assert action.logprobs == b"bbbb"
    assert [top.token_ids for top in action.top] == [b"2"]


def test_an_emitter_of_an_older_epoch_is_not_heard() -> None:
    stream = TokenStream()
    stream.placed("prefill-1")
    first = stream.epoch
    moved = records.Moved(instance_id="d1", address="a:1", epoch=first + 1, next_index=1)
    stream.on_event(tokens(0, 1, first))
    (follow,) = stream.on_event(records.RequestEvent(epoch=first, moved=moved))
    assert follow == Follow("d1", "a:1", 1)
    assert stream.place is Place.DECODE
    assert stream.on_event(tokens(1, 1, first)) == []
    assert stream.on_event(tokens(1, 1, first + 1)) != []
    stream.next_attempt()
    assert stream.epoch == first + 1 + EPOCHS_PER_ATTEMPT
    assert stream.on_event(tokens(2, 1, first + 1)) == []
    assert stream.on_failure(Failure(Reason.BACKEND_LOST), first + 1) == []
    assert delivered(stream) == [0, 1]


def test_ends_that_are_no_answer_break_the_attempt() -> None:
    for reason, expected in (
        (records.FINISH_REASON_ABORT, Reason.BACKEND_LOST),
        (records.FINISH_REASON_PREEMPTED_RESUMABLE, Reason.BACKEND_LOST),
        (records.FINISH_REASON_INSUFFICIENT_SYSTEM_RESOURCE, Reason.ENGINE_FULL),
        (records.FINISH_REASON_GRAMMAR_ERROR, Reason.UNSUPPORTED_FEATURE),
        (records.FINISH_REASON_UNSPECIFIED, Reason.BACKEND_LOST),
    ):
        stream = TokenStream()
        (action,) = stream.on_event(records.RequestEvent(finished=records.Finished(reason=reason)))
        assert isinstance(action, Broken)
        assert action.failure.reason is expected
        assert stream.place is not Place.ENDED


def test_nothing_follows_the_end() -> None:
    stream = TokenStream()
    finished = records.Finished(reason=records.FINISH_REASON_STOP)
    (action,) = stream.on_event(records.RequestEvent(finished=finished))
    assert action == Ended(records.FINISH_REASON_STOP)
    assert stream.on_event(tokens(0, 1)) == []
    assert stream.on_failure(Failure(Reason.BACKEND_LOST)) == []


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_p_03_any_sequence_of_losses_and_repeats_delivers_each_index_once(
    seed: int, length: int
) -> None:
    """Engines that emit with overlaps, die, move and speak late: the output is 0, 1, 2, ..."""
    rng = random.Random(seed)
    stream = TokenStream()
    late: list[records.RequestEvent] = []
    at = 0
    while at < length:
        choice = rng.random()
        if choice < 0.6:
            first = max(0, at - rng.randrange(3))
            num = min(length - first, rng.randint(1, 4))
            event = tokens(first, num, stream.epoch)
            late.append(event)
            for action in stream.on_event(event):
                assert isinstance(action, Delivered)
            at = max(at, first + num)
        elif choice < 0.75:
            stream.on_event(
                records.RequestEvent(
                    epoch=stream.epoch,
                    moved=records.Moved(instance_id="d", epoch=stream.epoch + 1, next_index=at),
                )
            )
        elif choice < 0.85:
            stream.next_attempt()
            at = stream.next_index
        elif late:
            stream.on_event(rng.choice(late))
    assert delivered(stream)[:length] == list(range(length))


def test_an_id_used_again_is_newer_than_its_first_use() -> None:
    now_s = 1_800_000_000.0
    first = TokenStream(epoch=first_epoch(now_s))
    first.next_attempt()
    first.next_attempt()
    assert first_epoch(now_s + 60) > first.epoch
    assert first_epoch(0.0) > 0
    assert first_epoch(2_700_000_000.0) < 2**32
