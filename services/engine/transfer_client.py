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
    credit = opened.credit_bytes
    for seq, chunk in enumerate(chunks_of(opened, request_id, pieces)):
        while credit < chunk.length_bytes:
            credit += (await _acknowledged(stream)).credit_bytes
        chunk.seq = seq
        await stream.write(pb.PushRequest(chunk=chunk))
        credit -= chunk.length_bytes
    await stream.done_writing()
    while True:
        if (await _acknowledged(stream)).verified:
            return


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
