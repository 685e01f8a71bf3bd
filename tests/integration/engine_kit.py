"""Real prefill, decode, balancers and store in one process, for tests of the engines."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pelagos.engine.v1 import records_pb2 as pb

from services.common.rpc_client import Channels
from services.common.service import Runtime, RuntimeConfig, running
from services.common.store_memory import MemoryStore
from services.decode.client import DecodeClient
from services.decode.config import DecodeConfig
from services.decode.engine import DecodeEngine
from services.decode.main import build_engine as build_decode
from services.engine.config import ModelConfig
from services.engine.layout import Geometry
from services.engine.records import tokens_from_event
from services.engine.requests import RequestKey
from services.engine.sim.config import SimConfig
from services.engine.sim.tokens import Scripts
from services.kvstore.config import StoreConfig
from services.kvstore.store.main import build as build_store
from services.lb.decode.config import DecodeLbConfig
from services.lb.decode.main import build as build_decode_lb
from services.prefill.client import PrefillClient
from services.prefill.config import PrefillConfig
from services.prefill.engine import PrefillEngine
from services.prefill.main import build_engine as build_prefill

# Blocks of 16: a prompt of a few hundred tokens has many.
GEOMETRY = Geometry(block_tokens=16, window=16, keep_tokens=24)
ROOT = bytes(range(32))


def model(**sim: Any) -> ModelConfig:
    settings = {"mode": "hash", "stop_every": 0, "time_scale": 0.0} | sim
    return ModelConfig(geometry=GEOMETRY, max_model_len=4096, sim=SimConfig(**settings))


@dataclass
class Engine:
    """One instance: its runtime, and the engine inside for looking at counts."""

    runtime: Runtime[Any]
    core: Any
    stack: AsyncExitStack

    @property
    def address(self) -> str:
        return self.runtime.address

    async def kill(self) -> None:
        """Stops the instance where it stands; its connections break. Nothing is handed over."""
        for task in self.runtime._tasks:
            if task.get_name() == "engine":
                task.cancel()
        await self.stack.aclose()


class Gate:
    """Holds engines' steps, so that a test decides what happens before the next one.

    `after`: how many decode steps of each engine pass before the gate.
    """

    def __init__(self, *engines: Engine, after: int = 0) -> None:
        self._opened = asyncio.Event()
        for engine in engines:
            for rank in engine.core.ranks:
                rank.runner.result = self._held(rank.runner.result, after)
                rank.runner.prefill = self._held(rank.runner.prefill, 0)

    def _held(self, wait: Any, after: int) -> Any:
        passed = itertools.count()

        async def held(what: Any) -> Any:
            if next(passed) >= after:
                await self._opened.wait()
            return await wait(what)

        return held

    def open(self) -> None:
        self._opened.set()


@dataclass
class Cluster:
    """What is running. Instances may be added while it runs."""

    store: MemoryStore
    stack: AsyncExitStack
    channels: Channels
    scripts: Scripts = field(default_factory=Scripts)
    prefills: list[Engine] = field(default_factory=list)
    decodes: list[Engine] = field(default_factory=list)
    prefill_config: PrefillConfig = field(default_factory=PrefillConfig)
    decode_config: DecodeConfig = field(default_factory=DecodeConfig)

    async def add_prefill(self, **changes: Any) -> Engine:
        config = replace(self.prefill_config, **changes)

        async def build(runtime: Runtime[PrefillConfig]) -> PrefillEngine:
            return await build_prefill(runtime, self.scripts)

        engine = await self._add("prefill", config, build)
        self.prefills.append(engine)
        return engine

    async def add_decode(self, **changes: Any) -> Engine:
        config = replace(self.decode_config, **changes)

        async def build(runtime: Runtime[DecodeConfig]) -> DecodeEngine:
            return await build_decode(runtime, self.scripts)

        engine = await self._add("decode", config, build)
        self.decodes.append(engine)
        return engine

    async def _add(self, name: str, config: Any, build: Any) -> Engine:
        stack = AsyncExitStack()
        cores: list[Any] = []

        async def keep(runtime: Runtime[Any]) -> None:
            cores.append(await build(runtime))

        runtime = await stack.enter_async_context(running(name, config, keep, store=self.store))
        engine = Engine(runtime, cores[0], stack)
        self.stack.push_async_callback(stack.aclose)
        return engine


@asynccontextmanager
async def cluster(
    tmp_path: Path,
    *,
    prefills: int = 1,
    decodes: int = 1,
    with_store: bool = False,
    payload_bytes: int = 4096,
    sim: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> AsyncIterator[Cluster]:
    """Starts engines and the decode balancer around one in-memory membership store."""
    runtime = RuntimeConfig(uvloop=False)
    stack = AsyncExitStack()
    store = MemoryStore()
    channels = Channels()
    found = Cluster(
        store,
        stack,
        channels,
        prefill_config=replace(
            # A machine that is slow to answer is no part of what is tested with this.
            PrefillConfig(
                model=model(**sim or {}), num_blocks=300, runtime=runtime, load_base_s=30.0
            ),
            **prefill or {},
        ),
        decode_config=replace(
            DecodeConfig(model=model(**sim or {}), num_blocks=300, runtime=runtime), **decode or {}
        ),
    )
    async with stack:
        stack.push_async_callback(channels.close)
        lb = await stack.enter_async_context(
            running("decode-lb", DecodeLbConfig(runtime=runtime), build_decode_lb, store=store)
        )
        if with_store:
            config = StoreConfig(
                dir=tmp_path / "kv",
                capacity_bytes=64 << 20,
                segment_bytes=4 << 20,
                payload_bytes=payload_bytes,
                runtime=runtime,
            )
            await stack.enter_async_context(running("store", config, build_store, store=store))
        for _ in range(decodes):
            await found.add_decode()
        for _ in range(prefills):
            await found.add_prefill()
        await lb.view.wait_for(lambda view: view.leader("decode-lb") is not None)
        yield found


def prompt_ids(num: int, seed: int = 0) -> array[int]:
    rng = random.Random(seed)
    return array("I", [rng.randrange(3, 128000) for _ in range(num)])


def spec(
    request_id: str,
    ids: array[int],
    *,
    max_tokens: int = 40,
    attempt: int = 0,
    resumed: int = 0,
    signature: str = "",
    **sampling: Any,
) -> pb.RequestSpec:
    fields = {"temperature": 1.0, "seed": 5, "stop_token_ids": [1]} | sampling
    return pb.RequestSpec(
        key=pb.RequestKey(request_id=request_id, attempt=attempt),
        prompt_tokens=ids.tobytes(),
        num_resumed_tokens=resumed,
        sampling=pb.Sampling(max_tokens=max_tokens, **fields),
        namespace=pb.Namespace(tenant="acme", root=ROOT),
        layout_signature=signature,
    )


@dataclass
class Answer:
    """What one request gave, over prefill and decode."""

    token_ids: list[int] = field(default_factory=list)
    first_index: int | None = None
    end: str = ""
    event: pb.RequestEvent = field(default_factory=pb.RequestEvent)
    moves: list[pb.Moved] = field(default_factory=list)

    def take(self, event: pb.RequestEvent) -> None:
        """Adds an event; a gap or a repeat in the indices is an error (T8)."""
        if event.HasField("tokens"):
            ids = [token.token_id for token in tokens_from_event(event.tokens)]
            if self.first_index is None:
                self.first_index = event.tokens.first_index
            assert event.tokens.first_index == self.first_index + len(self.token_ids)
            self.token_ids += ids
        kind = event.WhichOneof("event")
        if kind == "moved":
            self.moves.append(event.moved)
        if kind in ("finished", "failed", "moved"):
            self.end, self.event = kind, event


async def ask(found: Cluster, request: pb.RequestSpec, engine: Engine | None = None) -> Answer:
    """Runs a request directly on a prefill engine and follows it wherever it goes."""
    answer = Answer()
    address = (engine or found.prefills[0]).address
    async with PrefillClient(found.channels).run(address, request) as events:
        async for event in events:
            answer.take(event)
    while answer.end == "moved":
        moved = answer.moves[-1]
        assert moved.next_index == (answer.first_index or 0) + len(answer.token_ids)
        key = RequestKey(request.key.request_id, 0, moved.epoch, request.key.attempt)
        client = DecodeClient(found.channels)
        answer.end = ""
        async with (
            client.attach(moved.address, "entrypoint-t") as channel,
            channel.subscribe(key, moved.next_index) as stream,
        ):
            async for event in stream:
                answer.take(event)
    return answer


async def eventually(condition, what):
    """Waits for something that another task brings about; the test's deadline bounds it."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came: {what}")


