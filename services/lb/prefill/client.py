"""The prefill balancer as siblings see it: entrypoints submit to it, engines pull from it.

    queue = PrefillLbClient(channels, leader_of(view))
    assignment = await place(queue, spec, timeout_s=30, rematch=match_again)    # entrypoint

    async with queue.pull(hello) as session:                                    # engine
        async for command in session:
            ...

One call is one try at the current leader. `place` is the loop an entrypoint wants: it goes to each
next leader until the deadline, which is safe since a key is queued once whatever happens.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pelagos.engine.v1 import records_pb2 as records
from pelagos.lb.v1 import prefill_lb_pb2 as pb
from pelagos.lb.v1 import prefill_lb_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.election import TermGuard
from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels, call, stream_call
from services.lb.failover import following_leader
from services.lb.prefill.config import leader_name


@dataclass(frozen=True)
class Queued:
    """The request waits. `following`: at the side, for another one's equal cold prefix."""

    bucket: int
    position: int
    following: bool


@dataclass(frozen=True)
class Assignment:
    """The engine that took the request; attach to it there."""

    instance_id: str
    boot_id: str
    address: str
    queue_wait_s: float


@dataclass(frozen=True)
class Rematch:
    """Match the prompt again and submit it once more under the same key; its place is kept."""


News = Queued | Assignment | Rematch


@dataclass(frozen=True)
class Hello:
    """What an engine says of itself when it opens its pull call."""

    instance_id: str
    boot_id: str
    address: str
    quota_ns: int
    dp_size: int = 1
    accept_buckets: int = 0  # bit b = bucket b; 0 means all
    max_tokens: int = 0  # 0: the model's
    engine_type: str = ""
    model: str = ""
    holding: tuple[records.RequestKey, ...] = ()
    outstanding_ns: int = 0


@dataclass(frozen=True)
class WorkCommand:
    """Compute this, or refuse it."""

    spec: records.RequestSpec
    term: int


@dataclass(frozen=True)
class RevokeCommand:
    """Drop this; its submitter went away."""

    key: records.RequestKey
    term: int


Command = WorkCommand | RevokeCommand


@dataclass(frozen=True)
class BucketState:
    """One bucket of the queue."""

    min_tokens: int
    waiting: int
    waiting_tokens: int
    instance_ids: tuple[str, ...]
    head_block_s: float


class PullSession(Protocol):
    """An engine's open call. Reports are sent in order and never block; iterate for commands."""

    def capacity(self, remaining_ns: int, num_holding: int, accepting: bool = True) -> None:
        """Tells the quota left; everything accepted or finished before is in it."""
        ...

    def accepted(self, key: records.RequestKey) -> None:
        """Takes an offered request."""
        ...

    def rejected(self, key: records.RequestKey, reason: Reason) -> None:
        """Refuses an offered request."""
        ...

    def finished(
        self, key: records.RequestKey, committed: bool = False, engine_fault: bool = False
    ) -> None:
        """Tells that a request is over. `committed`: its blocks are on their way."""
        ...

    def __aiter__(self) -> AsyncIterator[Command]: ...


class PrefillQueue(Protocol):
    """What the client and the fake offer."""

    def submit(
        self, spec: records.RequestSpec, *, timeout_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[News]]:
        """Opens a submission; leaving the block takes back what no engine has accepted."""
        ...

    def pull(self, hello: Hello) -> AbstractAsyncContextManager[PullSession]:
        """Opens an engine's call."""
        ...

    async def queues(self) -> list[BucketState]:
        """Returns the buckets, shortest first."""
        ...


def leader_of(view: ClusterView, shard: str = "") -> Callable[[], str]:
    """Returns how to find the address of a shard's leader in the membership view."""

    def find() -> str:
        leader = view.leader(leader_name(shard))
        if leader is None:
            raise Failure(Reason.NO_INSTANCE, "no prefill balancer leads", retry_after_s=0.25)
        return leader.address

    return find


