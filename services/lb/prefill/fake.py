"""The prefill balancer in memory, with the same contract as the client: no gRPC, no election.

    async with FakePrefillLb() as queue:
        async with queue.submit(spec, timeout_s=5) as news: ...

It runs the real rules, so that what siblings test against is what they will meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType

from pelagos.engine.v1 import records_pb2 as records
from pelagos.lb.v1 import prefill_lb_pb2 as pb

from services.common.call import calling, current_call
from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.cost_model import CostModel
from services.common.errors import Failure, Reason
from services.lb.prefill import client, wire
from services.lb.prefill import events as ev
from services.lb.prefill.hub import EnginePull, PrefillHub
from services.lb.prefill.state import BalancerConfig


class FakePrefillLb:
    """A balancer that always leads, under term 1."""

    def __init__(
        self,
        rules: BalancerConfig | None = None,
        cost_model: CostModel | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._cost_model = cost_model or CostModel()
        rules = rules or BalancerConfig(rebuild_s=0.0)
        self._min_follow_tokens = rules.min_follow_tokens
        self.hub = PrefillHub(rules, clock, self._cost_model)
        self._ticks: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakePrefillLb:
        self.hub.begin()
        self._ticks = asyncio.create_task(self._run_ticks())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._ticks is not None
        self._ticks.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticks
        self.hub.end(Failure(Reason.NO_INSTANCE, "the balancer has stopped"))

    @asynccontextmanager
    async def submit(
        self, spec: records.RequestSpec, *, timeout_s: float
    ) -> AsyncIterator[AsyncIterator[client.News]]:
        """Opens a submission; leaving the block takes back what no engine has accepted."""
        _ = self.hub.balancer
        async with aclosing(self._news(spec, timeout_s)) as news:
            yield news

    @asynccontextmanager
    async def pull(self, hello: client.Hello) -> AsyncIterator[client.PullSession]:
        """Opens an engine's call."""
        message = client.hello_to_proto(hello).hello
        opened = self.hub.open_pull(wire.joined_of(message, self._cost_model))
        try:
            yield _FakePullSession(opened)
        finally:
            opened.close()

    async def queues(self) -> list[client.BucketState]:
        """Returns the buckets, shortest first."""
        rows = self.hub.balancer.buckets(self._clock.now_s())
        return [client.BucketState(a, b, c, tuple(d), e) for a, b, c, d, e in rows]

    async def _news(
        self, spec: records.RequestSpec, timeout_s: float
    ) -> AsyncGenerator[client.News, None]:
        # A copy: over gRPC both sides have their own, and may change it.
        spec = records.RequestSpec.FromString(spec.SerializeToString())
        with calling(current_call().with_timeout(timeout_s, self._clock)):
            work = wire.work_of(spec, self._clock, self._min_follow_tokens)
        async with aclosing(self.hub.submit(work, spec)) as news:
            async for item in news:
                yield _to_client(item)

    async def _run_ticks(self) -> None:
        while True:
            self.hub.tick()
            await self._clock.sleep(0.02)


def _to_client(news: ev.Wait | ev.Assign | ev.Rematch) -> client.News:
    match news:
        case ev.Wait():
            return client.Queued(news.bucket, news.position, news.following)
        case ev.Assign():
            return client.Assignment(
                news.engine_id, news.boot_id, news.address, news.queue_wait_ms / 1_000
            )
        case ev.Rematch():
            return client.Rematch()


class _FakePullSession:
    def __init__(self, pull: EnginePull) -> None:
        self._pull = pull

    def capacity(self, remaining_ns: int, num_holding: int, accepting: bool = True) -> None:
        self._report(
            pb.PullRequest(
                capacity=pb.PullCapacity(
                    remaining_ns=remaining_ns, holding=num_holding, accepting=accepting
                )
            )
        )

    def accepted(self, key: records.RequestKey) -> None:
        self._report(pb.PullRequest(accepted=pb.PullAccepted(key=key)))

    def rejected(self, key: records.RequestKey, reason: Reason) -> None:
        rejected = pb.PullRejected(key=key, reason=reason.value)
        self._report(pb.PullRequest(rejected=rejected))

    def finished(
        self, key: records.RequestKey, committed: bool = False, engine_fault: bool = False
    ) -> None:
        finished = pb.PullFinished(key=key, committed=committed, engine_fault=engine_fault)
        self._report(pb.PullRequest(finished=finished))

    async def __aiter__(self) -> AsyncIterator[client.Command]:
        while True:
            _, revoked, spec = await self._pull.next_command()
            if revoked:
                yield client.RevokeCommand(spec.key, 1)
            else:
                yield client.WorkCommand(spec, 1)

    def _report(self, report: pb.PullRequest) -> None:
        self._pull.report(wire.report_of(report, self._pull.engine_id, self._pull.boot_id))
