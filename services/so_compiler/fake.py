"""The SO compiler in memory, with the same contract as the client: no children, no network.

It checks and compiles for real, in this process and without the budgets of CPU and memory; for
tests of siblings, whose constraints are their own.
"""

from __future__ import annotations

from pelagos.so_compiler.v1 import so_compiler_pb2 as pb

from services.common.errors import Failure, Reason
from services.so_compiler.client import Grammar
from services.so_compiler.compiler import Compiler
from services.so_compiler.config import GrammarLimits, SoCompilerConfig
from services.so_compiler.grammar import BACKEND, BACKEND_VERSION, build_grammar
from services.so_compiler.worker_pool import Artifact, Job, WorkerPool


class _InlinePool(WorkerPool):
    """Compiles at once, here."""

    def __init__(self) -> None:
        super().__init__(1, GrammarLimits())
        self.jobs: list[Job] = []

    async def compile(self, job: Job, wall_s: float) -> Artifact:
        self.jobs.append(job)
        compiled = build_grammar(job.type, job.source, job.special_ids, GrammarLimits())
        return Artifact(compiled.data, compiled.warnings, cpu_ms=1)


class FakeSoCompiler:
    """One compiler, whatever address is asked for."""

    def __init__(self, config: SoCompilerConfig | None = None) -> None:
        self._pool = _InlinePool()
        self._compiler = Compiler(config or SoCompilerConfig(), self._pool, BACKEND_VERSION)

    @property
    def jobs(self) -> list[Job]:
        """Returns what was compiled, in order."""
        return self._pool.jobs

    async def compile(self, address: str, request: pb.CompileRequest) -> pb.CompileResponse:
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

    async def fetch(self, address: str, artifact_key: str) -> Grammar:
        """Returns an artifact. Raises Failure(NOT_FOUND) when it was evicted."""
        entry = self._compiler.find(artifact_key)
        return Grammar(BACKEND, BACKEND_VERSION, entry.tokenizer_id, entry.artifact.data)
