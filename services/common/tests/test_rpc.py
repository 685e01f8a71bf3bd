"""Server and client on loopback: failures, deadlines, context, cancellation, draining."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pelagos.lb.v1 import decode_lb_pb2 as pb
from pelagos.lb.v1 import decode_lb_pb2_grpc as rpc
from pelagos.recipe.v1 import recipe_pb2_grpc

from services.common import tracing
from services.common.call import Call, calling, current_call, from_metadata, to_metadata
from services.common.config import ConfigError
from services.common.errors import Failure, Reason, Scope
from services.common.metrics import Metrics
from services.common.rpc_client import (
    Channels,
    RetryPolicy,
    StreamCall,
    call,
    channel_options,
    stream_call,
)
from services.common.rpc_server import (
    RpcServer,
    RpcServerConfig,
    _check_listen,
    _options,
    is_loopback,
)
from services.common.tls import TlsFiles

SERVICE = "test.Echo"


@dataclass
class Echo:
    """Four methods, one of each kind, over plain bytes; the request says what to do."""

    calls: list[Call] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    num_attempts: int = 0

    async def act(self, request: bytes) -> bytes:
        self.num_attempts += 1
        self.calls.append(current_call())
        self.started.set()
        if request == b"fail":
            raise Failure(Reason.ENGINE_FULL, "full", {"n": "3"}, 0.25, scope=Scope.RANK)
        if request == b"flaky" and self.num_attempts < 3:
            raise Failure(Reason.BACKEND_LOST, "away")
        if request == b"bug":
            raise KeyError("the canary prompt")
        if request == b"hang":
            await self.release.wait()
        if request == b"timeout":
            async with asyncio.timeout(0):
                await asyncio.sleep(60)
        return request

    async def unary(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await self.act(request)
        finally:
            self.ended.set()

    async def down(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            while True:
                yield await self.act(b"" if request in (b"fail", b"bug") else request)
                if request in (b"fail", b"bug"):
                    await self.act(request)
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def up(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        return b",".join([await self.act(request) async for request in requests])

    async def both(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                yield await self.act(request)
        finally:
            self.ended.set()


def register(servicer: Echo, server) -> None:
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary),
        "Down": grpc.unary_stream_rpc_method_handler(servicer.down),
        "Up": grpc.stream_unary_rpc_method_handler(servicer.up),
        "Both": grpc.stream_stream_rpc_method_handler(servicer.both),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@dataclass
class Stub:
    """What generated code would make."""

    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.Unary = self.channel.unary_unary(f"/{SERVICE}/Unary")
        self.Down = self.channel.unary_stream(f"/{SERVICE}/Down")
        self.Up = self.channel.stream_unary(f"/{SERVICE}/Up")
        self.Both = self.channel.stream_stream(f"/{SERVICE}/Both")


@dataclass
class World:
    server: RpcServer
    echo: Echo
    channels: Channels
    stub: Stub


@pytest.fixture
async def world() -> AsyncIterator[World]:
    echo = Echo()
    server = RpcServer("127.0.0.1:0", RpcServerConfig(default_deadline_s=20))
    server.add(register, echo, while_draining=("Both",))
    address = server.bind()
    await server.start()
    await server.set_serving(True)
    channels = Channels()
    yield World(server, echo, channels, Stub(channels.get(address)))
    await channels.close()
    await server.stop(0)


async def failure_of(awaitable) -> Failure:
    with pytest.raises(Failure) as caught:
        await asyncio.wait_for(awaitable, 30)
    return caught.value


async def read_all(stream: StreamCall) -> list[bytes]:
    return [item async for item in stream]


async def test_a_failure_arrives_as_it_was_raised_from_every_kind_of_method(world: World) -> None:
    async def up() -> None:
        async with stream_call(world.stub.Up, timeout_s=20) as stream:
            await stream.write(b"fail")
            await stream.done_writing()
            await stream.response()

    async def down() -> None:
        async with stream_call(world.stub.Down, b"fail", timeout_s=20) as stream:
            await read_all(stream)

    async def both() -> None:
        async with stream_call(world.stub.Both, timeout_s=20) as stream:
            await stream.write(b"fail")
            await stream.read()

    for make in (lambda: call(world.stub.Unary, b"fail"), up, down, both):
        failure = await failure_of(make())
        assert failure.reason is Reason.ENGINE_FULL
        assert failure.message == "full"
        assert failure.metadata == {"n": "3"}
        assert failure.retry_after_s == 0.25
        assert failure.scope is Scope.RANK
    assert world.server.num_calls == 0


async def test_every_call_is_counted_once_by_how_it_ended() -> None:
    metrics = Metrics("x")
    server = RpcServer("127.0.0.1:0", metrics=metrics)
    server.add(register, Echo())
    address = server.bind()
    await server.start()
    channels = Channels()
    stub = Stub(channels.get(address))
    await call(stub.Unary, b"x")
    await failure_of(call(stub.Unary, b"fail"))
    await failure_of(call(stub.Unary, b"bug"))
    async with stream_call(stub.Both, timeout_s=20) as stream:
        await stream.write(b"x")
        await stream.done_writing()
        assert await read_all(stream) == [b"x"]
    await channels.close()
    await server.stop(1)
    text = metrics.render().decode()
    for method, reason in (
        *(("Unary", "ok"), ("Unary", "ENGINE_FULL"), ("Unary", "INTERNAL"), ("Both", "ok")),
    ):
        name = f'{{method="/{SERVICE}/{method}",reason="{reason}"}}'
        assert f"pelagos_x_rpc_calls_total{name} 1.0" in text
    assert f'pelagos_x_rpc_unary_seconds_count{{method="/{SERVICE}/Unary"}} 3.0' in text


async def test_s_09_an_unforeseen_failure_tells_the_caller_nothing_but_a_trace_id(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    with tracing.in_memory(), calling(Call("req-1", traceparent=traceparent)):
        failure = await failure_of(call(world.stub.Unary, b"bug"))
    assert failure.reason is Reason.INTERNAL
    assert "canary" not in str(failure)
    assert "ab" * 16 in failure.message
    record = next(r for r in caplog.records if r.message == "unforeseen failure")
    assert record.levelno == logging.ERROR
    assert record.trace_id == "ab" * 16  # type: ignore[attr-defined]
    assert record.request_id == "req-1"  # type: ignore[attr-defined]
    async with stream_call(world.stub.Down, b"bug", timeout_s=20) as stream:
        assert (await failure_of(read_all(stream))).reason is Reason.INTERNAL


async def test_id_tenant_and_trace_go_along_with_every_call(world: World) -> None:
    sent = Call("req-7", "tenant-1", f"00-{'1' * 32}-{'2' * 16}-01")
    with calling(sent):
        assert await call(world.stub.Unary, b"x") == b"x"
        async with stream_call(world.stub.Both, timeout_s=20) as stream:
            await stream.write(b"x")
            assert await stream.read() == b"x"
    for seen in world.echo.calls:
        assert (seen.request_id, seen.tenant) == ("req-7", "tenant-1")
        assert seen.traceparent.split("-")[1] == "1" * 32
    assert current_call() == Call()


async def test_a_stream_that_answers_one_request_has_a_span_and_a_shared_one_has_none(
    world: World,
) -> None:
    with tracing.in_memory() as exporter:
        with calling(Call("req-7")), tracing.span("outer") as outer:
            async with stream_call(world.stub.Down, b"x", timeout_s=20) as stream:
                assert await stream.read() == b"x"
            await asyncio.wait_for(world.echo.ended.wait(), 30)
            async with stream_call(world.stub.Both, timeout_s=20) as stream:
                await stream.write(b"x")
                assert await stream.read() == b"x"
            async with stream_call(world.stub.Down, b"fail", timeout_s=20) as stream:
                await failure_of(read_all(stream))
        async with stream_call(world.stub.Down, b"x", timeout_s=20) as stream:
            assert await stream.read() == b"x"  # outside of any trace
        async with asyncio.timeout(30):
            while True:
                spans = exporter.get_finished_spans()
                if len(spans) >= 3:
                    break
                await asyncio.sleep(0.01)
    down = [span for span in spans if span.name == f"{SERVICE}/Down"]
    assert len(down) == 2
    assert len(spans) == 3
    assert all(span.parent.span_id == outer.get_span_context().span_id for span in down)
    reasons = [(span.attributes or {}).get("error.type") for span in down]
    assert "ENGINE_FULL" in reasons


async def test_p_05_the_deadline_shrinks_on_its_way(world: World) -> None:
    with calling(Call("r").with_timeout(10)) as outer:
        await call(world.stub.Unary, b"x", margin_s=2.0, timeout_s=60)
        seen = world.echo.calls[0]
        assert seen.deadline_s <= outer.deadline_s - 2.0 + 0.5
    with calling(Call("r").with_timeout(0)):
        failure = await failure_of(call(world.stub.Unary, b"x"))
    assert failure.reason is Reason.DEADLINE
    assert len(world.echo.calls) == 1  # nothing was sent that could not be answered


async def test_p_05_a_call_without_a_deadline_gets_the_default() -> None:
    echo = Echo()
    server = RpcServer("127.0.0.1:0", RpcServerConfig(default_deadline_s=0.05))
    server.add(register, echo)
    address = server.bind()
    await server.start()
    channels = Channels()
    stub = Stub(channels.get(address))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Unary(b"hang")
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert echo.ended.is_set()
    await channels.close()
    await server.stop(0)


async def test_a_timeout_inside_a_handler_is_its_own_bug(world: World) -> None:
    failure = await failure_of(call(world.stub.Unary, b"timeout", timeout_s=20))
    assert failure.reason is Reason.INTERNAL


async def test_an_expired_call_ends_on_both_sides(world: World) -> None:
    failure = await failure_of(call(world.stub.Unary, b"hang", timeout_s=0.1))
    assert failure.reason is Reason.DEADLINE
    await asyncio.wait_for(world.echo.ended.wait(), 30)


async def test_p_06_leaving_a_stream_early_ends_its_handler(world: World) -> None:
    async with stream_call(world.stub.Down, b"x", timeout_s=None) as stream:
        async for _ in stream:
            break
    await asyncio.wait_for(world.echo.ended.wait(), 30)


async def test_p_06_a_cancelled_task_cancels_its_unary_call(world: World) -> None:
    task = asyncio.ensure_future(call(world.stub.Unary, b"hang"))
    await asyncio.wait_for(world.echo.started.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(world.echo.ended.wait(), 30)


@pytest.mark.parametrize("method", ["Unary", "Up"])
async def test_a_call_whose_channel_somebody_closes_fails_and_cancels_no_task(
    world: World, method: str
) -> None:
    async def called() -> object:
        if method == "Unary":
            return await call(world.stub.Unary, b"hang")
        async with stream_call(world.stub.Up, timeout_s=20) as stream:
            await stream.write(b"hang")
            return await stream.response()

    task = asyncio.ensure_future(called())
    await asyncio.wait_for(world.echo.started.wait(), 30)
    await world.channels.close()
    assert (await failure_of(task)).reason is Reason.CLIENT_CANCELLED


async def test_a_write_after_the_end_says_how_the_call_ended(world: World) -> None:
    async with stream_call(world.stub.Both, timeout_s=20) as stream:
        await stream.write(b"fail")
        assert (await failure_of(stream.read())).reason is Reason.ENGINE_FULL
        assert (await failure_of(stream.write(b"x"))).reason is Reason.ENGINE_FULL


async def test_the_end_of_a_stream_reads_as_none(world: World) -> None:
    async with stream_call(world.stub.Both, timeout_s=20) as stream:
        await stream.write(b"x")
        await stream.done_writing()
        assert await stream.read() == b"x"
        assert await stream.read() is None


async def test_p_04_a_draining_server_refuses_new_calls_and_lets_old_ones_go_on(
    world: World,
) -> None:
    running = asyncio.ensure_future(call(world.stub.Unary, b"hang"))
    await asyncio.wait_for(world.echo.started.wait(), 30)
    await world.server.refuse_new()
    assert (await failure_of(call(world.stub.Unary, b"x"))).reason is Reason.DRAINING
    async with stream_call(world.stub.Down, b"x", timeout_s=20) as stream:
        assert (await failure_of(stream.read())).reason is Reason.DRAINING
    async with stream_call(world.stub.Both, timeout_s=20) as stream:  # named in while_draining
        await stream.write(b"x")
        assert await stream.read() == b"x"
    world.echo.release.set()
    assert await running == b"hang"


async def test_health_is_per_service_and_off_while_draining(world: World) -> None:
    stub = health_pb2_grpc.HealthStub(world.channels.get(world.server.address))
    kinds = health_pb2.HealthCheckResponse

    async def status(service: str) -> int:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    assert await status("") == await status(SERVICE) == kinds.SERVING
    await world.server.set_serving(False, SERVICE)
    assert (await status(""), await status(SERVICE)) == (kinds.SERVING, kinds.NOT_SERVING)
    await world.server.refuse_new()
    assert await status("") == kinds.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await status("nobody")


async def test_reflection_names_the_services(world: World) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    channel = world.channels.get(world.server.address)
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    async with stream_call(stub.ServerReflectionInfo, timeout_s=20) as stream:
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await stream.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_p_11_only_a_policy_retries_and_only_so_often(world: World) -> None:
    failure = await failure_of(call(world.stub.Unary, b"flaky"))
    assert failure.reason is Reason.BACKEND_LOST
    assert world.echo.num_attempts == 1
    policy = RetryPolicy(max_attempts=3, first_wait_s=0.001)
    assert await call(world.stub.Unary, b"flaky", retry=policy) == b"flaky"
    assert world.echo.num_attempts == 3
    world.echo.num_attempts = 0
    assert (await failure_of(call(world.stub.Unary, b"bug", retry=policy))).reason is (
        Reason.INTERNAL
    )
    assert world.echo.num_attempts == 1


async def test_an_address_where_nobody_listens_is_a_lost_backend(world: World) -> None:
    spare = RpcServer("127.0.0.1:0")
    address = spare.bind()
    await spare.stop(0)
    failure = await failure_of(call(Stub(world.channels.get(address)).Unary, b"x"))
    assert failure.reason is Reason.BACKEND_LOST


async def test_a_message_over_the_limit_is_refused_as_a_request() -> None:
    echo = Echo()
    server = RpcServer("127.0.0.1:0", RpcServerConfig(max_message_bytes=1000))
    server.add(register, echo)
    address = server.bind()
    await server.start()
    channels = Channels()
    failure = await failure_of(call(Stub(channels.get(address)).Unary, bytes(2000)))
    assert failure.reason is Reason.INVALID_REQUEST
    assert not echo.calls
    await channels.close()
    await server.stop(0)


async def test_two_thousand_calls_at_once_are_all_answered(world: World) -> None:
    """gRPC's default cancels some of a burst over 1,000 at random."""
    answers = await asyncio.wait_for(
        asyncio.gather(
            *(call(world.stub.Unary, str(i).encode(), timeout_s=60) for i in range(2000))
        ),
        90,
    )
    assert answers == [str(i).encode() for i in range(2000)]


