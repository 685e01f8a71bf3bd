"""Any S3-compatible object store as a medium: one object per segment of many blocks.

Objects are written once, with a condition that the name is new where the store knows conditions,
in parts where they are large, and read by ranges. Credentials come from where every S3 client looks
(environment, profile, instance role), never from our configuration. The client library blocks, so
it runs in threads; its retries, its timeouts and the number of connections are bounded.
Source: kvcache-and-balancing.md, section 11.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from services.kvstore.backends.base import StorageAway, StorageFull
from services.kvstore.backends.segment_index import is_ours
from services.kvstore.checksums import Buffer

T = TypeVar("T")
_ABSENT: Final = frozenset(("404", "NoSuchKey", "NotFound"))
_EXISTS: Final = frozenset(("412", "PreconditionFailed", "ConditionalRequestConflict"))
_FULL: Final = frozenset(
    ("507", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "StorageFull")
)
_NO_CONDITIONS: Final = frozenset(("501", "NotImplemented"))
_BEYOND_THE_END: Final = frozenset(("416", "InvalidRange"))


@dataclass(frozen=True)
class S3Config:
    """Which bucket, and how patiently."""

    bucket: str
    prefix: str = ""  # of all names, with its slash
    endpoint: str = ""  # empty: Amazon's for the region
    region: str = "us-east-1"
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 10.0
    max_attempts: int = 3
    max_connections: int = 16
    part_bytes: int = 16 << 20  # larger objects are written in parts; at least 5 MiB

    @classmethod
    def parse(cls, url: str, **more: Any) -> S3Config:
        """Returns the place of "s3://bucket/prefix". Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query:
            raise ValueError("an S3 place is s3://bucket/prefix")
        path = parts.path.strip("/")
        return cls(bucket=parts.netloc, prefix=f"{path}/" if path else "", **more)


class S3Medium:
    """Objects below one prefix of a bucket that exists. Raises ImportError without boto3."""

    appends = False

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(config.max_connections, thread_name_prefix="kv-s3")
        self._errors = importlib.import_module("botocore.exceptions")
        options = importlib.import_module("botocore.config").Config(
            connect_timeout=config.connect_timeout_s,
            read_timeout=config.read_timeout_s,
            max_pool_connections=config.max_connections,
            retries={"max_attempts": config.max_attempts, "mode": "standard"},
            s3={"addressing_style": "path"} if config.endpoint else {},
            # Checksums of ours are on everything; many stores know no others.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        session = importlib.import_module("boto3").session.Session()
        self._client: Any = session.client(
            "s3",
            endpoint_url=config.endpoint or None,
            region_name=config.region,
            config=options,
        )
        self._has_conditions = True
        self._is_closed = False

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        if self._is_closed:
            raise StorageAway("closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, functools.partial(work, *args))
        except self._errors.ClientError as error:
            code = _code_of(error.response)
            if code in _ABSENT:
                raise FileNotFoundError(code) from None
            if code in _EXISTS:
                raise FileExistsError(code) from None
            if code in _FULL:
                raise StorageFull(code) from None
            raise StorageAway(code) from None  # the code only: messages may quote the request
        except self._errors.BotoCoreError as error:
            raise StorageAway(type(error).__name__) from None

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._config.bucket, "Key": self._config.prefix + name}

    async def names(self) -> set[str]:
        """Returns all names. Raises StorageAway, also for a bucket that is not there."""
        try:
            return await self._run(self._names)
        except FileNotFoundError:
            raise StorageAway("NoSuchBucket") from None

    def _names(self) -> set[str]:
        found: set[str] = set()
        start = len(self._config.prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._config.bucket, Prefix=self._config.prefix
        )
        for page in pages:
            for item in page.get("Contents", ()):
                name = item["Key"][start:]
                if is_ours(name):
                    found.add(name)
        return found

    async def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Returns a range; see Medium."""
        data, _ = await self._range(name, f"bytes={offset}-{offset + num_bytes - 1}")
        return data

    async def tail(self, name: str, num_bytes: int) -> tuple[bytes, int]:
        """Returns the last bytes and the whole length."""
        return await self._range(name, f"bytes=-{num_bytes}")

    async def _range(self, name: str, span: str) -> tuple[bytes, int]:
        return await self._run(self._get_range, name, span)

    def _get_range(self, name: str, span: str) -> tuple[bytes, int]:
        try:
            answer = self._client.get_object(**self._key(name), Range=span)
        except self._errors.ClientError as error:
            if _code_of(error.response) in _BEYOND_THE_END:
                return b"", 0
            raise
        with answer["Body"] as body:
            data = body.read()
        total = str(answer.get("ContentRange", "")).rpartition("/")[2]
        return data, int(total) if total.isdigit() else len(data)

    async def create(self, name: str, pieces: Sequence[Buffer]) -> None:
        """Writes a new object, whole or not at all; see Medium."""
        data = b"".join(bytes(piece) for piece in pieces)
        if self._has_conditions:
            try:
                await self._run(self._put, name, data, {"IfNoneMatch": "*"})
                return
            except StorageAway as error:
                if str(error) not in _NO_CONDITIONS:
                    raise
            self._has_conditions = False
        # Without conditions a name is only looked for first; names are of one writer anyway.
        if await self._run(self._exists, name):
            raise FileExistsError(name)
        await self._run(self._put, name, data, {})

    def _exists(self, name: str) -> bool:
        try:
            self._client.head_object(**self._key(name))
        except self._errors.ClientError as error:
            if _code_of(error.response) in _ABSENT:
                return False
            raise
        return True

    def _put(self, name: str, data: bytes, condition: Mapping[str, str]) -> None:
        if len(data) <= self._config.part_bytes:
            self._client.put_object(**self._key(name), Body=data, **condition)
            return
        where = self._key(name)
        upload = self._client.create_multipart_upload(**where)["UploadId"]
        try:
            parts = []
            for number, at in enumerate(range(0, len(data), self._config.part_bytes), 1):
                answer = self._client.upload_part(
                    **where,
                    UploadId=upload,
                    PartNumber=number,
                    Body=data[at : at + self._config.part_bytes],
                )
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            self._client.complete_multipart_upload(
                **where, UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )
        except BaseException:
            # Parts that belong to nothing would be paid for until somebody looks.
            self._client.abort_multipart_upload(**where, UploadId=upload)
            raise

    async def append(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        """Objects do not grow."""
        raise NotImplementedError

    async def take(self, name: str, new: str) -> None:
        """Objects do not grow: there is nothing to take away from anybody."""
        raise NotImplementedError

    async def delete(self, name: str) -> None:
        """Removes an object."""
        await self._run(self._delete, name)

    def _delete(self, name: str) -> None:
        self._client.delete_object(**self._key(name))

    async def close(self) -> None:
        """Lets go; a request that hangs ends by its own timeout."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def _code_of(response: Mapping[str, Any]) -> str:
    """Returns the error code of an answer; its HTTP status where it has no code."""
    code = str(response.get("Error", {}).get("Code", ""))
    return code or str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
