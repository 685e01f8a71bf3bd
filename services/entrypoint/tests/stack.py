"""An entrypoint and everything around it in one process: real gRPC on ports of the kernel's choice.

The neighbours are small servers written from the contracts: a codec whose ids are bytes, a balancer
that places at once, engines whose tokens are a function of the index. What they do on request —
die, stall, refuse, lose their place — is what the tests are about.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pelagos.decode.v1 import decode_pb2, decode_pb2_grpc
from pelagos.engine.v1 import engine_control_pb2 as control
from pelagos.engine.v1 import engine_control_pb2_grpc
from pelagos.engine.v1 import records_pb2 as records
from pelagos.kvstore.v1 import check_pb2, check_pb2_grpc
from pelagos.lb.v1 import prefill_lb_pb2, prefill_lb_pb2_grpc
from pelagos.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from pelagos.recipe.v1 import recipe_pb2 as recipe
from pelagos.recipe.v1 import recipe_pb2_grpc
from pelagos.so_compiler.v1 import so_compiler_pb2, so_compiler_pb2_grpc

from services.common.drain import DrainTimes
from services.common.errors import Failure, Reason
from services.common.rpc_errors import to_proto
from services.common.rpc_server import RpcServer, RpcServerConfig
from services.common.service import Runtime, RuntimeConfig, running
from services.common.store_memory import MemoryStore
from services.entrypoint.config import EntrypointConfig
from services.entrypoint.limits import MIB, Limits
from services.entrypoint.main import build

MODEL = "tiny"
STOP_ID = 0


def token_at(index: int) -> int:
    """The output of every request: letters, by index."""
    return ord("a") + index % 26


def text_of(num_tokens: int) -> str:
    """The text of that many output tokens."""
    return "".join(chr(token_at(i)) for i in range(num_tokens))


def u32(ids: Any) -> bytes:
    return b"".join(int(i).to_bytes(4, "little") for i in ids)


def ids_of(data: bytes) -> list[int]:
    return list(memoryview(data).cast("I"))


class FakeCodec(recipe_pb2_grpc.RecipeServiceServicer):
    """Ids are the bytes of the last user text; events are a reduced Chat stream."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self.num_batches = 0
        self.num_items = 0
        self.num_open = 0
        self.stop_text = ""
        self.padding = ""  # makes every event larger
        self.constraint: tuple[str, str] = ("", "")
        self.break_parse = asyncio.Event()
        self._calls: set[Any] = set()

    async def Encode(self, request, context):
        self.num_encoded += 1
        try:
            body = json.loads(request.body)
            items = body.get("messages") or body.get("input")
            text = items if isinstance(items, str) else items[-1]["content"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            error = {
                "error": {
                    "message": "invalid JSON request",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_request_error",
                }
            }
            raise Failure(
                Reason.INVALID_REQUEST, "invalid JSON request", {"body": json.dumps(error)}
            ) from None
        response = recipe.EncodeResponse(
            token_ids=u32(text.encode()),
            model=body["model"],
            model_version="v4.1",
            stream=bool(body.get("stream")),
            max_tokens=body.get("max_tokens", 8),
            temperature=1.0,
            top_p=1.0,
            stop_token_ids=u32([STOP_ID]),
            constraint_kind=self.constraint[0],
            constraint_schema=self.constraint[1],
            parse_state=json.dumps({"stream": bool(body.get("stream"))}).encode(),
        )
        return response

    async def CountTokens(self, request, context):
        text = json.loads(request.body)["messages"][-1]["content"]
        return recipe.CountTokensResponse(num_tokens=len(text.encode()))

    async def ListModels(self, request, context):
        return recipe.ListModelsResponse(
            models=[recipe.Model(name=MODEL, version="v4.1", tokenizer="bytes", vocab_size=256)]
        )

    async def Parse(self, request_iterator, context):
        streams: dict[int, _FakeParse] = {}
        async for request in request_iterator:
            self.num_batches += 1
            self.num_items += len(request.items)
            if self.break_parse.is_set():
                self.break_parse.clear()
                raise Failure(Reason.DRAINING, "the codec goes away")
            results: dict[int, recipe.ParseResult] = {}
            for item in request.items:
                kind = item.WhichOneof("step")
                if kind == "open":
                    streams[item.stream_id] = _FakeParse(item.open, self.stop_text, self.padding)
                stream = streams.get(item.stream_id)
                if stream is None:
                    continue
                if kind == "discard":
                    del streams[item.stream_id]
                    continue
                result = results.setdefault(
                    item.stream_id, recipe.ParseResult(stream_id=item.stream_id)
                )
                stream.step(kind, item, result)
                if result.done:
                    del streams[item.stream_id]
            self.num_open = len(streams)
            yield recipe.ParseResponse(results=results.values())


class _FakeParse:
    def __init__(self, opened: recipe.ParseOpen, stop_text: str, padding: str) -> None:
        self._id = opened.response_id
        self._stop = stop_text
        self._padding = padding
        self._text = ""
        self._usage: dict[str, int] = {}
        self._num_tokens = 0

    def step(self, kind: str, item: recipe.ParseItem, result: recipe.ParseResult) -> None:
        if kind == "ready":
            self._usage = {"prompt": item.ready.prompt_tokens, "cached": item.ready.cached_tokens}
            result.sse += self._frame({"role": "assistant", "content": ""})
        elif kind == "tokens":
            new = "".join(chr(i) for i in ids_of(item.tokens.token_ids))
            self._num_tokens += len(new)
            self._text += new
            result.sse += self._frame({"content": new})
            if self._stop and self._stop in self._text:
                self._text = self._text.partition(self._stop)[0]
                self._end(result, "stop")
                result.stopped = True
        elif kind == "finish":
            self._end(result, "length" if item.finish == recipe.PARSE_FINISH_LENGTH else "stop")
        elif kind == "fail":
            error = {"message": item.fail.message, "type": item.fail.reason}
            result.sse += b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
            result.sse += b"data: [DONE]\n\n"
            result.done = True

    def _end(self, result: recipe.ParseResult, reason: str) -> None:
        usage = {**self._usage, "completion": self._num_tokens}
        result.sse += self._frame({"content": ""}, reason, usage) + b"data: [DONE]\n\n"
        result.folded = json.dumps(
            {"id": self._id, "content": self._text, "finish_reason": reason, "usage": usage}
        ).encode()
        result.done = True
        result.completion_tokens = self._num_tokens

    def _frame(self, delta: dict[str, Any], reason: str | None = None, usage: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        document: dict[str, Any] = {"id": self._id, "pad": self._padding, "choices": [choice]}
        if usage is not None:
            document["usage"] = usage
        return b"data: " + json.dumps(document).encode() + b"\n\n"


class FakeCheck(check_pb2_grpc.CheckServiceServicer):
    """Answers with a fixed hit."""

    def __init__(self) -> None:
        self.requests: list[check_pb2.MatchRequest] = []
        self.hit_tokens = 0
        self.failure: Failure | None = None

    async def Match(self, request, context):
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        return check_pb2.MatchResponse(
            hit=records.CacheHit(hit_tokens=self.hit_tokens, ended_by="absent"),
            namespace=records.Namespace(tenant=request.tenant, root=b"r" * 32),
        )


class FakeCompiler(so_compiler_pb2_grpc.SoCompilerServiceServicer):
    """Compiles everything to one key."""

    def __init__(self) -> None:
        self.requests: list[so_compiler_pb2.CompileRequest] = []
        self.failure: Failure | None = None

    async def Compile(self, request, context):
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        return so_compiler_pb2.CompileResponse(artifact_key="artifact-1")


@dataclass
class FakeEngine:
    """A prefill or decode engine on its own port.

    Args:
        gate: cleared: no step is made.
        die_at: the whole server goes away before it emits the token with this index.
        end_at: output index at which the stop token comes; None: only max_tokens ends it.
    """

    role: str
    name: str
    next_engine: Callable[[], FakeEngine] | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    die_at: int | None = None
    end_at: int | None = None
    fail: Failure | None = None
    skip_index: int | None = None  # leaves out a token: an engine's bug
    step_tokens: int = 1
    window_tokens: int = 1 << 30  # stops this many tokens past the last Ack

    def __post_init__(self) -> None:
        self.gate.set()
        self.server = RpcServer("127.0.0.1:0")
        self.specs: dict[str, records.RequestSpec] = {}
        self.active: dict[tuple[str, int], int] = {}
        self.aborted: list[str] = []
        self.acked: dict[str, int] = {}
        self.num_messages = 0
        self.num_emitted = 0
        self.dead = False
        self.subscribed = asyncio.Event()
        if self.role == "prefill":
            register: Any = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        else:
            register = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        self.server.add(register, _Attach(self))
        self.server.add(
            engine_control_pb2_grpc.add_EngineControlServiceServicer_to_server, _Control(self)
        )

    async def start(self) -> FakeEngine:
        self.server.bind()
        await self.server.start()
        return self

    @property
    def address(self) -> str:
        return self.server.address

    async def kill(self) -> None:
        self.dead = True
        await self.server.stop(0)


class _Control(engine_control_pb2_grpc.EngineControlServiceServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Describe(self, request, context):
        return control.DescribeResponse(
            instance_id=self._engine.name,
            model_id=MODEL,
            weights_id="w1",
            layout_signature="ab" * 32,
            max_model_len=100_000,
            ranks=[control.RankCapacity(blocks=1000)],
            kv_layout=records.KvLayout(block_tokens=128, ring_tokens=134),
        )


class _Attach(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Attach(self, request_iterator, context):
        engine = self._engine
        streams: dict[int, tuple[str, int, int]] = {}  # id -> request, next index, epoch
        changed = asyncio.Event()

        async def read() -> None:
            async for request in request_iterator:
                kind = request.WhichOneof("command")
                if kind == "subscribe":
                    key = request.subscribe.key
                    streams[request.subscribe.stream_id] = (
                        key.request_id,
                        request.subscribe.from_index,
                        key.epoch,
                    )
                    engine.active[(key.request_id, key.epoch)] = 1
                    engine.acked[key.request_id] = request.subscribe.from_index
                    engine.subscribed.set()
                elif kind == "unsubscribe":
                    gone = streams.pop(request.unsubscribe.stream_id, None)
                    if gone is not None:
                        engine.active.pop((gone[0], gone[2]), None)
                        if request.unsubscribe.abort:
                            engine.aborted.append(gone[0])
                elif request.ack.stream_id in streams:
                    engine.acked[streams[request.ack.stream_id][0]] = request.ack.next_index
                changed.set()

        reader = asyncio.ensure_future(read())
        try:
            while True:
                await engine.gate.wait()
                events = []
                for stream_id, (request_id, index, epoch) in list(streams.items()):
                    events += self._step(streams, stream_id, request_id, index, epoch)
                if engine.die_at is not None and any(
                    e.HasField("tokens") and e.tokens.first_index >= engine.die_at for e in events
                ):
                    engine.die_at = None
                    asyncio.get_running_loop().create_task(engine.kill())
                    await asyncio.Event().wait()
                if not events:
                    changed.clear()
                    await changed.wait()
                    continue
                engine.num_messages += 1
                cls = prefill_pb2 if engine.role == "prefill" else decode_pb2
                yield cls.AttachResponse(events=events)
                await asyncio.sleep(0)
        finally:
            reader.cancel()
            for request_id, _, epoch in streams.values():
                engine.active.pop((request_id, epoch), None)

    def _step(
        self, streams: Any, stream_id: int, request_id: str, index: int, epoch: int
    ) -> list[records.RequestEvent]:
        engine = self._engine
        spec = engine.specs.get(request_id)

        def event(**kwargs: Any) -> records.RequestEvent:
            return records.RequestEvent(stream_id=stream_id, epoch=epoch, **kwargs)

        def end(**kwargs: Any) -> list[records.RequestEvent]:
            streams.pop(stream_id, None)
            engine.active.pop((request_id, epoch), None)
            return [event(**kwargs)]

        if spec is None:
            return end(failed=to_proto(Failure(Reason.NOT_FOUND, "not here")))
        if engine.fail is not None:
            return end(failed=to_proto(engine.fail))
        if index - engine.acked.get(request_id, 0) >= engine.window_tokens:
            return []
        resumed = spec.num_resumed_tokens
        usage = records.Usage(
            prompt_tokens=len(spec.prompt_tokens) // 4 - resumed,
            cached_tokens=spec.hit.hit_tokens,
            output_tokens=index + 1,
        )
        if index >= spec.sampling.max_tokens:
            return end(finished=records.Finished(reason=records.FINISH_REASON_LENGTH, usage=usage))
        if engine.end_at is not None and index >= engine.end_at:
            return end(finished=records.Finished(reason=records.FINISH_REASON_STOP, usage=usage))
        num = min(engine.step_tokens, spec.sampling.max_tokens - index)
        if engine.end_at is not None:
            num = min(num, engine.end_at - index)
        first = index + (1 if engine.skip_index == index else 0)
        ids = [token_at(i) for i in range(first, index + num)] or [token_at(first)]
        tokens = records.Tokens(first_index=first, token_ids=u32(ids))
        engine.num_emitted += len(ids)
        made = [event(tokens=tokens, usage=usage)]
        if engine.role == "prefill" and engine.next_engine is not None:
            target = engine.next_engine()
            target.specs[request_id] = spec
            moved = records.Moved(
                instance_id=target.name,
                address=target.address,
                epoch=epoch + 1,
                next_index=index + num,
            )
            return [*made, *end(moved=moved)]
        streams[stream_id] = (request_id, index + num, epoch)
        return made


class FakePrefillLb(prefill_lb_pb2_grpc.PrefillLbServiceServicer):
    """Places each request at once, in turn, on an engine that is alive."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.specs: list[records.RequestSpec] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Failure] = []
        self.num_cancelled = 0
        self.waiting = asyncio.Event()

    async def Submit(self, request, context):
        self.specs.append(request.spec)
        if self.failures:
            raise self.failures.pop(0)
        try:
            yield prefill_lb_pb2.SubmitResponse(queued=prefill_lb_pb2.Queued(position=0))
            self.waiting.set()
            await self.gate.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        alive = [engine for engine in self.engines if not engine.dead]
        if not alive:
            raise Failure(Reason.NO_INSTANCE, "no engine")
        engine = alive[len(self.specs) % len(alive)]
        engine.specs[request.spec.key.request_id] = request.spec
        yield prefill_lb_pb2.SubmitResponse(
            assigned=prefill_lb_pb2.Assigned(instance_id=engine.name, address=engine.address)
        )


@dataclass
class Stack:
    """The running parts; `client` speaks HTTP with the first key."""

    runtime: Runtime[EntrypointConfig]
    client: httpx.AsyncClient
    key: str
    codec: FakeCodec
    check: FakeCheck
    compiler: FakeCompiler
    lb: FakePrefillLb
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    base_url: str
    parts: Any

    @property
    def http(self) -> Any:
        return self.parts.http

    def chat(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}

    async def post(self, body: Any, path: str = "/v1/chat/completions", **kwargs: Any) -> Any:
        return await self.client.post(path, json=body, **kwargs)

    def census(self) -> dict[str, dict[str, int]]:
        return {
            owner: counts
            for owner, counts in self.runtime.census.snapshot().items()
            if owner.startswith("entrypoint.")
        }

    async def idle(self) -> dict[str, dict[str, int]]:
        """Returns the census once nothing is held any more."""
        await until(lambda: not any(sum(counts.values()) for counts in self.census().values()))
        return self.census()


@asynccontextmanager
async def running_stack(
    folder: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    limits: Limits | None = None,
    store: MemoryStore | None = None,
    key_folder: Path | None = None,
    **config: Any,
) -> AsyncIterator[Stack]:
    """Runs everything for as long as the block."""
    codec, check, compiler, lb = FakeCodec(), FakeCheck(), FakeCompiler(), FakePrefillLb()
    services = RpcServer("127.0.0.1:0", RpcServerConfig(max_message_bytes=128 * MIB))
    services.add(recipe_pb2_grpc.add_RecipeServiceServicer_to_server, codec)
    services.add(check_pb2_grpc.add_CheckServiceServicer_to_server, check)
    services.add(so_compiler_pb2_grpc.add_SoCompilerServiceServicer_to_server, compiler)
    services.add(prefill_lb_pb2_grpc.add_PrefillLbServiceServicer_to_server, lb)
    address = services.bind()
    await services.start()
    decode = [await FakeEngine("decode", f"decode-{i}").start() for i in range(num_decode)]
    turn = iter(range(1_000_000))

    def next_engine() -> FakeEngine:
        alive = [engine for engine in decode if not engine.dead]
        return alive[next(turn) % len(alive)]

    prefill = [
        await FakeEngine("prefill", f"prefill-{i}", next_engine).start() for i in range(num_prefill)
    ]
    lb.engines = prefill
    settings: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "http_listen": "127.0.0.1:0",
        "key_folder": str(key_folder or folder / "keys"),
        "recipe_address": address,
        "check_address": address,
        "prefill_lb_address": address,
        "so_compiler_address": address,
        "engine_addresses": tuple(engine.address for engine in prefill),
        "leader_wait_s": 0.5,
        "codec_wait_s": 0.5,
        "limits": limits or Limits(),
        "runtime": RuntimeConfig(
            drain=DrainTimes(notice_s=0.0, grace_s=10.0, handover_s=1.0),
            rpc=RpcServerConfig(max_message_bytes=128 * MIB),
        ),
    }
    settings.update(config)
    captured: dict[str, Any] = {}

    async def wire(runtime: Runtime[EntrypointConfig]) -> None:
        captured["parts"] = await build(runtime)

    try:
        async with running(
            "entrypoint", EntrypointConfig(**settings), wire, store=store
        ) as runtime:
            parts = captured["parts"]
            await until(lambda: parts.catalog.num_engines > 0)
            base_url = f"http://{runtime.member.labels['http']}"
            key = (Path(settings["key_folder"]) / "api-key").read_text().strip()
            async with httpx.AsyncClient(
                base_url=base_url,
                headers={"authorization": f"Bearer {key}"},
                timeout=30,
                trust_env=False,
                limits=httpx.Limits(max_connections=1000),
            ) as client:
                try:
                    yield Stack(
                        runtime,
                        client,
                        key,
                        codec,
                        check,
                        compiler,
                        lb,
                        prefill,
                        decode,
                        base_url,
                        parts,
                    )
                finally:
                    lb.gate.set()
                    for engine in (*prefill, *decode):
                        engine.gate.set()
    finally:
        for engine in (*prefill, *decode):
            if not engine.dead:
                await engine.kill()
        await services.stop(0)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits for something that another task or process brings about; fails when it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def sse_events(text: str) -> list[Any]:
    """The data of each event, parsed; comments are left out."""
    events = []
    for frame in text.split("\n\n"):
        for line in frame.split("\n"):
            if line.startswith("data: "):
                data = line[6:]
                events.append(data if data == "[DONE]" else json.loads(data))
    return events


def content_of(text: str) -> str:
    """The joined text of a stream of the fake codec."""
    return "".join(
        event["choices"][0]["delta"].get("content") or ""
        for event in sse_events(text)
        if isinstance(event, dict) and "choices" in event
    )
