"""SoCompilerService over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import grpc.aio
from pelagos.so_compiler.v1 import so_compiler_pb2 as pb
from pelagos.so_compiler.v1 import so_compiler_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.so_compiler.compiler import Compiler

PIECE_BYTES: Final = 1 << 20


class SoCompilerServicer(rpc.SoCompilerServiceServicer):
    """The RPCs over one compiler."""

    def __init__(self, compiler: Compiler, backend: str, backend_version: str) -> None:
        self._compiler = compiler
        self._backend = backend
        self._backend_version = backend_version

    async def Compile(
        self, request: pb.CompileRequest, context: grpc.aio.ServicerContext
    ) -> pb.CompileResponse:
        """Compiles or finds."""
        if request.type == pb.GRAMMAR_TYPE_UNSPECIFIED:
            raise Failure(Reason.INVALID_REQUEST, "the grammar type is missing")
        answer = await self._compiler.compile(request)
        return pb.CompileResponse(
            artifact_key=answer.key,
            size_bytes=len(answer.artifact.data),
            compile_ms=0 if answer.cached else answer.artifact.cpu_ms,
            cached=answer.cached,
            warnings=answer.artifact.warnings,
        )

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchResponse]:
        """Streams an artifact."""
        entry = self._compiler.find(request.artifact_key)
        data = entry.artifact.data
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            end = start + PIECE_BYTES
            yield pb.FetchResponse(
                backend=self._backend,
                backend_version=self._backend_version,
                tokenizer_id=entry.tokenizer_id,
                data=data[start:end],
                last=end >= len(data),
            )
