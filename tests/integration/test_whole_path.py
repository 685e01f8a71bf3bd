"""One request through every service, followed by its id; and the same request again."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.conftest import MODEL
from tests.support.background_stack import BackgroundStack
from tests.support.speech import Speech

# Whose spans a request must leave behind, and at least one name of each.
TOUCHED = {
    "entrypoint",
    "recipe",
    "check",
    "prefill-lb",
    "prefill",
    "store",
    "decode-lb",
    "decode",
}


@pytest.fixture(scope="module")
def speech(scripts) -> Speech:
    return Speech(scripts)


def ask(stack: BackgroundStack, request_id: str, text: str) -> httpx.Response:
    return httpx.post(
        f"{stack.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {stack.key}", "x-request-id": request_id},
        json={
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "thinking": {"type": "disabled"},
        },
        timeout=60,
    )


def eventually(read, accept, what: str):
    """Waits for what other processes do in the background; the test's deadline bounds it."""
    for _ in range(600):
        value = read()
        if accept(value):
            return value
        time.sleep(0.05)
    raise AssertionError(f"never came: {what}; last {value}")


def test_one_request_id_is_followed_through_every_service_it_touches(shared_stack, speech):
    prompt = f"{uuid.uuid4()} " + "a long enough prompt to fill blocks " * 100
    # A request that hits touches STORE and the window directory too.
    eventually(
        lambda: ask(shared_stack, speech.script("Warm. " * 100), prompt).json()["usage"],
        lambda usage: usage["prompt_cache_hit_tokens"] > 0,
        "a hit",
    )
    request_id = speech.script("Followed. " * 200)
    answer = ask(shared_stack, request_id, prompt)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == request_id

    def spans():
        return [
            span
            for span in shared_stack.spans()
            if span["attributes"].get("pelagos.request_id") == request_id
        ]

    def is_complete(found) -> bool:
        ids = {span["span_id"] for span in found}
        roots = [span for span in found if span["parent_id"] not in ids]
        return {span["service"] for span in found} >= TOUCHED and len(roots) == 1

    found = eventually(spans, is_complete, f"one tree of spans of {sorted(TOUCHED)}")
    assert len({span["trace_id"] for span in found}) == 1
    # CHECK asks the directory's shards, which live in the entrypoints.
    asked = [span for span in found if "SwaDirectoryService" in span["name"]]
    assert {span["service"] for span in asked} >= {"check", "entrypoint"}
    [root] = [span for span in found if not span["parent_id"]]
    assert root["service"] == "entrypoint"


def test_the_second_identical_request_hits_what_the_first_one_stored(shared_stack, speech):
    prompt = f"{uuid.uuid4()} " + "the same long prompt again and again " * 80
    text = "The same answer. " * 30
    first = ask(shared_stack, speech.script(text), prompt)
    assert first.status_code == 200, first.text
    body = first.json()
    assert body["usage"]["prompt_cache_hit_tokens"] == 0
    length = body["usage"]["prompt_tokens"]
    # The hit rule (kvcache-and-balancing.md, section 10): what is stored, at most L - 134, whole
    # blocks; and where no window state lies at its end one block less.
    most = (length - 134) // 128 * 128

    def again():
        return ask(shared_stack, speech.script(text), prompt).json()

    second = eventually(
        again,
        lambda reply: reply["usage"]["prompt_cache_hit_tokens"] >= most - 128,
        "a hit of the length that the rule gives",
    )
    hit = second["usage"]["prompt_cache_hit_tokens"]
    assert hit in (most, most - 128)
    assert second["choices"][0]["message"] == body["choices"][0]["message"]
    assert second["usage"]["prompt_tokens"] == length
    assert second["usage"]["prompt_cache_miss_tokens"] == length - hit


def test_a_hit_is_explained_to_the_owner_of_the_request(shared_stack, speech):
    answer = ask(shared_stack, speech.script("x"), f"{uuid.uuid4()} " + "short prompt " * 100)
    explained = answer.headers["x-pelagos-cache"]
    assert explained.startswith("hit=0")
    assert "ended-by=" in explained


def test_the_examples_people_are_shown_name_a_model_that_is_served(shared_stack):
    from deploy.local.up import UpConfig

    headers = {"authorization": f"Bearer {shared_stack.key}"}
    served = httpx.get(f"{shared_stack.url}/v1/models", headers=headers, timeout=60).json()
    names = [model["id"] for model in served["data"]]
    assert UpConfig().model in names
    page = httpx.get(shared_stack.url, timeout=60).text
    assert any(f'"model": "{name}"' in page for name in names)


def test_p_35_ur_46_equal_cold_prompts_at_once_are_computed_about_once(shared_stack, speech):
    def burst() -> tuple[float, int]:
        """Returns how often the prompt was computed in all, and how many hit (nearly) all of it."""
        prompt = f"{uuid.uuid4()} " + "a long enough prompt to be waited for " * 700

        def hit_and_length(request_id: str) -> tuple[int, int]:
            usage = ask(shared_stack, request_id, prompt).json()["usage"]
            return usage["prompt_cache_hit_tokens"], usage["prompt_tokens"]

        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(hit_and_length, [speech.script("Done.") for _ in range(24)]))
        whole = (answers[0][1] - 134) // 128 * 128
        computed = sum(max(0, whole - hit) for hit, _ in answers)
        return computed / whole, sum(hit >= whole - 128 for hit, _ in answers)

    # One leads; those that asked while its blocks were on their way may have seen a part of them,
    # and a machine that stands still for seconds may break the leader's promise. Not every time.
    bursts: list[tuple[float, int]] = []
    while len(bursts) < 3 and not any(times <= 4 and hits >= 20 for times, hits in bursts):
        bursts.append(burst())
    assert any(times <= 4 and hits >= 20 for times, hits in bursts), bursts
