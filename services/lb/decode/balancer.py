"""The decode balancer as a state machine: events in, actions out; no clock, no socket.

Engines report their ranks; between reports the balancer adds what it placed itself and no report
shows yet. Requests that move away from a draining engine go before the queue; the queue is FIFO.
Source: kvcache-and-balancing.md, section 13; reliability-and-security.md, P-26.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from services.common.errors import Reason
from services.lb.decode import policy
from services.lb.decode.policy import RankLoad
from services.lb.outlier import OutlierConfig, OutlierTable


@dataclass(frozen=True)
class BalancerConfig:
    """The balancer's rules."""

    level_factor: float = policy.LEVEL_FACTOR
    report_timeout_s: float = 3.0  # ranks with an older report take nothing new
    remember_s: float = 60.0  # how long a pick is answered the same again
    unseen_s: float = 10.0  # a pick that no report shows for so long was never used
    # A pick that nobody gave back for so long counts as a success of its instance.
    success_after_s: float = 2.0
    max_waiting_requests: int = 2_000
    outlier: OutlierConfig = field(default_factory=OutlierConfig)


@dataclass(frozen=True)
class RankReport:
    """Load of one rank, as its engine counts it."""

    rank: int
    num_kv_tokens: int
    num_requests: int
    num_free_tokens: int
    max_requests: int


# -- events


@dataclass(frozen=True)
class Pick:
    """A request needs a rank. `key` names its attempt. Prompt plus reserve in `num_tokens`."""

    key: str
    request_id: str
    num_tokens: int
    wait_until_s: float
    is_handoff: bool = False
    exclude: frozenset[str] = frozenset()  # instances that just failed it
    layout_signature: str = ""


@dataclass(frozen=True)
class Cancelled:
    """The caller of Pick went away."""

    key: str


@dataclass(frozen=True)
class Returned:
    """A pick is not used."""

    key: str
    instance_id: str
    instance_fault: bool


@dataclass(frozen=True)
class Report:
    """An engine tells the load of all its ranks."""

    instance_id: str
    boot_id: str
    address: str
    accepting: bool
    ranks: tuple[RankReport, ...]
    version: int
    layout_signature: str = ""
    seen_request_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lost:
    """The report call of an engine ended, or its membership did."""

    instance_id: str
    boot_id: str


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = Pick | Cancelled | Returned | Report | Lost | Tick


# -- actions


@dataclass(frozen=True)
class Placed:
    """Answer a Pick with this rank."""

    key: str
    instance_id: str
    boot_id: str
    address: str
    rank: int


@dataclass(frozen=True)
class Refused:
    """Fail a Pick."""

    key: str
    reason: Reason
    message: str
    retry_after_s: float | None = None


Action = Placed | Refused


# -- state


