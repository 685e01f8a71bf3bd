"""The match RPC, between real processes: what CHECK and its caller spend on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from pelagos.kvstore.v1 import check_pb2

from services.common.rpc_client import Channels
from services.kvstore.benchmarks.timing import Section, Times, helper_cpu_s
from services.kvstore.client import Block, CheckClient, StoreClient, chain, layout_fingerprint

BLOCK: Final = 128
LAYOUT: Final = layout_fingerprint({"block_tokens": BLOCK, "fmt": 1, "payload_bytes": 4096})
_FLAGS: Final = ("--listen=127.0.0.1:0", "--runtime.log_level=warning", "--runtime.die_with_parent")
_SIZES: Final = (10_000, 100_000)
_CALLS: Final = 20  # of one turn
_START_S: Final = 120.0
_END_S: Final = 30.0


async def run(quick: bool) -> list[Section]:
    """Measures everything of this part."""
    section = Section(
        "Match RPC",
        "`pelagos serve check` beside a store that holds the whole prompt, over loopback: raw token"
        " bytes in, keys and hit out; the pin that CHECK sends to the store afterwards is in its"
        " time. The caller is the client that entrypoints use. A prompt of a session it has seen is"
        " recognised and not hashed again.",
    )
    with tempfile.TemporaryDirectory() as folder:
        async with _running(Path(folder)) as (check, store, pid):
            for num_tokens in _SIZES:
                tokens = os.urandom(4 * num_tokens)
                await _store_all(check, store, tokens)
                for session in ("", "session"):
                    request = _request(tokens, session)
                    times = await _measure(check, request, pid, 5 if quick else 25)
                    what = f"{num_tokens:,} tokens" + (", known session" if session else "")
                    named = {f"CHECK, {what}": times[0], f"caller, {what}": times[1]}
                    section.add(named, lambda s: 1e3 * s / _CALLS, "ms")
                    if num_tokens == _SIZES[-1] and not session:
                        cpu_ms = 1e3 * times[0].cpu / _CALLS
                        section.claim_at_most(
                            "match RPC of a 100k-token prompt, CPU of CHECK", 2, cpu_ms, " ms"
                        )
    return [section]


def _request(tokens: bytes, session: str = "") -> check_pb2.MatchRequest:
    return check_pb2.MatchRequest(
        token_ids=tokens,
        model_id="model@rev0",
        layout_fingerprint=LAYOUT,
        tenant="acme",
        session_id=session,
    )


async def _measure(
    check: CheckClient, request: check_pb2.MatchRequest, pid: int, num_turns: int
) -> tuple[Times, Times]:
    """Returns the times of CHECK and of the caller, a turn of several calls each."""
    server, caller = Times(), Times()
    for turn in range(num_turns + 1):
        server_s, caller_s, wall_s = helper_cpu_s(pid), time.process_time(), time.perf_counter()
        for _ in range(_CALLS):
            answer = await check.match(request, timeout_s=30)
            assert answer.hit.ended_by in ("cap", "swa_miss"), answer.hit.ended_by
        wall_s = time.perf_counter() - wall_s
        if turn:
            server.cpu_s.append(helper_cpu_s(pid) - server_s)
            caller.cpu_s.append(time.process_time() - caller_s)
            server.wall_s.append(wall_s)
            caller.wall_s.append(wall_s)
    return server, caller


async def _store_all(check: CheckClient, store: StoreClient, tokens: bytes) -> None:
    """Stores all blocks of the prompt, and waits until CHECK's index has the last one."""
    cold = await check.match(_request(tokens), timeout_s=30)
    root = cold.namespace.root
    keys = chain(root, tokens, BLOCK)
    parents = [root, *(keys[at : at + 32] for at in range(0, len(keys), 32))]
    for index in range(1, len(parents)):
        block = Block(
            key=parents[index],
            parent_key=parents[index - 1],
            index=index,
            token_ids=tokens[(index - 1) * BLOCK * 4 : index * BLOCK * 4],
            layout=LAYOUT,
            payload=bytes(4096),
            tenant="acme",
        )
        status = await store.put(block)
        assert status.is_stored, status
    ended_by = ""
    async with asyncio.timeout(_START_S):
        while ended_by not in ("cap", "swa_miss"):
            ended_by = (await check.match(_request(tokens), timeout_s=30)).hit.ended_by


@contextlib.asynccontextmanager
async def _running(folder: Path) -> AsyncIterator[tuple[CheckClient, StoreClient, int]]:
    """Yields clients of a CHECK and a STORE, and CHECK's pid."""
    async with contextlib.AsyncExitStack() as stack:
        store_flags = (f"--dir={folder / 'kv'}", "--payload_bytes=4096")
        _, store_at = await _serve(stack, folder, "store", store_flags)
        key = f"--cluster_key_file={folder / 'cluster.key'}"
        pid, check_at = await _serve(stack, folder, "check", (f"--store={store_at}", key))
        channels = Channels()
        store = StoreClient(channels, store_at)
        yield CheckClient(channels, check_at), store, pid
        await store.close()
        await channels.close()


async def _serve(
    stack: contextlib.AsyncExitStack, folder: Path, service: str, flags: Sequence[str]
) -> tuple[int, str]:
    """Starts a service that ends with the stack; returns its pid and address."""
    ready = folder / f"{service}.json"
    command = [sys.executable, "-m", "services.common.cli", "serve", service, *_FLAGS, *flags]
    process = await asyncio.create_subprocess_exec(*command, f"--runtime.ready_file={ready}")

    async def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    stack.push_async_callback(end)
    async with asyncio.timeout(_START_S):
        while not ready.exists():
            if process.returncode is not None:
                raise RuntimeError(f"{service} ended with {process.returncode}")
            await asyncio.sleep(0.05)
    found: dict[str, Any] = json.loads(ready.read_text("utf-8"))
    return process.pid, str(found["address"])
