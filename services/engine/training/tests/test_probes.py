"""Probes need the blocks that they say they need, and together all of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from services.engine.training.probes import Probe, probes
from services.engine.training.rows import Corpus
from services.engine.training.tasks.turns import MODEL
from services.engine.training.tokenizer import DEFAULT_FILE
from services.recipe.client import codec

CORPUS = Corpus(DEFAULT_FILE, "held_out")
TOKENIZER = codec.Tokenizer(DEFAULT_FILE, num_threads=1, cache_bytes=0)
BLOCK = 16


def prompt_ids(probe: Probe) -> np.ndarray:
    options = codec.Options(models={MODEL: "v4.1"}).native()
    body = json.dumps(probe.question.body()).encode()
    return np.frombuffer(codec.encode("chat", body, options, TOKENIZER, 8192).token_ids(), "<u4")


@pytest.mark.parametrize("num_blocks", [2, 12, 40])
def test_every_block_is_needed_once(num_blocks: int) -> None:
    found = list(probes(CORPUS, 1, "a", num_blocks))
    needed = {block for probe in found for block in probe.blocks}
    assert set(range(num_blocks)) <= needed
    assert max(needed) <= num_blocks


def test_the_value_stands_in_the_named_blocks_and_nowhere_else() -> None:
    for probe in probes(CORPUS, 2, "a", 10):
        ids = prompt_ids(probe)
        assert len(ids) == probe.num_prompt_tokens
        value = probe.question.recalled
        assert TOKENIZER.decode(ids.tobytes()).count(value) == 1
        without = [ids[i : i + BLOCK] for i in range(0, len(ids), BLOCK)]
        kept = np.concatenate([b for i, b in enumerate(without) if i not in probe.blocks])
        assert value not in TOKENIZER.decode(kept.tobytes())
        inside = np.concatenate([without[block] for block in probe.blocks])
        assert value in TOKENIZER.decode(inside.tobytes())
        assert value in str(probe.question.expected)


def test_little_follows_the_last_boundary_and_lengths_are_odd_and_even() -> None:
    found = list(probes(CORPUS, 3, "a", 10))
    assert all(10 * BLOCK < probe.num_prompt_tokens <= 11 * BLOCK + 4 for probe in found)
    assert {probe.num_prompt_tokens % 2 for probe in found} == {0, 1}


def test_tenants_are_asked_the_same_and_answer_otherwise() -> None:
    first, second = (list(probes(CORPUS, 4, tenant, 10)) for tenant in ("a", "b"))
    assert [p.question.messages[-1] for p in first] == [p.question.messages[-1] for p in second]
    assert [p.blocks for p in first] == [p.blocks for p in second]
    assert [p.num_prompt_tokens for p in first] == [p.num_prompt_tokens for p in second]
    values = [{p.question.recalled for p in found} for found in (first, second)]
    assert not values[0] & values[1]


def test_probes_are_functions_of_their_arguments() -> None:
    assert list(probes(CORPUS, 5, "a", 6)) == list(probes(CORPUS, 5, "a", 6))


def test_blocks_too_small_for_a_fact_are_refused() -> None:
    with pytest.raises(ValueError, match="no facts fit"):
        next(probes(CORPUS, 6, "a", 64, block_tokens=4))
