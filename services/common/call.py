"""What travels with every call: request id, tenant, trace context and the deadline.

The server puts the `Call` of the request it serves into a context variable; the client reads it
from there, so a handler that calls onward passes all four on without naming them.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from services.common.clock import SYSTEM_CLOCK, Clock

REQUEST_ID_KEY: Final = "x-pelagos-request-id"
TENANT_KEY: Final = "x-pelagos-tenant"
TRACEPARENT_KEY: Final = "traceparent"
TRACESTATE_KEY: Final = "tracestate"


@dataclass(frozen=True)
class Call:
    """The request on whose behalf code runs. `deadline_s` is monotonic, inf for none."""

    request_id: str = ""
    tenant: str = ""
    traceparent: str = ""
    deadline_s: float = math.inf

    def remaining_s(self, margin_s: float = 0.0, clock: Clock = SYSTEM_CLOCK) -> float:
        """Returns the seconds left, less what the way back costs; never below 0."""
        return max(0.0, self.deadline_s - clock.now_s() - margin_s)

    def with_timeout(self, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> Call:
        """Returns the same call with a deadline no later than `timeout_s` from now."""
        return replace(self, deadline_s=min(self.deadline_s, clock.now_s() + timeout_s))


_NO_CALL: Final = Call()
_current: contextvars.ContextVar[Call] = contextvars.ContextVar("pelagos_call", default=_NO_CALL)


def current_call() -> Call:
    """Returns the call being served here; an empty one outside of any."""
    return _current.get()


@contextmanager
def calling(call: Call) -> Iterator[Call]:
    """Makes `call` the current one inside the block; for entry points and background work."""
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


def set_current_call(call: Call) -> None:
    """Makes `call` current for the rest of this task; the server's interceptor does this."""
    _current.set(call)


def to_metadata(call: Call) -> list[tuple[str, str]]:
    """Returns the gRPC metadata for an onward call. The deadline travels as gRPC's own timeout."""
    pairs = (
        (REQUEST_ID_KEY, call.request_id),
        (TENANT_KEY, call.tenant),
        (TRACEPARENT_KEY, call.traceparent),
    )
    return [(key, value) for key, value in pairs if value]


def from_metadata(
    metadata: Iterable[tuple[str, str | bytes]] | None, deadline_s: float = math.inf
) -> Call:
    """Returns the call described by gRPC metadata; missing parts are empty."""
    found = {key: value for key, value in metadata or () if isinstance(value, str)}
    return Call(
        request_id=found.get(REQUEST_ID_KEY, "")[:128],
        tenant=found.get(TENANT_KEY, "")[:256],
        traceparent=found.get(TRACEPARENT_KEY, "")[:128],
        deadline_s=deadline_s,
    )
