"""The expert balancer as engine leaders see it.

    placed = await experts.plan("decode-0", step=10_000, given=PlanInput(loads, 448, 64))

The answer is a pure function of the loads: `plan_locally` gives a single-process engine the same
one. `shuffle_plan`, `moe_lb` and the slot arithmetic are what an engine needs to carry it out.
A message holds 16 MiB: 1,000 steps of 40 layers of 384 experts do not fit; sum ten steps a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pelagos.lb.v1 import expert_lb_pb2 as pb
from pelagos.lb.v1 import expert_lb_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.rpc_client import Channels, call
from services.lb.expert.config import LEADER
from services.lb.expert.moves import Kind, Move, shuffle_plan
from services.lb.expert.planning import Plan, PlanInput
from services.lb.expert.planning import plan as plan_locally
from services.lb.expert.policy import Policy, initial_slots, moe_lb, num_extra_slots, num_slots
from services.lb.expert.wire import slots_from_bytes, slots_to_bytes

__all__ = [
    "ExpertLbClient",
    "ExpertPlanner",
    "Kind",
    "Move",
    "Placement",
    "Plan",
    "PlanInput",
    "Policy",
    "initial_slots",
    "leader_of",
    "moe_lb",
    "num_extra_slots",
    "num_slots",
    "plan_locally",
    "shuffle_plan",
]


@dataclass(frozen=True)
class Placement:
    """Expert per slot, layer by layer. Refuse one whose (term, version) is below the last seen."""

    version: int
    term: int
    slots: tuple[tuple[int, ...], ...]
    changed: bool
    moe_lb_before: float
    moe_lb_after: float


class ExpertPlanner(Protocol):
    """What the client and the fake offer."""

    async def plan(self, pool: str, step: int, given: PlanInput) -> Placement:
        """Plans for the window that ends at `step`. Idempotent per (pool, step)."""
        ...

    async def placement(self, pool: str) -> tuple[int, int, bytes]:
        """Returns (term, version, slots as bytes) in force. Raises Failure(NOT_FOUND)."""
        ...


def leader_of(view: ClusterView) -> Callable[[], str]:
    """Returns how to find the leader's address in the membership view."""

    def find() -> str:
        leader = view.leader(LEADER)
        if leader is None:
            raise Failure(Reason.NO_INSTANCE, "no expert balancer leads", retry_after_s=1.0)
        return leader.address

    return find


class ExpertLbClient:
    """The balancer over gRPC. `find_leader` returns an address or raises Failure(NO_INSTANCE)."""

    def __init__(
        self, channels: Channels, find_leader: Callable[[], str], timeout_s: float = 60.0
    ) -> None:
        self._channels = channels
        self._find_leader = find_leader
        self._timeout_s = timeout_s  # planning takes about 75 ms a layer of 384 experts

    async def plan(self, pool: str, step: int, given: PlanInput) -> Placement:
        """Plans for the window that ends at `step`."""
        reply = await call(
            self._stub().PlanPlacement, plan_to_proto(pool, step, given), timeout_s=self._timeout_s
        )
        return Placement(
            reply.placement.version,
            reply.placement.term,
            slots_from_bytes(reply.placement.slots, given.num_slots),
            reply.changed,
            reply.moe_lb_before,
            reply.moe_lb_after,
        )

    async def placement(self, pool: str) -> tuple[int, int, bytes]:
        """Returns (term, version, slots as bytes) in force."""
        reply = await call(
            self._stub().GetPlacement, pb.GetPlacementRequest(pool=pool), timeout_s=5.0
        )
        return reply.placement.term, reply.placement.version, reply.placement.slots

    def _stub(self) -> Any:
        return rpc.ExpertLbServiceStub(self._channels.get(self._find_leader()))


def plan_to_proto(pool: str, step: int, given: PlanInput) -> pb.PlanPlacementRequest:
    """Returns the message of a plan."""
    num_steps, num_layers, num_experts = given.loads.shape
    return pb.PlanPlacementRequest(
        pool=pool,
        step=step,
        num_steps=num_steps,
        num_layers=num_layers,
        num_experts=num_experts,
        num_slots=given.num_slots,
        num_ranks=given.num_ranks,
        loads=given.loads.astype("<u4").tobytes(),
        policy=given.policy.value,
        num_groups=given.num_groups,
        num_nodes=given.num_nodes,
        current=slots_to_bytes(given.current) if given.current else b"",
        min_gain=given.min_gain,
    )
