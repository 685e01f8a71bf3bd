"""What users of other servers reported about cancelling, crashing and freezing: on a whole stack.

Prefill is slow here and decode of a middling speed, so that there is a middle to break things in.
Each test names its report; docs/user-reports.md lists them all.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from deploy.local.plan import StackConfig
from tests.support.background_stack import BackgroundStack, scripted_flags
from tests.support.load import Streamed, body_for, new_client, stream_chat, vanish
from tests.support.speech import Speech
from tests.support.wire import APIS, CHAT, MODEL, PATHS, RESPONSES, Document, body_of, frames

LONG = "word " * 60_000  # two seconds of prefill and more
MIDDLE = "word " * 12_000

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def speech(scripts: Path) -> Speech:
    return Speech(scripts)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, scripts: Path) -> Iterator[BackgroundStack]:
    flags = {
        "prefill": [*scripted_flags(scripts, time_scale=3.0)["prefill"], "--pick_wait_ms=2000"],
        "decode": scripted_flags(scripts, time_scale=1.0)["decode"],
    }
    flags["entrypoint"] = [
        "--limits.keep_alive_comment_s=2.0",
        "--max_attempts=2",
        "--codec_wait_s=30",  # there is one codec here, and it is restarted
    ]
    config = StackConfig(
        folder=tmp_path_factory.mktemp("stack"), num_entrypoints=1, log_level="debug", flags=flags
    )
    with BackgroundStack(config) as running:
        yield running


async def eventually(accept: Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits for what other processes do; the test's deadline bounds it."""
    for _ in range(400):
        if await accept():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"never came: {what}")


def held(stack: BackgroundStack) -> dict[str, int]:
    """What requests hold in the engines and the entrypoint."""
    kinds = ("blocks", "slots", "requests", "sequences", "reservations", "leases", "transfers")
    return {
        f"{process.name} {owner} {kind}": count
        for service in ("prefill", "decode", "entrypoint")
        for process in stack.stack.of(service)
        for owner, counts in stack.census(process.name).items()
        if owner != "rpc_server"  # counts the open calls between processes too
        for kind, count in counts.items()
        if kind in kinds and count
    }


async def is_busy(stack: BackgroundStack, name: str) -> bool:
    """Whether an engine runs a sequence."""
    census = await asyncio.to_thread(stack.census, name)
    return census["decode.requests"]["requests"] > 0


async def assert_nothing_held(stack: BackgroundStack) -> None:
    async def is_idle() -> bool:
        return not await asyncio.to_thread(held, stack)

    await eventually(is_idle, f"an idle stack; held {await asyncio.to_thread(held, stack)}")


def gauge(stack: BackgroundStack, service: str, name: str) -> float:
    """The sum of a metric over a service's processes and its labels."""
    total = 0.0
    for process in stack.stack.of(service):
        for line in stack.admin(process.name, "/metrics").splitlines():
            if line.startswith(name) and line[len(name)] in " {":
                total += float(line.rpartition(" ")[2])
    return total


async def ask(stack: BackgroundStack, speech: Speech, prompt: str, text: str) -> Streamed:
    async with new_client(1) as client:
        return await stream_chat(client, stack, speech.script(text), body_for(MODEL, prompt))


# ---- waiting and leaving ---------------------------------------------------------------------


async def test_ur_23_comments_come_while_a_long_prompt_is_read(
    stack: BackgroundStack, speech: Speech
) -> None:
    async with new_client(2) as client, asyncio.TaskGroup() as group:
        for stream in (True, False):
            group.create_task(_long_answer(stack, speech, client, stream))


