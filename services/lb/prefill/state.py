"""The rules of the prefill balancer, and the records it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.lb.outlier import OutlierConfig
from services.lb.prefill import events as ev
from services.lb.prefill import policy
from services.lb.prefill.events import Work
from services.lb.prefill.fair_queue import Place
from services.lb.prefill.policy import Steal


@dataclass(frozen=True)
class BalancerConfig:
    """The balancer's rules."""

    bucket_bounds: tuple[int, ...] = policy.BUCKET_BOUNDS  # empty: one bucket for all
    round_s: float = 10.0
    max_moves: int = 2
    min_per_bucket: int = 1
    steal: Steal = Steal.ANY
    fair_tenants: bool = True
    max_waiting_requests: int = 2_000
    max_waiting_tokens: int = 20_000_000
    max_tenant_share: float = 0.75  # of the two bounds above, for one tenant
    max_queue_wait_s: float = 60.0
    no_engine_wait_s: float = 5.0  # how long requests wait while no engine is known at all
    report_timeout_s: float = 3.0  # an engine silent for longer is lost
    rebuild_s: float = 1.0  # a new leader hands nothing out before the engines have reported
    max_offers: int = 3  # engines that may refuse a request before it fails
    follow_prefixes: bool = True
    min_follow_tokens: int = 2_048  # shorter cold prefixes are not worth waiting for
    probe_delay_s: float = 0.25  # between a leader's end and asking the cache again
    probe_timeout_s: float = 1.0
    min_follow_s: float = 1.0  # floor of "twice the leader's predicted cost"
    remember_s: float = 60.0  # how long ended and absent requests keep their answer and place
    outlier: OutlierConfig = field(default_factory=OutlierConfig)


@dataclass
class Item:
    """A request that waits, or is offered and not yet accepted."""

    work: Work
    bucket: int
    place: Place
    arrived_s: float
    cost_ns: int
    offered_to: str | None = None
    refused_by: set[str] = field(default_factory=set)
    num_refusals: int = 0


@dataclass
class Engine:
    """An engine with an open pull call."""

    joined: ev.EngineJoined
    reported_ns: int
    reported_holding: int
    heard_s: float
    accepting: bool = True
    # Offered or accepted since the last capacity report: not in the report's figures yet (P-26).
    unreported: dict[str, int] = field(default_factory=dict)
    offered: set[str] = field(default_factory=set)
    accepted: set[str] = field(default_factory=set)

    @property
    def remaining_ns(self) -> int:
        """Returns the quota left, own offers that no report shows yet included."""
        return self.reported_ns - sum(self.unreported.values())

    @property
    def is_idle(self) -> bool:
        """Returns whether it holds nothing at all."""
        return self.reported_holding == 0 and not self.unreported

    def suits(self, item: Item) -> bool:
        """Returns whether the request is of a kind that it takes, room or not."""
        joined = self.joined
        return (
            item.work.num_tokens <= joined.max_tokens
            and (not joined.accept_buckets or bool(joined.accept_buckets >> item.bucket & 1))
            and joined.engine_id not in item.refused_by
        )

    @property
    def takes_work(self) -> bool:
        """Returns whether it takes anything now."""
        return self.accepting and self.reported_ns > 0


@dataclass(frozen=True)
class Ended:
    """A request that left the balancer: its place, and which engine took it, if any."""

    place: Place
    arrived_s: float
    bucket: int
    attempt: int
    until_s: float
    assigned: ev.Assign | None


@dataclass
class Counters:
    """Totals for the metrics."""

    offers: int = 0
    missed_tokens: int = 0  # submitted and not in the cache: the autoscaler's demand
    steals: int = 0
    bucket_moves: int = 0
    requeued: int = 0
    followed: int = 0
    rematched: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    head_blocked_s: dict[int, float] = field(default_factory=dict)
    queue_waits_s: list[float] = field(default_factory=list)  # drained by the metrics' reader
