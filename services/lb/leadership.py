"""Whether this process may decide, for balancers that must also decide while etcd is away.

A balancer leads by election. When its lease runs out because the store itself is away, nobody else
can be elected either: it goes on with what it knows (static stability, P-21) until the store says
that another leads. Writes to shared keys stay fenced by the term all the while (P-22). Only who has
been awake all the time may do so: a process that was frozen knows nothing of what it missed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from services.common.clock import Clock
from services.common.election import Election
from services.common.errors import Failure, Reason
from services.common.membership import ClusterView
from services.common.service import Runtime

_TURN_S: Final = 0.25
# A loop that has not turned for so long was frozen, or might as well have been.
_MAX_PAUSE_S: Final = 3.0


class Leadership:
    """One candidate. `on_begin(term)` and `on_end()` bracket the time it decides."""

    def __init__(
        self,
        election: Election,
        view: ClusterView,
        service: str,
        instance_id: str,
        on_begin: Callable[[int], None],
        on_end: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._awake_s = clock.now_s()
        self._election = election
        self._view = view
        self._service = service
        self._instance_id = instance_id
        self._on_begin = on_begin
        self._on_end = on_end
        self._term = 0
        election.subscribe(lambda _: self.reconcile())
        view.subscribe(self.reconcile)

    @property
    def election(self) -> Election:
        """Returns the election, for fenced writes."""
        return self._election

    @property
    def term(self) -> int:
        """Returns the term to speak under; 0 when another decides."""
        return self._term if self._may_decide() else 0

    def require(self) -> int:
        """Returns the term. Raises Failure(NO_INSTANCE) naming the leader, where one is known."""
        term = self.term
        if term:
            return term
        leader = self._view.leader(self._service)
        metadata = {"service": self._service}
        if leader is not None and leader.instance_id != self._instance_id:
            metadata["leader"] = leader.address
        text = f"this {self._service} does not lead"
        raise Failure(Reason.NO_INSTANCE, text, metadata, retry_after_s=0.25)

    async def run(self) -> None:
        """Keeps looking, for ever."""
        while True:
            self.reconcile()
            self._awake_s = self._clock.now_s()
            await self._clock.sleep(_TURN_S)

    def reconcile(self) -> None:
        """Begins or ends deciding; called whenever election or view have changed."""
        term = self._election.term
        if term and term != self._term:
            # A new term of our own after an outage goes on with what we know.
            is_new, self._term = not self._term, term
            if is_new:
                self._on_begin(term)
        elif self._term and not self._may_decide():
            self._term = 0
            self._on_end()

    def _may_decide(self) -> bool:
        if not self._term:
            return False
        leader = self._view.leader(self._service)
        is_ours = leader is None or leader.instance_id == self._instance_id
        if self._view.is_healthy and leader is not None and leader.term > self._term:
            return is_ours  # seen before our own lease has run out
        was_awake = self._clock.now_s() - self._awake_s <= _MAX_PAUSE_S
        held = is_ours and not self._view.is_healthy and was_awake
        return self._election.is_leader or held


def lead(
    runtime: Runtime[Any],
    service: str,
    on_begin: Callable[[int], None],
    on_end: Callable[[], None],
) -> Leadership:
    """Starts to campaign for `service` as long as the runtime lives."""
    leadership = Leadership(
        runtime.elect(service),
        runtime.view,
        service,
        runtime.instance_id,
        on_begin,
        on_end,
        runtime.clock,
    )
    runtime.spawn(leadership.run(), f"leadership {service}")
    return leadership