def held(found: Cluster) -> dict[str, int]:
    """Everything requests may hold, over all instances; all 0 when nothing runs."""
    counts: dict[str, int] = {}
    for engine in [*found.prefills, *found.decodes]:
        for owner, kinds in engine.runtime.census.snapshot().items():
            if owner.startswith(("prefill.", "decode.")):
                for kind, value in kinds.items():
                    counts[f"{owner}.{kind}"] = counts.get(f"{owner}.{kind}", 0) + value
    for engine in found.prefills:
        counts["outstanding_ns"] = counts.get("outstanding_ns", 0) + engine.core.ledger.total_ns
    for engine in found.decodes:
        quarantined = sum(rank.blocks.num_quarantined for rank in engine.core.ranks)
        counts["quarantined"] = counts.get("quarantined", 0) + quarantined
    for engine in [*found.prefills, *found.decodes]:
        open_ = sum(rank.runner.num_sequences for rank in engine.core.ranks)
        counts["device"] = counts.get("device", 0) + open_
    return {name: value for name, value in counts.items() if value}


async def nothing_held(found: Cluster) -> None:
    await eventually(lambda: not held(found), f"an empty census, not {held(found)}")


async def move_while_running(found: Cluster, request: pb.RequestSpec) -> Answer:
    """Runs a request and moves it to the other decode engine in the middle of its steps."""
    gate = Gate(*found.decodes)
    task = asyncio.create_task(ask(found, request))
    first, second = found.decodes
    await eventually(lambda: first.core.num_running + second.core.num_running, "a start")
    source, target = (first, second) if first.core.num_running else (second, first)
    (_, sequence) = source.core.find(RequestKey(request.key.request_id))
    export = asyncio.create_task(
        DecodeClient(found.channels).export(
            source.address, RequestKey(request.key.request_id), target.address
        )
    )
    await eventually(lambda: sequence.paused, "a pause")
    gate.open()
    moved = await export
    assert moved is not None
    assert source.core.num_moved == 1
    answer = await task
    assert len(answer.moves) == 2
    return answer
