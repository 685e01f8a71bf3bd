"""Leaving without loss: the order of a planned stop (P-04).

SIGTERM -> not ready, marked draining -> peers get time to see it -> new calls are refused, calls
in flight go on -> at the end of the grace the rest is handed over -> telemetry out, exit 0.
A second SIGTERM changes nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from services.common.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)

_POLL_S: Final = 0.02


class DrainPhase(enum.Enum):
    """How far a planned stop has come."""

    SERVING = "serving"
    NOTICE = "notice"  # marked draining, still taking calls from peers that have not seen it
    REFUSING = "refusing"  # in-flight goes on
    HANDOVER = "handover"  # the grace is over
    DONE = "done"


@dataclass(frozen=True)
class DrainTimes:
    """How long each phase may take."""

    notice_s: float = 2.0
    grace_s: float = 60.0
    handover_s: float = 10.0


class Drain:
    """One planned stop. `request` starts it, `run` goes through it once."""

    def __init__(self, times: DrainTimes, clock: Clock = SYSTEM_CLOCK) -> None:
        self._times = times
        self._clock = clock
        self._requested = asyncio.Event()
        self.phase = DrainPhase.SERVING

    def request(self) -> None:
        """Asks for the stop; asking again changes nothing."""
        self._requested.set()

    @property
    def is_requested(self) -> bool:
        """Returns whether the stop has begun."""
        return self._requested.is_set()

    async def wait_requested(self) -> None:
        """Waits for the request."""
        await self._requested.wait()

    def install_signals(self) -> None:
        """Makes SIGTERM and SIGINT request the stop, once or many times."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)

    async def run(
        self,
        *,
        mark_draining: Callable[[], Awaitable[None]],
        refuse_new: Callable[[], Awaitable[None]],
        num_in_flight: Callable[[], int],
        hand_over: Callable[[], Awaitable[None]],
    ) -> None:
        """Goes through the phases; returns when nothing is in flight or all time is spent."""
        self.phase = DrainPhase.NOTICE
        log.info("draining", extra={"in_flight": num_in_flight()})
        await mark_draining()
        await self._clock.sleep(self._times.notice_s)
        self.phase = DrainPhase.REFUSING
        await refuse_new()
        await self._wait_idle(num_in_flight, self._times.grace_s)
        self.phase = DrainPhase.HANDOVER
        try:
            async with asyncio.timeout(self._times.handover_s):
                await hand_over()
        except TimeoutError:
            log.warning("hand-over cut short", extra={"in_flight": num_in_flight()})
        self.phase = DrainPhase.DONE

    async def _wait_idle(self, num_in_flight: Callable[[], int], limit_s: float) -> None:
        end_s = self._clock.now_s() + limit_s
        while num_in_flight() and self._clock.now_s() < end_s:
            await self._clock.sleep(_POLL_S)
