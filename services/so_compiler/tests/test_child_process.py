"""Children of a process that serves gRPC on uvloop start every time."""

from __future__ import annotations

import os

import uvloop
from pelagos.so_compiler.v1 import so_compiler_pb2 as pb
from pelagos.so_compiler.v1 import so_compiler_pb2_grpc as rpc

from services.common.rpc_client import call
from services.common.service import running
from services.so_compiler.child_process import ChildProcess
from services.so_compiler.config import SoCompilerConfig
from services.so_compiler.main import build


def test_a_new_child_for_each_grammar_never_fails_a_compile_under_uvloop(monkeypatch) -> None:
    started: list[ChildProcess] = []
    start = ChildProcess.start.__func__

    async def remembered(cls, command, env):
        started.append(await start(cls, command, env))
        return started[-1]

    monkeypatch.setattr(ChildProcess, "start", classmethod(remembered))

    async def compile_many() -> None:
        async with running("so-compiler", SoCompilerConfig(listen="127.0.0.1:0"), build) as served:
            stub = rpc.SoCompilerServiceStub(served.channels.get(served.address))
            for number in range(1, 9):
                for child in started:
                    if child.returncode is None:
                        child.kill()
                request = pb.CompileRequest(
                    type=pb.GRAMMAR_TYPE_REGEX, source=f"a{{{number}}}", tokenizer_id="t"
                )
                assert (await call(stub.Compile, request, timeout_s=60)).artifact_key

    uvloop.run(compile_many())
    assert len(started) >= 8
    for child in started:
        assert child.returncode is not None
        assert not os.path.exists(f"/proc/{child.pid}/exe")