async def test_one_call_too_many_is_refused_and_the_others_go_on() -> None:
    echo = Echo()
    server = RpcServer("127.0.0.1:0", RpcServerConfig(max_calls=3))
    server.add(register, echo)
    address = server.bind()
    await server.start()
    channels = Channels()
    stub = Stub(channels.get(address))
    running = [asyncio.ensure_future(call(stub.Unary, b"hang", timeout_s=60)) for _ in range(2)]
    async with stream_call(stub.Both, timeout_s=60) as stream:
        await stream.write(b"x")
        assert await stream.read() == b"x"
        while server.num_calls < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        failure = await failure_of(call(stub.Unary, b"x", timeout_s=60))
        assert failure.reason is Reason.OVERLOADED
        assert failure.retry_after_s > 0
        async with stream_call(stub.Down, b"x", timeout_s=60) as refused:
            assert (await failure_of(refused.read())).reason is Reason.OVERLOADED
        await stream.write(b"y")
        assert await stream.read() == b"y"
        echo.release.set()
        assert await asyncio.gather(*running) == [b"hang"] * 2
        await stream.done_writing()
        assert await stream.read() is None
    assert await call(stub.Unary, b"z", timeout_s=60) == b"z"
    await channels.close()
    await server.stop(0)


def test_a_server_that_takes_no_call_is_a_configuration_error() -> None:
    with pytest.raises(ValueError, match="max_calls"):
        RpcServerConfig(max_calls=0)


