"""Pictures enter training as the running stack would send them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.model.presets import TINY
from services.engine.training.parameters import initial, is_vision
from services.engine.training.tasks.pictures import Picture
from services.engine.training.tokenizer import DEFAULT_FILE
from services.engine.training.vision import Prompts, VisionTrainer, pixels

pytestmark = pytest.mark.engine


def test_colours_are_a_little_off_in_training_and_plain_in_tests():
    seen = Picture(("red", "blue", "white", "black"))
    plain = pixels(seen, None)
    assert plain.shape == (84, 84, 3)
    assert plain[0, 83].tolist() == [40, 70, 220]
    shaded = pixels(seen, np.random.default_rng(2))
    off = np.abs(shaded.astype(int) - plain)
    assert 0 < off.max() <= 8
    assert (shaded[:42, :42] == shaded[0, 0]).all()


def test_the_picture_lies_where_its_placeholder_was_and_the_answer_ends():
    prompts = Prompts(DEFAULT_FILE)
    ids = prompts.ids("Copy:", False, 8)
    image = TINY.image_token_id
    assert ids.count(image) == 8
    assert ids[ids.index(image) : ids.index(image) + 8] == [image] * 8
    answer = prompts.answer(("red", "blue"), False)
    assert len(answer) == 3
    assert answer[-1] == TINY.eos_token_id
    assert len(prompts.answer(("red", "blue"), True)) > 5
    assert prompts.word("blue") == answer[1]


def test_only_the_tower_moves_and_its_cells_near_the_words():
    torch.set_num_threads(1)
    params = initial(TINY, 0)
    before = {name: value.clone() for name, value in params.items()}
    trainer = VisionTrainer(params, DEFAULT_FILE, 10)
    rng = np.random.default_rng(0)
    losses = [trainer.warm(rng) for _ in range(8)]
    assert losses[-1] < losses[0] * 0.9
    assert trainer.advance(rng) > 0
    moved = {name for name, value in params.items() if not torch.equal(value, before[name])}
    assert moved
    assert all(map(is_vision, moved))
