"""Moves the balancer's events and actions between submissions and engines; asyncio, no gRPC.

The server puts gRPC in front of it, the fake nothing. `payload` is what an engine receives: the
hub carries it unread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from services.common.clock import Clock
from services.common.cost_model import CostModel
from services.common.errors import Failure, Reason
from services.lb.prefill import events as ev
from services.lb.prefill.balancer import PrefillBalancer
from services.lb.prefill.events import Event, Work
from services.lb.prefill.state import BalancerConfig, Counters

News = ev.Wait | ev.Assign | ev.Rematch
_MAX_NEWS = 64  # a reader that is so far behind misses updates of its position, nothing else


class _Reader:
    """One submitter of one key: its news, and the end."""

    def __init__(self) -> None:
        self._news: deque[ev.Action] = deque()
        self._woken = asyncio.Event()

    def put(self, action: ev.Action) -> None:
        if isinstance(action, ev.Wait) and len(self._news) >= _MAX_NEWS:
            return
        self._news.append(action)
        self._woken.set()

    async def get(self) -> ev.Action:
        while not self._news:
            self._woken.clear()
            await self._woken.wait()
        return self._news.popleft()


class EnginePull:
    """The open call of one engine: reports go in, commands come out."""

    def __init__(self, hub: PrefillHub, joined: ev.EngineJoined, max_commands: int) -> None:
        self._hub = hub
        self.engine_id = joined.engine_id
        self.boot_id = joined.boot_id
        self._commands: deque[tuple[str, bool, Any]] = deque()
        self._max_commands = max_commands
        self._woken = asyncio.Event()
        self._failure: Failure | None = None

    def report(self, event: Event) -> None:
        """Takes a report. Its engine and boot id are those of the hello."""
        self._hub.dispatch(event)

    async def next_command(self) -> tuple[str, bool, Any]:
        """Returns (key, revoked, payload); raises the Failure that ended the call."""
        while not self._commands:
            if self._failure is not None:
                raise self._failure
            self._woken.clear()
            await self._woken.wait()
        return self._commands.popleft()

    def close(self) -> None:
        """Tells the balancer that the engine's call is over."""
        self._hub.close_pull(self)

    def send(self, key: str, revoked: bool, payload: Any) -> None:
        """Queues a command; an engine that does not read is ended, not buffered for ever."""
        if len(self._commands) >= self._max_commands:
            self.end(Failure(Reason.BACKEND_LOST, "the engine does not read its commands"))
            return
        self._commands.append((key, revoked, payload))
        self._woken.set()

    def end(self, failure: Failure) -> None:
        """Ends the call once what is queued has been read."""
        self._failure = self._failure or failure
        self._woken.set()


