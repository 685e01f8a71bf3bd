"""Fetches over a storage that fails in ways that it should not."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from services.kvstore.backends.base import ReadStatus, wait_all
from services.kvstore.store.blocks import BlockRead
from services.kvstore.store.fetch import Fetcher


class _FailsOnSome:
    """Has blocks of any key; reading those that begin with 1 fails as nobody thought of."""

    def block_bytes(self, key: bytes) -> int:
        return 4

    async def get(self, key: bytes, layout: bytes, room) -> BlockRead:
        if key[0] == 1:
            raise KeyError("unforeseen")
        room(4)[:] = key[:4]
        return BlockRead(ReadStatus.OK, 4)


@pytest.mark.timeout(30)
async def test_a_read_that_fails_unforeseen_is_a_miss_and_holds_no_other_up() -> None:
    fetcher = Fetcher(_FailsOnSome(), 1 << 20)
    keys = b"".join(bytes([first]) * 32 for first in (0, 1, 2))
    fetched = [part async for part in fetcher.fetch(keys, bytes(32), ring=None, slots=())]
    found = {part.index: (part.read.status, part.payload) for part in fetched}
    assert found[0] == (ReadStatus.OK, bytes(4))
    assert found[1] == (ReadStatus.IO, b"")
    assert found[2] == (ReadStatus.OK, bytes([2]) * 4)
    assert (fetcher.num_running, fetcher.num_inflight_bytes) == (0, 0)


class _ReadsWhenTold:
    """One block whose read, once begun, goes on until it is let go, however often cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.let_go = asyncio.Event()

    def block_bytes(self, key: bytes) -> int:
        return 4

    async def get(self, key: bytes, layout: bytes, room) -> BlockRead:
        self.began.set()
        await wait_all([asyncio.ensure_future(self.let_go.wait())])
        return BlockRead(ReadStatus.OK, 4)


@pytest.mark.timeout(30)
async def test_a_fetch_that_is_cancelled_while_it_ends_says_that_it_has_ended() -> None:
    blocks = _ReadsWhenTold()
    fetcher = Fetcher(blocks, 1 << 20)

    async def read_all() -> None:
        fetched = fetcher.fetch(bytes(32), bytes(32), ring=None, slots=(), fetch_id=7)
        async with aclosing(fetched) as parts:
            async for _ in parts:
                pass

    reader = asyncio.create_task(read_all())
    await blocks.began.wait()
    reader.cancel()  # the reader leaves, and its fetch waits for the read
    await asyncio.sleep(0)
    cancelling = asyncio.create_task(fetcher.cancel(7))  # and is told to stop as well
    await asyncio.sleep(0)
    assert not cancelling.done()
    blocks.let_go.set()
    assert await cancelling
    assert (fetcher.num_running, fetcher.num_inflight_bytes) == (0, 0)
    assert not await fetcher.cancel(7)
    with pytest.raises(asyncio.CancelledError):
        await reader