async def place(
    queue: PrefillQueue,
    spec: records.RequestSpec,
    *,
    timeout_s: float,
    rematch: Callable[[records.RequestSpec], Awaitable[records.RequestSpec]] | None = None,
    on_queued: Callable[[Queued], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random | None = None,
) -> Assignment:
    """Submits until an engine has accepted the request; follows the leader when it changes.

    `rematch` returns the spec with a new cache match. Raises Failure as the balancer refuses, and
    its last NO_INSTANCE or BACKEND_LOST when no leader is found in time.
    """
    latest = spec
    deadline_s = clock.now_s() + timeout_s

    async def once(_: float) -> Assignment:
        nonlocal latest
        while True:  # ends: a request is sent to match again only a few times
            remaining_s = deadline_s - clock.now_s()
            if remaining_s <= 0:
                raise Failure(Reason.DEADLINE, "no prefill engine took the request in time")
            async with queue.submit(latest, timeout_s=remaining_s) as news:
                async for item in news:
                    if isinstance(item, Assignment):
                        return item
                    if isinstance(item, Queued) and on_queued is not None:
                        on_queued(item)
            if rematch is not None:
                latest = await rematch(latest)

    return await following_leader(once, timeout_s=timeout_s, clock=clock, rng=rng)


class PrefillLbClient:
    """The balancer over gRPC. `find_leader` returns an address or raises Failure(NO_INSTANCE)."""

    def __init__(self, channels: Channels, find_leader: Callable[[], str]) -> None:
        self._channels = channels
        self._find_leader = find_leader
        self._guard = TermGuard()

    @asynccontextmanager
    async def submit(
        self, spec: records.RequestSpec, *, timeout_s: float
    ) -> AsyncIterator[AsyncIterator[News]]:
        """Opens a submission at the leader."""
        request = pb.SubmitRequest(spec=spec)
        async with stream_call(self._stub().Submit, request, timeout_s=timeout_s) as stream:
            yield _news(stream)

    @asynccontextmanager
    async def pull(self, hello: Hello) -> AsyncIterator[PullSession]:
        """Opens an engine's call at the leader; it lives until either side ends it."""
        outbox = _Outbox(hello_to_proto(hello))
        async with stream_call(self._stub().Pull, outbox.requests()) as stream:
            yield _GrpcPullSession(stream, outbox, self._guard)

    async def queues(self) -> list[BucketState]:
        """Returns the buckets, shortest first."""
        reply = await call(self._stub().GetQueues, pb.GetQueuesRequest(), timeout_s=5.0)
        return [
            BucketState(
                bucket.min_tokens,
                bucket.waiting,
                bucket.waiting_tokens,
                tuple(bucket.instance_ids),
                bucket.head_block_ms / 1_000,
            )
            for bucket in reply.buckets
        ]

    def _stub(self) -> Any:
        return rpc.PrefillLbServiceStub(self._channels.get(self._find_leader()))


async def _news(stream: Any) -> AsyncGenerator[News, None]:
    async for message in stream:
        match message.WhichOneof("event"):
            case "queued":
                queued = message.queued
                yield Queued(queued.bucket, queued.position, queued.following)
            case "assigned":
                taken = message.assigned
                yield Assignment(
                    taken.instance_id, taken.boot_id, taken.address, taken.queue_wait_ms / 1_000
                )
                return
            case "rematch":
                yield Rematch()
                return


class _Outbox:
    """Reports in order; gRPC pulls them at its own pace."""

    def __init__(self, hello: pb.PullRequest) -> None:
        self._items: deque[pb.PullRequest] = deque([hello])
        self._woken = asyncio.Event()

    def put(self, item: pb.PullRequest) -> None:
        # Two capacities in a row: the newer says it all.
        if self._items and item.HasField("capacity") and self._items[-1].HasField("capacity"):
            self._items.pop()
        self._items.append(item)
        self._woken.set()

    async def requests(self) -> AsyncGenerator[pb.PullRequest, None]:
        while True:
            while self._items:
                yield self._items.popleft()
            self._woken.clear()
            await self._woken.wait()


class _GrpcPullSession:
    def __init__(self, stream: Any, outbox: _Outbox, guard: TermGuard) -> None:
        self._stream = stream
        self._outbox = outbox
        self._guard = guard

    def capacity(self, remaining_ns: int, num_holding: int, accepting: bool = True) -> None:
        report = pb.PullCapacity(
            remaining_ns=remaining_ns, holding=num_holding, accepting=accepting
        )
        self._outbox.put(pb.PullRequest(capacity=report))

    def accepted(self, key: records.RequestKey) -> None:
        self._outbox.put(pb.PullRequest(accepted=pb.PullAccepted(key=key)))

    def rejected(self, key: records.RequestKey, reason: Reason) -> None:
        self._outbox.put(pb.PullRequest(rejected=pb.PullRejected(key=key, reason=reason.value)))

    def finished(
        self, key: records.RequestKey, committed: bool = False, engine_fault: bool = False
    ) -> None:
        report = pb.PullFinished(key=key, committed=committed, engine_fault=engine_fault)
        self._outbox.put(pb.PullRequest(finished=report))

    async def __aiter__(self) -> AsyncIterator[Command]:
        async for message in self._stream:
            self._guard.accept(message.term)  # a paused former leader may still speak (P-22)
            if message.HasField("work"):
                yield WorkCommand(message.work, message.term)
            elif message.HasField("revoke"):
                yield RevokeCommand(message.revoke, message.term)


def hello_to_proto(hello: Hello) -> pb.PullRequest:
    """Returns an engine's first message."""
    return pb.PullRequest(
        hello=pb.PullHello(
            instance_id=hello.instance_id,
            boot_id=hello.boot_id,
            address=hello.address,
            dp_size=hello.dp_size,
            quota_ns=hello.quota_ns,
            accept_buckets=hello.accept_buckets,
            max_tokens=hello.max_tokens,
            engine_type=hello.engine_type,
            model=hello.model,
            holding=hello.holding,
            outstanding_ns=hello.outstanding_ns,
        )
    )
