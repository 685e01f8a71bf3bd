"""The two RPC services of window states: the directory shard and the pool of a machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio
from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import swa_pb2 as pb
from pelagos.kvstore.v1 import swa_pb2_grpc as rpc

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure, Reason
from services.kvstore.swa.directory import Location, SwaDirectory, SwaKey
from services.kvstore.swa.pool import SwaPool

_PART_BYTES: Final = 1 << 20
_MAX_KEYS: Final = 4096
_MAX_TTL_S: Final = 3600
_MAX_NAME_BYTES: Final = 256


def key_of(message: pb.SwaKey) -> SwaKey:
    """Returns the key. Raises Failure for one of another size."""
    if len(message.key16) != 16 or not 0 < len(message.layout_digest) <= _MAX_NAME_BYTES:
        raise Failure(Reason.INVALID_REQUEST, "a state has a key of 16 bytes and a layout")
    return SwaKey(message.key16, message.layout_digest)


def key_to_proto(key: SwaKey) -> pb.SwaKey:
    """Returns the message of a key."""
    return pb.SwaKey(key16=key.key16, layout_digest=key.layout)


def location_of(message: records_pb2.SwaLocation) -> Location | None:
    """Returns the location; None for an empty one, which means a miss."""
    if not message.host_instance_id:
        return None
    return Location(
        position=message.position,
        host=message.host_instance_id,
        address=message.address,
        slot=message.slot,
        num_bytes=message.length_bytes,
        digest=message.digest,
        approximate=message.approximate,
        host_epoch=message.host_epoch,
    )


def location_to_proto(location: Location | None) -> records_pb2.SwaLocation:
    """Returns the message of a location; an empty one for None."""
    if location is None:
        return records_pb2.SwaLocation()
    return records_pb2.SwaLocation(
        position=location.position,
        host_instance_id=location.host,
        address=location.address,
        slot=location.slot,
        length_bytes=location.num_bytes,
        digest=location.digest,
        approximate=location.approximate,
        host_epoch=location.host_epoch,
    )


class SwaDirectoryServicer(rpc.SwaDirectoryServiceServicer):
    """One shard; hosted by an entrypoint, or run alone."""

    def __init__(self, directory: SwaDirectory | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.directory = directory or SwaDirectory()
        self._clock = clock

    async def Publish(
        self, request: pb.PublishRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PublishResponse:
        """Announces a state."""
        location = location_of(request.location)
        if location is None or request.ttl_s > _MAX_TTL_S:
            raise Failure(Reason.INVALID_REQUEST, "a state has a host, and a life of an hour")
        names = (location.host.encode(), location.address.encode(), location.digest)
        if any(len(name) > _MAX_NAME_BYTES for name in names):
            # Entries are bounded by number: each must have a bound as well.
            raise Failure(Reason.INVALID_REQUEST, f"names have at most {_MAX_NAME_BYTES} bytes")
        stored = self.directory.publish(
            key_of(request.key), location, self._clock.now_s(), request.ttl_s
        )
        return pb.PublishResponse(stored=stored)

    async def Withdraw(
        self, request: pb.WithdrawRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WithdrawResponse:
        """Takes an announcement back."""
        removed = self.directory.withdraw(key_of(request.key), request.host_instance_id)
        return pb.WithdrawResponse(removed=removed)

    async def Lookup(
        self,
        request: pb.SwaDirectoryServiceLookupRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.SwaDirectoryServiceLookupResponse:
        """Finds states."""
        if len(request.keys) > _MAX_KEYS:
            raise Failure(Reason.INVALID_REQUEST, "too many keys in one look-up")
        found = self.directory.lookup([key_of(key) for key in request.keys], self._clock.now_s())
        return pb.SwaDirectoryServiceLookupResponse(
            locations=[location_to_proto(location) for location in found]
        )


class SwaPoolServicer(rpc.SwaPoolServiceServicer):
    """Gives the states of this machine to others; added to an engine's server."""

    def __init__(self, pool: SwaPool) -> None:
        self._pool = pool

    async def GetState(
        self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GetStateResponse]:
        """Streams one state."""
        key = key_of(request.key)
        with self._pool.reading(key, request.slot, request.host_epoch) as data:
            if data is None:
                raise Failure(Reason.NOT_FOUND, "the state is gone")
            for at in range(0, len(data), _PART_BYTES):
                yield pb.GetStateResponse(data=data[at : at + _PART_BYTES], total_bytes=len(data))
