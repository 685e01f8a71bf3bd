"""One request below the codec: match, queue, follow, and run again when an engine is lost.

    generation = Generation(engines, job, sink)
    finish_reason = await generation.run()      # or Failure; cancel the task to abort everywhere

Tokens reach the sink in the turn in which they arrive, each index once. Everything the request
holds elsewhere (its place in the queue, its work on an engine) is let go in `finally`, whichever
way `run` ends (P-06).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Protocol

from pelagos.engine.v1 import records_pb2 as records
from pelagos.kvstore.v1 import check_pb2

from services.common import tracing
from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.common.rpc_errors import from_proto
from services.entrypoint import retry
from services.entrypoint.attach import EngineHub, EngineKind, Subscription
from services.entrypoint.catalog import Profile
from services.entrypoint.client_left import as_ours
from services.entrypoint.neighbours import Check
from services.entrypoint.token_stream import (
    Broken,
    Delivered,
    Ended,
    Follow,
    TokenStream,
    first_epoch,
)
from services.lb.prefill.client import Assignment, PrefillQueue, Queued

# Acknowledged in pieces: an Ack per step would double the messages on the channel.
ACK_EVERY_TOKENS: Final = 64
_TOKEN_BYTES: Final = 4
_SESSION_BYTES: Final = 4096
# What says that another balancer must be asked. Everything else is an answer.
_NO_LEADER: Final = (Reason.NO_INSTANCE, Reason.BACKEND_LOST, Reason.DRAINING)
_FIRST_LEADER_WAIT_S: Final = 0.05
_MAX_LEADER_WAIT_S: Final = 1.0


@dataclass(frozen=True)
class Job:
    """What to generate; fixed for all attempts.

    Args:
        prompt_tokens: little-endian u32.
        sampling: with the seed resolved, so that every attempt draws the same noise.
        deadline_s: monotonic; deadline_unix_ms is the same moment for other processes.
    """

    request_id: str
    tenant: str
    model: str
    profile: Profile
    prompt_tokens: bytes
    sampling: records.Sampling
    deadline_s: float
    deadline_unix_ms: int
    traceparent: str = ""
    cache_salt: str = ""
    media: Sequence[records.MediaSpan] = ()
    ttl_class: records.TtlClass.ValueType = records.TTL_CLASS_CHAT
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the length of the prompt."""
        return len(self.prompt_tokens) // _TOKEN_BYTES


class TokenSink(Protocol):
    """Who gets the tokens. Methods run on the event loop and return at once."""

    def on_stage(self, stage: str) -> None:
        """A stage was reached: matched, queued, assigned, prefilled, decode."""
        ...

    def on_tokens(self, delivered: Delivered, usage: records.Usage) -> None:
        """New tokens, in order, each once."""
        ...

    async def wait_room(self) -> None:
        """Returns when the client can take more; asked before a run again.

        An engine drops a request whose reader stands still; running it again at once would only
        be dropped again.
        """
        ...


@dataclass
class Engines:
    """What every generation of this process shares."""

    check: Check
    queue: PrefillQueue
    hub: EngineHub
    policy: retry.RetryPolicy
    budget: retry.RetryBudget
    clock: Clock
    rng: random.Random
    entrypoint_id: str
    leader_wait_s: float = 15.0  # a balancer's lease, and the election after it
    on_retry: Callable[[Reason], None] = field(default=lambda reason: None)


