"""`Etcd3Store`: the store port on the PyPI package etcd3 0.12.0 (extra `etcd3`).

Optional; docs/adr/0002 says why it is not the default. The package's own stubs do not import on
today's protobuf, so its message classes are made anew from the descriptors inside them, in a pool
of their own, and put in place before the package is imported. Its calls block, so they run on
threads; its watches do not resume, which `store.follow` does anyway.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib.util
import math
import sys
import types
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from services.common.store import (
    Change,
    Compacted,
    Compare,
    Delete,
    KeyValue,
    Lease,
    LeaseLost,
    Listing,
    Put,
    StoreUnavailable,
    TxnResult,
    WatchBatch,
)

_CALL_TIMEOUT_S: Final = 2.0
_MAX_THREADS: Final = 8
_MAX_BUFFERED_BATCHES: Final = 1000
_STUB_MODULES: Final = ("kv_pb2", "auth_pb2", "rpc_pb2")  # in order of their imports
_LEASE_NOT_FOUND: Final = "requested lease not found"


@functools.cache
def load_package() -> Any:
    """Returns the module `etcd3`, its stubs repaired. Raises ImportError when not installed."""
    spec = importlib.util.find_spec("etcd3")
    if spec is None or spec.origin is None:
        raise ImportError("the extra `etcd3` is not installed")
    folder = Path(spec.origin).parent / "etcdrpc"
    pool = descriptor_pool.DescriptorPool()
    for name in _STUB_MODULES:
        descriptor = pool.AddSerializedFile(_serialized_descriptor(folder / f"{name}.py"))
        sys.modules[f"etcd3.etcdrpc.{name}"] = _stub_module(f"etcd3.etcdrpc.{name}", descriptor)
    return importlib.import_module("etcd3")


class Etcd3Store:
    """A client of one etcd endpoint, by the package etcd3."""

    def __init__(self, endpoint: str, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._etcd3 = load_package()
        host, _, port = endpoint.rpartition(":")
        self._client = self._etcd3.client(host=host, port=int(port), timeout=timeout_s)
        # The package's watch thread has no end of its own: it would die of the closed channel.
        watcher = self._client.watcher
        self._watch_stub = _WatchStub(watcher._watch_stub)
        watcher._watch_stub = self._watch_stub
        watcher._run = functools.partial(_run_until_closed, watcher._run)
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="etcd3")

    async def get(self, key: str) -> KeyValue | None:
        """Returns the key's value."""
        reply = await self._run(self._client.get_response, key)
        return _item(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str) -> Listing:
        """Returns everything under the prefix."""
        reply = await self._run(
            functools.partial(self._client.get_prefix_response, prefix, sort_order="ascend")
        )
        return Listing(tuple(_item(kv) for kv in reply.kvs), reply.header.revision)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Writes one key."""
        reply = await self._run(functools.partial(self._client.put, key, value, lease=lease_id))
        return int(reply.header.revision)

    async def delete(self, key: str) -> bool:
        """Deletes one key."""
        return bool(await self._run(self._client.delete, key))

    async def delete_prefix(self, prefix: str) -> int:
        """Deletes everything under the prefix."""
        reply = await self._run(self._client.delete_prefix, prefix)
        return int(reply.deleted)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Put | Delete],
        otherwise: Sequence[Put | Delete] = (),
    ) -> TxnResult:
        """Compares and writes at one revision."""
        conditions = [part for compare in compares for part in self._conditions(compare)]
        succeeded, replies = await self._run(
            self._client.transaction,
            conditions,
            [self._op(op) for op in then],
            [self._op(op) for op in otherwise],
        )
        for reply in replies:
            header = getattr(reply, str(reply.WhichOneof("response"))).header
            if header.revision:
                return TxnResult(succeeded, header.revision)
        # The package hides the transaction's own header; a read tells where the store is.
        now = await self._run(self._client.get_response, "\0")
        return TxnResult(succeeded, now.header.revision)

    async def grant(self, ttl_s: float) -> Lease:
        """Returns a new lease; etcd counts whole seconds."""
        lease = await self._run(self._client.lease, math.ceil(ttl_s))
        return Lease(lease.id, float(lease.ttl))

    async def keep_alive(self, lease_id: int) -> float:
        """Renews the lease."""
        reply = await self._run(lambda: next(iter(self._client.refresh_lease(lease_id)), None))
        if reply is None:
            raise StoreUnavailable("the keepalive stream ended")
        if reply.TTL <= 0:
            raise LeaseLost(f"lease {lease_id:x} has expired")
        return float(reply.TTL)

    async def revoke(self, lease_id: int) -> None:
        """Ends the lease."""
        try:
            await self._run(self._client.revoke_lease, lease_id)
        except LeaseLost:
            pass

    async def compact(self, revision: int) -> None:
        """Forgets history before a revision; for tests."""
        await self._run(self._client.compact, revision)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchBatch]:
        """Yields changes from a revision on, as the package's thread hands them over."""
        loop = asyncio.get_running_loop()
        batches: asyncio.Queue[Any] = asyncio.Queue(_MAX_BUFFERED_BATCHES)

        def deliver(reply: Any) -> None:
            try:
                batches.put_nowait(reply)
            except asyncio.QueueFull:
                # Losing a batch would lose members: end the watch, the consumer lists again.
                while not batches.empty():
                    batches.get_nowait()
                batches.put_nowait(StoreUnavailable("the watch's reader is too slow"))

        def from_thread(reply: Any) -> None:
            try:
                loop.call_soon_threadsafe(deliver, reply)
            except RuntimeError:
                pass  # the loop is gone, and with it who would read

        watch_id = await self._run(
            functools.partial(
                self._client.add_watch_prefix_callback,
                prefix,
                from_thread,
                start_revision=from_revision,
            )
        )
        try:
            # The package swallows the `created` answer, whose revision says where the store is.
            now = await self._run(self._client.get_response, "\0")
            yield WatchBatch((), now.header.revision)
            while True:
                reply = await batches.get()
                if isinstance(reply, Exception):
                    raise self._translate(reply)
                if reply.events:
                    changes = tuple(self._change(event) for event in reply.events)
                    yield WatchBatch(changes, reply.header.revision)
        finally:
            self._client.cancel_watch(watch_id)

    async def close(self) -> None:
        """Closes the channel and lets the threads go."""
        self._watch_stub.is_closed = True
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, functools.partial(function, *args))
        except (grpc.RpcError, self._etcd3.exceptions.Etcd3Exception) as error:
            raise self._translate(error) from None

    def _translate(self, error: Exception) -> Exception:
        exceptions = self._etcd3.exceptions
        if isinstance(error, exceptions.RevisionCompactedError):
            return Compacted(error.compacted_revision)
        # The package raises its own classes without the text; the cause still has it.
        cause = error if isinstance(error, grpc.RpcError) else error.__context__
        text = str(cause.details()) if isinstance(cause, grpc.RpcError) else ""
        if _LEASE_NOT_FOUND in text:
            return LeaseLost(text)
        if isinstance(error, StoreUnavailable):
            return error
        return StoreUnavailable(f"etcd3: {type(error).__name__} {text}".rstrip())

    def _conditions(self, compare: Compare) -> Sequence[Any]:
        make = self._client.transactions
        parts = []
        if compare.create_revision is not None:
            parts.append(make.create(compare.key) == compare.create_revision)
        if compare.mod_revision is not None:
            parts.append(make.mod(compare.key) == compare.mod_revision)
        if compare.value is not None:
            parts.append(make.value(compare.key) == compare.value)
        return parts

    def _op(self, op: Put | Delete) -> Any:
        make = self._client.transactions
        if isinstance(op, Put):
            return make.put(op.key, op.value, lease=op.lease_id)
        return make.delete(op.key)

    def _change(self, event: Any) -> Change:
        kv = event._event.kv
        item = None if isinstance(event, self._etcd3.events.DeleteEvent) else _item(kv)
        return Change(kv.key.decode(errors="replace"), item, kv.mod_revision)


