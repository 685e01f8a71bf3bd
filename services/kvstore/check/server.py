"""CheckService, and what keeps it informed: the commit log of a store, pins and touches."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import grpc.aio
from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import check_pb2 as pb
from pelagos.kvstore.v1 import check_pb2_grpc as rpc
from pelagos.kvstore.v1 import store_pb2, store_pb2_grpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call
from services.kvstore.check.match import Matcher, Prompt, PromptMatch, SwaFinder
from services.kvstore.check.replica import Replica
from services.kvstore.formats import TtlClass
from services.kvstore.hash_chain import TOKEN_BYTES, Identity, MediaSpan, Uncacheable, layout_digest
from services.kvstore.swa.server import location_to_proto

log = logging.getLogger(__name__)

# Blocks of one prompt: 16 million tokens in blocks of 128. Their keys travel in the answer.
_MAX_BLOCKS: Final = 131_072
_MAX_NOTED_BYTES: Final = 64 << 20
_DEFAULT_BLOCK: Final = 128
_DEFAULT_RING: Final = 134
_CLASS_TO_PROTO: Final = {
    TtlClass.AGENT: records_pb2.TTL_CLASS_AGENT,
    TtlClass.CHAT: records_pb2.TTL_CLASS_CHAT,
}
_RECONNECT_S: Final = 0.2
# The store sends a heartbeat every second; silence beyond this is a dead connection.
_SILENCE_S: Final = 5.0


class StoreLink:
    """CHECK's connection to its store: follows the log, sends pins and touches after the reply."""

    def __init__(
        self,
        channels: Channels,
        address: Callable[[], str | None],
        replica: Replica,
        *,
        max_queued: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._channels = channels
        self._address = address
        self._replica = replica
        self._clock = clock
        self._last: tuple[grpc.aio.Channel, store_pb2_grpc.StoreServiceStub] | None = None
        self._notes: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(maxsize=max_queued)
        self._noted_bytes = 0
        self.num_dropped_notes = 0
        self.level = asyncio.Event()

    @property
    def num_queued(self) -> int:
        """Returns how many pins and touches wait."""
        return self._notes.qsize()

    def _stub(self) -> store_pb2_grpc.StoreServiceStub | None:
        address = self._address()
        if not address:
            return None
        # A stub makes a callable for every method: too much for each of many small notes.
        channel = self._channels.get(address)
        if self._last is None or self._last[0] is not channel:
            self._last = channel, store_pb2_grpc.StoreServiceStub(channel)
        return self._last[1]

    async def follow(self) -> None:
        """Keeps the replica level with the log, for ever."""
        while True:
            stub = self._stub()
            if stub is not None:
                try:
                    await self._follow_once(stub)
                except (Failure, TimeoutError):
                    pass  # the copy stays as it is, and says so
                finally:
                    self._replica.disconnected()
                    self.level.clear()
            await self._clock.sleep(_RECONNECT_S)

    async def _follow_once(self, stub: store_pb2_grpc.StoreServiceStub) -> None:
        request = store_pb2.FollowCommitsRequest(
            from_seq=self._replica.next_seq, log_id=self._replica.log_id
        )
        async with stream_call(stub.FollowCommits, request) as stream:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    part = await stream.read()
                if part is None:
                    return
                if not self._replica.take(
                    part.log_id,
                    part.entries,
                    part.next_seq,
                    part.reset,
                    part.level,
                    self._clock.now_s(),
                ):
                    log.warning("commit log damaged on the way, asked again")
                    return
                if part.level:
                    self.level.set()

    def note(self, method: str, request: Any) -> None:
        """Queues a pin or touch; when the queue is full it is dropped: both are hints."""
        num_bytes = len(request.keys)
        if self._notes.full() or self._noted_bytes + num_bytes > _MAX_NOTED_BYTES:
            self.num_dropped_notes += 1
            return
        self._noted_bytes += num_bytes
        self._notes.put_nowait((method, request))

    async def send_notes(self) -> None:
        """Sends what was noted, for ever."""
        while True:
            method, request = await self._notes.get()
            self._noted_bytes -= len(request.keys)
            stub = self._stub()
            if stub is None:
                continue
            try:
                await call(getattr(stub, method), request, timeout_s=2.0)
            except Failure:
                self.num_dropped_notes += 1


class CheckServicer(rpc.CheckServiceServicer):
    """The RPCs of one CHECK process."""

    def __init__(
        self,
        matcher: Matcher,
        replica: Replica,
        link: StoreLink,
        find_swa: SwaFinder,
        *,
        lagging_after_ms: float,
        on_match: Callable[[PromptMatch, int, float], None] = lambda *_: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._matcher = matcher
        self._replica = replica
        self._link = link
        self._find_swa = find_swa
        self._lagging_after_ms = lagging_after_ms
        self._on_match = on_match
        self._clock = clock

    async def Match(
        self, request: pb.MatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.MatchResponse:
        """Matches a prompt."""
        started = time.perf_counter()
        # Once: each look at the field copies it, which is 400 KB for 100,000 tokens.
        token_ids = request.token_ids
        if len(token_ids) % TOKEN_BYTES:
            raise Failure(Reason.INVALID_REQUEST, "token bytes are whole u32 values")
        _check_size(len(token_ids) // TOKEN_BYTES, request.block_tokens or _DEFAULT_BLOCK)
        lag_ms = self._replica.lag_ms(self._clock.now_s())
        is_lagging = not self._replica.is_level or lag_ms > self._lagging_after_ms
        prompt = _prompt_of(request, token_ids)
        wall_s = int(self._clock.wall_s())
        match = await self._matcher.match(prompt, self._find_swa, wall_s, is_lagging)
        ttl_class = (
            TtlClass.AGENT if request.ttl_class == records_pb2.TTL_CLASS_AGENT else TtlClass.CHAT
        )
        pin_id = self._hold(match, prompt.block_tokens, ttl_class, wall_s)
        spent_s = time.perf_counter() - started
        self._on_match(match, prompt.num_tokens, spent_s)
        return _response(request, match, pin_id, spent_s, lag_ms)

    def _hold(self, match: PromptMatch, block_tokens: int, ttl_class: TtlClass, wall_s: int) -> str:
        """Pins and touches what will be fetched, after the reply; returns the pin's name."""
        keys = match.keys[: 32 * (match.hit.stored_tokens // block_tokens)]
        if not keys:
            return ""
        pin_id = secrets.token_hex(8)
        self._link.note("Pin", store_pb2.PinRequest(pin_id=pin_id, keys=keys))
        if self._replica.needs_touch(keys, ttl_class, wall_s):
            self._link.note(
                "Touch", store_pb2.TouchRequest(keys=keys, ttl_class=_CLASS_TO_PROTO[ttl_class])
            )
        return pin_id

    async def Unpin(
        self, request: pb.UnpinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.UnpinResponse:
        """Drops a pin."""
        if request.pin_id:
            self._link.note("Pin", store_pb2.PinRequest(pin_id=request.pin_id))
        return pb.UnpinResponse()


def _check_size(num_tokens: int, block_tokens: int) -> None:
    num_blocks = num_tokens // block_tokens
    if num_blocks > _MAX_BLOCKS:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"{num_tokens} tokens make {num_blocks} blocks, the limit is {_MAX_BLOCKS}",
            {
                "num_tokens": str(num_tokens),
                "num_blocks": str(num_blocks),
                "max_blocks": str(_MAX_BLOCKS),
            },
        )


def _prompt_of(request: pb.MatchRequest, token_ids: bytes) -> Prompt:
    scope: Any = request.scope or "tenant"
    try:
        identity = Identity(
            model_id=request.model_id,
            layout=layout_digest(request.layout_fingerprint),
            tenant=request.tenant,
            scope=scope,
            user_salt=request.user_salt,
            adapter=request.adapter,
        )
    except Uncacheable:
        identity = None
    return Prompt(
        token_ids=token_ids,
        identity=identity,
        media=tuple(MediaSpan(m.start, m.num_tokens, m.digest) for m in request.media),
        session_id=request.session_id,
        block_tokens=request.block_tokens or _DEFAULT_BLOCK,
        ring_tokens=request.ring_tokens or _DEFAULT_RING,
    )


def _response(
    request: pb.MatchRequest, match: PromptMatch, pin_id: str, spent_s: float, lag_ms: float
) -> pb.MatchResponse:
    hit = match.hit
    policy = records_pb2.STORE_POLICY_ALL if match.root else records_pb2.STORE_POLICY_NONE
    message = records_pb2.CacheHit(
        hit_tokens=hit.hit_tokens,
        stored_tokens=hit.stored_tokens,
        replay_from=hit.replay_from,
        replay=hit.replay,
        block_keys=match.keys,
        pin_id=pin_id,
        ended_by=hit.ended_by.value,
    )
    if match.swa is not None:
        message.swa.CopyFrom(location_to_proto(match.swa))
    return pb.MatchResponse(
        hit=message,
        namespace=records_pb2.Namespace(
            tenant=request.tenant,
            root=match.root,
            store_policy=policy,
            ttl_class=request.ttl_class,
        ),
        blocks_looked_up=match.num_looked_up,
        spent_us=int(spent_s * 1e6),
        lag_ms=int(min(lag_ms, 2**31)),
    )
