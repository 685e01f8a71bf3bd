import asyncio
from types import SimpleNamespace

import pytest
from pelagos.common.v1 import errors_pb2
from pelagos.engine.v1 import records_pb2 as pb
from pelagos.prefill.v1 import prefill_pb2

from services.common.clock import VirtualClock
from services.common.errors import Failure, Reason
from services.engine.records import key_to_proto, tokens_from_event
from services.engine.requests import FinishReason, RequestKey, TokenOut, Usage
from services.engine.streams import StreamHub, StreamLimits, attach

KEY = RequestKey("r", 0, 1, 0)


class Bench:
    def __init__(self, **limits):
        self.clock = VirtualClock()
        self.unread, self.aborted, self.room = [], [], []
        self.hub = StreamHub(
            StreamLimits(**limits),
            on_unread=self.unread.append,
            on_abort=self.aborted.append,
            on_room=self.room.append,
            clock=self.clock,
        )

    def channel(self, stream_id=1, key=KEY, from_index=0):
        channel = self.hub.connect()
        self.hub.subscribe(channel, stream_id, key, from_index)
        return channel


def drain(channel):
    events, channel._pending = channel._pending, []
    return events


def outs(*ids):
    return [TokenOut(i) for i in ids]


def indices(events):
    """(first_index, ids) of the token events."""
    return [
        (e.tokens.first_index, [t.token_id for t in tokens_from_event(e.tokens)])
        for e in events
        if e.HasField("tokens")
    ]


def test_everything_posted_in_one_step_is_one_batch():
    bench = Bench()
    channel = bench.hub.connect()
    for stream_id in range(3):
        key = RequestKey(f"r{stream_id}")
        bench.hub.open(key).emit(outs(stream_id))
        bench.hub.subscribe(channel, stream_id, key, 0)
    assert len(drain(channel)) == 3


def test_a_reader_that_comes_late_gets_everything_from_its_index_on():
    bench = Bench()
    stream = bench.hub.open(KEY, first_index=5)
    stream.accepted(2, "i")
    stream.emit(outs(50, 51, 52), Usage(prompt_tokens=9))
    events = drain(bench.channel(from_index=6))
    assert events[0].accepted.rank == 2
    assert indices(events) == [(6, [51, 52])]
    stream.emit(outs(53))
    stream.finish(FinishReason.STOP, Usage(output_tokens=4))
    events = drain(bench.channel(from_index=0))
    assert indices(events) == [(5, [50, 51, 52, 53])]
    assert events[1].usage.prompt_tokens == 9
    assert events[2].finished.usage.output_tokens == 4
    assert all(e.epoch == 1 for e in events)


def test_t8_a_new_reader_takes_over_with_no_gap_and_no_repeat():
    bench = Bench()
    stream = bench.hub.open(KEY)
    first = bench.channel()
    stream.emit(outs(1, 2))
    assert indices(drain(first)) == [(0, [1, 2])]
    bench.hub.disconnect(first)
    stream.emit(outs(3))
    second = bench.channel(from_index=2)
    assert indices(drain(second)) == [(2, [3])]
    stream.emit(outs(4))
    assert drain(first) == []
    assert indices(drain(second)) == [(3, [4])]


def test_a_slow_reader_gets_one_window_and_the_request_pauses():
    bench = Bench(window_tokens=4)
    stream = bench.hub.open(KEY)
    channel = bench.channel()
    stream.emit(outs(1, 2, 3))
    assert not stream.is_full
    stream.emit(outs(4, 5, 6))
    assert stream.is_full
    stream.finish(FinishReason.LENGTH, Usage())
    assert indices(drain(channel)) == [(0, [1, 2, 3]), (3, [4])]
    stream.ack(4)
    assert bench.room == [KEY]
    events = drain(channel)
    assert indices(events) == [(4, [5, 6])]
    assert events[-1].HasField("finished")


def test_nobody_reading_for_too_long_is_reported_and_a_reader_that_acks_is_not():
    bench = Bench(window_tokens=2, reader_timeout_s=10)
    stream = bench.hub.open(KEY)
    bench.clock._now_s += 9
    bench.hub.sweep()
    assert bench.unread == []
    channel = bench.channel()
    bench.clock._now_s += 100
    bench.hub.sweep()
    assert bench.unread == []
    stream.emit(outs(1, 2, 3))
    bench.clock._now_s += 9
    stream.ack(1)
    bench.clock._now_s += 9
    bench.hub.sweep()
    assert bench.unread == []
    bench.hub.disconnect(channel)
    bench.clock._now_s += 10
    bench.hub.sweep()
    assert bench.unread == [KEY]