class _StoreClosed(Exception):
    """Ends the package's watch thread."""


class _WatchStub:
    """The package's watch stub, until the store is closed."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.is_closed = False

    def Watch(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_closed:
            raise _StoreClosed
        return self._stub.Watch(*args, **kwargs)


def _run_until_closed(run: Callable[[], None]) -> None:
    try:
        run()
    except _StoreClosed:
        pass


def _item(kv: Any) -> KeyValue:
    key = kv.key.decode(errors="replace")
    return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _serialized_descriptor(file: Path) -> bytes:
    """Returns the file descriptor inside a generated module, without running that module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            value = node.value
            if isinstance(value, ast.Call):
                value = value.args[0]
            literal = ast.literal_eval(value)
            data = literal if isinstance(literal, bytes) else literal.encode("latin-1")
            # Options of the Go generator would name an extension that nobody needs here.
            descriptor = descriptor_pb2.FileDescriptorProto.FromString(data)
            descriptor.ClearField("options")
            return descriptor.SerializeToString()
    raise ImportError(f"{file.name} holds no descriptor: not the version 0.12.0")


def _stub_module(name: str, descriptor: Any) -> types.ModuleType:
    """Returns a module with a file's messages, enums and enum values, as protoc would write it."""
    module = types.ModuleType(name)
    for message in descriptor.message_types_by_name.values():
        setattr(module, message.name, message_factory.GetMessageClass(message))
    for enum_type in descriptor.enum_types_by_name.values():
        for value in enum_type.values:
            setattr(module, value.name, value.number)
    return module
