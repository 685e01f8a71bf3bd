"""A checkpoint's tokenizer: whose ids it names, and when it is not the network's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.tokenizer_id import V41
from services.engine.config import ModelConfig as EngineModel
from services.engine.model.checkpoint import make_random_checkpoint
from services.engine.model.config import ConfigError
from services.engine.model.presets import TINY, TINY_FULLVOCAB
from services.engine.model.serve import network_of
from services.engine.model.settings import TorchConfig
from services.engine.model.vocabulary import TOKEN_MAP, read_vocabulary, vocabulary_of
from services.recipe import make_tokenizer

pytestmark = pytest.mark.engine


def write_tokenizer(path: Path, *, image: int = 2041, num: int = 2000) -> Path:
    """A file of a small vocabulary: letters, and the named tokens in the last rows."""
    names = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
    vocab = dict(zip(names, range(3), strict=True))
    vocab |= {f"piece{number}": number for number in range(3, num)}
    added = [{"id": at, "content": text} for text, at in vocab.items() if at < 3]
    added.append({"id": image, "content": "<｜image｜>"})
    path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    return path


@pytest.fixture(scope="session")
def real():
    return read_vocabulary(make_tokenizer.build()["v4.1"])


def test_the_compressed_ids_of_the_real_vocabulary_are_as_many_as_published(real):
    token_map = real.token_map(129280)
    assert len(np.unique(token_map)) == 99092
    # First seen, first numbered; a word counts as one however it is written.
    assert token_map[:3].tolist() == [0, 1, 2]
    words = [real.spellings[at] for at in range(129280) if token_map[at] == token_map[29616]]
    assert len(words) > 1
    assert len({word.strip("Ġ").lower() for word in words}) == 1


def test_a_small_network_refuses_the_large_vocabulary_and_the_large_one_takes_it(real):
    real.demand_fits(TINY_FULLVOCAB)
    with pytest.raises(ConfigError, match="ids up to 129279, the network knows 2048"):
        real.demand_fits(TINY)


def test_special_ids_that_differ_are_named(tmp_path):
    good = read_vocabulary(write_tokenizer(tmp_path / "good.json"))
    good.demand_fits(TINY)
    moved = read_vocabulary(write_tokenizer(tmp_path / "moved.json", image=2042))
    with pytest.raises(ConfigError, match=r"image_token_id is 2041.*as 2042"):
        moved.demand_fits(TINY)
    with pytest.raises(ConfigError, match="eos_token_id is 7"):
        good.demand_fits(replace(TINY, eos_token_id=7))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer file"):
        read_vocabulary(broken)


def test_an_engine_names_the_vocabulary_beside_its_checkpoint(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "small.json")
    folder = tmp_path / "tiny"
    make_random_checkpoint(TINY, 3, folder, tokenizer=tokenizer)
    settings = TorchConfig(checkpoint=str(folder))
    model = EngineModel(engine="torch", torch=settings)
    found = vocabulary_of(folder)
    assert model.vocabulary_id == found.tokenizer_id != V41
    assert model.vocabulary_file == str(folder / "tokenizer.json")
    assert (model.max_model_len, model.vocab_size, model.image_token_id) == (8192, 2048, 2041)
    # As flags are laid over defaults: an instance of the default values becomes another one.
    assert replace(EngineModel(), engine="torch", torch=settings) == model
    assert EngineModel().vocabulary_id == V41
    assert EngineModel(engine="torch").vocabulary_id == "ids-2048"  # takes ids only
    with pytest.raises(ConfigError, match="ids up to 129279"):
        make_random_checkpoint(TINY, 3, folder, tokenizer=make_tokenizer.build()["v4.1"])


def test_weights_of_another_training_are_not_taken_for_these(tmp_path):
    ids = set()
    for seed in (1, 2):
        make_random_checkpoint(TINY, seed, tmp_path / str(seed))
        ids.add(TorchConfig(checkpoint=str(tmp_path / str(seed))).weights_id)
    assert len(ids) == 2


def test_a_network_with_the_real_vocabulary_is_written_with_its_token_map(tmp_path):
    make_random_checkpoint(TINY_FULLVOCAB, 1, tmp_path, tokenizer=make_tokenizer.build()["v4.1"])
    settings = TorchConfig(checkpoint=str(tmp_path))
    assert EngineModel(engine="torch", torch=settings).vocabulary_id == V41
    assert len(np.load(tmp_path / TOKEN_MAP)) == 129280
    assert network_of(settings).config.text.vocab_size == 129280
