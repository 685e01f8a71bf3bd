"""Sampling and verification: exact distributions, and noise that depends on positions alone.

Source: model.md, sections 14 and 16; engine.md, sections 3.3 to 3.5.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.reference import sampling as s

pytestmark = pytest.mark.engine

# 99.99 % quantiles of chi squared.
CHI2 = {4: 23.51, 7: 29.88}


def params(num: int, temperature=1.0, top_p=1.0, top_k=0, seed=7) -> s.Params:
    return s.Params(
        np.full(num, temperature, np.float32),
        np.full(num, top_p, np.float32),
        np.full(num, top_k, np.int64),
        np.full(num, seed, np.uint64),
    )


def chi2(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


def test_noise_is_the_published_mix_of_seed_position_and_stream():
    def mix(z: int) -> int:
        mask = (1 << 64) - 1
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    seeds = np.array([0, 5, 2**64 - 1], np.uint64)
    positions = np.array([0, 17, 1_000_000])
    for stream in range(4):
        found = s.uniforms(seeds, positions, stream)
        for seed, p, u in zip(seeds.tolist(), positions.tolist(), found, strict=True):
            z = (seed + 0x9E3779B97F4A7C15 * (8 * p + stream + 1)) % (1 << 64)
            assert u == (mix(z) >> 11) * 2.0**-53
    many = s.uniforms(np.full(20000, 3, np.uint64), np.arange(20000), 0)
    assert chi2(np.histogram(many, 8, (0, 1))[0], np.full(8, 1 / 8)) < CHI2[7]


def test_a_sample_follows_the_distribution():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1])
    num = 20000
    logprobs = s.target_logprobs(logits.expand(num, -1), params(num))
    ids = s.sample_rows(logprobs, np.full(num, 9, np.uint64), np.arange(num))
    probabilities = logits.double().softmax(0).numpy()
    assert chi2(np.bincount(ids, minlength=5), probabilities) < CHI2[4]


def test_top_p_keeps_the_entry_that_crosses_the_mass_and_top_k_the_lower_of_equals():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.1]]))
    kept = s.target_logprobs(logits, params(1, top_p=0.5)).isfinite()[0]
    assert kept.tolist() == [False, True, True, False, False]
    kept = s.target_logprobs(logits, params(1, top_k=2)).isfinite()[0]
    assert kept.tolist() == [False, True, True, False, False]
    both = s.target_logprobs(logits, params(1, top_p=0.75, top_k=2))
    torch.testing.assert_close(both.exp().sum(1), torch.ones(1))
    assert s.target_logprobs(logits, params(1, top_p=1e-9)).isfinite().sum() == 1


def test_temperature_is_applied_before_the_mass_is_cut():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    hot = s.target_logprobs(logits, params(1, temperature=2.0, top_p=0.6))
    assert hot.isfinite()[0].tolist() == [True, True, False, False]
    torch.testing.assert_close(hot[0, :2], (logits[0, :2] / 2).log_softmax(0))


def test_greedy_is_the_largest_and_the_lowest_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    for temperature in (0.0, 9e-6):
        greedy = s.target_logprobs(logits, params(1, temperature=temperature, top_p=0.1, top_k=3))
        assert greedy.exp()[0].tolist() == [0, 1, 0, 0]


def test_zero_mass_is_never_drawn():
    mass = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.5, 0.0]])
    for noise in (0.0, 0.4999999, 0.5, 0.999999999999, 1 - 2**-53):
        assert s.draw(mass, np.array([noise]))[0] in (2, 4)
    assert s.draw(mass, np.array([0.0]))[0] == 2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rejection_keeps_the_target_distribution_whatever_drafted(seed):
    """The token at the first position is distributed as the target, for random proposals."""
    rng = torch.Generator().manual_seed(seed)
    num = 20000
    target = torch.randn(5, generator=rng).log_softmax(0)
    proposal = (2 * torch.randn(5, generator=rng)).log_softmax(0)
    seeds = np.full(num, seed, np.uint64)
    positions = 10 * np.arange(num)
    drafts = s.sample_rows(proposal.expand(num, -1), seeds, positions + 1, s.DRAFT)
    accepted, tokens = s.verify_rows(
        target.expand(2 * num, -1),
        2 * np.arange(num),
        np.ones(num, np.int64),
        drafts[:, None],
        proposal.expand(num, 1, -1),
        seeds,
        positions,
        coupled=False,
    )
    probabilities = target.exp().double().numpy()
    assert chi2(np.bincount(tokens[:, 0], minlength=5), probabilities) < CHI2[4]
    assert 0.1 < accepted.mean() < 1
    after = tokens[accepted == 1, 1]
    assert chi2(np.bincount(after, minlength=5), probabilities) < CHI2[4]


def test_coupled_verification_gives_the_tokens_of_plain_sampling():
    num, width = 50, 3
    logits = torch.randn(num * (width + 1), 6, generator=torch.Generator().manual_seed(4))
    logprobs = s.target_logprobs(logits, params(len(logits)))
    seeds, positions = np.full(num, 7, np.uint64), 10 * np.arange(num)
    rows = (width + 1) * np.arange(num)
    plain = np.stack(
        [s.sample_rows(logprobs[rows + i], seeds, positions + i + 1) for i in range(width + 1)], 1
    )
    drafts = plain[:, :width].copy()
    drafts[::2, 1] = (drafts[::2, 1] + 1) % 6
    counts = np.full(num, width)
    counts[5] = 1
    accepted, tokens = s.verify_rows(
        logprobs, rows, counts, drafts, None, seeds, positions, coupled=True
    )
    for b in range(num):
        wanted = min(1 if b % 2 == 0 else width, counts[b])
        assert accepted[b] == wanted
        assert tokens[b, : wanted + 1].tolist() == plain[b, : wanted + 1].tolist()


def test_verify_lengths_of_the_worked_example():
    confidences = np.array(
        [
            [0.6, 0.9, 0.9, 0.9, 0.9],
            [0.9, 0.9, 0.8, 0.5, 0.5],
            [0.95, 0.9, 0.9, 0.2, 0.9],
            [0.1, 0.9, 0.9, 0.9, 0.9],
        ]
    )
    survivals = np.cumprod(confidences, 1)
    assert s.assign_verify_lengths(survivals, 16).tolist() == [6, 5, 4, 1]
    survivals[3] = 0
    assert s.assign_verify_lengths(survivals, 16).tolist() == [6, 5, 4, 1]
    ones = np.ones((2, 5))
    assert [s.assign_verify_lengths(ones, b).tolist() for b in (3, 7, 9)] == [
        [2, 1],
        [6, 1],
        [6, 3],
    ]


def test_verify_lengths_are_those_of_the_simulated_device():
    from services.engine.sim.split import split_rows

    rng = np.random.default_rng(1)
    for _ in range(300):
        batch = int(rng.integers(1, 6))
        confidences = rng.choice([0.0, 0.3, 0.5, 0.9, 1.0], (batch, 5))
        budget = int(rng.integers(batch, 6 * batch + 1))
        survivals = np.cumprod(confidences, 1)
        found = s.assign_verify_lengths(survivals, budget)
        assert found.tolist() == split_rows(budget, confidences.tolist(), 5)
        assert found.sum() == budget
