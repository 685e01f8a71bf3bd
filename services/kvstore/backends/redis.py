"""A Redis-like server as a backend: one binary value per shard, for tests and tiny set-ups.

A value is who wrote it (16 bytes), then the shard. It lives as long as its class says, counted from
the last read. A stream in the server tells other STOREs what came and went; one that has fallen
behind its end looks through all keys again. Commands travel in pipelines that are bounded in count,
in bytes and in number. A server without memory left is full; nothing is ever waited for longer than
the timeout. Needs Redis 6.2 or newer. Source: kvcache-and-balancing.md, section 11.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.common.clock import SYSTEM_CLOCK, Clock
from services.kvstore.backends.base import (
    BackendStat,
    Capabilities,
    Changes,
    PutStatus,
    ReadStatus,
    ScrubReport,
    ShardRef,
    StorageAway,
    wait_all,
)
from services.kvstore.backends.verify import check_shard, joined, ref_of, take_object
from services.kvstore.checksums import Buffer
from services.kvstore.formats import ShardHeader
from services.kvstore.index_table import TTL_S
from services.kvstore.placement import (
    OBJECT_HEADER_BYTES,
    SHARD_HEADER_BYTES,
    WHOLE,
    slot_bytes,
)

log = logging.getLogger(__name__)

_WRITER_BYTES: Final = 16
_HEAD_BYTES: Final = _WRITER_BYTES + SHARD_HEADER_BYTES
_RETRY_S: Final = 1.0
_NO_ENTRY: Final = b"0-0"
_SLACK_S: Final = 1200  # access is counted in epochs of 600 s: the server must never be early


@dataclass(frozen=True)
class RedisConfig:
    """Which server, and how patiently."""

    url: str  # redis://host:port/db, rediss:// with TLS
    writer: str
    password: str = ""
    prefix: str = "pelagos:"
    capacity_bytes: int = 2 << 30  # of what this writer keeps there
    payload_bytes: int = 114_688  # largest block
    timeout_s: float = 2.0
    max_connections: int = 4  # as many pipelines are under way at a time
    max_pipeline_commands: int = 64
    max_pipeline_bytes: int = 8 << 20
    max_log_entries: int = 100_000


class RedisBackend:
    """A SharedBackend over one server. Create with `await RedisBackend.open(config)`."""

    capabilities = Capabilities(
        protects=True, atomic_replace=True, range_read=True, batch=True, durable_ack=False
    )

    def __init__(self, config: RedisConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        self._config = config
        self._clock = clock
        asyncio_client = importlib.import_module("redis.asyncio")
        self._errors = importlib.import_module("redis.exceptions")
        pool = asyncio_client.BlockingConnectionPool.from_url(
            config.url,
            password=config.password or None,
            max_connections=config.max_connections,
            timeout=config.timeout_s,
            socket_timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
        )
        self._client: Any = asyncio_client.Redis.from_pool(pool)
        self._turns = asyncio.Semaphore(config.max_connections)
        self._me = hashlib.sha256(config.writer.encode()).digest()[:_WRITER_BYTES]
        self._prefix = config.prefix.encode() + b"b:"
        self._stream = config.prefix.encode() + b"log"
        self._sizes: dict[ShardRef, int] = {}  # bytes of a shard's data
        self._own: set[ShardRef] = set()
        self._seen = _NO_ENTRY  # the last entry of the stream that was read
        # What the next poll tells, also when the look that found it is broken off.
        self._added: dict[ShardRef, bytes] = {}
        self._removed: dict[ShardRef, None] = {}
        self._queued: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._away_until_s = self._full_until_s = 0.0
        self.num_away = 0

    @classmethod
    async def open(cls, config: RedisConfig, clock: Clock = SYSTEM_CLOCK) -> RedisBackend:
        """Returns the backend with everything there indexed. Raises StorageAway."""
        backend = cls(config, clock)
        try:
            await backend._scan()
            backend._added.clear()
        except BaseException:
            await backend.close()
            raise
        return backend

    # ---- asking the server --------------------------------------------------------------------

    async def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the answer to each command, in bounded pipelines; an error is an answer.

        Raises: StorageAway when the server cannot be asked.
        """
        answers: list[Any] = []
        batch: list[tuple[Any, ...]] = []
        size = 0
        for command in commands:
            num_bytes = sum(len(part) for part in command if isinstance(part, bytes))
            is_full = len(batch) >= self._config.max_pipeline_commands
            if batch and (is_full or size + num_bytes > self._config.max_pipeline_bytes):
                answers += await self._send(batch)
                batch, size = [], 0
            batch.append(command)
            size += num_bytes
        return answers + (await self._send(batch) if batch else [])

    async def _one(self, *command: Any) -> Any:
        """Returns the answer to one command; those of one turn of the loop travel together.

        Raises: StorageAway.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if not self._queued:
            loop.call_soon(self._start_flush)
        self._queued.append((command, answer))
        return await answer

    def _start_flush(self) -> None:
        queued, self._queued = self._queued, []
        task = asyncio.ensure_future(self._flush(queued))
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    async def _flush(self, queued: Sequence[tuple[tuple[Any, ...], asyncio.Future[Any]]]) -> None:
        try:
            answers = await self._pipeline([command for command, _ in queued])
        except Exception as error:
            if not isinstance(error, StorageAway):
                log.error("unforeseen failure of the shared storage", exc_info=error)
            for _, answer in queued:  # nobody may wait for ever
                if not answer.done():
                    answer.set_exception(StorageAway(str(error)))
            return
        for (_, future), answer in zip(queued, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _send(self, batch: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self._is_closed or self._clock.now_s() < self._away_until_s:
            raise StorageAway("closed" if self._is_closed else "did not answer a moment ago")
        try:
            async with asyncio.timeout(2 * self._config.timeout_s), self._turns:
                pipe = self._client.pipeline(transaction=False)
                for command in batch:
                    pipe.execute_command(*command)
                answers: list[Any] = await pipe.execute(raise_on_error=False)
        except (self._errors.RedisError, OSError, TimeoutError) as error:
            raise self._away(type(error).__name__) from None
        for answer in answers:
            if isinstance(answer, self._errors.RedisError) and not _is_full(answer):
                # Loading, read-only, a password that is missing: the first word says which.
                raise self._away(str(answer).partition(" ")[0])
        return answers

    def _away(self, why: str) -> StorageAway:
        if self._clock.now_s() >= self._away_until_s:
            log.warning("shared storage is away", extra={"why": why})
        self.num_away += 1
        self._away_until_s = self._clock.now_s() + _RETRY_S
        return StorageAway(why)

    def _key(self, ref: ShardRef) -> bytes:
        return self._prefix + ref.key16 + bytes([ref.shard]) + ref.put_id.to_bytes(8, "big")

    def _ref_of_key(self, key: bytes) -> ShardRef | None:
        name = key[len(self._prefix) :]
        if len(name) != 25:
            return None
        return ShardRef(name[:16], name[16], int.from_bytes(name[17:], "big"))

    # ---- what is there ------------------------------------------------------------------------

    async def _scan(self) -> None:
        """Looks through all keys."""
        (newest,) = await self._pipeline([("XREVRANGE", self._stream, "+", "-", "COUNT", 1)])
        seen = newest[0][0] if newest else _NO_ENTRY
        former = set(self._sizes)
        found: set[ShardRef] = set()
        cursor: Any = 0
        while True:
            pattern = _escaped(self._prefix) + b"*"
            (answer,) = await self._pipeline([("SCAN", cursor, "MATCH", pattern, "COUNT", 512)])
            cursor, keys = answer
            heads = await self._pipeline([("GETRANGE", k, 0, _HEAD_BYTES - 1) for k in keys])
            for key, head in zip(keys, heads, strict=True):
                ref = self._ref_of_key(key)
                if ref is not None and self._take_up(ref, head):
                    found.add(ref)
            if int(cursor) == 0:
                break
        gone = former - found
        self._forget(gone)
        self._removed |= dict.fromkeys(sorted(gone))
        self._seen = seen

    def _take_up(self, ref: ShardRef, head: bytes) -> bool:
        header = ShardHeader.parse(head[_WRITER_BYTES:])
        if header is None or ref_of(header) != ref:
            return False
        if ref not in self._sizes:
            self._added[ref] = head[_WRITER_BYTES:]
        self._sizes[ref] = header.shard_bytes
        if head[:_WRITER_BYTES] == self._me:
            self._own.add(ref)
        return True

    def _forget(self, refs: set[ShardRef]) -> None:
        for ref in refs:
            self._sizes.pop(ref, None)
        self._own -= refs

    async def poll(self) -> Changes:
        """Reads the stream of changes; see SharedBackend."""
        oldest, newest = await self._pipeline(
            [
                ("XRANGE", self._stream, "-", "+", "COUNT", 1),
                ("XREVRANGE", self._stream, "+", "-", "COUNT", 1),
            ]
        )
        first, last = (found[0][0] if found else _NO_ENTRY for found in (oldest, newest))
        # Entries that we have not read are gone, or it is not the stream that we have read.
        if _order(first) > _order(self._seen) or _order(last) < _order(self._seen):
            await self._scan()
        else:
            await self._follow()
        added, self._added = self._added, {}
        removed, self._removed = self._removed, {}
        return Changes(
            b"".join(raw for ref, raw in added.items() if ref in self._sizes),
            tuple(ref for ref in removed if ref not in self._sizes),
        )

    async def _follow(self) -> None:
        """Reads the stream from where we were to its end."""
        count = self._config.max_pipeline_commands
        while True:
            start = b"(" + self._seen
            (entries,) = await self._pipeline(
                [("XRANGE", self._stream, start, "+", "COUNT", count)]
            )
            for entry, fields in entries:
                self._seen = entry
                ((name, value),) = dict(fields).items()
                if name == b"r":
                    ref = self._ref_of_key(value)
                    if ref is not None and ref in self._sizes:
                        self._forget({ref})
                        self._removed[ref] = None
                    continue
                header = ShardHeader.parse(value[_WRITER_BYTES:])
                if header is not None and value[:_WRITER_BYTES] != self._me:
                    self._take_up(ref_of(header), value)
            if len(entries) < count:
                return

    def owns(self, ref: ShardRef) -> bool:
        """Returns whether this writer's name stands in front of the shard."""
        return ref in self._own

    # ---- reads --------------------------------------------------------------------------------

    async def _read(self, ref: ShardRef) -> bytes | ReadStatus:
        if ref not in self._sizes:
            return ReadStatus.ABSENT
        # A read gives the value new life; the class is not at hand, and longest is never early.
        try:
            value = await self._one("GETEX", self._key(ref), "EX", max(TTL_S) + _SLACK_S)
        except StorageAway:
            return ReadStatus.AWAY
        if value is None:
            self._forget({ref})
            return ReadStatus.ABSENT
        return ReadStatus.IO if isinstance(value, Exception) else value[_WRITER_BYTES:]

    async def get_shard(self, ref: ShardRef) -> tuple[bytes | None, ReadStatus]:
        """Returns a shard; see BlockBackend."""
        data = await self._read(ref)
        if isinstance(data, ReadStatus):
            return None, data
        status = check_shard(data, ref)
        return (data, status) if status is ReadStatus.OK else (None, status)

    async def get_object(
        self, ref: ShardRef, key: bytes, layout: bytes, out: Buffer
    ) -> tuple[bytes | None, ReadStatus]:
        """Reads a block stored whole; see BlockBackend."""
        data = await self._read(ref)
        if isinstance(data, ReadStatus):
            return None, data
        return take_object(data, ref, key, layout, out)

    async def object_header(self, ref: ShardRef) -> bytes | None:
        """Returns the header of a block stored whole; see BlockBackend."""
        end = _HEAD_BYTES + OBJECT_HEADER_BYTES - 1
        try:
            value = await self._one("GETRANGE", self._key(ref), _HEAD_BYTES, end)
        except StorageAway:
            return None
        is_whole = isinstance(value, bytes) and len(value) == OBJECT_HEADER_BYTES
        return value if is_whole else None

    def object_bytes(self, ref: ShardRef) -> int | None:
        """Returns the length of a shard's data, without reading it."""
        return self._sizes.get(ref)

    async def list_headers(self) -> AsyncGenerator[bytes, None]:
        """Yields headers, also of what was only left out here, and of what the server has taken
        without an answer; see BlockBackend. Raises StorageAway."""
        await self._scan()
        refs = sorted(self._sizes)
        for at in range(0, len(refs), 512):
            part = refs[at : at + 512]
            heads = await self._pipeline(
                [("GETRANGE", self._key(ref), _WRITER_BYTES, _HEAD_BYTES - 1) for ref in part]
            )
            found = [head for head in heads if len(head) == SHARD_HEADER_BYTES]
            if found:
                yield b"".join(found)

    # ---- writes -------------------------------------------------------------------------------

    async def put_shard(self, pieces: Sequence[Buffer], durable: bool = False) -> PutStatus:
        """Stores one shard; how durable it is, the server's own configuration says."""
        header, data = joined(pieces)
        if len(data) > slot_bytes(self._config.payload_bytes, WHOLE):
            raise ValueError("the shard is larger than a slot")
        ref = ref_of(header)
        if ref in self._sizes:
            return PutStatus.BUFFERED
        num_slots = (await self.stat()).num_slots
        if self._clock.now_s() < self._full_until_s or len(self._own) >= num_slots:
            return PutStatus.FULL
        # Shielded: a put that was sent may be there, and then it must be known.
        work = asyncio.ensure_future(self._put(ref, header, data))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await wait_all([work])
            raise

    async def _put(self, ref: ShardRef, header: ShardHeader, data: bytes) -> PutStatus:
        ttl_s = TTL_S[header.ttl_class] if header.ttl_class < len(TTL_S) else max(TTL_S)
        head = self._me + data[:SHARD_HEADER_BYTES]
        try:
            answers = await asyncio.gather(
                self._one("SET", self._key(ref), self._me + data, "EX", ttl_s + _SLACK_S),
                self._one(*self._entry(b"s", head)),
            )
            is_full = any(isinstance(answer, Exception) for answer in answers)
            if is_full:  # what others are not told of they would never learn
                await self._one("DEL", self._key(ref))
        except StorageAway:
            return PutStatus.AWAY
        if is_full:
            self._full_until_s = self._clock.now_s() + _RETRY_S
            return PutStatus.FULL
        self._sizes[ref] = header.shard_bytes
        self._own.add(ref)
        return PutStatus.BUFFERED

    def _entry(self, kind: bytes, value: bytes) -> tuple[Any, ...]:
        count = self._config.max_log_entries
        return ("XADD", self._stream, "MAXLEN", "~", count, "*", kind, value)

    async def delete_shards(self, refs: Sequence[ShardRef], erase: bool = False) -> int:
        """Frees shards. One that somebody else wrote is only left out here: its writer decides;
        but erasing erases, whoever wrote it."""
        known = {ref for ref in refs if ref in self._sizes}
        going = sorted(ref for ref in known if erase or ref in self._own)
        if not erase:
            self._forget(known)
        commands = []
        for ref in going:
            commands += [("DEL", self._key(ref)), self._entry(b"r", self._key(ref))]
        try:
            answers = await self._pipeline(commands)
        except StorageAway:
            if erase:
                raise
            return len(known)  # here they are gone; they expire there
        if erase and any(isinstance(answer, Exception) for answer in answers[::2]):
            raise StorageAway("blocks could not be erased")
        self._forget(known)  # not before: who is told that it failed erases once more
        return len(known)

    # ---- the rest -----------------------------------------------------------------------------

    async def stat(self) -> BackendStat:
        """Returns the counts of what this writer keeps."""
        size = slot_bytes(self._config.payload_bytes, WHOLE)
        num_slots = max(self._config.capacity_bytes // size, 1)
        return BackendStat(num_slots, len(self._own), size, len(self._own) * size)

    async def scrub(self, bytes_per_s: float) -> ScrubReport:
        """Reads all of ours once; see BlockBackend."""
        bad: list[tuple[ShardRef, ReadStatus]] = []
        num_checked = 0
        for ref in sorted(self._own):
            size = self._sizes.get(ref, 0)
            _, status = await self.get_shard(ref)
            if status in (ReadStatus.AWAY, ReadStatus.ABSENT):
                continue
            num_checked += 1
            if status is not ReadStatus.OK:
                bad.append((ref, status))
            if bytes_per_s > 0:
                await self._clock.sleep(size / bytes_per_s)
        await self.delete_shards([ref for ref, _ in bad])
        return ScrubReport(num_checked, tuple(bad))

    async def sync(self) -> None:
        """Nothing to wait for: the server's own configuration says what is durable."""

    async def close(self) -> None:
        """Lets go."""
        self._is_closed = True
        await asyncio.gather(*self._flushes, return_exceptions=True)
        await self._client.aclose()
        await self._client.connection_pool.disconnect()


def _is_full(error: Exception) -> bool:
    return str(error).startswith("OOM") or "used memory > 'maxmemory'" in str(error)


def _order(entry: bytes) -> tuple[int, int]:
    """Returns an entry's id as numbers that can be compared."""
    time_ms, _, number = entry.partition(b"-")
    return int(time_ms), int(number)


def _escaped(pattern: bytes) -> bytes:
    """Returns a pattern that matches exactly these bytes."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^" else bytes([c]) for c in pattern)
