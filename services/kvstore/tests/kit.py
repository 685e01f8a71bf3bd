"""What several tests of the store need: prompts, blocks with known bytes, running services."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pelagos.kvstore.v1 import check_pb2

from services.common.service import Runtime, running
from services.common.store_memory import MemoryStore
from services.kvstore.check import main as check_main
from services.kvstore.client import Block, CheckClient, PutStatus, StoreClient, TtlClass, chain
from services.kvstore.config import CheckConfig, StoreConfig
from services.kvstore.hash_chain import layout_fingerprint
from services.kvstore.store import main as store_main

DOCUMENT = {"block_tokens": 128, "fmt": 1, "payload_bytes": 5000}
LAYOUT = layout_fingerprint(DOCUMENT)
BLOCK = 128


def token_ids(seed: int, count: int) -> bytes:
    """Returns so many random ids; a longer call begins with a shorter one's."""
    rng = random.Random(seed)
    return struct.pack(f"<{count}I", *(rng.randrange(129_280) for _ in range(count)))


def payload_of(key: bytes, num_bytes: int = 5000) -> bytes:
    """Returns the only right bytes of a block."""
    return random.Random(key).randbytes(num_bytes)


def blocks_of(
    root: bytes, tokens: bytes, *, layout: bytes = LAYOUT, num_bytes: int = 5000, **more: object
) -> list[Block]:
    """Returns the complete blocks of a prompt, with their right bytes."""
    keys = chain(root, tokens, BLOCK)
    parents = [root, *(keys[at : at + 32] for at in range(0, len(keys), 32))]
    return [
        Block(
            key=parents[i + 1],
            parent_key=parents[i],
            index=i + 1,
            token_ids=tokens[i * BLOCK * 4 : (i + 1) * BLOCK * 4],
            layout=layout,
            payload=payload_of(parents[i + 1], num_bytes),
            **more,  # type: ignore[arg-type]
        )
        for i in range(len(keys) // 32)
    ]


def match_request(tokens: bytes, **more: object) -> check_pb2.MatchRequest:
    """Returns a match of a prompt by tenant acme."""
    fields: dict[str, object] = {
        "token_ids": tokens,
        "model_id": "model@rev0",
        "layout_fingerprint": LAYOUT,
        "tenant": "acme",
    }
    return check_pb2.MatchRequest(**(fields | more))  # type: ignore[arg-type]


@dataclass
class Stack:
    """A running CHECK and STORE."""

    check: CheckClient
    store: StoreClient
    check_runtime: Runtime[CheckConfig]
    store_runtime: Runtime[StoreConfig]

    async def put_all(self, blocks: list[Block]) -> list[PutStatus]:
        """Puts blocks, in order, and returns how each ended."""
        return list(await asyncio.gather(*(self.store.put(block) for block in blocks)))

    async def match_until(
        self,
        request: check_pb2.MatchRequest,
        is_done: Callable[[check_pb2.MatchResponse], bool],
    ) -> check_pb2.MatchResponse:
        """Matches again until it is as wanted; the test's deadline bounds the wait."""
        while True:
            answer = await self.check.match(request, timeout_s=30)
            if is_done(answer):
                return answer
            await asyncio.sleep(0.01)

    async def stored(self, request: check_pb2.MatchRequest, num_tokens: int):
        """Matches until so much is stored."""
        return await self.match_until(request, lambda a: a.hit.stored_tokens == num_tokens)


def store_config(folder: Path, **more: object) -> StoreConfig:
    """Returns a small embedded store."""
    fields: dict[str, object] = {
        "dir": folder / "kv",
        "capacity_bytes": 8 << 20,
        "segment_bytes": 1 << 20,
        "payload_bytes": 5000,
        "scrub_bytes_per_s": 0,
    }
    return StoreConfig(**(fields | more))  # type: ignore[arg-type]


@asynccontextmanager
async def stack(folder: Path, **more: object) -> AsyncIterator[Stack]:
    """Runs STORE and CHECK in this process, with real servers on loopback."""
    members = MemoryStore()
    async with (
        running("store", store_config(folder, **more), store_main.build, store=members) as store,
        running(
            "check",
            CheckConfig(store=store.address, cluster_key_file=str(folder / "cluster.key")),
            check_main.build,
            store=members,
        ) as check,
    ):
        client = StoreClient(check.channels, store.address)
        try:
            yield Stack(CheckClient(check.channels, check.address), client, check, store)
        finally:
            await client.close()


AGENT, CHAT = TtlClass.AGENT, TtlClass.CHAT


async def until(is_true: Callable[[], bool]) -> None:
    """Waits for something that another task does; the test's deadline bounds the wait."""
    while not is_true():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
