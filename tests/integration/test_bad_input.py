"""Bad input of every kind gets its status and body, and disturbs nothing else.

Sources: recipe.md, section 10; reliability-and-security.md, sections 3 and 4.
"""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from tests.integration.conftest import MODEL
from tests.support.background_stack import BackgroundStack
from tests.support.speech import Speech

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
GOOD = {
    CHAT: {"model": MODEL, "messages": USER},
    RESPONSES: {"model": MODEL, "input": "hi"},
    MESSAGES: {"model": MODEL, "messages": USER, "max_tokens": 16},
}


@pytest.fixture(scope="module")
def speech(scripts) -> Speech:
    return Speech(scripts)


@pytest.fixture(scope="module")
def neighbour(shared_stack: BackgroundStack, speech: Speech):
    """A long answer that streams while the bad requests come; checked to the letter at the end."""
    wanted = "Undisturbed words go on and on. " * 60
    request_id = speech.script(wanted)
    got: list[str] = []

    def listen() -> None:
        body = {**GOOD[CHAT], "stream": True, "thinking": {"type": "disabled"}}
        headers = {"authorization": f"Bearer {shared_stack.key}", "x-request-id": request_id}
        url = f"{shared_stack.url}{CHAT}"
        with httpx.stream("POST", url, headers=headers, json=body, timeout=100) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        got.append(choice["delta"].get("content") or "")

    thread = threading.Thread(target=listen)
    thread.start()
    yield
    thread.join(100)
    assert "".join(got) == wanted


def post(stack: BackgroundStack, path: str, body, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"authorization": f"Bearer {stack.key}", "content-type": "application/json", **headers}
    return httpx.post(f"{stack.url}{path}", content=content, headers=sent, timeout=60)


def error_of(path: str, answer: httpx.Response) -> dict:
    """Checks the shape of the path's API and returns the error."""
    document = answer.json()
    assert answer.headers["x-request-id"]
    if "x-error-reason" in answer.headers:
        assert answer.headers["x-should-retry"] in ("true", "false")
    return document["error"]


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"model": 1}', 400),
        (b"[1, 2]", 400),
        (b"\xff\xfe", 400),
        (b'{"model": NaN}', 400),
        (b'{"a": "\\ud800"}', 400),
        (b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", 400),
        (b'{"a": ' + b"1" * 65 + b"}", 400),
    ],
    ids=["empty", "cut", "type", "list", "utf-8", "nan", "surrogate", "deep", "long number"],
)
def test_malformed_json_is_a_bad_request(shared_stack, path, body, expected):
    answer = post(shared_stack, path, body)
    assert answer.status_code == expected, answer.text
    assert error_of(path, answer)["type"] == "invalid_request_error"


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_unknown_model_and_impossible_limits(shared_stack, path):
    unknown = post(shared_stack, path, {**GOOD[path], "model": "nobody"})
    assert unknown.status_code == 400
    assert "nobody" in error_of(path, unknown)["message"]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for value in (0, -1, 10**9, "many"):
        if path == MESSAGES and value == 10**9:
            continue  # lowered to the bound there (recipe.md, section 9.1)
        answer = post(shared_stack, path, {**GOOD[path], limit: value})
        assert answer.status_code == 400, (value, answer.text)
        assert error_of(path, answer)["type"] == "invalid_request_error"


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("stream", [False, True])
def test_ur_24_a_prompt_that_is_too_long_is_plain_http(shared_stack, stream):
    body = {**GOOD[CHAT], "stream": stream, "max_tokens": 390_000}
    body["messages"] = [{"role": "user", "content": "word " * 200_000}]
    answer = post(shared_stack, CHAT, body)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert "maximum context length" in error_of(CHAT, answer)["message"]


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_wrong_and_missing_keys(shared_stack, path):
    for headers in ({"authorization": "Bearer sk-wrong"}, {"authorization": "Basic x"}):
        answer = post(shared_stack, path, GOOD[path], **headers)
        assert answer.status_code == 401
        assert error_of(path, answer)["type"] == "authentication_error"
        assert answer.headers["x-error-reason"] == "UNAUTHENTICATED"
    answer = httpx.post(f"{shared_stack.url}{path}", json=GOOD[path], timeout=60)
    assert answer.status_code == 401


@pytest.mark.usefixtures("neighbour")
def test_a_body_over_the_limit_is_refused_before_it_is_read(shared_stack):
    host, _, port = shared_stack.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(
            f"POST {MESSAGES} HTTP/1.1\r\nhost: x\r\nx-api-key: {shared_stack.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {33 * 2**20}\r\n\r\n".encode()
        )
        head = raw.recv(65536).decode()
    assert head.startswith("HTTP/1.1 413")
    assert "BODY_TOO_LARGE" in head


@pytest.mark.usefixtures("neighbour")
def test_routes_and_methods_that_are_not_there(shared_stack):
    assert httpx.get(f"{shared_stack.url}/v1/nothing", timeout=60).status_code == 404
    assert httpx.get(f"{shared_stack.url}{CHAT}", timeout=60).status_code == 405
    # S-10: nothing of the admin plane on the public port.
    for path in ("/metrics", "/census", "/config", "/drain", "/debug"):
        assert httpx.get(f"{shared_stack.url}{path}", timeout=60).status_code == 404


@pytest.mark.usefixtures("neighbour")
def test_ur_74_image_addresses_are_not_fetched_by_default(shared_stack):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/image.png"
        body = {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            ],
        }
        answer = post(shared_stack, CHAT, body)
        assert answer.status_code == 400
        assert answer.headers["x-error-reason"].startswith("IMAGE")
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.usefixtures("neighbour")
def test_ur_70_odd_sampling_values_never_reach_an_engine(shared_stack):
    pids = [
        process.pid
        for process in (*shared_stack.stack.of("prefill"), *shared_stack.stack.of("decode"))
    ]
    for field, value, status in [
        ("temperature", 3, 400),
        ("temperature", "hot", 400),
        ("top_p", 0, 400),
        ("seed", -1, 400),
        ("seed", 2**63, 400),
        ("top_logprobs", 21, 400),
        ("n", 2, 400),
        ("logit_bias", {"-1": 5, "99999999999": 1}, 200),
    ]:
        body = {**GOOD[CHAT], "max_tokens": 4, field: value}
        if field == "top_logprobs":
            body["logprobs"] = True
        assert post(shared_stack, CHAT, body).status_code == status, field
    again = [
        process.pid
        for process in (*shared_stack.stack.of("prefill"), *shared_stack.stack.of("decode"))
    ]
    assert again == pids
