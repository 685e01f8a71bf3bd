"""gRPC in front of the prefill balancer: message in, hub asked, message out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from pelagos.lb.v1 import prefill_lb_pb2 as pb
from pelagos.lb.v1 import prefill_lb_pb2_grpc as rpc

from services.common import tracing
from services.common.clock import Clock
from services.common.cost_model import CostModel
from services.common.errors import Failure, Reason
from services.common.layout import MAX_VALUE_BYTES, Keys
from services.common.metrics import Metrics
from services.common.store import KeyValue, Put, StorePort, StoreUnavailable, follow
from services.lb.leadership import Leadership
from services.lb.prefill import events as ev
from services.lb.prefill import wire
from services.lb.prefill.config import PrefillLbConfig
from services.lb.prefill.hub import EnginePull, PrefillHub

log = logging.getLogger(__name__)


class PrefillLbServicer(rpc.PrefillLbServiceServicer):
    """The RPCs of one shard. Only the leader serves them."""

    def __init__(self, config: PrefillLbConfig, clock: Clock, metrics: Metrics) -> None:
        self._config = config
        self._clock = clock
        self._leadership: Leadership | None = None
        self._cost_models: dict[str, CostModel] = {}
        self._buckets: ev.PublishBuckets | None = None
        self._demand_seen = (clock.now_s(), 0)
        self.hub = PrefillHub(
            config.rules, clock, config.cost, config.max_commands, self._note_buckets
        )
        self._metrics = _HubMetrics(metrics, self.hub)

    # -- leadership

    def campaign_with(self, leadership: Leadership) -> None:
        """Says who decides whether we lead."""
        self._leadership = leadership

    def begin_term(self, term: int) -> None:
        """Starts to serve; engines and submitters find us by the leader's key."""
        log.info("serving the prefill queue", extra={"term": term})
        self.hub.begin()

    def end_term(self) -> None:
        """Stops to serve; everybody is sent to the next leader."""
        text = "this balancer no longer leads"
        self.hub.end(Failure(Reason.NO_INSTANCE, text, retry_after_s=0.25))

    def _require(self) -> int:
        assert self._leadership is not None, "campaign_with comes first"
        return self._leadership.require()

    # -- RPCs

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> AsyncIterator[Any]:
        self._require()
        spec = request.spec
        work = wire.work_of(spec, self._clock, self._config.rules.min_follow_tokens)
        wait = tracing.start_span(
            "prefill_lb.queue_wait",
            {"pelagos.request_id": spec.key.request_id, "pelagos.num_tokens": work.num_tokens},
            traceparent=spec.traceparent,
        )
        news = self.hub.submit(work, spec)
        try:
            async for item in news:
                yield wire.news_to_proto(item)
        finally:
            await news.aclose()
            wait.end()

    async def Pull(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        term = self._require()
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("report") != "hello":
            raise Failure(Reason.INVALID_REQUEST, "the first message of an engine is its hello")
        hello = first.hello
        cost_model = self._cost_models.get(hello.engine_type, self._config.cost)
        pull = self.hub.open_pull(wire.joined_of(hello, cost_model))
        log.info("engine joined", extra={"engine": pull.engine_id, "boot_id": pull.boot_id})
        reader = asyncio.create_task(self._read_reports(pull, request_iterator))
        try:
            while True:
                _, revoked, spec = await pull.next_command()
                term = self._require()
                if revoked:
                    yield pb.PullResponse(revoke=spec.key, term=term)
                else:
                    yield pb.PullResponse(work=spec, term=term)
        finally:
            pull.close()
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
            log.info("engine left", extra={"engine": pull.engine_id, "boot_id": pull.boot_id})

    async def _read_reports(self, pull: EnginePull, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                pull.report(wire.report_of(request, pull.engine_id, pull.boot_id))
            pull.end(Failure(Reason.CLIENT_CANCELLED, "the engine has ended its call"))
        except Failure as failure:
            pull.end(failure)
        except Exception as error:
            # However reading ends, the call ends: an engine that cannot report gets no work.
            log.warning("engine's reports broke", extra={"error": type(error).__name__})
            pull.end(Failure(Reason.BACKEND_LOST, "the engine's reports broke"))

    async def GetQueues(self, request: pb.GetQueuesRequest, context: Any) -> pb.GetQueuesResponse:
        term = self._require()
        balancer = self.hub.balancer
        return pb.GetQueuesResponse(
            buckets=[
                pb.BucketState(
                    min_tokens=lower,
                    waiting=waiting,
                    waiting_tokens=tokens,
                    instance_ids=engines,
                    head_block_ms=wire.to_ms(blocked_s),
                )
                for lower, waiting, tokens, engines, blocked_s in balancer.buckets(
                    self._clock.now_s()
                )
            ],
            term=term,
            following=balancer.census()["following"],
        )

    # -- loops

    async def run_ticks(self) -> None:
        """Looks at deadlines, silent engines and rounds, for ever."""
        while True:
            self.hub.tick()
            self._metrics.update()
            await self._clock.sleep(self._config.tick_s)

    def demand(self) -> float | None:
        """Returns the missed tokens per second since it was last asked; None for a standby."""
        now_s, total = self._clock.now_s(), self.hub.counters.missed_tokens
        before_s, before = self._demand_seen
        self._demand_seen = (now_s, total)
        if self._leadership is None or not self._leadership.term or now_s <= before_s:
            return None
        # A new term counts from zero again.
        return (total - before if total >= before else total) / (now_s - before_s)

    async def follow_cost_models(self, store: StorePort, keys: Keys) -> None:
        """Keeps the fitted cost models current, by engine type."""
        prefix = keys.named("lb", "cost", "")
        async for snapshot in follow(store, prefix, clock=self._clock):
            if snapshot.healthy:
                self._cost_models = {
                    key.removeprefix(prefix): model
                    for key, item in snapshot.items.items()
                    if (model := parse_cost_model(item)) is not None
                }

    async def publish_buckets(self, store: StorePort, keys: Keys) -> None:
        """Writes the division down for the next leader, fenced by the term; at most once a second.

        A division that could not be written costs the next leader a few rounds, nothing else.
        """
        assert self._leadership is not None
        shard = (self._config.shard,) if self._config.shard else ()
        key = keys.named("lb", "prefill", "buckets", *shard)
        restored_term = 0
        while True:
            if self._leadership.term and self._leadership.term != restored_term:
                restored_term = self._leadership.term
                await self._restore_buckets(store, key)
            if self._buckets is not None and self._leadership.election.is_leader:
                published, self._buckets = self._buckets, None
                value = buckets_to_bytes(published)
                if len(value) <= MAX_VALUE_BYTES:
                    with suppress(Failure, StoreUnavailable):
                        await self._leadership.election.write([Put(key, value)])
                else:
                    log.warning("the division is too large to be published")
            await self._clock.sleep(1.0)

    async def _restore_buckets(self, store: StorePort, key: str) -> None:
        with suppress(StoreUnavailable):
            item = await store.get(key)
            found = None if item is None else parse_buckets(item)
            if found is not None and self.hub.is_active:
                self.hub.balancer.restore_buckets(*found)

    def _note_buckets(self, action: ev.PublishBuckets) -> None:
        self._buckets = action


def buckets_to_bytes(action: ev.PublishBuckets) -> bytes:
    """Returns the division as JSON, compact: lanes with the engines of each."""
    lanes: dict[tuple[int, ...], list[str]] = {}
    for engine_id, buckets in action.buckets_of.items():
        lanes.setdefault(buckets, []).append(engine_id)
    document = {
        "round": action.round_number,
        "lanes": [{"buckets": list(b), "engines": e} for b, e in sorted(lanes.items())],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def parse_buckets(item: KeyValue) -> tuple[int, dict[str, tuple[int, ...]]] | None:
    """Returns (round, buckets by engine); None for a value that cannot be read."""
    try:
        document = json.loads(item.value)
        return int(document["round"]), {
            str(engine): tuple(int(b) for b in lane["buckets"])
            for lane in document["lanes"]
            for engine in lane["engines"]
            if lane["buckets"]
        }
    except (ValueError, KeyError, TypeError):
        return None


def parse_cost_model(item: KeyValue) -> CostModel | None:
    """Returns a fitted model; None for a value that cannot be read or used."""
    try:
        document: Mapping[str, Any] = json.loads(item.value)
        known = {f.name for f in fields(CostModel)}
        return CostModel(**{name: value for name, value in document.items() if name in known})
    except (ValueError, TypeError, AttributeError):
        return None


class _HubMetrics:
    """The metrics of the queues; `update` reads the hub's totals."""

    def __init__(self, metrics: Metrics, hub: PrefillHub) -> None:
        self._hub = hub
        self._wait = metrics.histogram("queue_wait_seconds", "Time between submission and engine")
        self._offers = metrics.counter("offers_total", "Requests offered to engines")
        self._steals = metrics.counter("steals_total", "Offers to engines of another lane")
        self._moves = metrics.counter("bucket_moves_total", "Engines that changed their lane")
        self._requeued = metrics.counter("requeued_total", "Offers back from lost engines")
        self._followed = metrics.counter("followed_total", "Requests that waited for a prefix")
        self._rematched = metrics.counter("rematched_total", "Requests sent to match again")
        self._refused = metrics.counter("refused_total", "Refusals", ("reason",))
        self._blocked = metrics.counter(
            "head_block_seconds_total", "Time heads waited though quota was left", ("lane",)
        )
        metrics.gauge("waiting_requests", "Requests in the queues").set_function(
            lambda: self._census("waiting")
        )
        metrics.gauge("waiting_tokens", "Their tokens").set_function(
            lambda: self._census("waiting_tokens")
        )
        metrics.gauge("following_requests", "Requests behind a cold prefix").set_function(
            lambda: self._census("following")
        )
        metrics.gauge("engines", "Engines with an open call").set_function(
            lambda: self._census("engines")
        )
        metrics.gauge("work_imbalance_ratio", "Busiest over mean unfinished work").set_function(
            lambda: hub.balancer.imbalance() if hub.is_active else 1.0
        )
        self._last: dict[tuple[str, str], float] = {}

    def update(self) -> None:
        """Moves the counters on to the hub's totals; a new term starts them from zero again."""
        counters = self._hub.counters
        for name in ("offers", "steals", "bucket_moves", "requeued", "followed", "rematched"):
            metric = {"bucket_moves": self._moves}.get(name) or getattr(self, f"_{name}")
            self._raise(metric, (name, ""), getattr(counters, name))
        for reason, count in counters.refused.items():
            self._raise(self._refused.labels(reason=reason), ("refused", reason), count)
        for lane, seconds in counters.head_blocked_s.items():
            self._raise(self._blocked.labels(lane=lane), ("blocked", str(lane)), seconds)
        waits, counters.queue_waits_s = counters.queue_waits_s, []
        for wait_s in waits:
            self._wait.observe(wait_s)

    def _raise(self, metric: Any, key: tuple[str, str], total: float) -> None:
        before = self._last.get(key, 0.0)
        metric.inc(total - before if total >= before else total)
        self._last[key] = total

    def _census(self, name: str) -> int:
        return self._hub.balancer.census()[name] if self._hub.is_active else 0