async def test_channels_are_shared_per_address_and_can_be_forgotten() -> None:
    channels = Channels()
    assert channels.get("127.0.0.1:1") is channels.get("127.0.0.1:1")
    channels.get("127.0.0.1:2")
    assert channels.num_channels == 2
    await channels.forget("127.0.0.1:1")
    await channels.forget("127.0.0.1:9")
    assert channels.num_channels == 1
    await channels.close()


async def test_generated_servicers_are_named_and_unimplemented_methods_say_so() -> None:
    server = RpcServer("127.0.0.1:0")
    server.add(rpc.add_DecodeLbServiceServicer_to_server, rpc.DecodeLbServiceServicer())
    server.add(
        recipe_pb2_grpc.add_RecipeServiceServicer_to_server,
        recipe_pb2_grpc.RecipeServiceServicer(),
    )
    assert server.service_names == (
        "pelagos.lb.v1.DecodeLbService",
        "pelagos.recipe.v1.RecipeService",
    )
    address = server.bind()
    await server.start()
    channels = Channels()
    stub = rpc.DecodeLbServiceStub(channels.get(address))
    assert isinstance(await failure_of(call(stub.PickRank, pb.PickRankRequest())), Failure)
    await channels.close()
    await server.stop(0)


# ---- where it may listen ----------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "example.org:1"])
async def test_s_03_plain_text_off_loopback_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="not on loopback"):
        RpcServer(listen).bind()
    # The flag that allows it says what it weakens; nothing is bound here.
    _check_listen(listen, RpcServerConfig(plaintext_off_loopback_is_insecure=True))


