"""The door: places per key with a short queue, and the load of the whole entrypoint.

Order of refusal: unauthenticated, over quota, over size, over load; nothing expensive happens
before (reliability-and-security.md, section 2, "Admission").
"""

from __future__ import annotations

import asyncio
from collections import deque

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.entrypoint.auth import Identity
from services.entrypoint.limits import Limits
from services.entrypoint.quota import Grant, Quota

_Waiter = asyncio.Future[Grant]


class Door:
    """Gives each request its key's place; keys over their share wait, up to a bound."""

    def __init__(self, quota: Quota, limits: Limits, clock: Clock) -> None:
        self._quota = quota
        self._limits = limits
        self._clock = clock
        self._waiting: dict[str, deque[tuple[Identity, _Waiter]]] = {}

    @property
    def num_waiting(self) -> int:
        """Returns the requests that wait for a place; a row of the census."""
        return sum(len(queue) for queue in self._waiting.values())

    async def enter(self, identity: Identity) -> Grant:
        """Returns the request's grant, at once or when the key has a place again.

        Raises: Failure(QUOTA) when the key's queue is full too, or a rate is used up.
        """
        queue = self._waiting.get(identity.key_id)
        if not queue and self._quota.has_place(identity, self._clock.now_s()):
            return self._quota.begin(identity, self._clock.now_s())
        if queue is not None and len(queue) >= self._limits.max_queued_per_key:
            raise Failure(
                Reason.QUOTA,
                f"this key has {len(queue)} requests waiting, the limit is "
                f"{self._limits.max_queued_per_key}",
                {"max_waiting": str(self._limits.max_queued_per_key)},
                retry_after_s=2.0,
            )
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        entry = (identity, waiter)
        self._waiting.setdefault(identity.key_id, deque()).append(entry)
        try:
            return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave(waiter.result())  # got its place in the turn in which it left
            raise
        finally:
            self._forget(identity.key_id, entry)

    def leave(self, grant: Grant, num_used_tokens: int | None = None) -> None:
        """Gives a place back; the key's next request takes it."""
        self._quota.settle(grant, num_used_tokens)
        self._admit_next(grant.key_id)

    def admit_waiting(self) -> None:
        """Looks again for everybody who waits; called when shares have changed."""
        for key_id in list(self._waiting):
            self._admit_next(key_id)

    def _admit_next(self, key_id: str) -> None:
        queue = self._waiting.get(key_id)
        while queue:
            identity, waiter = queue[0]
            if waiter.done():
                queue.popleft()
                continue
            if not self._quota.has_place(identity, self._clock.now_s()):
                return
            queue.popleft()
            try:
                waiter.set_result(self._quota.begin(identity, self._clock.now_s()))
            except Failure as failure:
                waiter.set_exception(failure)

    def _forget(self, key_id: str, entry: tuple[Identity, _Waiter]) -> None:
        queue = self._waiting.get(key_id)
        if queue is None:
            return
        try:
            queue.remove(entry)
        except ValueError:
            pass
        if not queue:
            del self._waiting[key_id]


class Load:
    """Requests and tokens that this entrypoint has taken and that wait for their first token."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0

    def enter(self) -> LoadShare:
        """Takes a place. Raises Failure(OVERLOADED)."""
        if self.num_requests >= self._max_requests:
            raise _overloaded()
        self.num_requests += 1
        return LoadShare(self)

    def add_tokens(self, share: LoadShare, num_tokens: int) -> None:
        """Adds a request's tokens. Raises Failure(OVERLOADED); one request alone always fits."""
        if self.num_tokens and self.num_tokens + num_tokens > self._max_tokens:
            raise _overloaded()
        self.num_tokens += num_tokens
        share.num_tokens += num_tokens


class LoadShare:
    """One request's part of the load; `leave` once it has its first token, or has ended."""

    def __init__(self, load: Load) -> None:
        self._load: Load | None = load
        self.num_tokens = 0

    def leave(self) -> None:
        """Gives it back. Safe twice."""
        load, self._load = self._load, None
        if load is not None:
            load.num_requests -= 1
            load.num_tokens -= self.num_tokens


def _overloaded() -> Failure:
    return Failure(Reason.OVERLOADED, "too many requests are waiting", retry_after_s=2.0)
