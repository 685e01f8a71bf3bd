"""The expert balancer in memory, with the same contract as the client; term 1."""

from __future__ import annotations

from services.lb.expert import client, wire
from services.lb.expert.book import PlacementBook, plan_or_refuse
from services.lb.expert.planning import PlanInput


class FakeExpertLb:
    """It plans with the real rules, at once."""

    def __init__(self) -> None:
        self._book = PlacementBook()

    async def plan(self, pool: str, step: int, given: PlanInput) -> client.Placement:
        """Plans for the window that ends at `step`. Idempotent per (pool, step)."""
        request = wire.input_of(client.plan_to_proto(pool, step, given))
        placed = self._book.answered(pool, step)
        if placed is None:
            placed = self._book.record(pool, step, 1, plan_or_refuse(request))
        plan = placed.plan
        return client.Placement(
            placed.version,
            placed.term,
            plan.slots,
            plan.changed,
            plan.moe_lb_before,
            plan.moe_lb_after,
        )

    async def placement(self, pool: str) -> tuple[int, int, bytes]:
        """Returns (term, version, slots as bytes) in force. Raises Failure(NOT_FOUND)."""
        placed = self._book.placement(pool)
        return placed.term, placed.version, wire.slots_to_bytes(placed.plan.slots)
