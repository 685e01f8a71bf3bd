"""EngineControlService, the same cases on all three engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pelagos.engine.v1 import engine_control_pb2 as pb
from pelagos.engine.v1 import engine_control_pb2_grpc as rpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import call, stream_call
from services.common.service import Runtime, RuntimeConfig, running
from services.decode.config import DecodeConfig
from services.decode.main import build as build_decode
from services.encoder.config import EncoderConfig
from services.encoder.main import build as build_encoder
from services.prefill.config import PrefillConfig
from services.prefill.main import build as build_prefill
from tests.contract.engine_parts import quick_model

RUNTIME = RuntimeConfig(uvloop=False)
MODEL = quick_model()
ENGINES = {
    "prefill": (PrefillConfig(num_blocks=200, model=MODEL, runtime=RUNTIME), build_prefill),
    "decode": (DecodeConfig(num_blocks=200, model=MODEL, runtime=RUNTIME), build_decode),
    "encoder": (EncoderConfig(runtime=RUNTIME), build_encoder),
}
ROLES = {
    "prefill": pb.ENGINE_ROLE_PREFILL,
    "decode": pb.ENGINE_ROLE_DECODE,
    "encoder": pb.ENGINE_ROLE_VISION,
}


@pytest.fixture(params=sorted(ENGINES))
async def engine(request) -> AsyncIterator[tuple[str, Runtime[Any], Any]]:
    config, build = ENGINES[request.param]
    async with running(request.param, config, build) as runtime:
        stub = rpc.EngineControlServiceStub(runtime.channels.get(runtime.address))
        yield request.param, runtime, stub


async def test_an_engine_says_what_it_is(engine):
    name, runtime, stub = engine
    described = await call(stub.Describe, pb.DescribeRequest(), timeout_s=5)
    assert described.role == ROLES[name]
    assert described.instance_id == runtime.instance_id
    assert described.boot_id == runtime.boot_id
    assert described.engine == "sim"
    if name != "encoder":
        assert described.layout_signature == MODEL.layout().signature
        assert described.kv_layout.ring_tokens == 22
        assert runtime.member.fingerprint["layout"] == described.layout_signature
        assert len(described.ranks) == described.dp_size == 1


async def test_load_comes_at_once_and_keeps_coming(engine):
    _, runtime, stub = engine
    reports = []
    async with stream_call(stub.WatchLoad, pb.WatchLoadRequest(interval_ms=20)) as stream:
        async for report in stream:
            reports.append(report)
            if len(reports) == 3:
                break
    assert [report.version for report in reports] == [1, 2, 3]
    assert all(report.boot_id == runtime.boot_id for report in reports)
    assert all(report.ranks[0].accepting for report in reports)
    times = [report.monotonic_ms for report in reports]
    assert times == sorted(times)


async def test_tunables_are_versioned_and_all_or_nothing(engine):
    _, _, stub = engine
    answer = await call(stub.Configure, pb.ConfigureRequest(version=5), timeout_s=5)
    assert answer.version == 5
    again = await call(stub.Configure, pb.ConfigureRequest(version=5), timeout_s=5)
    assert again.version == 5
    with pytest.raises(Failure) as failure:
        await call(stub.Configure, pb.ConfigureRequest(version=4), timeout_s=5)
    assert failure.value.reason is Reason.CONFLICT


async def test_a_measurement_ends_with_its_result_or_says_that_there_is_none(engine):
    name, _, stub = engine
    what = {"prefill": "cost_model", "decode": "decode_curve", "encoder": "nothing"}[name]
    reports = []

    async def measure(wanted):
        async with stream_call(stub.Profile, pb.ProfileRequest(what=wanted), timeout_s=10) as it:
            async for report in it:
                reports.append(report)

    with pytest.raises(Failure) as failure:
        await measure("something else")
    assert failure.value.reason is Reason.UNSUPPORTED_FEATURE
    if name == "encoder":
        return
    await measure(what)
    assert reports[-1].points_done == reports[-1].points_total
    if name == "prefill":
        assert reports[-1].cost_model.k1_ns == pytest.approx(MODEL.cost.k1_ns, rel=0.05)
    else:
        assert reports[-1].decode_curve[0].base_ms > 0


async def test_an_idle_engine_drains_at_once_and_takes_nothing_more(engine):
    _name, runtime, stub = engine
    request = pb.DrainRequest(grace_ms=1, hard_ms=1000)
    states = []
    async with stream_call(stub.Drain, request, timeout_s=10) as stream:
        async for progress in stream:
            states.append(progress.state)
            assert progress.lost == 0
    assert states[-1] == pb.DRAIN_STATE_STOPPED
    async with stream_call(stub.WatchLoad, pb.WatchLoadRequest()) as stream:
        report = await stream.read()
    assert not report.ranks[0].accepting
    assert not runtime.is_ready
    async with stream_call(stub.Drain, request, timeout_s=10) as stream:
        again = await stream.read()
    assert again.state == pb.DRAIN_STATE_STOPPED