class Generation:
    """One request's life between the codec and the engines."""

    def __init__(
        self,
        engines: Engines,
        job: Job,
        sink: TokenSink,
        grammar: asyncio.Future[records.GrammarRef] | None = None,
    ) -> None:
        self._engines = engines
        self._job = job
        self._sink = sink
        self._grammar = grammar
        self.stream = TokenStream(epoch=first_epoch(engines.clock.wall_s()))
        self.hit = records.CacheHit()
        self._namespace = records.Namespace()
        self._subscription: Subscription | None = None
        self._followed = EngineKind.PREFILL
        self._turn: asyncio.Future[Ended | Broken] | None = None
        self._incident = ""
        self._num_acked = 0

    @property
    def num_output_tokens(self) -> int:
        """Returns how many tokens were delivered."""
        return self.stream.next_index

    async def run(self) -> records.FinishReason.ValueType:
        """Returns why the output ended, or raises Failure."""
        while True:
            try:
                return await self._attempt()
            except Failure as error:
                failure = as_ours(error)
                decision = retry.decide(
                    failure,
                    attempt=self.stream.attempt,
                    incident=self._incident or f"{self._job.request_id}#{self.stream.attempt}",
                    remaining_s=self._remaining_s(),
                    policy=self._engines.policy,
                    budget=self._engines.budget,
                    rng=self._engines.rng,
                )
                if isinstance(decision, retry.GiveUp):
                    raise decision.failure from None
                self._engines.on_retry(failure.reason)
                self._sink.on_stage("retry")
                self.stream.next_attempt()
                self._incident = ""
                await self._sink.wait_room()
                if decision.wait_s:
                    await self._engines.clock.sleep(decision.wait_s)

    def acknowledge(self, next_index: int, *, at_once: bool = False) -> None:
        """Says that everything below `next_index` has left for the client (credits)."""
        due = next_index - self._num_acked >= (1 if at_once else ACK_EVERY_TOKENS)
        if due and self._subscription is not None:
            self._num_acked = next_index
            subscription = self._subscription
            subscription.channel.ack(subscription.stream_id, next_index)

    # ---- Follower: called by the engine channel ------------------------------------------------

    def on_event(self, event: records.RequestEvent) -> None:
        """Takes one event of an engine."""
        if event.WhichOneof("event") == "failed":
            actions = self.stream.on_failure(from_proto(event.failed), event.epoch)
        else:
            if event.WhichOneof("event") == "accepted":
                self._sink.on_stage(f"accepted by {self._followed.value}")
            actions = self.stream.on_event(event)
        for action in actions:
            if isinstance(action, Delivered):
                self._sink.on_tokens(action, self.stream.usage)
            elif isinstance(action, Follow):
                self.acknowledge(action.from_index, at_once=True)  # the old engine may forget it
                self._follow(EngineKind.DECODE, action.address, action.from_index)
                self._sink.on_stage("decode")
            else:
                self.acknowledge(self.stream.next_index, at_once=True)
                self._end_turn(action)

    def on_lost(self, failure: Failure, incident: str) -> None:
        """The engine that was followed is gone."""
        self._subscription = None
        self._incident = incident
        self._end_turn(Broken(failure))

    # ---- one attempt ---------------------------------------------------------------------------

    async def _attempt(self) -> records.FinishReason.ValueType:
        """Places the request and follows it to its end; raises Failure when that fails."""
        job, stream = self._job, self.stream
        if stream.next_index >= job.sampling.max_tokens:
            # The engine was lost between its last token and saying so.
            stream.end()
            return records.FINISH_REASON_LENGTH
        prompt = job.prompt_tokens + bytes(stream.output_tokens)
        spec = records.RequestSpec(
            key=self._key(),
            prompt_tokens=prompt,
            num_resumed_tokens=stream.next_index,
            sampling=job.sampling,
            media=job.media,
            deadline_unix_ms=job.deadline_unix_ms,
            priority=job.priority,
            traceparent=job.traceparent,
            entrypoint_id=self._engines.entrypoint_id,
            model=job.profile.model_id,
            layout_signature=job.profile.layout_signature,
        )
        await self._match(prompt, spec)
        if self._grammar is not None:
            spec.grammar.CopyFrom(await asyncio.shield(self._grammar))
        self._turn = asyncio.get_running_loop().create_future()
        ended = False
        try:
            with tracing.span("entrypoint.queue"):
                await self._place(prompt, spec)
            outcome = await self._turn
            ended = isinstance(outcome, Ended)
            if isinstance(outcome, Broken):
                raise outcome.failure
            return outcome.reason
        finally:
            self._turn.cancel()
            self._turn = None
            self._leave(abort=not ended)

    async def _match(self, prompt: bytes, spec: records.RequestSpec) -> None:
        job = self._job
        with tracing.span("entrypoint.check"):
            response = await self._engines.check.match(
                check_pb2.MatchRequest(
                    token_ids=prompt,
                    model_id=job.profile.cache_model_id,
                    layout_fingerprint=job.profile.layout_digest,
                    tenant=job.tenant,
                    scope="user" if job.cache_salt else "tenant",
                    user_salt=job.cache_salt,
                    ttl_class=job.ttl_class,
                    session_id=_session_id(job),
                    media=job.media,
                    request_id=job.request_id,
                    block_tokens=job.profile.block_tokens,
                    ring_tokens=job.profile.ring_tokens,
                )
            )
        if response is None:
            # No identity, no cache: nothing may be stored under a key that nobody derived.
            spec.namespace.CopyFrom(
                records.Namespace(
                    tenant=job.tenant,
                    store_policy=records.STORE_POLICY_NONE,
                    ttl_class=job.ttl_class,
                )
            )
            hit = records.CacheHit(ended_by="namespace")
        else:
            spec.namespace.CopyFrom(response.namespace)
            hit = response.hit
            spec.hit.CopyFrom(hit)
        if self.stream.attempt == 1:
            self.hit = hit  # what an API shows is the hit of the prompt as it was sent
        self._sink.on_stage("matched")

    async def _place(self, prompt: bytes, spec: records.RequestSpec) -> None:
        """Queues the request and follows it on the engine that took it.

        Waits for a balancer while none leads; a key is queued once, so asking the next one is safe.
        """
        engines = self._engines
        give_up_s: float | None = None
        wait_s = _FIRST_LEADER_WAIT_S
        while True:
            try:
                submission = engines.queue.submit(spec, timeout_s=self._remaining_s())
                async with submission as news:
                    async for item in news:
                        give_up_s = None
                        if isinstance(item, Assignment):
                            self.stream.placed(item.instance_id)
                            self._follow(EngineKind.PREFILL, item.address, self.stream.next_index)
                            self._sink.on_stage("assigned")
                            return
                        if isinstance(item, Queued):
                            self._sink.on_stage("queued")
                # Sent to match again: another request has computed our prefix meanwhile.
                await self._match(prompt, spec)
            except Failure as error:
                failure = as_ours(error)
                now_s = engines.clock.now_s()
                give_up_s = give_up_s or now_s + engines.leader_wait_s
                if failure.reason not in _NO_LEADER or now_s >= give_up_s:
                    raise failure from None
                await engines.clock.sleep(engines.rng.uniform(0.0, wait_s))
                wait_s = min(_MAX_LEADER_WAIT_S, 2 * wait_s)

    def _follow(self, kind: EngineKind, address: str, from_index: int) -> None:
        self._leave(abort=False)
        self._followed = kind
        self._num_acked = from_index
        self._subscription = self._engines.hub.follow(kind, address, self._key(), from_index, self)

    def _leave(self, *, abort: bool) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._engines.hub.leave(subscription, abort=abort)

    def _end_turn(self, outcome: Ended | Broken) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(outcome)

    def _key(self) -> records.RequestKey:
        return records.RequestKey(
            request_id=self._job.request_id,
            epoch=self.stream.epoch,
            attempt=self.stream.attempt,
        )

    def _remaining_s(self) -> float:
        remaining_s = self._job.deadline_s - self._engines.clock.now_s()
        if remaining_s <= 0:
            raise Failure(Reason.DEADLINE, "the request's deadline has passed")
        return remaining_s


def _session_id(job: Job) -> str:
    """Returns what follow-ups of one conversation share: its first tokens, within the tenant."""
    head = job.prompt_tokens[:_SESSION_BYTES]
    return sha256(job.tenant.encode() + b"\0" + job.cache_salt.encode() + b"\0" + head).hexdigest()[
        :32
    ]


async def settle(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits until it has let go of everything."""
    task.cancel()
    with suppress(asyncio.CancelledError, Failure):
        await task
