"""The whole stack under load: what dies, goes away or hangs up, and what clients see of it.

Promises P-01 to P-03, P-06 and P-21; issue's list "It must show".
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.plan import StackConfig
from tests.support.background_stack import BackgroundStack, scripted_flags
from tests.support.load import body_for, new_client, stream_chat, vanish
from tests.support.speech import Speech

MODEL = "DeepSeek-V4.1-Flash"
NUM_STREAMS = 50


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def speech(scripts: Path) -> Speech:
    return Speech(scripts)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, scripts: Path) -> Iterator[BackgroundStack]:
    folder = tmp_path_factory.mktemp("stack")
    config = StackConfig(folder=folder, flags=scripted_flags(scripts, time_scale=0.5))
    with BackgroundStack(config) as running:
        yield running


def text_of(index: int) -> str:
    return f"Stream {index} counts: " + " ".join(str(number * 7 + index) for number in range(90))


async def run_streams(stack: BackgroundStack, speech: Speech, num: int, meanwhile) -> list:
    """Streams `num` answers while something happens; returns (wanted, seen) of each."""
    wanted = [text_of(index) for index in range(num)]
    ids = [speech.script(text) for text in wanted]
    bodies = [body_for(MODEL, f"{ids[index]} {'filler ' * 40}") for index in range(num)]
    async with new_client(num) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(stream_chat(client, stack, request_id, body))
            for request_id, body in zip(ids, bodies, strict=True)
        ]
        group.create_task(meanwhile())
    return [(text, task.result()) for text, task in zip(wanted, tasks, strict=True)]


def assert_nothing_was_noticed(results: list) -> None:
    for wanted, seen in results:
        assert seen.error == ""
        assert seen.text == wanted  # no gap, no repeat
        assert (seen.finish, seen.num_done) == ("stop", 1)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("service", ["prefill", "decode"])
async def test_killing_an_engine_under_fifty_streams_is_not_noticed(stack, speech, service):
    victim = stack.stack.of(service)[0]
    pid = victim.pid

    async def kill() -> None:
        await asyncio.sleep(0.8)  # in the middle: some wait, some are handed over, some stream
        victim.signal(signal.SIGKILL)

    assert_nothing_was_noticed(await run_streams(stack, speech, NUM_STREAMS, kill))
    assert victim.pid != pid


@pytest.mark.timeout(200)
async def test_p_21_ur_54_etcd_away_for_thirty_seconds_fails_no_request(stack, speech):
    failed: list = []
    num_answered = 0
    stop_at_s = time.monotonic() + 34

    async def outage() -> None:
        etcd = stack.stack.etcd
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(etcd.stop(), stack.loop))
        await asyncio.sleep(30)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(etcd.start(), stack.loop))

    async def asks(client, index: int) -> None:
        nonlocal num_answered
        while time.monotonic() < stop_at_s:
            text = f"Answer of {index}."
            seen = await stream_chat(client, stack, speech.script(text), body_for(MODEL, "Go on."))
            num_answered += 1
            if seen.error or seen.text != text:
                failed.append(seen)
            await asyncio.sleep(0.2)

    async with new_client(4) as client, asyncio.TaskGroup() as group:
        group.create_task(outage())
        for index in range(4):
            group.create_task(asks(client, index))
    assert failed == []
    assert num_answered > 20
    # Views agree again without a hand: new work is served, and the members are all there.
    assert_nothing_was_noticed(await run_streams(stack, speech, 4, lambda: asyncio.sleep(0)))


# What a process keeps for the next request: bounded, so it stops growing; not per request.
POOLED = ("channels", "threads", "descriptors")


def held(stack: BackgroundStack, pooled: bool) -> dict[str, int]:
    """What requests hold, or what is pooled for them, over all processes."""
    return {
        f"{process.name} {owner} {kind}": count
        for process in stack.stack
        for owner, kinds in stack.census(process.name).items()
        if not owner.startswith("kv")  # stored blocks are meant to stay
        for kind, count in kinds.items()
        if (kind in POOLED) == pooled and (owner, kind) != ("process", "bytes")  # P-15's
    }


async def settled(stack: BackgroundStack, most: dict[str, int], pooled: bool) -> dict[str, int]:
    """Returns what is above `most` after a bounded wait; empty when all of it came back."""
    above: dict[str, int] = {}
    for _ in range(60):
        counts = await asyncio.to_thread(held, stack, pooled)
        above = {name: count for name, count in counts.items() if count > most.get(name, 0)}
        if not above:
            break
        await asyncio.sleep(0.5)
    return above


@pytest.mark.timeout(300)
async def test_p_06_ur_30_a_thousand_clients_that_vanish_leave_nothing_behind(stack, speech):
    assert_nothing_was_noticed(await run_streams(stack, speech, 4, lambda: asyncio.sleep(0)))
    idle = await asyncio.to_thread(held, stack, False)
    rng = random.Random(7)
    gate = asyncio.Semaphore(40)

    async def one(index: int) -> None:
        async with gate:
            more = {"stream": rng.random() < 0.8}
            text = "word " * rng.choice([1, 30, 700])
            body = json.dumps(body_for(MODEL, f"{index} {text}", **more)).encode()
            await vanish(stack, body, rng.random() ** 2 * 1.5)

    async def vanishing(first: int, last: int) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(first, last):
                group.create_task(one(index))

    await vanishing(0, 400)
    assert await settled(stack, idle, False) == {}
    pooled = await asyncio.to_thread(held, stack, True)
    # A pool may still be filling by a few; a leak would add one per request.
    most = {name: count + 12 for name, count in pooled.items()}
    await vanishing(400, 1000)
    assert await settled(stack, idle, False) == {}
    assert await settled(stack, most, True) == {}
    assert_nothing_was_noticed(await run_streams(stack, speech, 4, lambda: asyncio.sleep(0)))
