"""Compiling as a service: keys, one flight per key, fairness between tenants, memory of answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256

from pelagos.so_compiler.v1 import so_compiler_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.so_compiler.artifact_cache import ArtifactCache, Entry
from services.so_compiler.config import SoCompilerConfig
from services.so_compiler.worker_pool import Artifact, Job, WorkerPool

# What is the grammar's own fault stays so; faults of ours are not remembered.
_REMEMBERED = (Reason.SCHEMA_UNSUPPORTED, Reason.GRAMMAR_BUDGET, Reason.UNSUPPORTED_FEATURE)


@dataclass(frozen=True)
class Answer:
    """A compiled artifact and how it was come by."""

    key: str
    artifact: Artifact
    cached: bool


class Compiler:
    """The service's core; `pool` does the work."""

    def __init__(
        self,
        config: SoCompilerConfig,
        pool: WorkerPool,
        backend_version: str,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config = config
        self._pool = pool
        self._backend_version = backend_version
        self._clock = clock
        self.cache = ArtifactCache(config.cache)
        self._flights: dict[str, asyncio.Task[Artifact]] = {}
        self._readers: Counter[str] = Counter()
        self._by_tenant: Counter[str] = Counter()

    @property
    def num_flights(self) -> int:
        """Returns the compilations running or queued; a row of the census."""
        return len(self._flights)

    def artifact_key(self, request: pb.CompileRequest) -> str:
        """Returns the content address: a digest of everything that the artifact depends on.

        The tenant is part of it, so that no caller learns from a hit what another one compiled.
        """
        document = json.dumps(
            [
                request.type,
                request.source,
                request.strict,
                request.tokenizer_id,
                request.tenant,
                sorted(request.special_ids.items()),
                self._backend_version,
            ],
            ensure_ascii=False,
        )
        return sha256(document.encode()).hexdigest()

    async def compile(self, request: pb.CompileRequest) -> Answer:
        """Returns the artifact, or raises Failure (SCHEMA_UNSUPPORTED, GRAMMAR_BUDGET, ...)."""
        key = self.artifact_key(request)
        entry = self.cache.get(key)
        if entry is not None:
            return Answer(key, entry.artifact, cached=True)
        refusal = self.cache.refusal(key, self._clock.now_s())
        if refusal is not None:
            raise Failure(refusal.reason, refusal.message, refusal.metadata)
        flight = self._flights.get(key) or self._start(key, request)
        self._readers[key] += 1
        try:
            return Answer(key, await asyncio.shield(flight), cached=False)
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                flight.cancel()  # the last who waited has left: the child is stopped

    def find(self, key: str) -> Entry:
        """Returns a compiled artifact. Raises Failure(NOT_FOUND)."""
        entry = self.cache.get(key)
        if entry is None:
            raise Failure(Reason.NOT_FOUND, "the artifact was evicted; compile again")
        return entry

    async def close(self) -> None:
        """Stops everything in flight."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await self._pool.close()

    def _start(self, key: str, request: pb.CompileRequest) -> asyncio.Task[Artifact]:
        config = self._config
        if len(self._flights) >= config.max_queued:
            raise Failure(Reason.OVERLOADED, "too many grammars are being compiled", None, 1.0)
        if self._by_tenant[request.tenant] >= config.max_concurrent_per_tenant:
            raise Failure(
                Reason.OVERLOADED,
                "this tenant compiles too many grammars at once",
                {"max_concurrent": str(config.max_concurrent_per_tenant)},
                1.0,
            )
        self._by_tenant[request.tenant] += 1
        flight = asyncio.ensure_future(self._fly(key, request))
        self._flights[key] = flight
        flight.add_done_callback(lambda done: self._landed(key, request.tenant, done))
        return flight

    async def _fly(self, key: str, request: pb.CompileRequest) -> Artifact:
        wall_s = request.timeout_ms / 1000 if request.timeout_ms else self._config.grammar.wall_s
        job = Job(request.type, request.source, dict(request.special_ids))
        try:
            artifact = await self._pool.compile(job, wall_s)
        except Failure as failure:
            if failure.reason in _REMEMBERED:
                self.cache.refuse(key, failure, self._clock.now_s())
            raise
        self.cache.put(key, Entry(artifact, request.tenant, request.tokenizer_id))
        return artifact

    def _landed(self, key: str, tenant: str, flight: asyncio.Task[Artifact]) -> None:
        self._flights.pop(key, None)
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        if not flight.cancelled():
            flight.exception()  # read here: its waiters may all have left