@dataclass
class _Instance:
    report: Report
    heard_s: float
    size: int = 0  # KV tokens of its largest rank, held and free
    # Placed by us and in no report yet: key -> (request id, rank, tokens, placed at).
    unseen: dict[str, tuple[str, int, int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Picked:
    placed: Placed
    placed_s: float


@dataclass
class Counters:
    """Totals for the metrics."""

    placed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    returned: int = 0
    faults: int = 0
    waits_s: list[float] = field(default_factory=list)  # drained by the metrics' reader


class DecodeBalancer:
    """The table of all decode ranks of a cluster, and the queue in front of it."""

    def __init__(self, config: BalancerConfig, now_s: float) -> None:
        self._config = config
        self._instances: dict[str, _Instance] = {}
        self._handoffs: deque[Pick] = deque()
        self._queue: deque[Pick] = deque()
        self._enqueued_s: dict[str, float] = {}
        self._picked: OrderedDict[str, _Picked] = OrderedDict()
        self._unproven: deque[tuple[float, str, str]] = deque()  # placed at, key, instance
        self._waits: list[tuple[float, str]] = []
        self._outliers = OutlierTable(config.outlier)
        self._ranks: dict[str, list[RankLoad]] | None = None  # by instance; None: to be rebuilt
        self.counters = Counters()

    # -- what the shell asks

    def on_event(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event and returns what must be done, in order."""
        match event:
            case Pick():
                return self._pick(event, now_s)
            case Cancelled(key):
                self._dequeue(key)
                return []
            case Returned(key, instance_id, instance_fault):
                self._return(key, instance_id, instance_fault, now_s)
                return self._place_all(now_s)
            case Report():
                self._report(event, now_s)
                return self._place_all(now_s)
            case Lost(instance_id, boot_id):
                known = self._instances.get(instance_id)
                if known is not None and known.report.boot_id == boot_id:
                    self._remove(instance_id)
                return []
            case Tick():
                return self._tick(now_s)

    @property
    def num_waiting(self) -> int:
        """Returns the requests that wait for room."""
        return len(self._enqueued_s)

    def has_pick(self, key: str, instance_id: str) -> bool:
        """Returns whether this pick is remembered."""
        picked = self._picked.get(key)
        return picked is not None and picked.placed.instance_id == instance_id

    def rank_loads(self, now_s: float) -> list[RankLoad]:
        """Returns every rank that may take requests now, own placements in flight included."""
        loads = self._loads()
        ranks: list[RankLoad] = []
        for instance_id, instance in self._instances.items():
            if self._is_eligible(instance, now_s):
                ranks += loads[instance_id]
        return ranks

    def census(self) -> dict[str, int]:
        """Returns how many of everything is held; all but the first two are 0 when idle."""
        return {
            "instances": len(self._instances),
            "remembered": len(self._picked),
            "waiting": len(self._enqueued_s),
            "unseen": sum(len(instance.unseen) for instance in self._instances.values()),
            "unproven": len(self._unproven),
        }

    # -- events

    def _pick(self, pick: Pick, now_s: float) -> list[Action]:
        picked = self._picked.get(pick.key)
        if picked is not None:
            return [picked.placed]
        if pick.key in self._enqueued_s:
            return []  # the shell answers everybody who waits for this key
        if self.num_waiting >= self._config.max_waiting_requests:
            return [self._refuse(pick.key, Reason.OVERLOADED, "the decode queue is full", 0.5)]
        if self._never_fits(pick, now_s):
            text = f"{pick.num_tokens} tokens fit no rank, however empty"
            return [self._refuse(pick.key, Reason.NOT_FITTING, text)]
        must_wait = bool(self._handoffs if pick.is_handoff else self._enqueued_s)
        self._enqueued_s[pick.key] = now_s
        (self._handoffs if pick.is_handoff else self._queue).append(pick)
        heapq.heappush(self._waits, (pick.wait_until_s, pick.key))
        # Behind others it waits for the next tick, which decides for the whole batch.
        return [] if must_wait else self._place_all(now_s)

    def _return(self, key: str, instance_id: str, instance_fault: bool, now_s: float) -> None:
        picked = self._picked.get(key)
        if picked is None or picked.placed.instance_id != instance_id:
            return
        del self._picked[key]
        self.counters.returned += 1
        self._ranks = None
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.unseen.pop(key, None)
        if instance_fault:
            self.counters.faults += 1
            self._outliers.on_failure(instance_id, now_s)
        else:
            self._outliers.on_release(instance_id)

    def _report(self, report: Report, now_s: float) -> None:
        known = self._instances.get(report.instance_id)
        if known is None or known.report.boot_id != report.boot_id:
            # Another boot id: everything on the old one is lost.
            known = _Instance(report, now_s)
            self._instances[report.instance_id] = known
            # The policy takes the first of equal ranks: keep them in the order of their ids.
            self._instances = dict(sorted(self._instances.items()))
            self._outliers.add(report.instance_id)
        elif report.version and report.version <= known.report.version:
            return  # overtaken by a newer one
        known.report, known.heard_s = report, now_s
        sizes = (rank.num_kv_tokens + rank.num_free_tokens for rank in report.ranks)
        known.size = max(sizes, default=0)
        seen = set(report.seen_request_ids)
        known.unseen = {key: v for key, v in known.unseen.items() if v[0] not in seen}
        self._ranks = None

    def _remove(self, instance_id: str) -> None:
        del self._instances[instance_id]
        for key in [k for k, v in self._picked.items() if v.placed.instance_id == instance_id]:
            del self._picked[key]  # asked again, the request gets another rank
        self._outliers.keep_only(self._instances)
        self._ranks = None

    def _tick(self, now_s: float) -> list[Action]:
        config = self._config
        actions: list[Action] = []
        while self._unproven and self._unproven[0][0] + config.success_after_s <= now_s:
            _, key, instance_id = self._unproven.popleft()
            if self.has_pick(key, instance_id) and instance_id in self._instances:
                self._outliers.on_success(instance_id)
        while self._picked:
            key, picked = next(iter(self._picked.items()))
            if picked.placed_s + config.remember_s > now_s:
                break
            del self._picked[key]
        for instance in self._instances.values():
            late = [k for k, v in instance.unseen.items() if v[3] + config.unseen_s <= now_s]
            for key in late:
                del instance.unseen[key]
                self._ranks = None
        actions += self._place_all(now_s)
        while self._waits and self._waits[0][0] <= now_s:
            _, key = heapq.heappop(self._waits)
            pick = self._dequeue(key)
            if pick is not None:
                actions.append(self._timed_out(pick, now_s))
        if not actions or not self._enqueued_s:
            return actions
        return actions + self._place_all(now_s)  # who stood behind the ones that left

    # -- placing

    def _place_all(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if not self._enqueued_s:
            return actions
        lengths = [pick.num_tokens for pick in (*self._handoffs, *self._queue)]
        level = policy.level_of(lengths, self.rank_loads(now_s), self._config.level_factor)
        for queue in (self._handoffs, self._queue):
            skipped: list[Pick] = []
            while queue:
                pick = queue[0]
                # Room is checked when it is handed out, and so is the caller's patience (P-05).
                if pick.wait_until_s <= now_s:
                    queue.popleft()
                    del self._enqueued_s[pick.key]
                    actions.append(self._timed_out(pick, now_s))
                    continue
                candidates = self._candidates(pick, now_s)
                rank = policy.pick_rank(candidates, pick.num_tokens, level)
                if rank is not None:
                    queue.popleft()
                    actions.append(self._place(pick, rank, now_s))
                elif candidates:
                    break  # FIFO: nobody overtakes the head; it waits for room
                else:
                    skipped.append(queue.popleft())  # no rank is of its kind: it blocks nobody
            queue.extendleft(reversed(skipped))
            if queue and len(skipped) < len(queue):
                break  # hand-offs that wait for room go before the queue
        return actions

    def _place(self, pick: Pick, rank: RankLoad, now_s: float) -> Action:
        instance_id, _, number = rank.rank_id.rpartition("/")
        instance = self._instances[instance_id]
        index = int(number)
        instance.unseen[pick.key] = (pick.request_id, index, pick.num_tokens, now_s)
        loads = self._loads()[instance_id]
        position = next(i for i, load in enumerate(loads) if load.rank_id == rank.rank_id)
        loads[position] = policy.with_request(loads[position], pick.num_tokens)
        placed = Placed(
            pick.key, instance_id, instance.report.boot_id, instance.report.address, index
        )
        self._picked[pick.key] = _Picked(placed, now_s)
        self._unproven.append((now_s, pick.key, instance_id))
        self._outliers.on_pick(instance_id)
        self.counters.placed += 1
        self.counters.waits_s.append(now_s - self._enqueued_s.pop(pick.key))
        return placed

    def _candidates(self, pick: Pick, now_s: float) -> list[RankLoad]:
        loads = self._loads()
        ranks: list[RankLoad] = []
        for instance_id, instance in self._instances.items():
            if (
                self._is_eligible(instance, now_s)
                and instance_id not in pick.exclude
                and self._has_layout(instance, pick)
                and self._outliers.allows(instance_id, now_s)
            ):
                ranks += loads[instance_id]
        return ranks

    def _is_eligible(self, instance: _Instance, now_s: float) -> bool:
        is_fresh = now_s - instance.heard_s <= self._config.report_timeout_s
        return is_fresh and instance.report.accepting

    @staticmethod
    def _has_layout(instance: _Instance, pick: Pick) -> bool:
        ours, theirs = pick.layout_signature, instance.report.layout_signature
        return not ours or not theirs or ours == theirs

    def _loads(self) -> dict[str, list[RankLoad]]:
        if self._ranks is None:
            self._ranks = {
                instance_id: self._loads_of(instance_id, instance)
                for instance_id, instance in self._instances.items()
            }
        return self._ranks

    @staticmethod
    def _loads_of(instance_id: str, instance: _Instance) -> list[RankLoad]:
        loads = {
            rank.rank: RankLoad(
                f"{instance_id}/{rank.rank:04}",
                rank.num_kv_tokens,
                rank.num_requests,
                rank.num_free_tokens,
                rank.max_requests,
            )
            for rank in sorted(instance.report.ranks, key=lambda rank: rank.rank)
        }
        for _, index, num_tokens, _ in instance.unseen.values():
            if index in loads:
                loads[index] = policy.with_request(loads[index], num_tokens)
        return list(loads.values())

    def _never_fits(self, pick: Pick, now_s: float) -> bool:
        sizes = [
            instance.size
            for instance in self._instances.values()
            if instance.size
            and self._is_eligible(instance, now_s)
            and self._has_layout(instance, pick)
        ]
        return bool(sizes) and max(sizes) < pick.num_tokens

    def _timed_out(self, pick: Pick, now_s: float) -> Action:
        if not any(
            self._is_eligible(instance, now_s) and self._has_layout(instance, pick)
            for instance in self._instances.values()
        ):
            return self._refuse(pick.key, Reason.NO_INSTANCE, "no decode instance is known", 1.0)
        return self._refuse(pick.key, Reason.ENGINE_FULL, "no decode rank has room", 0.5)

    def _refuse(
        self, key: str, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> Action:
        self.counters.refused[reason.value] = self.counters.refused.get(reason.value, 0) + 1
        return Refused(key, reason, message, retry_after_s)

    def _dequeue(self, key: str) -> Pick | None:
        if self._enqueued_s.pop(key, None) is None:
            return None
        for queue in (self._handoffs, self._queue):
            for pick in queue:
                if pick.key == key:
                    queue.remove(pick)
                    return pick
        raise AssertionError(f"{key} waits in no queue")
