"""The codec call: batches, and streams that outlive it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pelagos.recipe.v1 import recipe_pb2 as pb

from services.common.clock import VirtualClock
from services.common.errors import Failure, Reason
from services.entrypoint.parse_mux import MAX_OUTAGE_S, ParseMux


class Link:
    """A codec that answers each tokens step with its ids as text; fails when told to."""

    def __init__(self) -> None:
        self.batches: list[Sequence[pb.ParseItem]] = []
        self.lose = asyncio.Event()
        self.away = False

    async def run(
        self,
        next_batch: Callable[[], asyncio.Future[Sequence[pb.ParseItem]]],
        on_results: Callable[[Sequence[pb.ParseResult]], None],
    ) -> None:
        if self.away:
            raise Failure(Reason.NO_INSTANCE, "nobody")
        while True:
            batch = asyncio.ensure_future(next_batch())
            lost = asyncio.ensure_future(self.lose.wait())
            await asyncio.wait({batch, lost}, return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if self.lose.is_set():
                self.lose.clear()
                batch.cancel()
                raise Failure(Reason.BACKEND_LOST, "gone")
            items = batch.result()
            self.batches.append(items)
            results: dict[int, pb.ParseResult] = {}
            for item in items:
                result = results.setdefault(
                    item.stream_id, pb.ParseResult(stream_id=item.stream_id)
                )
                kind = item.WhichOneof("step")
                if kind == "tokens":
                    result.sse += b"<%s>" % item.tokens.token_ids
                elif kind == "finish":
                    result.sse += b"."
                    result.done = True
            on_results([r for r in results.values() if r.sse or r.done])


class Sink:
    def __init__(self) -> None:
        self.data = b""
        self.done = False
        self.failure: Failure | None = None

    def on_parsed(self, result: pb.ParseResult) -> None:
        assert not self.done
        self.data += result.sse
        self.done = result.done

    def on_parse_lost(self, failure: Failure) -> None:
        self.failure = failure


async def settle(turns: int = 30) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_steps_of_one_turn_are_one_batch() -> None:
    link, clock = Link(), VirtualClock()
    mux = ParseMux(link, clock=clock)
    task = asyncio.ensure_future(mux.run())
    sinks = [Sink() for _ in range(50)]
    streams = [mux.open(pb.ParseOpen(), sink) for sink in sinks]
    await settle()
    num_before = len(link.batches)
    for _ in range(4):
        for stream in streams:
            stream.tokens(b"abcd", b"", ())
        await settle()
    assert len(link.batches) == num_before + 4
    assert {sink.data for sink in sinks} == {b"<abcd>" * 4}
    for stream in streams:
        stream.close()
    assert mux.num_streams == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_p_02_a_lost_codec_leaves_no_seam() -> None:
    link, clock = Link(), VirtualClock()
    mux = ParseMux(link, clock=clock)
    task = asyncio.ensure_future(mux.run())
    sink = Sink()
    stream = mux.open(pb.ParseOpen(), sink)
    stream.ready(3, 0)
    for i in range(3):
        stream.tokens(b"%d%d%d%d" % (i, i, i, i) * (i + 1), b"", ())
        await settle()
    link.lose.set()
    await settle()
    stream.tokens(b"9999", b"", ())  # while nobody is there
    await clock.advance(1.0)
    stream.finish(pb.PARSE_FINISH_STOP)
    await settle()
    assert sink.data == b"<0000><11111111><222222222222><9999>."
    assert sink.done
    assert mux.num_streams == 0
    # The pieces were played as they had come: events depend on them.
    replay = [i.tokens.token_ids for b in link.batches[-2:] for i in b if i.HasField("tokens")]
    assert replay == [b"0000", b"1111" * 2, b"2222" * 3, b"9999"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_any_codec_a_stream_ends_in_bounded_time() -> None:
    link, clock = Link(), VirtualClock()
    link.away = True
    mux = ParseMux(link, clock=clock)
    task = asyncio.ensure_future(mux.run())
    sink = Sink()
    mux.open(pb.ParseOpen(), sink).tokens(b"abcd", b"", ())
    await clock.advance(MAX_OUTAGE_S / 2)
    assert sink.failure is None
    await clock.advance(MAX_OUTAGE_S)
    assert sink.failure is not None
    assert mux.num_streams == 0
    link.away = False
    late = Sink()
    mux.open(pb.ParseOpen(), late).tokens(b"abcd", b"", ())
    await clock.advance(2.0)
    assert late.data == b"<abcd>"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
