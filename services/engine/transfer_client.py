"""Sends a sequence's KV and state to the engine that will go on with it.

    transfer_id = await push(stub, open_request, pieces)

Chunks go out as credit allows; the receiver's refusal stops the sender at once. Returning means
that every piece has arrived and its checksum agreed; the commit is the receiver's (Decode.Run).
Source: engine.md, section 7.5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import google_crc32c
import xxhash
from pelagos.engine.v1 import kv_transfer_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.rpc_client import StreamCall, call, stream_call
from services.common.rpc_errors import from_proto

_OPEN_TIMEOUT_S = 5.0
_NO_PROGRESS_S = 10.0  # a transfer without progress for so long has failed (7.5)
_CLOSE_TIMEOUT_S = 1.0
_LAST_WORD_S = 1.0  # how long a receiver's reason may come after a write has failed


@dataclass(frozen=True)
class Outgoing:
    """One block, the tail, or the state, whole."""

    kind: pb.ChunkKind.ValueType
    index: int
    data: bytes


def checksum(pieces: Iterable[Outgoing]) -> bytes:
    """xxh3-128 over all bytes in the order of sending: what the hand-off record carries."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece.data)
    return digest.digest()


async def push(
    stub: Any, request: pb.OpenRequest, pieces: Iterable[Outgoing], timeout_s: float = 60.0
) -> str:
    """Opens a transfer, sends every piece and returns the transfer's id once all is verified.

    Raises: Failure. The transfer is closed on the way out unless it has succeeded, so the
    receiver learns within one call that nothing more will come.
    """
    opened: pb.OpenResponse = await call(stub.Open, request, timeout_s=_OPEN_TIMEOUT_S)
    done = False
    try:
        async with stream_call(stub.Push, timeout_s=timeout_s) as stream:
            await _send_all(stream, opened, request.key.request_id, pieces)
        done = True
        return opened.transfer_id
    finally:
        if not done:
            closing = pb.CloseRequest(transfer_id=opened.transfer_id, abort=True)
            with suppress(Failure, asyncio.CancelledError):
                await asyncio.shield(call(stub.Close, closing, timeout_s=_CLOSE_TIMEOUT_S))


async def _send_all(
    stream: StreamCall[Any, Any],
    opened: pb.OpenResponse,
    request_id: str,
    pieces: Iterable[Outgoing],
) -> None:
    credit = _Credit(stream, opened.credit_bytes)
    try:
        for seq, chunk in enumerate(chunks_of(opened, request_id, pieces)):
            await credit.take(chunk.length_bytes)
            chunk.seq = seq
            await stream.write(pb.PushRequest(chunk=chunk))
        await stream.done_writing()
        await credit.verified()
    except Failure as failure:
        raise await credit.refusal() or failure from None
    finally:
        credit.close()


class _Credit:
    """Bytes that may be sent. Listens all the time: a refusal is heard before a write fails of it,
    and a call that a write has broken says nothing any more."""

    def __init__(self, stream: StreamCall[Any, Any], level: int) -> None:
        self._level = level
        self._more = asyncio.Event()
        self._listener = asyncio.create_task(self._listen(stream), name="transfer's credit")
        self._listener.add_done_callback(lambda _: self._more.set())

    async def _listen(self, stream: StreamCall[Any, Any]) -> None:
        while True:
            answer = await _acknowledged(stream)
            self._level += answer.credit_bytes
            self._more.set()
            if answer.verified:
                return

    async def take(self, num_bytes: int) -> None:
        """Waits until so many bytes may be sent. Raises: Failure."""
        while True:
            if self._listener.done():
                await self._listener
                raise Failure(Reason.HANDOFF_MISMATCH, "the receiver verified less than all")
            if self._level >= num_bytes:
                break
            self._more.clear()
            await self._more.wait()
        self._level -= num_bytes

    async def verified(self) -> None:
        """Waits for the receiver's last word. Raises: Failure."""
        await self._listener

    async def refusal(self) -> Failure | None:
        """Returns what the receiver said when a write failed, None where it said nothing."""
        await asyncio.wait({self._listener}, timeout=_LAST_WORD_S)
        if not self._listener.done() or self._listener.cancelled():
            return None
        heard = self._listener.exception()
        return heard if isinstance(heard, Failure) else None

    def close(self) -> None:
        self._listener.cancel()
        if self._listener.done() and not self._listener.cancelled():
            self._listener.exception()  # it was raised, or something else was first


async def _acknowledged(stream: StreamCall[Any, Any]) -> pb.PushResponse:
    try:
        async with asyncio.timeout(_NO_PROGRESS_S):
            answer: pb.PushResponse | None = await stream.read()
    except TimeoutError:
        raise Failure(Reason.BACKEND_LOST, "the transfer made no progress") from None
    if answer is None:
        raise Failure(Reason.BACKEND_LOST, "the receiver has ended the transfer")
    if answer.HasField("error"):
        raise from_proto(answer.error)
    return answer


def chunks_of(
    opened: pb.OpenResponse, request_id: str, pieces: Iterable[Outgoing]
) -> Iterable[pb.KvChunk]:
    """Cuts pieces to the receiver's chunk size; the very last chunk says so."""
    held: pb.KvChunk | None = None
    for piece in pieces:
        for at in range(0, len(piece.data), opened.max_chunk_bytes):
            if held is not None:
                yield held
            data = piece.data[at : at + opened.max_chunk_bytes]
            held = pb.KvChunk(
                transfer_id=opened.transfer_id,
                epoch=opened.epoch,
                kind=piece.kind,
                block_index=piece.index,
                offset_bytes=at,
                data=data,
                length_bytes=len(data),
                crc32c=google_crc32c.value(data),
                request_id=request_id,
            )
    if held is not None:
        held.last = True
        yield held
