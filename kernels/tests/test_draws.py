"""Sampling without a host gives the tokens of sampling on host arrays, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.reference import draws, sampling

pytestmark = pytest.mark.engine

VOCAB, WIDTH = 61, 5


def params_of(rng: np.random.Generator, n: int, kind: str) -> sampling.Params:
    temperature = rng.choice([0.0, 0.7, 1.3], n).astype(np.float32)
    top_p, top_k = np.ones(n, np.float32), np.zeros(n, np.int64)
    if kind == "greedy":
        temperature[:] = 0
    if kind == "full":
        top_p = rng.choice([1.0, 0.8, 0.3], n).astype(np.float32)
        top_k = rng.choice([-1, 0, 1, 7], n).astype(np.int64)
    return sampling.Params(temperature, top_p, top_k, rng.integers(0, 2**64, n, np.uint64))


def device_of(params: sampling.Params) -> draws.Draws:
    return draws.Draws(
        torch.from_numpy(params.temperature),
        torch.from_numpy(params.top_p),
        torch.from_numpy(params.top_k),
        torch.from_numpy(params.seeds.view(np.int64)),
    )


def test_noise_is_the_same_for_any_seed():
    rng = np.random.default_rng(0)
    seeds = np.concatenate(
        (rng.integers(0, 2**64, 500, np.uint64), np.array([0, 1, 2**63, 2**64 - 1], np.uint64))
    )
    positions = rng.integers(0, 1 << 20, len(seeds))
    for stream in range(4):
        found = draws.uniforms(
            torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions), stream
        )
        assert np.array_equal(found.numpy(), sampling.uniforms(seeds, positions, stream))


@pytest.mark.parametrize("kind", draws.KINDS)
def test_distributions_are_the_same_bits(kind):
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((40, VOCAB), np.float32).round(1))
    params = params_of(rng, 40, kind)
    expected = sampling.target_logprobs(logits, params)
    assert torch.equal(draws.target_logprobs(logits, device_of(params), kind), expected)


def test_a_row_without_limits_does_not_depend_on_its_batch():
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((2, VOCAB), np.float32))
    both = sampling.Params(
        np.full(2, 0.9, np.float32),
        np.array([1.0, 0.5], np.float32),
        np.zeros(2, np.int64),
        np.zeros(2, np.uint64),
    )
    alone = both.take(np.array([0]))
    together = sampling.target_logprobs(logits, both)
    assert torch.equal(together[:1], sampling.target_logprobs(logits[:1], alone))


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_split_as_on_the_host(seed):
    rng = np.random.default_rng(seed)
    lanes, live = 9, int(rng.integers(1, 10))
    confidences = rng.choice([0.0, 0.3, 0.5, 1.0, rng.random()], (lanes, WIDTH))
    survivals = confidences.cumprod(1)
    budget = int(rng.integers(live, live * (WIDTH + 1) + 1))
    found = draws.split_rows(
        torch.from_numpy(survivals), torch.arange(lanes) < live, torch.tensor(budget)
    )
    assert found[live:].sum() == 0
    assert found.sum() == budget
    expected = sampling.assign_verify_lengths(survivals[:live], budget)
    assert found[:live].tolist() == expected.tolist()


@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "rejection"])
@pytest.mark.parametrize("kind", draws.KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_verification_gives_the_tokens_of_the_host(kind, coupled, seed):
    rng = np.random.default_rng([7, seed])
    lanes = 12
    counts = rng.integers(1, WIDTH + 2, lanes)
    firsts = np.cumsum(counts) - counts
    params = params_of(rng, lanes, kind)
    rows = params.take(np.repeat(np.arange(lanes), counts))
    logits = torch.from_numpy(3 * rng.standard_normal((counts.sum() + 4, VOCAB), np.float32))
    real = logits[: counts.sum()]
    offered = torch.from_numpy(rng.standard_normal((lanes, WIDTH, VOCAB), np.float32))
    offered = offered.log_softmax(2)
    drafts = rng.integers(0, VOCAB, (lanes, WIDTH))
    best = logits.argmax(1).numpy()
    for lane in range(lanes):  # many right ones, so that every length occurs
        for i in range(counts[lane] - 1):
            if rng.random() < 0.7:
                drafts[lane, i] = best[firsts[lane] + i]
    positions = rng.integers(0, 1000, lanes)
    accepted, tokens = sampling.verify_rows(
        sampling.target_logprobs(real, rows),
        firsts,
        counts - 1,
        drafts,
        None if coupled else offered,
        params.seeds,
        positions,
        coupled=coupled,
    )
    held = device_of(params)
    # Rows past the last one and lanes without rows change nothing.
    padded = draws.Draws(*(torch.cat((t, t[:1])) for t in vars(held).values()))
    owners = torch.from_numpy(np.append(np.repeat(np.arange(lanes), counts), [lanes] * 4))
    greedy_only = kind == "greedy" and coupled
    found = draws.verify_lanes(
        logits,
        None if greedy_only else draws.target_logprobs(logits, padded.take(owners), kind),
        torch.from_numpy(np.append(firsts, len(real))),
        torch.from_numpy(np.append(counts, 0)),
        torch.from_numpy(np.concatenate((drafts, drafts[:1]))),
        torch.from_numpy(np.append(positions, 0)),
        padded,
        None if coupled else torch.cat((offered, offered[:1])),
    )
    assert found.accepted[:lanes].tolist() == accepted.tolist()
    assert found.tokens[:lanes].tolist() == tokens.tolist()


def test_masks_of_bits_take_away_what_they_do_not_allow():
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.standard_normal((5, VOCAB), np.float32))
    allowed = rng.random((2, 64)) < 0.3
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    which = torch.tensor([-1, 1, 0, -1, 1])
    found = draws.apply_bits(logits.clone(), torch.from_numpy(words), which)
    for row, mask in enumerate(which.tolist()):
        if mask < 0:
            assert torch.equal(found[row], logits[row])
        else:
            assert (found[row] > float("-inf")).tolist() == allowed[mask][:VOCAB].tolist()
