"""What happens to the prefill balancer, and what it wants done. Times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.cost_model import CostModel
from services.common.errors import Reason


@dataclass(frozen=True)
class Work:
    """One attempt of one request.

    `key` names the attempt, `request_id` the request. `num_present` is the first position that is
    computed. `prefix_key` names the blocks that would be computed: equal keys, equal cold prefix;
    empty when there is too little to share.
    """

    key: str
    request_id: str
    tenant: str
    num_tokens: int
    num_present: int
    deadline_s: float
    attempt: int = 0
    priority: int = 0
    model: str = ""
    prefix_key: bytes = b""


# -- events


@dataclass(frozen=True)
class Submitted:
    """An entrypoint wants this computed. The same key again joins the first."""

    work: Work


@dataclass(frozen=True)
class Cancelled:
    """The submitter went away."""

    key: str


@dataclass(frozen=True)
class EngineJoined:
    """An engine opened its pull call; it may hold work from before."""

    engine_id: str
    boot_id: str
    address: str
    quota_ns: int
    outstanding_ns: int = 0
    holding: tuple[str, ...] = ()
    accept_buckets: int = 0  # bit per bucket; 0 means all
    max_tokens: int = 1 << 20
    model: str = ""
    cost_model: CostModel = field(default_factory=CostModel)


@dataclass(frozen=True)
class EngineCapacity:
    """What an engine has left. All it accepted or finished before is in it."""

    engine_id: str
    boot_id: str
    remaining_ns: int
    num_holding: int
    accepting: bool = True


@dataclass(frozen=True)
class EngineAccepted:
    """The engine took an offered request."""

    engine_id: str
    boot_id: str
    key: str


@dataclass(frozen=True)
class EngineRejected:
    """The engine refuses an offered request."""

    engine_id: str
    boot_id: str
    key: str
    reason: Reason


@dataclass(frozen=True)
class EngineFinished:
    """The engine is done with a request. `committed`: its blocks are on their way."""

    engine_id: str
    boot_id: str
    key: str
    committed: bool = False
    engine_fault: bool = False


@dataclass(frozen=True)
class EngineLost:
    """The pull call ended, or the engine's membership did."""

    engine_id: str
    boot_id: str


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    Submitted
    | Cancelled
    | EngineJoined
    | EngineCapacity
    | EngineAccepted
    | EngineRejected
    | EngineFinished
    | EngineLost
    | Tick
)


# -- actions


@dataclass(frozen=True)
class Wait:
    """Tell the submitter that its request waits."""

    key: str
    bucket: int
    position: int
    following: bool


@dataclass(frozen=True)
class Offer:
    """Send the request to the engine."""

    key: str
    engine_id: str
    boot_id: str


@dataclass(frozen=True)
class Assign:
    """Tell the submitter which engine took its request. Its last message."""

    key: str
    engine_id: str
    boot_id: str
    address: str
    queue_wait_ms: int


@dataclass(frozen=True)
class Rematch:
    """Ask the submitter to match the prompt again and submit it. Its last message."""

    key: str


@dataclass(frozen=True)
class Refuse:
    """Fail the submission. Its last message."""

    key: str
    reason: Reason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Revoke:
    """Tell the engine to drop the request."""

    key: str
    engine_id: str
    boot_id: str


@dataclass(frozen=True)
class Evict:
    """End the pull call of an engine that is silent or out of place; it may join again."""

    engine_id: str
    boot_id: str
    reason: Reason
    message: str


@dataclass(frozen=True)
class PublishBuckets:
    """Write down which engine serves which buckets."""

    round_number: int
    buckets_of: dict[str, tuple[int, ...]]


Action = Wait | Offer | Assign | Rematch | Refuse | Revoke | Evict | PublishBuckets
