"""What one call's streams make of steps that no caller of ours would send."""

import json
import struct

import pytest
from pelagos.recipe.v1 import recipe_pb2 as pb

from services.recipe.config import RecipeConfig
from services.recipe.encoder import RequestEncoder
from services.recipe.parse_session import ParseSession
from services.recipe.registry import load_registry

BODY = {
    "model": "DeepSeek-V4.1-Flash",
    "stream": True,
    "logprobs": True,
    "messages": [{"role": "user", "content": "Hi"}],
}
HELLO = 19_923  # a whole word


@pytest.fixture(scope="module")
def registry():
    return load_registry(RecipeConfig())


@pytest.fixture(scope="module")
def state(registry):
    request = pb.EncodeRequest(protocol=pb.PROTOCOL_CHAT, body=json.dumps(BODY).encode())
    return RequestEncoder(registry, 1 << 20).encode(request).parse_state


@pytest.fixture
def session(registry):
    return ParseSession(registry, max_streams=100, now_s=lambda: 1.0)


def opened(stream_id, state, **more):
    step = pb.ParseOpen(parse_state=state, response_id=f"r{stream_id}", **more)
    return pb.ParseItem(stream_id=stream_id, open=step)


def tokens(stream_id, token_ids=struct.pack("<I", HELLO), **more):
    step = pb.ParseTokens(token_ids=token_ids, **more)
    return pb.ParseItem(stream_id=stream_id, tokens=step)


def top(token_ids=b"", logprobs=b""):
    return pb.TopLogprobs(token_ids=token_ids, logprobs=logprobs)


NESTED = b'{"model":"m","response":{"stream":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"


@pytest.mark.parametrize(
    "opening",
    [
        {"parse_state": b""},
        {"parse_state": b"\xff\xfe"},
        {"parse_state": b"[" * 100_000},
        {"parse_state": NESTED},
        {"parse_state": b"[]"},
        {"parse_state": b'"model"'},
        {"parse_state": b'{"model": ["a"], "response": {}}'},
        {"parse_state": b'{"model": {}, "response": {}}'},
        {"parse_state": b'{"model": 3, "response": {}}'},
        {"parse_state": b'{"model": "m", "response": 3}'},
        {"parse_state": b'{"model": "m", "response": {"stream": true}}'},
        {"parse_state": b'{"n": ' + b"1" * 5_000 + b"}"},
        {"created_unix_s": -1},
        {"tokenizer": "none"},
        {"tokenizer": "\0"},
    ],
)
def test_a_stream_that_cannot_open_ends_alone(session, state, opening):
    fields = {"parse_state": state, "response_id": "r", **opening}
    bad = pb.ParseItem(stream_id=1, open=pb.ParseOpen(**fields))
    results = session.step([opened(2, state), bad, tokens(1), tokens(2)])
    by_id = {result.stream_id: result for result in results}
    assert by_id[1].done
    assert by_id[1].error
    assert by_id[1].error != "internal error"
    assert b"Hello" not in by_id[1].sse
    assert (by_id[2].done, by_id[2].error) == (False, "")
    assert by_id[2].sse
    assert session.num_open == 1


@pytest.mark.parametrize(
    "step",
    [
        {"token_ids": b"abc"},
        {"logprobs": b"abc"},
        {"logprobs": b"\0" * 8},
        {"logprobs": b"\0" * 4, "top": [top(token_ids=b"abc", logprobs=b"\0" * 4)]},
        {"logprobs": b"\0" * 4, "top": [top(token_ids=b"\0" * 4, logprobs=b"\0")]},
        {"logprobs": b"\0" * 4, "top": [top(token_ids=b"\0" * 8, logprobs=b"\0" * 4)]},
    ],
)
def test_a_stream_with_a_broken_step_ends_alone(session, state, step):
    session.step([opened(1, state), opened(2, state)])
    results = session.step([tokens(2), tokens(1, **step), tokens(2)])
    by_id = {result.stream_id: result for result in results}
    assert by_id[1].done
    assert by_id[1].error not in ("", "internal error")
    assert (by_id[2].done, by_id[2].error) == (False, "")
    assert session.num_open == 1
    assert session.step([tokens(1)]) == []  # it is gone, and what comes late is passed over


def test_a_second_opening_of_an_open_stream_ends_it(session, state):
    results = session.step([opened(1, state), opened(1, state), tokens(1)])
    assert [(result.stream_id, result.done) for result in results] == [(1, True)]
    assert "open already" in results[0].error
    assert session.num_open == 0


def test_an_id_given_away_again_in_one_message_has_a_result_for_each_of_its_streams(session, state):
    finish = pb.ParseItem(stream_id=1, finish=pb.PARSE_FINISH_STOP)
    first, second = session.step([opened(1, state), tokens(1), finish, opened(1, state), tokens(1)])
    assert (first.stream_id, first.done) == (1, True)
    assert first.sse.endswith(b"data: [DONE]\n\n")
    assert (second.stream_id, second.done) == (1, False)
    assert b"[DONE]" not in second.sse
    assert session.num_open == 1


def test_steps_of_streams_that_nobody_opened_are_passed_over(session):
    fail = pb.ParseFail(reason="r", message="m")
    items = [
        tokens(7),
        pb.ParseItem(stream_id=7),
        pb.ParseItem(stream_id=7, fail=fail),
        pb.ParseItem(stream_id=7, discard=True),
        pb.ParseItem(stream_id=7, finish=pb.PARSE_FINISH_STOP),
        pb.ParseItem(stream_id=7, text=pb.ParseText(content="x", token_count=1)),
    ]
    assert session.step(items) == []
    assert session.num_open == 0


def test_no_more_streams_than_allowed(registry, state):
    session = ParseSession(registry, max_streams=2)
    results = session.step([opened(number, state) for number in range(4)])
    assert [(result.stream_id, result.done) for result in results] == [(2, True), (3, True)]
    session.step([pb.ParseItem(stream_id=0, discard=True)])
    assert session.step([opened(4, state)]) == []


def test_log_probabilities_that_are_no_numbers_are_null(session, state):
    values = [float("nan"), float("inf"), float("-inf")]
    for number, value in enumerate(values):
        step = tokens(number, logprobs=struct.pack("<f", value))
        (result,) = session.step([opened(number, state), step])
        assert not result.error
        events = result.sse.decode().split("\n\n")
        entries = [json.loads(event.removeprefix("data: ")) for event in events if event]
        assert '"logprob": null' in json.dumps(entries)
