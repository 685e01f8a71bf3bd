"""Expert placement of a decode engine: loads to the balancer, its answer into the network.

Every look sums the tokens per layer and expert since the last; ten looks are one window. A balancer
that is away, or a placement that does not fit, leaves the old one in force.
Source: engine.md, sections 4.2 and 4.5.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from services.common.errors import Failure
from services.lb.expert.client import ExpertPlanner, PlanInput

log = logging.getLogger(__name__)

LOOKS = 10  # of one window
FIRST = 3  # before the first plan: a cold layout is mended early


@runtime_checkable
class PlacesExperts(Protocol):
    """What a runner offers whose experts can move."""

    @property
    def expert_ranks(self) -> int: ...
    @property
    def leads_experts(self) -> bool:
        """Returns whether this rank plans for its group."""
        ...

    @property
    def expert_slots(self) -> tuple[tuple[int, ...], ...]: ...
    async def expert_loads(self) -> npt.NDArray[np.int64]: ...
    async def place_experts(self, slots: Sequence[Sequence[int]]) -> None: ...


class ExpertBalance:
    """The loop of one group: `turn` is called once per look.

    pool: this group's name at the balancer.
    """

    def __init__(self, runner: PlacesExperts, planner: ExpertPlanner, pool: str) -> None:
        self._runner = runner
        self._planner = planner
        self._pool = pool
        self._window: deque[npt.NDArray[np.int64]] = deque(maxlen=LOOKS)
        self._seen = (0, 0)  # newest (term, version): older ones are refused
        self._looks = 0
        self.last_success_step = 0
        self.num_failed = 0

    async def turn(self, step: int) -> bool:
        """Looks at the loads, and plans at the end of a window. Returns whether experts moved."""
        loads = await self._runner.expert_loads()
        if loads.any():  # placeholder rows are not counted, and a quiet window says nothing
            self._window.append(loads)
            self._looks += 1
        if self._looks != FIRST and (self._looks == 0 or self._looks % LOOKS):
            return False
        current = self._runner.expert_slots
        given = PlanInput(
            np.stack(self._window).astype(np.uint32),
            len(current[0]),
            self._runner.expert_ranks,
            current=current,
        )
        try:
            placed = await self._planner.plan(self._pool, step, given)
            if (placed.term, placed.version) < self._seen:
                raise ValueError("the placement is older than one that was seen")
            self._seen = (placed.term, placed.version)
            if placed.changed:
                await self._runner.place_experts(placed.slots)
        except (Failure, ValueError) as error:
            self.num_failed += 1
            log.error("experts stay where they are", extra={"pool": self._pool, "why": str(error)})
            return False
        self.last_success_step = step
        if placed.changed:
            log.info(
                "experts moved",
                extra={
                    "pool": self._pool,
                    "step": step,
                    "moe_lb_before": round(placed.moe_lb_before, 4),
                    "moe_lb_after": round(placed.moe_lb_after, 4),
                },
            )
        return placed.changed