def test_loopback_is_recognized() -> None:
    for listen in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/x"):
        assert is_loopback(listen)
    for listen in ("0.0.0.0:1", "[::]:1", "192.168.0.1:1", "localhost.evil.org:1", ":1"):
        assert not is_loopback(listen)


async def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    first = RpcServer("127.0.0.1:0")
    address = first.bind()
    with pytest.raises(ConfigError, match="cannot listen"):
        RpcServer(address).bind()
    await first.stop(0)
    with pytest.raises(ConfigError, match="not host:port"):
        RpcServer("127.0.0.1").bind()


async def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    server = RpcServer(f"unix:{tmp_path}/s")
    server.add(register, Echo())
    await server.start()
    channels = Channels()
    assert await call(Stub(channels.get(server.address)).Unary, b"x") == b"x"
    await channels.close()
    await server.stop(0)


def test_tls_needs_all_three_files() -> None:
    assert not TlsFiles().enabled
    with pytest.raises(ValueError, match="tls needs"):
        TlsFiles(certificate="a")


# ---- the options of the toolbox, which P-20 and bursts depend on --------------------------------


def test_server_and_channel_have_every_option_of_the_toolbox() -> None:
    server = dict(_options(RpcServerConfig()))
    assert server["grpc.server.max_pending_requests"] == 100_000
    assert server["grpc.server.max_pending_requests_hard_limit"] == 100_000
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 500
    assert server["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.keepalive_time_ms"] == 20_000
    assert server["grpc.keepalive_timeout_ms"] == 10_000
    assert server["grpc.http2.ping_timeout_ms"] == 10_000
    channel = dict(channel_options())
    assert channel["grpc.keepalive_time_ms"] == 2000
    assert channel["grpc.keepalive_timeout_ms"] == 1000
    assert channel["grpc.http2.ping_timeout_ms"] == 1000
    assert channel["grpc.http2.max_pings_without_data"] == 0
    limit = 16 * 1024 * 1024
    assert server["grpc.max_receive_message_length"] == limit
    assert channel["grpc.max_receive_message_length"] == limit


def test_metadata_goes_there_and_back() -> None:
    sent = Call("r", "t", "00-a-b-01")
    assert from_metadata(to_metadata(sent)) == sent
    assert from_metadata(None) == Call()
    assert from_metadata([("x-pelagos-request-id", b"\xff"), ("other", "1")]) == Call()
    assert len(from_metadata([("x-pelagos-request-id", "x" * 5000)]).request_id) == 128
