"""Random streams of the codec against the vendors' published types (UR-21)."""

from __future__ import annotations

import json
import random

import pytest

from services.recipe import codec
from services.recipe.codec import Options, Streams, StreamSpec, Tokenizer
from services.recipe.make_tokenizer import DEFAULT_FOLDER, V41_FILE
from tests.integration.test_user_reports_protocol import validate_frame
from tests.support.speech import dsml
from tests.support.wire import APIS, CHAT, body_of, frames

NUM_STREAMS = 334  # of each API


@pytest.mark.parametrize("api", APIS)
def test_ur_21_random_streams_are_made_of_published_frames(api: str) -> None:
    rng = random.Random(21)
    tokenizer = Tokenizer(DEFAULT_FOLDER / V41_FILE)
    options = Options().native()
    pieces = [
        tokenizer.encode_full(text)
        for text in (
            "Some words. ",
            "12 °C 🌤",
            "</think>",
            "<｜DSML｜",
            dsml({"note": {"text": 'x\n"y'}, "note#2": {"n": [1, None]}}),
            dsml({"other": {}})[:40],
            "\n\n",
        )
    ]
    num_frames = 0
    for number in range(NUM_STREAMS):
        body = body_of(api, stream=True, thinking=rng.random() < 0.5, tools=("note",))
        encoded = codec.encode(api, json.dumps(body).encode(), options, tokenizer, 100_000)
        streams = Streams()
        spec = StreamSpec(f"r{number}", 1, rng.getrandbits(64))
        handle = streams.open(encoded.parse_state().encode(), tokenizer, spec)
        sse = streams.ready(handle, 10, 4, None, 1).sse
        ids = b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 6)))
        at = 0
        while at < len(ids):
            size = 4 * rng.randint(1, 9)
            sse += streams.tokens(handle, ids[at : at + size], 1).sse
            at += size
        if rng.random() < 0.2:
            sse += streams.fail(handle, "BACKEND_LOST", "lost", "id")
        else:
            sse += streams.finish(handle, rng.choice(["stop", "length"]), 1).sse
        found = frames(sse.decode())
        num_frames += len(found)
        if api == CHAT:
            assert found.pop() == ("", "[DONE]")
        for _, event in found:
            if "error" in event and event.get("type") in (None, "error"):
                assert isinstance(event["error"]["message"], str)  # the vendors publish no more
            else:
                validate_frame(api, event)
    assert num_frames > 5 * NUM_STREAMS
