"""The storages that several STOREs share, behind one face: open a writer, hurt it, take it away."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.kvstore.backends.base import ShardRef, SharedBackend
from services.kvstore.backends.posix import PosixMedium
from services.kvstore.backends.redis import RedisBackend, RedisConfig
from services.kvstore.backends.s3 import S3Config, S3Medium
from services.kvstore.backends.segment_writer import SegmentedConfig
from services.kvstore.backends.segmented import SegmentedBackend
from services.kvstore.tests.servers import REGION, Server, s3_client

SLOT = 4096
SEGMENTED: dict[str, Any] = {
    "capacity_bytes": 64 * SLOT,
    "segment_bytes": 8 * SLOT,
    "payload_bytes": 3000,
    "batch_shards": 4,
    "linger_s": 0.002,
    "reap_after_s": 0.0,  # the suite's shards say that they were made in 1970
}


class Hooked:
    """A medium that does something of ours before, after or instead of some of its calls."""

    def __init__(self, medium: Any, **hooks: Any) -> None:
        self._medium = medium
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        return self._hooks.get(name) or getattr(self._medium, name)


def hook(backend: Any, **hooks: Any) -> Any:
    """Puts hooks around the medium of a backend; returns the medium as it was."""
    medium = backend._medium
    backend._medium = backend._segments._medium = Hooked(medium, **hooks)
    return medium


@dataclass
class Shared:
    """One shared storage, empty at first."""

    opened: list[SharedBackend] = field(default_factory=list)

    async def writer(self, name: str = "w1", **more: Any) -> SharedBackend:
        """Opens it under a writer's name."""
        backend = await self._open(name, more)
        self.opened.append(backend)
        return backend

    async def close(self) -> None:
        """Lets go of all that were opened; closing twice is no harm."""
        for backend in self.opened:
            await backend.close()

    async def _open(self, name: str, more: dict[str, Any]) -> SharedBackend:
        raise NotImplementedError

    async def damage(self, backend: SharedBackend, ref: ShardRef, at: int) -> None:
        """Flips a bit of a stored shard."""
        raise NotImplementedError

    async def cut(self, backend: SharedBackend, ref: ShardRef) -> None:
        """Cuts off the storage in the middle of a shard."""
        raise NotImplementedError

    def go_away(self) -> None:
        """Makes it answer nobody."""
        raise NotImplementedError

    def come_back(self) -> None:
        """Makes it answer again, with what it held."""
        raise NotImplementedError

    def num_places_with(self, needle: bytes) -> int:
        """Returns in how many files, objects or values the bytes stand."""
        raise NotImplementedError


@dataclass
class PosixShared(Shared):
    """A folder."""

    folder: Path = Path()
    mark: str = ""

    async def _open(self, name: str, more: dict[str, Any]) -> SharedBackend:
        medium = await PosixMedium.open(self.folder, self.mark)
        self.mark = medium.mark
        return await SegmentedBackend.open(medium, SegmentedConfig(name, **(SEGMENTED | more)))

    def _place(self, backend: SharedBackend, ref: ShardRef) -> tuple[Path, int]:
        place = backend._index.place(ref)
        return self.folder / place.segment, place.offset

    async def damage(self, backend: SharedBackend, ref: ShardRef, at: int) -> None:
        path, offset = self._place(backend, ref)
        data = bytearray(path.read_bytes())
        data[offset + at] ^= 4
        path.write_bytes(data)

    async def cut(self, backend: SharedBackend, ref: ShardRef) -> None:
        path, offset = self._place(backend, ref)
        path.write_bytes(path.read_bytes()[: offset + 500])

    def go_away(self) -> None:
        self.folder.rename(self.folder.with_name("unmounted"))
        self.folder.mkdir()

    def come_back(self) -> None:
        self.folder.rmdir()
        self.folder.with_name("unmounted").rename(self.folder)

    def num_places_with(self, needle: bytes) -> int:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return sum(needle in path.read_bytes() for path in files)


@dataclass
class S3Shared(Shared):
    """A prefix of a bucket."""

    server: Server | None = None
    prefix: str = ""
    bucket: str = "kvcache"

    async def _open(self, name: str, more: dict[str, Any]) -> SharedBackend:
        fields = {"timeout_s": 5.0} | more
        place = S3Config.parse(
            f"s3://{self.bucket}/{self.prefix}",
            endpoint=f"http://127.0.0.1:{self.server.port}",
            region=REGION,
            connect_timeout_s=1.0,
            read_timeout_s=fields["timeout_s"],
            max_attempts=1,
        )
        config = SegmentedConfig(name, **(SEGMENTED | fields))
        return await SegmentedBackend.open(S3Medium(place), config)

    def _object(self, backend: SharedBackend, ref: ShardRef) -> tuple[Any, dict[str, str], int]:
        place = backend._index.place(ref)
        where = {"Bucket": self.bucket, "Key": f"{self.prefix}/{place.segment}"}
        return s3_client(self.server), where, place.offset

    async def damage(self, backend: SharedBackend, ref: ShardRef, at: int) -> None:
        client, where, offset = self._object(backend, ref)
        data = bytearray(client.get_object(**where)["Body"].read())
        data[offset + at] ^= 4
        client.put_object(**where, Body=bytes(data))

    async def cut(self, backend: SharedBackend, ref: ShardRef) -> None:
        client, where, offset = self._object(backend, ref)
        data = client.get_object(**where)["Body"].read()
        client.put_object(**where, Body=data[: offset + 500])

    def go_away(self) -> None:
        self.server.signal(signal.SIGSTOP)

    def come_back(self) -> None:
        self.server.signal(signal.SIGCONT)

    def num_places_with(self, needle: bytes) -> int:
        client, count = s3_client(self.server), 0
        listed = client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        for item in listed.get("Contents", ()):
            body = client.get_object(Bucket=self.bucket, Key=item["Key"])["Body"].read()
            count += needle in body
        return count


@dataclass
class RedisShared(Shared):
    """A database of a server."""

    server: Server | None = None
    prefix: str = ""

    async def _open(self, name: str, more: dict[str, Any]) -> SharedBackend:
        fields: dict[str, Any] = {"capacity_bytes": 48 * SLOT, "payload_bytes": 3000}
        known = {"capacity_bytes", "payload_bytes", "timeout_s", "max_log_entries"}
        fields |= {key: value for key, value in more.items() if key in known}
        url = f"redis://127.0.0.1:{self.server.port}/0"
        return await RedisBackend.open(RedisConfig(url, name, prefix=self.prefix, **fields))

    async def damage(self, backend: SharedBackend, ref: ShardRef, at: int) -> None:
        key = backend._key(ref)
        data = bytearray(await backend._client.get(key))
        data[16 + at] ^= 4
        await backend._client.set(key, bytes(data))

    async def cut(self, backend: SharedBackend, ref: ShardRef) -> None:
        key = backend._key(ref)
        await backend._client.set(key, (await backend._client.get(key))[:500])

    def go_away(self) -> None:
        self.server.kill()

    def come_back(self) -> None:
        self.server.start()

    def num_places_with(self, needle: bytes) -> int:
        import redis

        with redis.Redis(port=self.server.port) as client:
            keys = [k for k in client.scan_iter(f"{self.prefix}*") if client.type(k) == b"string"]
            return sum(needle in (client.get(key) or b"") for key in keys)
