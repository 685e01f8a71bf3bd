"""Asking whoever leads now: the one loop that callers of an elected balancer need."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason

T = TypeVar("T")

# What says "ask another balancer". Everything else is an answer.
_NOT_HERE = (Reason.NO_INSTANCE, Reason.BACKEND_LOST, Reason.DRAINING)
_FIRST_WAIT_S = 0.05
_MAX_WAIT_S = 1.0


async def following_leader(
    ask: Callable[[float], Awaitable[T]],
    *,
    timeout_s: float,
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random | None = None,
) -> T:
    """Returns the answer of `ask(remaining_s)`, asking again while no leader answers.

    Only for calls that are idempotent by their key. Raises every other Failure at once, and the
    last one when the time is up.
    """
    rng = rng or random.Random()
    deadline_s = clock.now_s() + timeout_s
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return await ask(max(0.0, deadline_s - clock.now_s()))
        except Failure as failure:
            pause_s = rng.uniform(0, wait_s)
            if failure.reason not in _NOT_HERE or clock.now_s() + pause_s >= deadline_s:
                raise
        await clock.sleep(pause_s)
        wait_s = min(_MAX_WAIT_S, 2 * wait_s)
