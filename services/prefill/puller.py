"""Pulls work from the prefill balancer and tells it what became of it.

Source: kvcache-and-balancing.md, section 12, layer 2; protos/pelagos/lb/v1/prefill_lb.proto.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.engine.records import key_from_proto, key_to_proto
from services.lb.prefill.client import (
    Hello,
    PrefillQueue,
    PullSession,
    RevokeCommand,
    WorkCommand,
)
from services.prefill.engine import PrefillEngine
from services.prefill.work import Work

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_REPORT_EVERY_S = 0.5


class Puller:
    """One per shard of the balancer. A lost balancer costs nothing that was pulled before."""

    def __init__(
        self,
        engine: PrefillEngine,
        queue: PrefillQueue,
        *,
        boot_id: str,
        address: str,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._boot_id = boot_id
        self._address = address
        self._clock = clock
        self._session: PullSession | None = None

    @property
    def is_connected(self) -> bool:
        return self._session is not None

    async def run(self) -> None:
        """Pulls until cancelled; goes to the next leader when this one is lost."""
        while True:
            with suppress(Failure):
                async with self._queue.pull(self._hello()) as session:
                    self._session = session
                    self.report()
                    async with asyncio.TaskGroup() as group:
                        ticker = group.create_task(self._tick(), name="pull reports")
                        try:
                            await self._follow(session)
                        finally:
                            ticker.cancel()
            self._session = None
            await self._clock.sleep(_RETRY_S)

    async def _follow(self, session: PullSession) -> None:
        try:
            async for command in session:
                if isinstance(command, WorkCommand):
                    self._take(session, command)
                elif isinstance(command, RevokeCommand):
                    self._engine.abort(key_from_proto(command.key))
        except Failure as failure:
            log.info("balancer lost", extra={"reason": failure.reason.value})

    def _take(self, session: PullSession, command: WorkCommand) -> None:
        spec = command.spec
        try:
            self._engine.submit(spec)
        except Failure as failure:
            log.info(
                "work refused",
                extra={"request_id": spec.key.request_id, "reason": failure.reason.value},
            )
            session.rejected(spec.key, failure.reason)
        except Exception:
            # One request that we cannot take must not end the stream of all others (P-07).
            log.exception("work failed", extra={"request_id": spec.key.request_id})
            session.rejected(spec.key, Reason.INTERNAL)
        else:
            session.accepted(spec.key)
        self.report()

    def _hello(self) -> Hello:
        engine = self._engine
        return Hello(
            instance_id=engine.instance_id,
            boot_id=self._boot_id,
            address=self._address,
            quota_ns=engine.config.quota_ns,
            dp_size=len(engine.ranks),
            accept_buckets=engine.accept_buckets,
            max_tokens=engine.config.model.max_model_len,
            engine_type=engine.config.model.engine,
            model=engine.config.model.model_id,
            holding=tuple(key_to_proto(key) for key in engine.request_keys()),
            outstanding_ns=engine.ledger.total_ns,
        )

    def report(self) -> None:
        """Tells the quota as it is now; called after every change of it."""
        if self._session is not None:
            engine = self._engine
            self._session.capacity(engine.remaining_ns, engine.num_requests, engine.accepting)

    def ended(self, work: Work) -> None:
        """Tells that a request is over here, however it ended."""
        if self._session is not None:
            self._session.finished(
                key_to_proto(work.key), committed=work.committed, engine_fault=work.engine_fault
            )

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_REPORT_EVERY_S)
            self.report()
