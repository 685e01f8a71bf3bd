"""The small vocabulary: cuts as the large one does, and holds the named tokens where it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pelagos.recipe.v1 import recipe_pb2 as pb

from services.engine.training import tokenizer as building
from services.engine.training.render import Rendered, render
from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.stages import Stage, dialogue
from services.engine.training.tasks.turns import MODEL, Call, Dialogue, Turn
from services.recipe.client import EmbeddedRecipe, RecipeConfig, codec, make_tokenizer

SMALL = codec.Tokenizer(building.DEFAULT_FILE, num_threads=1, cache_bytes=0)


@pytest.fixture(scope="module")
def large_file() -> Path:
    return make_tokenizer.build()["v4.1"]


@pytest.fixture(scope="module")
def large(large_file: Path) -> codec.Tokenizer:
    return codec.Tokenizer(large_file, num_threads=1, cache_bytes=0)


def ids_of(data: bytes) -> list[int]:
    return memoryview(data).cast("I").tolist()


def pieces(tokenizer: codec.Tokenizer, rendered: Rendered) -> list[bytes]:
    """Returns the bytes of each token, numbers cut into their digits."""
    found = []
    for id_ in ids_of(tokenizer.encode_prompt(rendered.text, rendered.ranges)):
        spelled = tokenizer.token_bytes(id_) or b""
        found += [bytes([byte]) for byte in spelled] if spelled.isdigit() else [spelled]
    return found


def held_out_texts(num: int) -> list[Rendered]:
    texts = []
    for stage in Stage:
        for mode, _ in stage.value.modes:
            for seed in range(num):
                draw = Draw(f"unseen/{mode}/{seed}", "held_out", open_names=False)
                texts.append(render(dialogue(draw, stage.value, mode, 500, Memory())))
    return texts


def test_held_out_text_is_cut_as_the_large_tokenizer_cuts_it(large: codec.Tokenizer) -> None:
    num_pieces = 0
    for rendered in held_out_texts(25):
        found = pieces(SMALL, rendered)
        assert found == pieces(large, rendered), rendered.text
        num_pieces += len(found)
    assert num_pieces > 50_000


def test_no_token_holds_two_digits() -> None:
    for id_ in range(SMALL.num_ids):
        spelled = SMALL.token_bytes(id_) or b""
        assert SMALL.is_added(id_) or sum(48 <= byte <= 57 for byte in spelled) <= 1, spelled


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert SMALL.decode(SMALL.encode_plain(text)) == text


def test_every_row_of_the_embedding_stands_for_something() -> None:
    assert SMALL.num_ids == building.NUM_IDS
    assert all(SMALL.token_bytes(id_) for id_ in range(building.NUM_IDS))


def test_the_named_tokens_lie_in_the_last_rows() -> None:
    ids = building.special_ids()
    assert (ids["Bos"], ids["Eos"], ids["Image"]) == (0, 1, 2041)
    assert sorted(ids.values()) == [0, 1, *range(2020, 2035), 2041]
    for name, id_ in ids.items():
        assert SMALL.added_id(codec.DEFAULT_SPELLINGS[name]) == id_


def test_a_rendered_request_has_the_specials_at_their_ids() -> None:
    ids = building.special_ids()
    turns = (
        Turn("tool_call", "Weather?", "", "I call w.", call=Call("w", (("city", "Paris"),))),
        Turn("tool_result", "sunny", "The result is sunny.", "Done.", role="tool"),
    )
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
    rendered = render(Dialogue(turns, thinking=True, tools=(tool,)))
    found = ids_of(SMALL.encode_prompt(rendered.text, rendered.ranges))
    assert found[0] == ids["Bos"]
    assert found[1] == ids["System"]
    assert found[-1] == ids["Eos"]
    assert found.count(ids["User"]) == found.count(ids["Assistant"]) == 2
    heads = [index for index, id_ in enumerate(found) if id_ == ids["Assistant"]]
    assert {found[head + 1] for head in heads} == {ids["ThinkingStart"]}
    # The tool prompt's own prose carries seven, the call six.
    written = found[heads[0] :]
    assert written.count(ids["Dsml"]) == 6
    assert written.count(ids["ThinkingEnd"]) == 2


def test_an_image_is_the_image_id_at_every_position() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PNG}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [picture]}]}
    options = codec.Options(models={MODEL: "v4.1"}).native()
    encoded = codec.encode("chat", json.dumps(body).encode(), options, SMALL, 8192)
    found = ids_of(encoded.token_ids())
    assert found.count(2041) == encoded.num_image_tokens > 1


def test_typed_special_spellings_stay_text() -> None:
    for spelling in codec.DEFAULT_SPELLINGS.values():
        found = ids_of(SMALL.encode_plain(f"a {spelling} b"))
        assert all(3 <= id_ < building.FIRST_SPECIAL_ID for id_ in found)


def test_the_committed_file_is_what_the_command_builds(large_file: Path) -> None:
    text, num_used = building.build(large_file)
    assert text == building.DEFAULT_FILE.read_text(encoding="utf-8")
    assert 1_000 < num_used <= building.FIRST_SPECIAL_ID - building.NUM_BASE_IDS


def test_texts_that_need_too_many_merges_are_refused() -> None:
    with pytest.raises(ValueError, match="use 2 merges, and only 1 fit"):
        building.kept_merges(["a b", "ab c"], {260}, 1)


def test_merges_keep_what_they_are_made_of_and_no_numbers() -> None:
    kept = building.kept_merges(["1 2", "a b", "x y", "ab c"], {259, 262}, 3)
    assert kept.token_ids == (260, 261, 262)
    assert kept.num_used == 2


async def test_the_codec_service_serves_the_small_vocabulary_beside_the_large_one() -> None:
    config = RecipeConfig(
        tokenizers={"mini": str(building.DEFAULT_FILE)}, models={MODEL: "v4.1@mini"}
    )
    recipe = EmbeddedRecipe(config)
    (model,) = [model for model in await recipe.list_models() if model.name == MODEL]
    assert dict(model.special_ids) == building.special_ids()
    assert model.vocab_size == building.NUM_IDS
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    request = pb.EncodeRequest(protocol=pb.PROTOCOL_CHAT, body=json.dumps(body).encode())
    response = await recipe.encode(request)
    ids = building.special_ids()
    assert ids_of(response.token_ids)[-2:] == [ids["Assistant"], ids["ThinkingStart"]]
    assert ids_of(response.stop_token_ids) == [ids["Eos"]]
    assert response.end_of_thinking_id == ids["ThinkingEnd"]


# One grey pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
