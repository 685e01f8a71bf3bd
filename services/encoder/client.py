"""Calls an encoder engine.

client = EncoderClient(channels)
plans = await client.plan(address, [(640, 480)])
image = await client.encode(address, Picture(640, 480, data, digest))
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pelagos.encoder.v1 import encoder_pb2 as pb
from pelagos.encoder.v1 import encoder_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call
from services.common.rpc_errors import from_proto

_PLAN_TIMEOUT_S = 2.0
_ENCODE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Picture:
    """An image to encode; `digest` is its 32-byte media digest."""

    width: int
    height: int
    data: bytes
    digest: bytes
    tenant: str = ""
    request_id: str = ""
    ticket: str = ""


@dataclass(frozen=True)
class Size:
    """Geometry of an image: prompt positions and patches."""

    width: int
    height: int
    num_tokens: int
    num_patches: int


@dataclass(frozen=True)
class Embedding:
    """[num_tokens, hidden] bf16, row-major."""

    size: Size
    hidden: int
    data: bytes
    cached: bool


class EncoderClient:
    """One object for any number of cards; addresses are arguments."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def _stub(self, address: str) -> rpc.EncoderServiceStub:
        return rpc.EncoderServiceStub(self._channels.get(address))

    async def plan(self, address: str, sizes: Sequence[tuple[int, int]]) -> list[Size]:
        """Geometry of declared sizes, (width, height) each. Raises: Failure."""
        request = pb.PlanRequest(widths=[w for w, _ in sizes], heights=[h for _, h in sizes])
        answer = await call(self._stub(address).Plan, request, timeout_s=_PLAN_TIMEOUT_S)
        return [_size(geometry) for geometry in answer.images]

    async def encode(self, address: str, picture: Picture) -> Embedding:
        """Encodes one image. Raises: Failure; IMAGE_INVALID is the image's own fault."""
        request = pb.EncodeRequest(
            item_id="0",
            width=picture.width,
            height=picture.height,
            data=picture.data,
            digest=picture.digest,
            tenant=picture.tenant,
            request_id=picture.request_id,
            ticket=picture.ticket,
        )

        async def one() -> AsyncIterator[pb.EncodeRequest]:
            yield request

        data = bytearray()
        last: pb.EncodeResponse | None = None
        async with stream_call(
            self._stub(address).Encode, one(), timeout_s=_ENCODE_TIMEOUT_S
        ) as stream:
            async for part in stream:
                if part.HasField("error"):
                    raise from_proto(part.error)
                if part.offset_bytes != len(data):
                    raise Failure(Reason.BACKEND_LOST, "a piece of an embedding is missing")
                data += part.embeddings
                last = part
        if last is None or len(data) != last.total_bytes:
            raise Failure(Reason.BACKEND_LOST, "the card ended without a whole embedding")
        return Embedding(_size(last.geometry), last.hidden, bytes(data), last.cached)


def _size(geometry: pb.Geometry) -> Size:
    return Size(geometry.width, geometry.height, geometry.num_tokens, geometry.num_patches)
