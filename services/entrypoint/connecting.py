"""Connecting for a long-lived call: a refused or frozen peer is noticed before the call."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
import grpc.aio

from services.common.errors import Failure, Reason

# A frozen process still completes TCP handshakes; gRPC itself would wait 20 s for its greeting.
CONNECT_TIMEOUT_S: Final = 3.0


async def connect(channel: grpc.aio.Channel, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Returns once the channel is connected. Raises Failure(BACKEND_LOST) when it is not."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise Failure(Reason.BACKEND_LOST, "the connection is refused")
    except TimeoutError:
        if not limit.expired():
            raise
        raise Failure(Reason.BACKEND_LOST, "the peer does not answer") from None
