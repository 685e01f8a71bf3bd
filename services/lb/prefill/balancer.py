"""The prefill balancer as a state machine: events in, actions out; no clock, no socket.

Requests wait in the fair queue of their length bucket. Engines pull: an engine with quota left is
offered the head of its lane; it accepts or refuses. Until it has accepted, the request is ours and
goes back to the head of its bucket when the engine is lost; afterwards the entrypoint, which holds
the delivered tokens, submits a new attempt, which goes to the head as well.
Source: kvcache-and-balancing.md, sections 12 and 18.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from services.common.cost_model import CostModel
from services.common.errors import Reason
from services.lb.outlier import OutlierTable
from services.lb.prefill import events as ev
from services.lb.prefill import policy
from services.lb.prefill.events import Action, Event, Work
from services.lb.prefill.fair_queue import FairQueue, Place
from services.lb.prefill.lanes import LaneTable
from services.lb.prefill.leaders import PrefixLeaders
from services.lb.prefill.state import BalancerConfig, Counters, Ended, Engine, Item


class PrefillBalancer:
    """Queues of one shard of the engine pool. Call `on_event` for everything, `Tick` often."""

    def __init__(
        self, config: BalancerConfig, now_s: float, cost_model: CostModel | None = None
    ) -> None:
        self._config = config
        self._cost_model = cost_model or CostModel()
        self._num_buckets = len(config.bucket_bounds) + 1
        self._queues = [FairQueue(config.fair_tenants) for _ in range(self._num_buckets)]
        self._items: dict[str, Item] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()  # by request id
        self._accepted: dict[str, ev.Assign] = {}  # by key
        self._waiting_key: dict[str, str] = {}  # request id -> its newest attempt that waits
        self._engines: dict[str, Engine] = {}
        self._table = LaneTable(self._num_buckets, config.min_per_bucket, config.max_moves)
        self._leaders = PrefixLeaders(config.min_follow_tokens)
        self._outliers = OutlierTable(config.outlier)
        self._arrivals = itertools.count()
        self._deadlines: list[tuple[float, str]] = []
        self._arrived_ns = [0] * self._num_buckets
        self._waiting_tokens = 0
        self._tenant_tokens: dict[str, int] = {}
        self._tenant_requests: dict[str, int] = {}
        self._next_round_s = now_s + config.round_s
        self._hand_out_from_s = now_s + config.rebuild_s
        self._engines_seen_s = now_s
        self._blocked_since: dict[int, float] = {}
        self.counters = Counters()

    # -- what the shell asks

    def on_event(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event and returns what must be done, in order."""
        actions = self._handle(event, now_s)
        actions += self._release_followers(now_s)
        if not (isinstance(event, ev.Submitted) and self._stands_behind(event.work.key)):
            actions += self._hand_out(now_s)
        return actions

    def _stands_behind(self, key: str) -> bool:
        """Returns whether a new request changes nothing yet: under load, that is nearly always."""
        item = self._items.get(key)
        return item is not None and self._queues[item.bucket].head() not in (None, key)

    @property
    def num_waiting(self) -> int:
        """Returns the requests in the queues and at their side."""
        return len(self._items)

    def buckets(self, now_s: float) -> list[tuple[int, int, int, list[str], float]]:
        """Returns per bucket: lower bound, requests, tokens, engines, how long its head waits."""
        rows = []
        for bucket, queue in enumerate(self._queues):
            lane = self._table.lane_of_bucket(bucket)
            tokens = sum(
                item.work.num_tokens for item in self._items.values() if item.bucket == bucket
            )
            engines = sorted(e for e, of in self._table.lane_of.items() if of == lane)
            since = self._blocked_since.get(lane)
            lower = self._config.bucket_bounds[bucket - 1] if bucket else 0
            rows.append(
                (lower, len(queue), tokens, engines, 0.0 if since is None else now_s - since)
            )
        return rows

    def imbalance(self) -> float:
        """Returns the busiest engine's unfinished work over the mean; 1.0 is even."""
        work = [max(0, e.joined.quota_ns - e.remaining_ns) for e in self._engines.values()]
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    def census(self) -> dict[str, int]:
        """Returns how many of everything is held; all but engines are 0 when idle."""
        return {
            "waiting": len(self._items),
            "waiting_tokens": self._waiting_tokens,
            "following": self._leaders.num_followers,
            "leaders": len(self._leaders),
            "accepted": len(self._accepted),
            "engines": len(self._engines),
            "unreported": sum(len(engine.unreported) for engine in self._engines.values()),
            "tenants": len(self._tenant_requests),
        }

    def restore_buckets(self, round_number: int, buckets_of: Mapping[str, Sequence[int]]) -> None:
        """Takes over the division that a former leader wrote down."""
        self._table.restore(round_number, buckets_of)

    # -- events

    def _handle(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case ev.Submitted(work):
                return self._submit(work, now_s)
            case ev.Cancelled(key):
                return self._cancel(key, now_s)
            case ev.EngineJoined():
                return self._join(event, now_s)
            case ev.EngineLost(engine_id, boot_id):
                if self._engine(engine_id, boot_id) is not None:
                    self._lose(engine_id, now_s)
                return []
            case ev.Tick():
                return self._tick(now_s)
        engine = self._engine(event.engine_id, event.boot_id)
        if engine is None:  # of a life that is over, or evicted: its stream is being ended
            return []
        engine.heard_s = now_s
        match event:
            case ev.EngineCapacity():
                engine.reported_ns = event.remaining_ns
                engine.reported_holding = event.num_holding
                engine.accepting = event.accepting
                engine.unreported = {
                    key: cost for key, cost in engine.unreported.items() if key in engine.offered
                }
                return []
            case ev.EngineAccepted():
                return self._accept(engine, event.key, now_s)
            case ev.EngineRejected():
                return self._reject(engine, event, now_s)
            case ev.EngineFinished():
                return self._finish(engine, event, now_s)
        raise AssertionError(f"no case for {event}")

    def _submit(self, work: Work, now_s: float) -> list[Action]:
        config = self._config
        if work.key in self._items:
            return [self._wait_action(work.key)]
        if work.key in self._accepted:
            return [self._accepted[work.key]]
        ended = self._ended.get(work.request_id)
        if ended is not None and ended.assigned is not None and ended.assigned.key == work.key:
            return [ended.assigned]
        if work.deadline_s <= now_s:
            return [self._refuse(work.key, Reason.DEADLINE, "the deadline has passed")]
        refusal = self._refusal(work, now_s)
        if refusal is not None:
            return [refusal]
        actions: list[Action] = self._drop_older_attempts(work, now_s)
        bucket = policy.bucket_of(work.num_tokens, config.bucket_bounds)
        cost_ns = self._cost_model.charge(work.num_tokens - work.num_present, work.num_present)
        # Attempts count from 0 or 1; one that replaces another stands before all new requests.
        is_retry = work.attempt > 1 or (ended is not None and ended.attempt < work.attempt)
        if ended is not None and ended.bucket == bucket:
            place = ended.place
            # A new attempt waits anew; one that was matched again has waited since it came.
            arrived_s = now_s if is_retry else ended.arrived_s
        else:
            place = self._queues[bucket].place_for(
                work.tenant, cost_ns, work.priority, next(self._arrivals)
            )
            arrived_s = now_s
        place = place._replace(is_new=place.is_new and not is_retry)
        self._ended.pop(work.request_id, None)
        item = Item(work, bucket, place, arrived_s, cost_ns)
        self._items[work.key] = item
        self._waiting_key[work.request_id] = work.key
        if ended is None:  # asked for the first time
            self.counters.missed_tokens += work.num_tokens - work.num_present
        self._count(work, 1)
        self._arrived_ns[bucket] += cost_ns
        until_s = min(work.deadline_s, arrived_s + config.max_queue_wait_s)
        heapq.heappush(self._deadlines, (until_s, work.key))
        actions += self._enqueue_or_follow(item, now_s)
        return actions

    def _enqueue_or_follow(self, item: Item, now_s: float) -> list[Action]:
        work = item.work
        following, freed = False, list[str]()
        if self._config.follow_prefixes:
            num_missing = work.num_tokens - work.num_present
            following, freed = self._leaders.join(
                work.key, work.request_id, work.prefix_key, num_missing, now_s
            )
        actions: list[Action] = [self._send_to_rematch(key, now_s) for key in freed]
        if following:
            self.counters.followed += 1
        else:
            self._queues[item.bucket].push(work.key, item.place, item.cost_ns)
        return [self._wait_action(work.key), *actions]

    def _refusal(self, work: Work, now_s: float) -> ev.Refuse | None:
        config = self._config
        engines = self._engines.values()
        if engines and all(e.joined.max_tokens < work.num_tokens for e in engines):
            longest = max(e.joined.max_tokens for e in engines)
            text = f"{work.num_tokens} tokens fit no engine; the largest takes {longest}"
            return self._refuse(work.key, Reason.NOT_FITTING, text)
        if engines and not any(e.joined.model in ("", work.model) for e in engines) and work.model:
            return self._refuse(work.key, Reason.NO_INSTANCE, "no engine serves this model")
        if not engines and now_s - self._engines_seen_s > config.no_engine_wait_s:
            return self._refuse(work.key, Reason.NO_INSTANCE, "no prefill engine is known", 1.0)
        tokens, requests = self._waiting_tokens + work.num_tokens, len(self._items) + 1
        if requests > config.max_waiting_requests or tokens > config.max_waiting_tokens:
            return self._refuse(work.key, Reason.OVERLOADED, "the prefill queue is full", 1.0)
        share = config.max_tenant_share
        if (
            self._tenant_requests.get(work.tenant, 0) + 1 > share * config.max_waiting_requests
            or self._tenant_tokens.get(work.tenant, 0) + work.num_tokens
            > share * config.max_waiting_tokens
        ):
            # The rest of the queue is kept for others (P-13).
            return self._refuse(work.key, Reason.OVERLOADED, "the tenant's queue is full", 1.0)
        return None

    def _drop_older_attempts(self, work: Work, now_s: float) -> list[Action]:
        key = self._waiting_key.get(work.request_id)
        if key is None or self._items[key].work.attempt >= work.attempt:
            return []
        actions = self._cancel(key, now_s)
        return [*actions, self._refuse(key, Reason.CONFLICT, "a newer attempt has come")]

    def _cancel(self, key: str, now_s: float) -> list[Action]:
        item = self._items.get(key)
        if item is None:
            return []
        engine_id = item.offered_to
        actions: list[Action] = []
        if engine_id is not None and engine_id in self._engines:
            engine = self._engines[engine_id]
            engine.offered.discard(key)  # its cost stays unreported until the next report
            self._outliers.on_release(engine_id)
            actions.append(ev.Revoke(key, engine_id, engine.joined.boot_id))
        self._forget(item, now_s, assigned=None)
        return actions

    def _join(self, event: ev.EngineJoined, now_s: float) -> list[Action]:
        actions: list[Action] = []
        known = self._engines.get(event.engine_id)
        if known is not None:
            self._lose(event.engine_id, now_s)  # a new call of the same engine replaces the old one
        models = {e.joined.model for e in self._engines.values()} - {"", event.model}
        if event.model and models:
            text = f"this shard serves {min(models)}, the engine {event.model}"
            return [ev.Evict(event.engine_id, event.boot_id, Reason.WRONG_ROLE, text)]
        engine = Engine(
            event, event.quota_ns - event.outstanding_ns, len(event.holding), heard_s=now_s
        )
        self._table.join(event.engine_id)
        self._engines[event.engine_id] = engine
        self._engines_seen_s = now_s
        if known is None or known.joined.boot_id != event.boot_id:
            self._outliers.add(event.engine_id)
        for key in event.holding:
            # What it kept over our restart must not be computed twice.
            item = self._items.get(key)
            if item is not None and item.offered_to is None:
                engine.offered.add(key)
                item.offered_to = event.engine_id
                self._queues[item.bucket].remove(key)
                actions += self._accept(engine, key, now_s)
            elif key not in self._accepted:
                engine.accepted.add(key)
                self._accepted[key] = ev.Assign(
                    key, event.engine_id, event.boot_id, event.address, 0
                )
        actions.append(self._publish())
        return actions

    def _accept(self, engine: Engine, key: str, now_s: float) -> list[Action]:
        if key not in engine.offered:
            return []  # revoked meanwhile; the engine has the revocation on its way
        engine.offered.discard(key)
        engine.accepted.add(key)
        item = self._items[key]
        joined = engine.joined
        wait_s = now_s - item.arrived_s
        assign = ev.Assign(
            key, joined.engine_id, joined.boot_id, joined.address, round(wait_s * 1_000)
        )
        self._accepted[key] = assign
        self.counters.queue_waits_s.append(wait_s)
        if self._leaders.is_leader(key):
            predicted_s = item.cost_ns / 1e9
            give_up_s = now_s + max(self._config.min_follow_s, 2 * predicted_s)
            self._leaders.leader_started(key, give_up_s)
        self._forget(item, now_s, assigned=assign, ends_prefix=False)
        return [assign]

    def _reject(self, engine: Engine, event: ev.EngineRejected, now_s: float) -> list[Action]:
        key = event.key
        if key not in engine.offered:
            return []
        engine.offered.discard(key)
        engine.unreported.pop(key, None)
        engine_id = event.engine_id
        item = self._items[key]
        item.offered_to = None
        item.refused_by.add(engine_id)
        item.num_refusals += 1
        facts = event.reason.facts
        if not event.reason.retryable:
            # The request's own fault: it would be refused everywhere, and the engine is healthy.
            self._outliers.on_release(engine_id)
            self._forget(item, now_s, assigned=None)
            return [self._refuse(key, event.reason, "refused by the engine")]
        if facts.blame.name == "INSTANCE":
            self._outliers.on_failure(engine_id, now_s)
        else:
            self._outliers.on_release(engine_id)
        # It said no: nothing more for it until it reports what it has.
        engine.reported_ns = min(engine.reported_ns, 0)
        if item.num_refusals >= self._config.max_offers:
            self._forget(item, now_s, assigned=None)
            return [self._refuse(key, Reason.OVERLOADED, "every engine asked refused it", 1.0)]
        if item.refused_by >= self._engines.keys():
            item.refused_by.clear()  # all have refused once: whoever has room again may take it
        self._requeue_at_head(item)
        return []

    def _finish(self, engine: Engine, event: ev.EngineFinished, now_s: float) -> list[Action]:
        key = event.key
        actions = self._accept(engine, key, now_s)  # one so short that it was never announced
        engine.accepted.discard(key)
        self._accepted.pop(key, None)
        if event.engine_fault:
            self._outliers.on_failure(event.engine_id, now_s)
        else:
            self._outliers.on_success(event.engine_id)
        self._leaders.ended(key, event.committed, now_s, self._config.probe_delay_s)
        return actions

    def _lose(self, engine_id: str, now_s: float) -> None:
        engine = self._engines.pop(engine_id)
        self._table.leave(engine_id)
        for key in sorted(engine.offered, key=lambda k: self._items[k].place, reverse=True):
            item = self._items[key]
            item.offered_to = None
            self._requeue_at_head(item)
            self.counters.requeued += 1
        for key in engine.accepted:
            self._accepted.pop(key, None)
            self._leaders.ended(key, False, now_s, 0.0)
        # The answer "this engine has it" is void now; the places stay.
        for request_id, ended in self._ended.items():
            if ended.assigned is not None and ended.assigned.engine_id == engine_id:
                self._ended[request_id] = dataclasses.replace(ended, assigned=None)
        self._outliers.keep_only(self._engines)

    def _tick(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        config = self._config
        for engine_id, engine in list(self._engines.items()):
            if now_s - engine.heard_s > config.report_timeout_s:
                boot_id = engine.joined.boot_id
                self._lose(engine_id, now_s)
                text = "no report for too long"
                actions.append(ev.Evict(engine_id, boot_id, Reason.BACKEND_LOST, text))
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, key = heapq.heappop(self._deadlines)
            if key in self._items:
                actions += self._expire(key, now_s)
        if self._engines:
            self._engines_seen_s = now_s
        elif now_s - self._engines_seen_s > config.no_engine_wait_s:
            for key, item in list(self._items.items()):
                self._forget(item, now_s, assigned=None)
                text = "no prefill engine is known"
                actions.append(self._refuse(key, Reason.NO_INSTANCE, text, 1.0))
        while self._ended and next(iter(self._ended.values())).until_s <= now_s:
            self._ended.popitem(last=False)
        if now_s >= self._next_round_s:
            # A long pause makes one round, not many.
            self._next_round_s = max(self._next_round_s + config.round_s, now_s)
            actions += self._redivide()
        return actions

    def _redivide(self) -> list[Action]:
        demand = [
            arrived + queue.waiting_ns
            for arrived, queue in zip(self._arrived_ns, self._queues, strict=True)
        ]
        self._arrived_ns = [0] * self._num_buckets
        idle = {engine_id for engine_id, engine in self._engines.items() if engine.is_idle}
        lanes = self._table.lanes
        num_moved = self._table.redivide(demand, idle)
        if num_moved is None:
            return []
        if self._table.lanes != lanes:
            self._blocked_since.clear()
        self.counters.bucket_moves += num_moved
        return [self._publish()] if num_moved or self._table.lanes != lanes else []

    def _publish(self) -> Action:
        return ev.PublishBuckets(self._table.round_number, self._table.buckets_of())

    # -- pieces

    def _expire(self, key: str, now_s: float) -> list[Action]:
        item = self._items[key]
        is_deadline = item.work.deadline_s <= now_s
        actions = self._cancel(key, now_s)
        if is_deadline:
            return [
                *actions,
                self._refuse(key, Reason.DEADLINE, "the deadline passed in the queue"),
            ]
        text = f"waited {self._config.max_queue_wait_s} s for an engine"
        return [*actions, self._refuse(key, Reason.QUEUE_TIMEOUT, text, 1.0)]

    def _requeue_at_head(self, item: Item) -> None:
        item.place = item.place._replace(is_new=False)
        self._leaders.leader_waits_again(item.work.key)
        self._queues[item.bucket].push(item.work.key, item.place, item.cost_ns)

    def _release_followers(self, now_s: float) -> list[Action]:
        probes, keys = self._leaders.due(now_s, self._config.probe_timeout_s)
        for probe in probes:
            if probe.key in self._items:
                self._leaders.probe_left(probe, self._items[probe.key].work.request_id)
                keys.append(probe.key)
        return [self._send_to_rematch(key, now_s) for key in keys if key in self._items]

    def _send_to_rematch(self, key: str, now_s: float) -> Action:
        item = self._items[key]
        self._remove(item, now_s, None)
        self.counters.rematched += 1
        return ev.Rematch(key)

    def _forget(
        self, item: Item, now_s: float, assigned: ev.Assign | None, ends_prefix: bool = True
    ) -> None:
        if ends_prefix:
            self._leaders.ended(item.work.key, False, now_s, 0.0)
        self._remove(item, now_s, assigned)

    def _remove(self, item: Item, now_s: float, assigned: ev.Assign | None) -> None:
        work = item.work
        del self._items[work.key]
        if self._waiting_key.get(work.request_id) == work.key:
            del self._waiting_key[work.request_id]
        self._queues[item.bucket].remove(work.key)
        self._count(work, -1)
        until_s = now_s + self._config.remember_s
        self._ended.pop(work.request_id, None)
        self._ended[work.request_id] = Ended(
            item.place, item.arrived_s, item.bucket, work.attempt, until_s, assigned
        )
        while len(self._ended) > 10 * self._config.max_waiting_requests:
            self._ended.popitem(last=False)

    def _count(self, work: Work, sign: int) -> None:
        self._waiting_tokens += sign * work.num_tokens
        tenant = work.tenant
        self._tenant_tokens[tenant] = self._tenant_tokens.get(tenant, 0) + sign * work.num_tokens
        self._tenant_requests[tenant] = self._tenant_requests.get(tenant, 0) + sign
        if not self._tenant_requests[tenant]:
            del self._tenant_requests[tenant], self._tenant_tokens[tenant]

    def _refuse(
        self, key: str, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> ev.Refuse:
        self.counters.refused[reason.value] = self.counters.refused.get(reason.value, 0) + 1
        return ev.Refuse(key, reason, message, retry_after_s)

    def _wait_action(self, key: str) -> ev.Wait:
        item = self._items[key]
        queue = self._queues[item.bucket]
        following = self._leaders.is_follower(key)
        position = 0 if following or item.offered_to is not None else queue.position(key)
        return ev.Wait(key, item.bucket, position, following)

    def _engine(self, engine_id: str, boot_id: str) -> Engine | None:
        engine = self._engines.get(engine_id)
        return engine if engine is not None and engine.joined.boot_id == boot_id else None

    # -- handing out

    def _hand_out(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if now_s < self._hand_out_from_s:
            return actions
        progress = True
        while progress:
            progress = False
            for lane in range(len(self._table.lanes)):
                head = self._lane_head(lane, now_s, actions)
                if head is None:
                    self._unblock(lane, now_s)
                    continue
                puller = self._choose(head, lane, now_s)
                if puller is None:
                    self._note_block(lane, now_s)
                    continue
                self._unblock(lane, now_s)
                actions.append(self._offer(head, puller, now_s))
                progress = True
            if not progress:
                progress = self._steal_one(now_s, actions)
        return actions

    def _steal_one(self, now_s: float, actions: list[Action]) -> bool:
        lengths = [
            sum(len(self._queues[b]) for b in range(lane.first, lane.end))
            for lane in self._table.lanes
        ]
        if not any(lengths):
            return False
        for engine_id in sorted(self._engines):
            engine = self._engines[engine_id]
            lane = self._table.lane_of[engine_id]
            if not engine.is_idle or lengths[lane]:
                continue
            source = policy.steal_from(lane, lengths, self._config.steal)
            if source is None:
                continue
            head = self._lane_head(source, now_s, actions)
            if head is None or not self._may_take(engine, head, now_s):
                continue
            self.counters.steals += 1
            self._unblock(source, now_s)
            actions.append(self._offer(head, engine_id, now_s))
            return True
        return False

    def _lane_head(self, lane: int, now_s: float, actions: list[Action]) -> Item | None:
        """Returns the next request of a lane; what has expired is thrown out on the way (P-05)."""
        while True:
            first, end = self._table.lanes[lane].first, self._table.lanes[lane].end
            heads: list[tuple[Place, str]] = []
            for queue in self._queues[first:end]:
                place, key = queue.head_place(), queue.head()
                if place is not None and key is not None:
                    heads.append((place, key))
            if not heads:
                return None
            # Tags of different buckets do not compare: between them arrival decides.
            _, key = min(heads, key=lambda h: (h[0].is_new, h[0].negative_priority, h[0].arrival))
            item = self._items[key]
            until_s = min(item.work.deadline_s, item.arrived_s + self._config.max_queue_wait_s)
            if until_s > now_s:
                return item
            actions += self._expire(key, now_s)

    def _choose(self, item: Item, lane: int, now_s: float) -> str | None:
        lane_of = self._table.lane_of
        able = [
            (engine_id, engine)
            for engine_id, engine in self._engines.items()
            if self._may_take(engine, item, now_s)
        ]
        own = [pair for pair in able if lane_of[pair[0]] == lane]
        if not own and any(
            lane_of[engine_id] == lane and engine.suits(item) and self._is_live(engine, now_s)
            for engine_id, engine in self._engines.items()
        ):
            return None
        # A head that nobody of its lane may ever take is everybody's: it must not starve.
        pullers = [
            policy.Puller(engine_id, engine.remaining_ns, engine.is_idle)
            for engine_id, engine in own or able
        ]
        chosen = policy.choose_puller(pullers, item.cost_ns)
        return chosen.engine_id if chosen else None

    def _may_take(self, engine: Engine, item: Item, now_s: float) -> bool:
        return engine.takes_work and engine.suits(item) and self._is_live(engine, now_s)

    def _is_live(self, engine: Engine, now_s: float) -> bool:
        return now_s - engine.heard_s <= self._config.report_timeout_s and self._outliers.allows(
            engine.joined.engine_id, now_s
        )

    def _offer(self, item: Item, engine_id: str, now_s: float) -> Action:
        key = item.work.key
        engine = self._engines[engine_id]
        self._queues[item.bucket].take(key)
        item.offered_to = engine_id
        engine.offered.add(key)
        work = item.work
        num_new = work.num_tokens - work.num_present
        engine.unreported[key] = engine.joined.cost_model.charge(num_new, work.num_present)
        self._outliers.on_pick(engine_id)
        self.counters.offers += 1
        return ev.Offer(key, engine_id, engine.joined.boot_id)

    def _note_block(self, lane: int, now_s: float) -> None:
        # Blocked means: somebody of the lane has quota left, and yet the head does not go.
        lane_of = self._table.lane_of
        if any(lane_of[k] == lane and e.remaining_ns > 0 for k, e in self._engines.items()):
            since = self._blocked_since.get(lane, now_s)
            total = self.counters.head_blocked_s
            total[lane] = total.get(lane, 0.0) + now_s - since
            self._blocked_since[lane] = now_s
        else:
            self._unblock(lane, now_s)

    def _unblock(self, lane: int, now_s: float) -> None:
        since = self._blocked_since.pop(lane, None)
        if since is not None:
            total = self.counters.head_blocked_s
            total[lane] = total.get(lane, 0.0) + now_s - since
