"""The decode balancer as siblings see it: prefill asks for ranks, decode engines report theirs.

    lb = DecodeLbClient(channels, leader_of(view))
    picked = await pick_rank(lb, PickRequest("req-1", num_tokens=900), timeout_s=5)   # prefill
    async with lb.report() as session:                                                # decode
        await session.send(report)

One method call is one try at the current leader; `pick_rank` goes on to each next leader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pelagos.lb.v1 import decode_lb_pb2 as pb
from pelagos.lb.v1 import decode_lb_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.election import TermGuard
from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels, call, stream_call
from services.lb.decode.config import LEADER
from services.lb.failover import following_leader

ANSWER_S = 1.0  # beyond the time a pick may wait: for the way there and back


@dataclass(frozen=True)
class PickRequest:
    """A request that needs a decode rank. `num_tokens`: prompt plus expected output."""

    request_id: str
    num_tokens: int
    attempt: int = 0
    is_handoff: bool = False  # moves away from a draining engine: goes before the queue
    max_wait_s: float = 0.0  # 0: the balancer's default
    exclude_instances: tuple[str, ...] = ()
    layout_signature: str = ""
    tenant: str = ""


@dataclass(frozen=True)
class PickedRank:
    """The rank to reserve."""

    instance_id: str
    boot_id: str
    address: str
    rank: int
    term: int


@dataclass(frozen=True)
class RankLoad:
    """What one rank holds, by its engine's own count; reservations included."""

    rank: int
    num_kv_tokens: int
    num_requests: int
    num_free_tokens: int
    max_requests: int
    num_steps: int = 0


@dataclass(frozen=True)
class LoadReport:
    """What an engine tells every 100 ms, or on change.

    `seen_request_ids`: picked for it and reserved, running or refused since the last report; the
    balancer counts them by itself until then.
    """

    instance_id: str
    boot_id: str
    address: str
    accepting: bool
    ranks: tuple[RankLoad, ...]
    layout_signature: str = ""
    seen_request_ids: tuple[str, ...] = ()


class ReportSession(Protocol):
    """An engine's open call."""

    async def send(self, report: LoadReport) -> int:
        """Sends one report and returns the leader's term once it was taken."""
        ...


class DecodeRanks(Protocol):
    """What the client and the fake offer."""

    async def pick(self, request: PickRequest) -> PickedRank:
        """Returns a rank. Idempotent per (request_id, attempt) for 60 s."""
        ...

    async def return_rank(
        self, request_id: str, attempt: int, instance_id: str, instance_fault: bool = False
    ) -> bool:
        """Gives a pick back; returns whether it was known. Idempotent."""
        ...

    def report(self) -> AbstractAsyncContextManager[ReportSession]:
        """Opens an engine's call; its ranks take nothing new once it has ended."""
        ...


def leader_of(view: ClusterView) -> Callable[[], str]:
    """Returns how to find the leader's address in the membership view."""

    def find() -> str:
        leader = view.leader(LEADER)
        if leader is None:
            raise Failure(Reason.NO_INSTANCE, "no decode balancer leads", retry_after_s=0.25)
        return leader.address

    return find


async def pick_rank(
    ranks: DecodeRanks, request: PickRequest, *, timeout_s: float, clock: Clock = SYSTEM_CLOCK
) -> PickedRank:
    """Returns a rank; asks each next leader while none answers, which the key makes harmless.

    A NO_INSTANCE of the leader itself (no engine is known) is asked again as well.
    """
    return await following_leader(lambda _: ranks.pick(request), timeout_s=timeout_s, clock=clock)


class DecodeLbClient:
    """The balancer over gRPC. `find_leader` returns an address or raises Failure(NO_INSTANCE)."""

    def __init__(
        self, channels: Channels, find_leader: Callable[[], str], answer_s: float = ANSWER_S
    ) -> None:
        self._channels = channels
        self._answer_s = answer_s
        self._find_leader = find_leader
        self._guard = TermGuard()

    async def pick(self, request: PickRequest) -> PickedRank:
        """Returns a rank from the leader."""
        reply = await call(
            self._stub().PickRank,
            pick_to_proto(request),
            timeout_s=(request.max_wait_s or 1.0) + self._answer_s,
        )
        self._guard.accept(reply.term)  # a paused former leader may still answer (P-22)
        return PickedRank(reply.instance_id, reply.boot_id, reply.address, reply.rank, reply.term)

    async def return_rank(
        self, request_id: str, attempt: int, instance_id: str, instance_fault: bool = False
    ) -> bool:
        """Gives a pick back to the leader."""
        message = pb.ReturnRankRequest(
            request_id=request_id,
            attempt=attempt,
            instance_id=instance_id,
            instance_fault=instance_fault,
        )
        reply = await call(self._stub().ReturnRank, message, timeout_s=self._answer_s)
        return bool(reply.found)

    @asynccontextmanager
    async def report(self) -> AsyncIterator[ReportSession]:
        """Opens an engine's call at the leader."""
        async with stream_call(self._stub().Report) as stream:
            yield _GrpcReportSession(stream)

    def _stub(self) -> Any:
        return rpc.DecodeLbServiceStub(self._channels.get(self._find_leader()))


class _GrpcReportSession:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._version = 0

    async def send(self, report: LoadReport) -> int:
        self._version += 1
        await self._stream.write(report_to_proto(report, self._version))
        reply = await self._stream.read()
        if reply is None:
            raise Failure(Reason.NO_INSTANCE, "the balancer has ended the call")
        return int(reply.term)


def pick_to_proto(request: PickRequest) -> pb.PickRankRequest:
    """Returns the message of a pick."""
    return pb.PickRankRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        num_tokens=request.num_tokens,
        handoff=request.is_handoff,
        max_wait_ms=round(request.max_wait_s * 1_000),
        exclude_instances=request.exclude_instances,
        layout_signature=request.layout_signature,
        tenant=request.tenant,
    )


def report_to_proto(report: LoadReport, version: int) -> pb.ReportRequest:
    """Returns the message of a report."""
    return pb.ReportRequest(
        instance_id=report.instance_id,
        boot_id=report.boot_id,
        address=report.address,
        layout_signature=report.layout_signature,
        accepting=report.accepting,
        ranks=[
            pb.DecodeRankLoad(
                rank=rank.rank,
                kv_tokens=rank.num_kv_tokens,
                requests=rank.num_requests,
                free_tokens=rank.num_free_tokens,
                max_requests=rank.max_requests,
                steps=rank.num_steps,
            )
            for rank in report.ranks
        ],
        seen_request_ids=report.seen_request_ids,
        version=version,
    )
