"""The network beside a slow one that was written from the specification alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch

from services.engine.keys import MediaSpan
from services.engine.model.cache import geometry
from services.engine.model.checkpoint import RandomSource
from services.engine.model.presets import NANO
from services.engine.model.tests.kit import EXACT, INVARIANT, Driver, network, prompt
from services.engine.model.tests.naive import Naive, Trace

pytestmark = pytest.mark.engine

IDS = tuple(prompt(42, 21))
KEEP_FROM = len(IDS) - geometry(NANO).keep_tokens


@lru_cache(maxsize=1)
def naive() -> Naive:
    torch.set_num_threads(1)
    return Naive(NANO, RandomSource(NANO, 1))


@lru_cache(maxsize=4)
def trace(keep_from: int) -> Trace:
    return naive().run(list(IDS), keep_from=keep_from)


def logits_of(driver: Driver, ids: tuple[int, ...], **row) -> torch.Tensor:
    """Runs a prompt; returns the logits of its last row."""
    found = []
    backbone = driver.runner.backbone
    original = backbone.logits
    backbone.logits = lambda x: found.append(original(x)) or found[-1].clone()
    driver.open(1, ids, **{k: v for k, v in row.items() if k == "media"})
    driver.prefill(driver.row(1, 0, len(ids), embeddings=row.get("embeddings", ())))
    return found[0][0]


@pytest.mark.parametrize("numerics", [EXACT, INVARIANT], ids=["tiles", "gather"])
def test_logits_and_entries_are_those_of_the_slow_network(numerics):
    expected = trace(KEEP_FROM)
    driver = Driver(network(NANO, numerics))
    logits = logits_of(driver, IDS)
    wanted = expected.logits[len(IDS) - 1]
    assert wanted.abs().max() > 1
    np.testing.assert_allclose(logits.numpy(), wanted.numpy(), atol=3e-4)
    pool = driver.runner.pool
    for layer, entries in expected.main.items():
        per_block = pool.sources[layer].entries
        at = torch.arange(len(entries))
        slots = torch.tensor(driver.tables[1])[at // per_block] * per_block + at % per_block
        found = pool.main[layer].gather(slots)
        np.testing.assert_allclose(found.numpy(), torch.stack(entries).numpy(), atol=1e-4)


def test_decode_rows_and_drafts_are_those_of_the_slow_network():
    driver = Driver(network(NANO, EXACT), truncation="off")
    ids = list(IDS[:30])
    said = driver.generate(ids, 4, drafts=0)
    expected = naive().run([*ids, *said[:-1]])
    assert [int(expected.logits[t].argmax()) for t in range(29, 33)] == said
    sequence = driver.runner._sequences[1]
    drafts, confidences = naive().draft(expected.features, 32, said[-1])
    assert sequence.drafts.tolist() == drafts
    np.testing.assert_allclose(sequence.confidences, confidences, atol=1e-4)


def test_an_image_takes_other_experts_no_memory_and_its_own_embeddings():
    ids = list(prompt(24, 22))
    span = MediaSpan(5, 9, bytes(32))
    ids[5:14] = [NANO.image_token_id] * 9
    rng = np.random.default_rng(4)
    picture = torch.from_numpy(rng.standard_normal((9, 64), np.float32)).to(torch.bfloat16)
    flags = [5 <= t < 14 for t in range(24)]
    rows = {5 + i: picture[i].float() for i in range(9)}
    keep = {"keep_from": 24 - geometry(NANO).keep_tokens}
    expected = naive().run(ids, image=flags, embeddings=rows, **keep).logits[23]
    data = picture.view(torch.uint8).numpy().tobytes()
    driver = Driver(network(NANO, EXACT))
    logits = logits_of(driver, tuple(ids), media=(span,), embeddings=((5, data),))
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=3e-4)
    without = naive().run(ids, embeddings=rows, **keep).logits[23]
    assert (without - expected).abs().max() > 1e-2