async def _long_answer(
    stack: BackgroundStack, speech: Speech, client: httpx.AsyncClient, stream: bool
) -> None:
    body = body_of(CHAT, f"{stream} {LONG}", stream=stream)
    headers = {"authorization": f"Bearer {stack.key}", "x-request-id": speech.script("Read.")}
    answer = await client.post(f"{stack.url}{PATHS[CHAT]}", headers=headers, json=body)
    assert answer.status_code == 200
    if stream:
        assert answer.text.startswith(":")  # a comment came first: the wait was seen
        deltas = [event["choices"][0]["delta"] for _, event in frames(answer.text)[:-1]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Read."
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "Read."


async def test_ur_28_a_client_that_leaves_stops_its_long_prompt(
    stack: BackgroundStack, speech: Speech
) -> None:
    name = "pelagos_prefill_computed_tokens"

    async def computes() -> bool:
        return bool(await asyncio.to_thread(held, stack))

    for number in range(8):
        before = await asyncio.to_thread(gauge, stack, "prefill", name)
        body = json.dumps(body_for(MODEL, f"left {number} {LONG}")).encode()
        leaving = asyncio.create_task(vanish(stack, body, 30))
        await eventually(computes, "a prompt at work")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await assert_nothing_held(stack)
        computed = await asyncio.to_thread(gauge, stack, "prefill", name) - before
        # On a machine that is busy with other work the prompt may be over before we look.
        if computed < 60_000:
            break
    assert computed < 60_000
    assert (await ask(stack, speech, "Still there?", "Yes.")).text == "Yes."


async def test_ur_33_what_an_aborted_prompt_left_is_never_wrong(
    stack: BackgroundStack, speech: Speech
) -> None:
    rng = random.Random(33)
    for number in range(4):
        prompt = f"abort {number} {MIDDLE}"
        body = json.dumps(body_for(MODEL, prompt)).encode()
        await vanish(stack, body, rng.uniform(0.1, 0.8))
        # The engines check every reused byte against the tokens it must belong to.
        seen = await ask(stack, speech, prompt, f"Answer {number}.")
        assert (seen.text, seen.error) == (f"Answer {number}.", "")
    await assert_nothing_held(stack)


# ---- kills and freezes -----------------------------------------------------------------------


async def test_ur_32_a_killed_prefill_leaves_no_block_held_on_decode(
    stack: BackgroundStack, speech: Speech
) -> None:
    victim = stack.stack.of("prefill")[0]
    texts = [f"Answer {number}: " + "and on " * 60 for number in range(8)]

    async def kill() -> None:
        async def hands_over() -> bool:
            return any("decode" in name for name in await asyncio.to_thread(held, stack))

        await eventually(hands_over, "a reservation")
        victim.signal(signal.SIGKILL)

    async with new_client(8) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                stream_chat(
                    client,
                    stack,
                    speech.script(text),
                    body_for(MODEL, f"handed {number} " + "word " * 3000),
                )
            )
            for number, text in enumerate(texts)
        ]
        group.create_task(kill())
    assert [(task.result().text, task.result().error) for task in tasks] == [
        (text, "") for text in texts
    ]
    await _until_all_ready(stack)
    await assert_nothing_held(stack)


async def _until_all_ready(stack: BackgroundStack) -> None:
    for process in stack.stack:
        waiting = asyncio.run_coroutine_threadsafe(process.wait_ready(), stack.loop)
        await asyncio.wait_for(asyncio.wrap_future(waiting), 60)


async def test_ur_49_a_frozen_engine_leaves_the_rotation_and_its_requests_go_on(
    stack: BackgroundStack, speech: Speech
) -> None:
    victim = stack.stack.of("decode")[0]
    pid = victim.pid
    texts = [f"Stream {number}: " + "and on " * 300 for number in range(8)]
    async with new_client(8) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                stream_chat(client, stack, speech.script(text), body_for(MODEL, "Go on."))
            )
            for text in texts
        ]
        await eventually(lambda: is_busy(stack, victim.name), "a sequence on the engine")
        victim.signal(signal.SIGSTOP)
        try:
            # None waits for it: all are answered while it is frozen.
            results = await asyncio.wait_for(asyncio.gather(*tasks), 100)
        finally:
            victim.signal(signal.SIGCONT)
    assert [(seen.text, seen.error) for seen in results] == [(text, "") for text in texts]
    assert victim.pid == pid
    await assert_nothing_held(stack)


