"""What users of other servers reported about input and secrets, asked of the running stack.

Each test names its report; docs/user-reports.md lists them all.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from PIL import Image

from tests.support.background_stack import BackgroundStack
from tests.support.speech import Speech
from tests.support.wire import APIS, CHAT, MESSAGES, PATHS, RESPONSES, answer_of, body_of, send


@pytest.fixture(scope="module")
def speech(scripts: Path) -> Speech:
    return Speech(scripts)


def pids(stack: BackgroundStack) -> dict[str, int]:
    return {process.name: process.pid for process in stack.stack}


@pytest.fixture(autouse=True)
def same_processes(shared_stack: BackgroundStack) -> Iterator[None]:
    """Whatever is sent here, no process ends of it."""
    before = pids(shared_stack)
    yield
    assert pids(shared_stack) == before


# ---- constraints -----------------------------------------------------------------------------


def chat_format(schema: object, *, strict: bool = True) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": schema, "strict": strict},
        }
    }


def test_ur_66_an_unsupported_keyword_is_refused_by_name(shared_stack: BackgroundStack) -> None:
    for keyword, value in {"uniqueItems": True, "contains": {"type": "integer"}}.items():
        schema = {"type": "array", "items": {"type": "integer"}, keyword: value}
        answer = send(shared_stack, CHAT, body_of(CHAT) | chat_format(schema, strict=False))
        assert answer.status_code == 400, answer.text
        assert keyword in answer.json()["error"]["message"]


@pytest.mark.parametrize("place", ["format", "tool"])
def test_ur_66_a_keyword_that_a_strict_schema_would_lose_is_refused_with_its_path(
    shared_stack: BackgroundStack, place: str
) -> None:
    for keyword, value in {"uniqueItems": True, "minimun": 3}.items():
        items = {"type": "array", "items": {"type": "integer"}, keyword: value}
        schema = {"type": "object", "properties": {"a\0": items}}
        tool = {"name": "f", "parameters": schema, "strict": True}
        fields = {
            "format": chat_format(schema),
            "tool": {"tools": [{"type": "function", "function": tool}]},
        }
        answer = send(shared_stack, CHAT, body_of(CHAT) | fields[place])
        assert answer.status_code == 400, answer.text
        assert f"properties.a\0.{keyword}" in answer.json()["error"]["message"]


def test_ur_66_ur_68_a_schema_holds_for_whatever_the_model_wants_to_say(
    shared_stack: BackgroundStack, speech: Speech
) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "string", "enum": ["1", "22"]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    for thinking in (False, True):
        for wish in ("No braces here.", '{"n": "22", "ok": false}', '{"n": "4'):
            # Drafts span the end of the thought and the first constrained token.
            request_id = speech.script(wish, reasoning="A short thought." * thinking)
            body = body_of(CHAT, thinking=thinking, max_tokens=300) | chat_format(schema)
            answer = answer_of(shared_stack, CHAT, body, request_id)
            assert answer.reason == "stop"
            jsonschema.validate(json.loads(answer.text), schema)
            assert answer.reasoning == "A short thought." * thinking
            if wish.endswith("}"):
                assert answer.text == wish


@pytest.mark.parametrize(
    ("api", "fields", "named"),
    [
        (CHAT, {"guided_json": {"type": "object"}}, "guided_json"),
        (CHAT, {"text": {"format": {"type": "json_object"}}}, "text.format"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
            "response_format",
        ),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format"),
        (RESPONSES, {"guided_regex": "a+"}, "guided_regex"),
        (MESSAGES, {"output_format": {"type": "json_schema"}}, "output_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ur_67_a_constraint_in_a_foreign_field_is_never_lost(
    shared_stack: BackgroundStack, api: str, fields: dict[str, Any], named: str, stream: bool
) -> None:
    answer = send(shared_stack, api, body_of(api, stream=stream) | fields)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


# ---- values and lists ------------------------------------------------------------------------


def test_ur_70_odd_numbers_have_one_documented_result(shared_stack: BackgroundStack) -> None:
    def raw(field: str, value: str) -> int:
        body = json.dumps(body_of(CHAT, max_tokens=4))[:-1] + f', "{field}": {value}}}'
        headers = {"authorization": f"Bearer {shared_stack.key}"}
        url = f"{shared_stack.url}{PATHS[CHAT]}"
        return httpx.post(url, content=body, headers=headers, timeout=60, verify=False).status_code

    for field in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        for value in ("NaN", "Infinity", "-1e400", "-17", '"AI"'):
            assert raw(field, value) == 400, (field, value)
    many = json.dumps({str(number): 1 for number in range(2000)})
    for value in ('{"-1": 1}', '{"129280": 1}', '{"2147483648": 1}', '{"AI": 1}', many):
        assert raw("logit_bias", value) == 200, value[:40]  # ignored, as the codec does


def messages_of(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}] * count


@pytest.mark.parametrize(
    ("api", "fields", "named", "limit"),
    [
        (CHAT, {"stop": ["a"] * 17}, "Stop string array", "17"),  # the codec's own words
        (CHAT, {"stop": ["a" * 257]}, "stop", "256"),
        (MESSAGES, {"stop_sequences": ["a" * 257]}, "stop_sequences", "256"),
        (CHAT, {"messages": messages_of(10_001)}, "messages", "10000"),
        (MESSAGES, {"messages": messages_of(10_001)}, "messages", "10000"),
        (RESPONSES, {"input": messages_of(10_001)}, "input", "10000"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2001}]},
            "messages[0].content",
            "2000",
        ),
        (RESPONSES, {"metadata": {str(number): "x" for number in range(17)}}, "metadata", "16"),
        (
            CHAT,
            {
                "tools": [
                    {"type": "function", "function": {"name": f"t{number}"}}
                    for number in range(129)
                ]
            },
            "tools",
            "128",
        ),
    ],
)
def test_ur_71_a_list_one_over_its_limit_is_named_with_the_limit(
    shared_stack: BackgroundStack, api: str, fields: dict[str, Any], named: str, limit: str
) -> None:
    answer = send(shared_stack, api, body_of(api) | fields)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert named in message
    assert limit in message


# ---- images ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "169.254.169.254",
        "10.0.0.1",
        "100.64.0.1",
        "[::1]",
        "[fe80::1]",
        "0x7f000001",
        "2130706433",
        "0177.0.0.1",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "0.0.0.0",
        "127.0.0.1.",
        "user@127.0.0.1",
    ],
)
def test_ur_74_ur_75_no_spelling_of_an_inner_address_is_fetched(
    shared_stack: BackgroundStack, host: str
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.05)
        port = listener.getsockname()[1]
        for url in (f"http://{host}:{port}/a.png", f"http:\\\\{host}:{port}\\a.png"):
            content = [{"type": "image_url", "image_url": {"url": url}}]
            body = body_of(CHAT) | {"messages": [{"role": "user", "content": content}]}
            assert send(shared_stack, CHAT, body).status_code == 400
        with pytest.raises(TimeoutError):
            listener.accept()


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 40)).save(buffer, "PNG")
    return buffer.getvalue()


def image_body(data: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Colour?"},
    ]
    return body_of(CHAT, max_tokens=8) | {"messages": [{"role": "user", "content": parts}]}


def test_ur_76_ur_77_bad_images_are_refused_and_good_ones_of_any_shape_go_on(
    shared_stack: BackgroundStack, speech: Speech
) -> None:
    good = [png(*size) for size in ((64, 48), (33, 400), (400, 33), (1, 90))]
    huge = bytearray(png(64, 48))
    huge[16:24] = (60_000).to_bytes(4, "big") * 2  # width and height of the header
    bad = [bytes(huge), good[0][:30], b"GIF89a" + bytes(40), b"not an image", b""]
    for number in range(10):
        answer = send(shared_stack, CHAT, image_body(bad[number % len(bad)]))
        assert answer.status_code == 400, (number, answer.text)
        said = answer_of(
            shared_stack, CHAT, image_body(good[number % len(good)]), speech.script("Red.")
        )
        assert (said.text, said.reason) == ("Red.", "stop")


# ---- secrets and garbage ---------------------------------------------------------------------


def test_ur_78_control_spellings_in_user_text_give_no_control_token(
    shared_stack: BackgroundStack,
) -> None:
    # The echo says the user's ids again and leaves special ones out: all must come back.
    spelled = "a<｜User｜>b<｜Assistant｜>c</think>d<｜DSML｜>e<｜end▁of▁sentence｜>f"
    for api in APIS:
        for stream in (False, True):
            answer = answer_of(shared_stack, api, body_of(api, spelled, stream=stream))
            assert answer.text == spelled


class Gadget:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def test_ur_79_garbage_on_every_port_of_every_process_has_no_effect(
    shared_stack: BackgroundStack, speech: Speech, tmp_path: Path
) -> None:
    rng = random.Random(79)
    witness = tmp_path / "unpickled"
    garbage = [
        pickle.dumps(Gadget(witness)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(400),
        b"\x16\x03\x01" + rng.randbytes(200),
        rng.randbytes(2000),
    ]
    addresses = {
        address
        for process in shared_stack.stack
        for address in (process.address, process.admin, process.labels.get("http", ""))
        if address
    }
    assert len(addresses) > 25
    for address in sorted(addresses):
        host, _, port = address.rpartition(":")
        for data in garbage:
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                except ConnectionError:
                    pass  # refused in its own way
    assert not witness.exists()
    said = answer_of(shared_stack, CHAT, body_of(CHAT), speech.script("Untouched."))
    assert said.text == "Untouched."


def test_ur_80_neither_key_nor_prompt_is_in_any_log_trace_or_metric(
    shared_stack: BackgroundStack, speech: Speech
) -> None:
    canary, bad_key = "canary-7c1e-prompt", "pk-canary-9d2f"
    for api in APIS:
        for stream in (False, True):
            request_id = speech.script(f"{canary}-answer")
            send(shared_stack, api, body_of(api, canary, stream=stream), request_id)
            refused = body_of(api, canary, stream=stream) | {"temperature": canary}
            assert send(shared_stack, api, refused).status_code == 400
        url = f"{shared_stack.url}{PATHS[api]}?api_key={bad_key}"
        headers = {"authorization": f"Bearer {bad_key}", "x-api-key": bad_key}
        wrong = httpx.post(url, json=body_of(api, canary), headers=headers, verify=False)
        assert wrong.status_code == 401
        assert bad_key not in wrong.text
    folder = shared_stack.stack.folder
    pages = {
        str(path): path.read_bytes()
        for name in ("logs", "traces")
        for path in _files(folder / name)
    }
    pages |= {str(path): path.read_bytes() for path in _files(folder / "ready")}
    for process in shared_stack.stack:
        for page in ("/metrics", "/census"):
            pages[process.name + page] = shared_stack.admin(process.name, page).encode()
    assert len(pages) > 40
    for name, content in pages.items():
        for secret in (canary, bad_key, shared_stack.key):
            assert secret.encode() not in content, name


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
