"""Connecting for a long-lived call: a refused or frozen peer is noticed before the call."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
import grpc.aio

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels

# A frozen process still completes TCP handshakes; gRPC itself would wait 20 s for its greeting.
CONNECT_TIMEOUT_S: Final = 3.0
_FAILED: Final = grpc.ChannelConnectivity.TRANSIENT_FAILURE


async def connect(
    channels: Channels, address: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> grpc.aio.Channel:
    """Returns a channel that is connected. Raises Failure(BACKEND_LOST) when it cannot be."""
    channel = channels.get(address)
    if channel.get_state() is _FAILED:
        # A channel that has failed says so until it is connected again, however often it tries;
        # a new one tells at once whether anybody is there.
        await channels.forget(address)
        channel = channels.get(address)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
                if state is _FAILED:
                    raise Failure(Reason.BACKEND_LOST, "the connection is refused")
    except TimeoutError:
        if not limit.expired():
            raise
        raise Failure(Reason.BACKEND_LOST, "the peer does not answer") from None
    return channel
