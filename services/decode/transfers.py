"""Receives KV and state of sequences: the shell around `engine/transfer.py`.

Bytes go straight into the reserved blocks. A block that a peer may still write to is never free:
the writer is fenced by its epoch, and its stream is torn down before anything is given back.
Source: engine.md, section 7.5; P-36, UR-30 to UR-32.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import xxhash
from pelagos.engine.v1 import kv_transfer_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.rpc_errors import to_proto
from services.engine import transfer as core
from services.engine.layout import KvLayout
from services.engine.requests import RequestKey
from services.engine.transfer import Phase, Piece, Transfer, TransferError

log = logging.getLogger(__name__)

STATE = Piece("state", 0)
_STATES = {
    Phase.OPENED: pb.TRANSFER_STATE_OPENED,
    Phase.WRITING: pb.TRANSFER_STATE_WRITING,
    Phase.SEALED: pb.TRANSFER_STATE_SEALED,
    Phase.VERIFIED: pb.TRANSFER_STATE_VERIFIED,
    Phase.COMMITTED: pb.TRANSFER_STATE_COMMITTED,
    Phase.ABORTING: pb.TRANSFER_STATE_ABORTING,
    Phase.STOPPED: pb.TRANSFER_STATE_STOPPED,
}
_REASONS = {
    TransferError.STALE_EPOCH: Reason.STALE_EPOCH,
    TransferError.CHECKSUM: Reason.HANDOFF_MISMATCH,
    TransferError.COVERAGE: Reason.HANDOFF_MISMATCH,
    TransferError.WRONG_KEY: Reason.HANDOFF_MISMATCH,
    TransferError.OUT_OF_RANGE: Reason.HANDOFF_MISMATCH,
    TransferError.SEQUENCE: Reason.HANDOFF_MISMATCH,
}


@dataclass(eq=False)
class Incoming:
    """A transfer with its destination: the blocks of one reservation."""

    core: Transfer
    key: RequestKey
    reservation_id: str
    num_tokens: int
    table: list[int]
    write: Callable[[int, bytes], None]  # block id, bytes
    stopped: Callable[[Incoming], None]  # called once writes have stopped
    partial: dict[Piece, bytearray] = field(default_factory=dict)
    state: bytes = b""
    digest: Any = field(default_factory=xxhash.xxh3_128)
    num_bytes: int = 0
    writer: asyncio.Event | None = None  # set to make a running Push handler leave

    @property
    def checksum(self) -> bytes:
        """Over all bytes in the order they were sent."""
        return bytes(self.digest.digest())


class Transfers:
    """All transfers of an instance, and its KvTransferService."""

    def __init__(self, layout: KvLayout, max_chunk_bytes: int, credit_bytes: int) -> None:
        self._layout = layout
        self._max_chunk_bytes = max_chunk_bytes
        self._credit_bytes = credit_bytes
        self._by_id: dict[str, Incoming] = {}
        self._epochs = itertools.count(1)
        self.find_destination: Callable[[pb.OpenRequest], Incoming] = _no_destination
        self.num_refused_chunks = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def make(
        self,
        key: RequestKey,
        reservation_id: str,
        num_tokens: int,
        table: list[int],
        write: Callable[[int, bytes], None],
        stopped: Callable[[Incoming], None],
    ) -> Incoming:
        """A new transfer into the blocks of a reservation, under a new fencing epoch."""
        size = self._layout.geometry.block_tokens
        pieces = {Piece("block", i) for i in range(num_tokens // size)} | {STATE}
        if num_tokens % size:
            pieces.add(Piece("tail", num_tokens // size))
        transfer = Transfer(
            f"xfer-{secrets.token_hex(8)}", key.request_id, next(self._epochs), frozenset(pieces)
        )
        incoming = Incoming(transfer, key, reservation_id, num_tokens, table, write, stopped)
        self._by_id[transfer.transfer_id] = incoming
        return incoming

    def find(self, transfer_id: str) -> Incoming | None:
        return self._by_id.get(transfer_id)

    def forget(self, incoming: Incoming) -> None:
        self._by_id.pop(incoming.core.transfer_id, None)

    def abort(self, incoming: Incoming) -> None:
        """Gives a transfer up. Its blocks stay owned until the writer's stream is down."""
        incoming.core = core.on_abort(incoming.core)
        if incoming.writer is not None:
            incoming.writer.set()
        else:
            self._stop(incoming)

    def _stop(self, incoming: Incoming) -> None:
        incoming.core = core.on_stopped(incoming.core)
        incoming.stopped(incoming)

    # --- KvTransferService ----------------------------------------------------------------------

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        if request.layout_signature != self._layout.signature:
            raise Failure(Reason.LAYOUT_MISMATCH, "the two engines lay out KV differently")
        if request.direction != pb.TRANSFER_DIRECTION_PUSH:
            raise Failure(Reason.UNSUPPORTED_FEATURE, "this engine only receives pushes")
        incoming = self.find_destination(request)
        return pb.OpenResponse(
            transfer_id=incoming.core.transfer_id,
            transport="grpc",
            epoch=incoming.core.epoch,
            max_chunk_bytes=self._max_chunk_bytes,
            credit_bytes=self._credit_bytes,
        )

    async def Push(self, requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        incoming: Incoming | None = None
        aborted = asyncio.Event()
        chunks = aiter(requests)
        try:
            while True:
                message = await _next_or(chunks, aborted)
                if message is None:
                    break
                chunk = message.chunk
                if incoming is None:
                    incoming = self._enter(chunk, aborted)
                answer = self._take(incoming, chunk)
                yield answer
                if answer.HasField("error"):
                    return
            if incoming is not None and incoming.core.phase is Phase.ABORTING:
                # Its lease lapsed or its request ended; what the sender still holds is fenced off.
                yield _refusal(incoming, Failure(Reason.STALE_EPOCH, "the receiver gave up"))
        finally:
            if incoming is not None and incoming.writer is aborted:
                incoming.writer = None
                # This stream is down: nothing it sent can arrive any more.
                if incoming.core.peer_may_write:
                    self._stop(incoming)

    async def Close(self, request: pb.CloseRequest, context: Any) -> pb.CloseResponse:
        incoming = self._by_id.get(request.transfer_id)
        if incoming is None:
            return pb.CloseResponse(state=pb.TRANSFER_STATE_STOPPED, writes_stopped=True)
        if request.abort and incoming.core.phase is not Phase.COMMITTED:
            self.abort(incoming)
        done = incoming.core
        size = self._layout.geometry.block_tokens
        blocks = sum(piece.kind == "block" for piece in done.received)
        tail = any(piece.kind == "tail" for piece in done.received)
        return pb.CloseResponse(
            state=_STATES[done.phase],
            writes_stopped=not done.peer_may_write,
            coverage_tokens=blocks * size + (incoming.num_tokens % size if tail else 0),
            bytes=incoming.num_bytes,
        )

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[Any]:
        raise Failure(Reason.UNSUPPORTED_FEATURE, "this engine moves KV by push")
        yield  # makes this a stream

    def _enter(self, chunk: pb.KvChunk, aborted: asyncio.Event) -> Incoming:
        incoming = self._by_id.get(chunk.transfer_id)
        if incoming is None:
            self.num_refused_chunks += 1
            raise Failure(Reason.NOT_FOUND, "the transfer is not known here")
        if not core.accepts(incoming.core, chunk.epoch) or incoming.writer is not None:
            self.num_refused_chunks += 1
            raise Failure(Reason.STALE_EPOCH, "another writer has taken over, or none may write")
        incoming.writer = aborted
        return incoming

    def _take(self, incoming: Incoming, chunk: pb.KvChunk) -> pb.PushResponse:
        """Accounts for a chunk and puts its bytes where they belong."""
        if not core.accepts(incoming.core, chunk.epoch):
            self.num_refused_chunks += 1
            failure = Failure(Reason.STALE_EPOCH, "the transfer has ended")
            return _refusal(incoming, failure)
        piece, complete = self._place(incoming, chunk)
        ok = google_crc32c.value(chunk.data) == chunk.crc32c and piece is not None
        done = frozenset({piece}) if piece is not None and complete else frozenset()
        incoming.core = core.on_chunk(
            incoming.core, chunk.seq, chunk.request_id, chunk.epoch, done, ok
        )
        if incoming.core.error is None:
            incoming.digest.update(chunk.data)
            incoming.num_bytes += len(chunk.data)
            if piece is not None and complete:
                self._store(incoming, piece)
            if chunk.last:
                incoming.core = core.on_last(incoming.core)
        if incoming.core.error is not None:
            reason = _REASONS[incoming.core.error]
            log.warning(
                "transfer refused",
                extra={"request_id": incoming.key.request_id, "why": incoming.core.error.value},
            )
            return _refusal(incoming, Failure(reason, incoming.core.error.value))
        return pb.PushResponse(
            transfer_id=incoming.core.transfer_id,
            seq=chunk.seq,
            credit_bytes=len(chunk.data),
            verified=incoming.core.phase is Phase.SEALED,
        )

    def _place(self, incoming: Incoming, chunk: pb.KvChunk) -> tuple[Piece | None, bool]:
        """The piece a chunk belongs to and whether it is whole now; None for a wrong offset."""
        if chunk.kind == pb.CHUNK_KIND_STATE:
            piece, size = STATE, self._layout.state_bytes
        else:
            name = "block" if chunk.kind == pb.CHUNK_KIND_BLOCK else "tail"
            piece, size = Piece(name, chunk.block_index), self._layout.block_bytes
        held = incoming.partial.setdefault(piece, bytearray())
        if chunk.offset_bytes != len(held) or len(held) + len(chunk.data) > size:
            return None, False
        held += chunk.data
        return piece, len(held) == size

    def _store(self, incoming: Incoming, piece: Piece) -> None:
        data = bytes(incoming.partial.pop(piece))
        if piece == STATE:
            incoming.state = data
        else:
            incoming.write(incoming.table[piece.index], data)


def _refusal(incoming: Incoming, failure: Failure) -> pb.PushResponse:
    return pb.PushResponse(transfer_id=incoming.core.transfer_id, error=to_proto(failure))


def _no_destination(request: pb.OpenRequest) -> Incoming:
    raise Failure(Reason.NOT_FOUND, "no reservation of this id is held")


async def _next_or(chunks: AsyncIterator[Any], aborted: asyncio.Event) -> Any | None:
    """The next message; None at the end of the stream or once aborted."""
    if aborted.is_set():
        return None
    read = asyncio.ensure_future(anext(chunks, None))
    gave_up = asyncio.ensure_future(aborted.wait())
    try:
        await asyncio.wait({read, gave_up}, return_when=asyncio.FIRST_COMPLETED)
        return read.result() if read.done() else None
    finally:
        for task in (read, gave_up):
            if not task.done():
                task.cancel()
        await asyncio.gather(read, gave_up, return_exceptions=True)