async def test_ur_58_a_structured_answer_survives_its_engine_to_the_letter(
    stack: BackgroundStack, speech: Speech
) -> None:
    wanted = json.dumps([number * 7 for number in range(150)])
    schema = {"type": "array", "items": {"type": "integer"}}
    answer_format = {
        "type": "json_schema",
        "json_schema": {"name": "numbers", "schema": schema},
    }
    body = body_for(MODEL, "Numbers, please.", response_format=answer_format)
    victim = stack.stack.of("decode")[1]
    async with new_client(4) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(stream_chat(client, stack, speech.script(wanted), body))
            for _ in range(4)
        ]
        await eventually(lambda: is_busy(stack, victim.name), "a sequence on the engine")
        victim.signal(signal.SIGKILL)
    for task in tasks:
        seen = task.result()
        assert seen.error == ""
        assert seen.text == wanted
        assert json.loads(seen.text)[-1] == 149 * 7
    await _until_all_ready(stack)


async def test_ur_43_damaged_blocks_in_the_store_are_recomputed(
    stack: BackgroundStack, speech: Speech
) -> None:
    prompt = "kept " + MIDDLE
    first = await ask(stack, speech, prompt, "The same answer.")
    assert first.text == "The same answer."

    async def is_stored() -> bool:
        return await asyncio.to_thread(gauge, stack, "store", "pelagos_store_put_queue_blocks") == 0

    await eventually(is_stored, "all blocks written")
    rng = random.Random(43)
    damaged = 0
    for path in (stack.stack.folder / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            with path.open("r+b") as file:
                for _ in range(40):
                    file.seek(rng.randrange(path.stat().st_size))
                    file.write(rng.randbytes(1))
                    damaged += 1
    assert damaged
    for _ in range(2):
        again = await ask(stack, speech, prompt, "The same answer.")
        assert (again.text, again.error) == ("The same answer.", "")


async def test_ur_47_client_errors_put_no_engine_out_of_rotation(
    stack: BackgroundStack, speech: Speech
) -> None:
    async with new_client(16) as client:
        headers = {"authorization": f"Bearer {stack.key}"}
        body = body_of(CHAT, max_tokens=390_000) | {
            "messages": [{"role": "user", "content": "word " * 2000}]
        }

        async def refused() -> int:
            url = f"{stack.url}{PATHS[CHAT]}"
            return (await client.post(url, headers=headers, json=body)).status_code

        for _ in range(10):
            assert await asyncio.gather(*(refused() for _ in range(20))) == [400] * 20
    assert await asyncio.to_thread(gauge, stack, "prefill-lb", "pelagos_prefill_lb_engines") == 2
    assert (await ask(stack, speech, "And now?", "Served.")).text == "Served."


async def test_ur_57_a_planned_stop_of_each_service_under_load_loses_nothing(
    stack: BackgroundStack, speech: Speech
) -> None:
    results: list[tuple[str, Streamed]] = []
    stopping = asyncio.Event()

    async def asks(number: int) -> None:
        while not stopping.is_set():
            text = f"Answer {len(results)} of client {number}: " + "and on " * 20
            results.append((text, await ask(stack, speech, "Go on.", text)))

    async def roll() -> None:
        for name in ("decode-1", "prefill-1", "recipe", "check"):
            spec = stack.stack[name].spec
            for step in (stack.stack.remove(name), stack.stack.add(spec)):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(step, stack.loop))
        stopping.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(roll())
        for number in range(3):
            group.create_task(asks(number))
    assert len(results) > 10
    assert [seen.error for text, seen in results if seen.text != text or seen.error] == []


async def test_ur_19_outcomes_add_up_and_first_tokens_are_requests_that_sent_one(
    stack: BackgroundStack, speech: Speech
) -> None:
    names = ("requests_accepted_total", "requests_total", "first_tokens_total")

    def counts() -> list[float]:
        return [gauge(stack, "entrypoint", f"pelagos_entrypoint_{name}") for name in names]

    before = await asyncio.to_thread(counts)
    ok = [await ask(stack, speech, "Count me.", "One.") for _ in range(4)]
    assert all(seen.text == "One." for seen in ok)
    for number in range(2):  # leave once they are accepted, long before a token
        body = json.dumps(body_for(MODEL, f"gone {number} {LONG}")).encode()
        leaving = asyncio.create_task(vanish(stack, body, 30))
        wanted = before[0] + len(ok) + number + 1

        async def is_accepted(wanted: float = wanted) -> bool:
            return (await asyncio.to_thread(counts))[0] == wanted

        await eventually(is_accepted, "an accepted request")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    async with new_client(1) as client:
        late = {"authorization": f"Bearer {stack.key}", "x-request-timeout-ms": "300"}
        answer = await client.post(
            f"{stack.url}{PATHS[CHAT]}", headers=late, json=body_of(CHAT, f"late {LONG}")
        )
        assert answer.status_code == 504
    await assert_nothing_held(stack)
    accepted, ended, first = (
        now - then for now, then in zip(await asyncio.to_thread(counts), before, strict=True)
    )
    assert (accepted, ended, first) == (7, 7, 4)