def test_an_early_subscription_waits_for_its_request_and_fails_when_none_comes():
    bench = Bench(wait_unknown_s=10)
    channel = bench.channel()
    assert drain(channel) == []
    bench.hub.open(KEY).emit(outs(7))
    assert indices(drain(channel)) == [(0, [7])]
    bench.hub.subscribe(channel, 2, RequestKey("never"), 0)
    bench.clock._now_s += 10
    bench.hub.sweep()
    (event,) = drain(channel)
    assert event.stream_id == 2
    assert event.failed.reason == errors_pb2.REASON_NOT_FOUND


def test_a_request_that_has_gone_fails_a_late_subscription_at_once():
    bench = Bench(keep_ended_s=10)
    bench.hub.open(KEY).finish(FinishReason.STOP, Usage())
    bench.clock._now_s += 10
    bench.hub.sweep()
    assert bench.hub.find(KEY) is None
    (event,) = drain(bench.channel())
    assert event.HasField("failed")


def test_an_attempt_runs_once_and_a_newer_one_replaces_an_ended_one():
    bench = Bench()
    stream = bench.hub.open(KEY)
    with pytest.raises(Failure) as failure:
        bench.hub.open(KEY)
    assert failure.value.reason is Reason.CONFLICT
    stream.finish(FinishReason.ABORT, Usage())
    with pytest.raises(Failure):
        bench.hub.open(KEY)
    again = bench.hub.open(RequestKey("r", 0, 0, 1))
    assert bench.hub.find(KEY) is again


def test_p_01_a_stream_ends_once():
    bench = Bench()
    stream = bench.hub.open(KEY)
    stream.finish(FinishReason.STOP, Usage())
    with pytest.raises(AssertionError):
        stream.fail(Failure(Reason.INTERNAL))
    with pytest.raises(AssertionError):
        stream.emit(outs(1))


def test_p_06_an_unsubscribe_with_abort_aborts_even_a_request_that_has_not_arrived():
    bench = Bench()
    bench.hub.open(KEY)
    channel = bench.channel()
    bench.hub.unsubscribe(channel, 1, abort=True)
    other = RequestKey("later")
    bench.hub.subscribe(channel, 2, other, 0)
    bench.hub.unsubscribe(channel, 2, abort=True)
    assert bench.aborted == [KEY, other]


async def test_the_handler_carries_commands_in_and_batches_out_and_lets_go():
    bench = Bench()
    commands: asyncio.Queue = asyncio.Queue()

    async def requests():
        while (item := await commands.get()) is not None:
            yield item

    stream = bench.hub.open(KEY)
    handler = attach(bench.hub, requests(), prefill_pb2.AttachResponse)
    subscribe = pb.Subscribe(stream_id=4, key=key_to_proto(KEY))
    await commands.put(prefill_pb2.AttachRequest(subscribe=subscribe, entrypoint_id="e"))
    stream.accepted(0, "i")
    response = await anext(handler)
    assert response.events[0].stream_id == 4
    stream.emit(outs(1))
    stream.finish(FinishReason.STOP, Usage())
    response = await anext(handler)
    assert [e.WhichOneof("event") for e in response.events] == ["tokens", "finished"]
    await commands.put(prefill_pb2.AttachRequest(ack=pb.Ack(stream_id=4, next_index=1)))
    await commands.put(None)
    while bench.hub.find(KEY) is not None:  # noqa: ASYNC110 - the loop turns are the point
        await asyncio.sleep(0)
    await handler.aclose()
    assert bench.hub.num_channels == 0


async def test_a_channel_that_sends_nonsense_ends_with_the_reason():
    bench = Bench()

    async def requests():
        yield SimpleNamespace(WhichOneof=lambda _: "subscribe", subscribe=pb.Subscribe())

    with pytest.raises(Failure) as failure:
        async for _ in attach(bench.hub, requests(), prefill_pb2.AttachResponse):
            pass
    assert failure.value.reason is Reason.INVALID_REQUEST
    assert bench.hub.num_channels == 0
