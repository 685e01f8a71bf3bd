"""The placements in force, by pool: versions rise, an answer is given again for the same step."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import Failure, Reason
from services.lb.expert.planning import Plan, PlanInput, plan


@dataclass(frozen=True)
class Placed:
    """A plan with its number. Receivers refuse a (term, version) below one they have seen."""

    version: int
    term: int
    plan: Plan


class PlacementBook:
    """What the balancer has answered, per pool."""

    def __init__(self, max_pools: int = 256) -> None:
        self._max_pools = max_pools
        self._answers: dict[str, tuple[int, Placed]] = {}  # pool -> (step, answer)

    @property
    def num_pools(self) -> int:
        """Returns the pools that have a placement."""
        return len(self._answers)

    def clear(self) -> None:
        """Forgets everything: another term begins, and engines keep what they have."""
        self._answers.clear()

    def answered(self, pool: str, step: int) -> Placed | None:
        """Returns the answer for this step, if it was given before.

        Raises: Failure(CONFLICT) for a step before the last one: the asker is behind.
        """
        known = self._answers.get(pool)
        if known is None:
            return None
        if step < known[0]:
            raise Failure(
                Reason.CONFLICT,
                f"step {step} of this pool is over, the last plan is of step {known[0]}",
                {"step": str(step), "last_step": str(known[0])},
            )
        return known[1] if step == known[0] else None

    def record(self, pool: str, step: int, term: int, planned: Plan) -> Placed:
        """Takes a plan and returns it with its number; the first for a step stands."""
        answered = self.answered(pool, step)
        if answered is not None:
            return answered
        known = self._answers.get(pool)
        if known is None and len(self._answers) >= self._max_pools:
            raise Failure(Reason.OVERLOADED, f"{self._max_pools} pools are planned already")
        version = 1 if known is None else known[1].version + planned.changed
        placed = Placed(version, term, planned)
        self._answers[pool] = (step, placed)
        return placed

    def placement(self, pool: str) -> Placed:
        """Returns the placement in force. Raises Failure(NOT_FOUND) before the first plan."""
        known = self._answers.get(pool)
        if known is None:
            raise Failure(Reason.NOT_FOUND, "no plan of this pool was made in this term")
        return known[1]


def plan_or_refuse(given: PlanInput) -> Plan:
    """Returns the plan. Raises Failure(INVALID_REQUEST) on shapes that do not fit."""
    try:
        return plan(given)
    except ValueError as error:
        raise Failure(Reason.INVALID_REQUEST, str(error)) from None