async def test_ur_20_no_engine_left_is_a_failure_in_every_api_never_a_success(
    stack: BackgroundStack, speech: Speech
) -> None:
    """Last here: the decode engines stay dead."""
    text = "Words that will never end. " * 400
    headers = {"authorization": f"Bearer {stack.key}"}
    killed = asyncio.Event()
    started: list[str] = []

    async def reads(client: httpx.AsyncClient, api: str) -> str:
        body = body_of(api, stream=True)
        mine = headers | {"x-request-id": speech.script(text)}
        got = ""
        url = f"{stack.url}{PATHS[api]}"
        async with client.stream("POST", url, headers=mine, json=body) as answer:
            async for part in answer.aiter_text():
                got += part
                if got.count("data: ") > 8 and api not in started:
                    started.append(api)
        return got

    def sdk_reads() -> list[type[BaseException]]:
        raised: list[type[BaseException]] = []
        plain = {"thinking": {"type": "disabled"}}
        with openai.OpenAI(
            base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0, timeout=100
        ) as client:
            try:
                for _ in client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "hi"}],
                    stream=True,
                    extra_body=plain,
                    extra_headers={"x-request-id": speech.script(text)},
                ):
                    if "openai" not in started:
                        started.append("openai")
            except openai.APIError as error:
                raised.append(type(error))
        return raised

    def anthropic_reads() -> list[type[BaseException]]:
        raised: list[type[BaseException]] = []
        with anthropic.Anthropic(
            base_url=stack.url, api_key=stack.key, max_retries=0, timeout=100
        ) as client:
            try:
                with client.messages.stream(
                    model=MODEL,
                    max_tokens=4000,
                    thinking={"type": "disabled"},
                    messages=[{"role": "user", "content": "hi"}],
                    extra_headers={"x-request-id": speech.script(text)},
                ) as stream:
                    for _ in stream:
                        if "anthropic" not in started:
                            started.append("anthropic")
            except anthropic.APIError as error:
                raised.append(type(error))
        return raised

    async def kill() -> None:
        async def all_started() -> bool:
            return len(started) == len(APIS) + 2

        await eventually(all_started, f"five streams; {started}")
        for process in stack.stack.of("decode"):
            process.restart = False
            process.signal(signal.SIGKILL)
        killed.set()

    async with new_client(3) as client, asyncio.TaskGroup() as group:
        raw = {api: group.create_task(reads(client, api)) for api in APIS}
        ours = group.create_task(asyncio.to_thread(sdk_reads))
        theirs = group.create_task(asyncio.to_thread(anthropic_reads))
        group.create_task(kill())
    assert killed.is_set()
    assert ours.result() == [openai.APIError]
    assert len(theirs.result()) == 1
    for api, task in raw.items():
        _assert_failed(api, frames(task.result()))


def _assert_failed(api: str, found: list[tuple[str, Document | str]]) -> None:
    if api == CHAT:
        assert found.pop() == ("", "[DONE]")
    name, last = found[-1]
    assert isinstance(last, dict)
    others = json.dumps([event for _, event in found[:-1]])
    if api == CHAT:
        assert last["error"]["type"] == "server_error"
        assert '"finish_reason": "' not in others
    elif api == RESPONSES:
        assert name == last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["sequence_number"] == len(found) - 1
        assert "response.completed" not in others
    else:
        assert name == last["type"] == "error"
        assert "message_stop" not in others
        assert "message_delta" not in others