class PrefillHub:
    """The balancer of one term, its submitters and its engines."""

    def __init__(
        self,
        rules: BalancerConfig,
        clock: Clock,
        cost_model: CostModel | None = None,
        max_commands: int = 4_096,
        on_buckets: Callable[[ev.PublishBuckets], None] | None = None,
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._cost_model = cost_model or CostModel()
        self._max_commands = max_commands
        self._on_buckets = on_buckets or (lambda _: None)
        self._balancer: PrefillBalancer | None = None
        self._readers: dict[str, list[_Reader]] = {}
        self._payloads: dict[str, Any] = {}
        self._pulls: dict[str, EnginePull] = {}

    def begin(self) -> None:
        """Starts a term with nothing known; engines and submitters come by themselves."""
        self._balancer = PrefillBalancer(self._rules, self._clock.now_s(), self._cost_model)

    def end(self, failure: Failure) -> None:
        """Ends the term: every call ends with `failure`, nothing is kept."""
        self._balancer = None
        for key in list(self._readers):
            reason, text = failure.reason, failure.message
            self._tell(key, ev.Refuse(key, reason, text, failure.retry_after_s))
        for pull in list(self._pulls.values()):
            pull.end(failure)
        self._readers.clear()
        self._payloads.clear()
        self._pulls.clear()

    @property
    def balancer(self) -> PrefillBalancer:
        """Returns the balancer of this term. Raises Failure(NO_INSTANCE) between terms."""
        if self._balancer is None:
            raise Failure(Reason.NO_INSTANCE, "this balancer does not lead", retry_after_s=0.25)
        return self._balancer

    @property
    def is_active(self) -> bool:
        """Returns whether a term is on."""
        return self._balancer is not None

    @property
    def counters(self) -> Counters:
        """Returns the totals of this term."""
        return self._balancer.counters if self._balancer is not None else Counters()

    @property
    def num_submissions(self) -> int:
        """Returns how many submitters wait for news."""
        return sum(len(readers) for readers in self._readers.values())

    @property
    def num_pulls(self) -> int:
        """Returns how many engines have a call open."""
        return len(self._pulls)

    def tick(self) -> None:
        """Looks at deadlines, silence and rounds; call it often."""
        if self._balancer is not None:
            self.dispatch(ev.Tick())

    async def submit(self, work: Work, payload: Any) -> AsyncGenerator[News, None]:
        """Yields the news of a submission, Assign or Rematch last.

        Leaving it takes the request out of the queue, or revokes it, unless somebody else
        submitted the same key. Raises Failure as the balancer refuses.
        """
        balancer = self.balancer
        reader = _Reader()
        readers = self._readers.setdefault(work.key, [])
        readers.append(reader)
        self._payloads.setdefault(work.key, payload)
        try:
            self.dispatch(ev.Submitted(work))
            while True:
                action = await reader.get()
                if isinstance(action, ev.Refuse):
                    raise Failure(action.reason, action.message, retry_after_s=action.retry_after_s)
                assert isinstance(action, ev.Wait | ev.Assign | ev.Rematch)
                yield action
                if not isinstance(action, ev.Wait):
                    return
        finally:
            if reader in readers:
                readers.remove(reader)
            if not readers and self._readers.get(work.key) is readers:
                del self._readers[work.key]
                if self._balancer is balancer:
                    self.dispatch(ev.Cancelled(work.key))  # nothing happens if it has ended
                    self._payloads.pop(work.key, None)

    def open_pull(self, joined: ev.EngineJoined) -> EnginePull:
        """Opens an engine's call; the engine's older call ends."""
        _ = self.balancer
        pull = EnginePull(self, joined, self._max_commands)
        older = self._pulls.get(joined.engine_id)
        if older is not None:
            older.end(Failure(Reason.STALE_EPOCH, "a newer call of this engine has begun"))
        self._pulls[joined.engine_id] = pull
        self.dispatch(joined)
        return pull

    def close_pull(self, pull: EnginePull) -> None:
        """Ends an engine's call from its side."""
        if self._pulls.get(pull.engine_id) is pull:
            del self._pulls[pull.engine_id]
            if self._balancer is not None:
                self.dispatch(ev.EngineLost(pull.engine_id, pull.boot_id))

    def dispatch(self, event: Event) -> None:
        """Gives an event to the balancer and does what it says."""
        if self._balancer is None:
            return
        for action in self._balancer.on_event(event, self._clock.now_s()):
            match action:
                case ev.Offer(key, engine_id):
                    self._command(engine_id, key, False, self._payloads.get(key))
                case ev.Revoke(key, engine_id):
                    self._command(engine_id, key, True, self._payloads.get(key))
                case ev.Evict(engine_id, boot_id, reason, message):
                    pull = self._pulls.get(engine_id)
                    if pull is not None and pull.boot_id == boot_id:
                        pull.end(Failure(reason, message, retry_after_s=1.0))
                        del self._pulls[engine_id]
                case ev.PublishBuckets():
                    self._on_buckets(action)
                case ev.Wait(key):
                    self._tell(key, action)
                case ev.Assign(key) | ev.Rematch(key) | ev.Refuse(key):
                    self._tell(key, action)
                    self._payloads.pop(key, None)

    def _command(self, engine_id: str, key: str, revoked: bool, payload: Any) -> None:
        pull = self._pulls.get(engine_id)
        if pull is not None:
            pull.send(key, revoked, payload)

    def _tell(self, key: str, action: ev.Action) -> None:
        for reader in self._readers.get(key, ()):
            reader.put(action)
