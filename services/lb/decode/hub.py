"""Moves the decode balancer's events and actions between callers and engines; no gRPC."""

from __future__ import annotations

import asyncio

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.lb.decode import balancer as dec
from services.lb.decode.balancer import BalancerConfig, Counters, DecodeBalancer, Placed

_IDLE_TICK_S = 0.1  # while nothing waits: only what has lapsed is looked at


class DecodeHub:
    """The balancer of one term and those who wait for its answers."""

    def __init__(self, rules: BalancerConfig, clock: Clock, tick_s: float = 0.005) -> None:
        self._rules = rules
        self._clock = clock
        self._tick_s = tick_s
        self._balancer: DecodeBalancer | None = None
        self._waiting: dict[str, list[asyncio.Future[Placed]]] = {}
        self._something_waits = asyncio.Event()

    def begin(self) -> None:
        """Starts a term with nothing known: the engines' next reports tell everything."""
        self._balancer = DecodeBalancer(self._rules, self._clock.now_s())

    def end(self, failure: Failure) -> None:
        """Ends the term: whoever waits gets `failure`."""
        self._balancer = None
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(failure)
        self._waiting.clear()

    @property
    def is_active(self) -> bool:
        """Returns whether a term is on."""
        return self._balancer is not None

    @property
    def balancer(self) -> DecodeBalancer:
        """Returns the balancer of this term. Raises Failure(NO_INSTANCE) between terms."""
        if self._balancer is None:
            raise Failure(Reason.NO_INSTANCE, "this balancer does not lead", retry_after_s=0.25)
        return self._balancer

    @property
    def counters(self) -> Counters:
        """Returns the totals of this term."""
        return self._balancer.counters if self._balancer is not None else Counters()

    @property
    def num_waiting(self) -> int:
        """Returns how many callers wait for a rank."""
        return sum(len(futures) for futures in self._waiting.values())

    async def pick(self, pick: dec.Pick) -> Placed:
        """Returns the rank for a request; waits for room. Raises Failure as the rules say."""
        balancer = self.balancer
        future: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        futures = self._waiting.setdefault(pick.key, [])
        futures.append(future)
        try:
            self.dispatch(pick)
            if not future.done():
                self._something_waits.set()
            return await future
        finally:
            if future in futures:
                futures.remove(future)
            if not futures and self._waiting.get(pick.key) is futures:
                del self._waiting[pick.key]
                if self._balancer is balancer:
                    self.dispatch(dec.Cancelled(pick.key))  # nothing happens if it was answered

    def give_back(self, key: str, instance_id: str, instance_fault: bool) -> bool:
        """Takes a pick back; returns whether it was known."""
        found = self.balancer.has_pick(key, instance_id)
        self.dispatch(dec.Returned(key, instance_id, instance_fault))
        return found

    def dispatch(self, event: dec.Event) -> None:
        """Gives an event to the balancer and answers whom it says."""
        if self._balancer is None:
            return
        for action in self._balancer.on_event(event, self._clock.now_s()):
            for future in self._waiting.get(action.key, ()):
                if future.done():
                    continue
                if isinstance(action, Placed):
                    future.set_result(action)
                else:
                    future.set_exception(
                        Failure(action.reason, action.message, retry_after_s=action.retry_after_s)
                    )

    async def run_batches(self) -> None:
        """Decides for what waits, batch by batch, for ever."""
        while True:
            await self._something_waits.wait()
            self._something_waits.clear()
            while self._waiting:
                await self._clock.sleep(self._tick_s)
                self.dispatch(dec.Tick())

    async def run_lapses(self) -> None:
        """Looks at what lapses while nothing waits, for ever."""
        while True:
            self.dispatch(dec.Tick())
            await self._clock.sleep(_IDLE_TICK_S)
