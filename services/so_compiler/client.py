"""The SO compiler as siblings see it: entrypoints compile, engines fetch.

compiler = SoCompilerClient(runtime.channels)
compiled = await compiler.compile(address, CompileRequest(type=..., source=..., tenant=...))
grammar = await compiler.fetch(address, compiled.artifact_key)     # bytes for the backend
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from pelagos.so_compiler.v1 import so_compiler_pb2 as pb
from pelagos.so_compiler.v1 import so_compiler_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call

COMPILE_TIMEOUT_S: Final = 8.0
FETCH_TIMEOUT_S: Final = 10.0
MAX_ARTIFACT_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True)
class Grammar:
    """An artifact as an engine loads it. A tokenizer or backend that differs is an error there."""

    backend: str
    backend_version: str
    tokenizer_id: str
    data: bytes


class SoCompiler(Protocol):
    """What the client and the fake offer."""

    async def compile(self, address: str, request: pb.CompileRequest) -> pb.CompileResponse:
        """Compiles or finds."""
        ...

    async def fetch(self, address: str, artifact_key: str) -> Grammar:
        """Returns an artifact. Raises Failure(NOT_FOUND) when it was evicted."""
        ...


class SoCompilerClient:
    """The service over gRPC; the address travels with each request (`GrammarRef.address`)."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def compile(
        self, address: str, request: pb.CompileRequest, timeout_s: float = COMPILE_TIMEOUT_S
    ) -> pb.CompileResponse:
        """Compiles or finds. Raises Failure naming the path of what is not supported."""
        response: pb.CompileResponse = await call(
            self._stub(address).Compile, request, timeout_s=timeout_s
        )
        return response

    async def fetch(
        self, address: str, artifact_key: str, timeout_s: float = FETCH_TIMEOUT_S
    ) -> Grammar:
        """Returns an artifact. Raises Failure(NOT_FOUND) when it was evicted."""
        pieces: list[bytes] = []
        num_bytes = 0
        request = pb.FetchRequest(artifact_key=artifact_key)
        async with stream_call(self._stub(address).Fetch, request, timeout_s=timeout_s) as stream:
            async for piece in stream:
                pieces.append(piece.data)
                num_bytes += len(piece.data)
                if num_bytes > MAX_ARTIFACT_BYTES:
                    raise Failure(Reason.GRAMMAR_BUDGET, "the artifact is too large")
                if piece.last:
                    return Grammar(
                        piece.backend, piece.backend_version, piece.tokenizer_id, b"".join(pieces)
                    )
        raise Failure(Reason.BACKEND_LOST, "the artifact ended early")

    def _stub(self, address: str) -> rpc.SoCompilerServiceStub:
        return rpc.SoCompilerServiceStub(self._channels.get(address))
