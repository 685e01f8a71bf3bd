"""Sampling and verification of drafts without a host: every value stays a tensor.

The same numbers as `sampling.py`, which works on host arrays; shapes depend on no value, so that a
step of these ops can be captured. Source: model.md, sections 14 and 16; engine.md, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.sampling import (
    ACCEPTANCE,
    GREEDY_BELOW,
    RESIDUAL,
    RESIDUAL_SLACK,
    TARGET,
)

KINDS = ("greedy", "plain", "full")  # what a batch needs: argmax, temperature, or top-p and top-k
_ABSENT = float("-inf")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


@dataclass(frozen=True)
class Draws:
    """How rows are drawn: [n] each. `seeds` are the bits of 64-bit seeds, int64."""

    temperature: Tensor  # float32
    top_p: Tensor  # float32
    top_k: Tensor  # int64; below 1 takes all
    seeds: Tensor

    def take(self, rows: Tensor) -> Draws:
        return Draws(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seeds[rows])

    @property
    def greedy(self) -> Tensor:
        return self.temperature < GREEDY_BELOW


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifts 64 bits right as if they had no sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: Tensor, positions: Tensor, stream: int | Tensor) -> Tensor:
    """Returns noise in [0, 1) per (seed, position, stream), float64."""
    z = seeds + _STEP * (8 * positions + stream + 1)
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * 2.0**-53


def target_logprobs(logits: Tensor, draws: Draws, kind: str) -> Tensor:
    """Returns the distribution of each row, [n, V] float32, as `sampling.target_logprobs`.

    kind: the least of `KINDS` that holds for all rows.
    """
    vocab = logits.shape[1]
    best = logits.argmax(1, keepdim=True)
    at = torch.arange(vocab, device=logits.device)
    point = torch.zeros_like(logits).masked_fill_(at != best, _ABSENT)
    if kind == "greedy":
        return point
    scaled = logits / draws.temperature[:, None]
    drawn = scaled.log_softmax(1)
    if kind == "full":
        ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
        mass = ordered.softmax(1)
        dropped = (mass.cumsum(1) - mass) > draws.top_p[:, None]
        limit = torch.where(draws.top_k < 1, vocab, draws.top_k)
        dropped |= at >= limit[:, None]
        dropped &= at > 0
        kept = ordered.masked_fill(dropped, _ABSENT)
        cut = torch.empty_like(kept).scatter_(1, ids, kept).log_softmax(1)
        free = (draws.top_p >= 1) & (draws.top_k < 1)
        drawn = torch.where(free[:, None], drawn, cut)
    return torch.where(draws.greedy[:, None], point, drawn)


def draw(mass: Tensor, noise: Tensor) -> Tensor:
    """Returns the smallest id per row whose cumulated mass exceeds noise * total. mass: [n, V]."""
    cdf = mass.double().cumsum(1)
    total = cdf[:, -1]
    wanted = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, wanted[:, None], right=True)[:, 0]


def split_rows(survivals: Tensor, live: Tensor, budget: Tensor) -> Tensor:
    """Splits `budget` rows by the survival of drafts, as `sampling.assign_verify_lengths`.

    Args:
        survivals: [B, G] float64, not increasing along a row; live: [B] bool, lanes that count.
        budget: [] int64.
    Returns: rows per lane, [B] int64; none for a lane that does not count.
    """
    lanes, width = survivals.shape
    ranked = torch.where(live[:, None], survivals, -1.0).reshape(-1)
    order = ranked.sort(descending=True, stable=True).indices
    taken = torch.arange(lanes * width, device=ranked.device) < budget - live.sum()
    extra = torch.zeros(lanes, dtype=torch.int64, device=ranked.device)
    extra = extra.scatter_add_(0, order // width, taken.long())
    return torch.where(live, 1 + extra, 0)


@dataclass(frozen=True)
class Verified:
    """What verification says per lane, and which token each row would give."""

    accepted: Tensor  # [B]
    tokens: Tensor  # [B, G + 1]: accepted drafts, then the new token; rest 0


def verify_lanes(
    logits: Tensor,
    target: Tensor | None,
    first: Tensor,
    num_rows: Tensor,
    drafts: Tensor,
    base: Tensor,
    draws: Draws,
    proposals: Tensor | None,
) -> Verified:
    """Accepts drafts from the left and draws the token after the last accepted one.

    Args:
        logits: [n, V], masked; target: [n, V] of `target_logprobs`, None when all is greedy.
        first, num_rows: [B] rows of each lane, 0 rows for a lane that does not count.
        drafts: [B, G]; base: [B] position of each lane's first row.
        proposals: [B, G, V] log-probabilities that drafts were drawn from; None: coupled, a draft
            is accepted iff it is what would have been drawn anyway.
    """
    width = drafts.shape[1]
    offsets = torch.arange(width + 1, device=drafts.device)
    last = (num_rows - 1).clamp(min=0)[:, None]
    rows = (first[:, None] + torch.minimum(offsets, last)).clamp(max=logits.shape[0] - 1)
    judged = offsets[:-1] < num_rows[:, None] - 1
    if target is None or proposals is None:
        if target is None:
            drawn = logits.argmax(1)[rows]
        else:
            shape = rows.shape
            where = base[:, None] + offsets + 1
            noise = uniforms(draws.seeds[:, None], where, TARGET)
            drawn = draw(target[rows.reshape(-1)].exp(), noise.reshape(-1)).view(shape)
        accepted = _prefix((drawn[:, :-1] == drafts) & judged)
        return Verified(accepted, torch.where(offsets <= accepted[:, None], drawn, 0))
    wanted = target[rows[:, :-1], drafts].double()
    offered = proposals.gather(2, drafts[:, :, None])[:, :, 0].double()
    ratio = (wanted - offered).exp().clamp(max=1.0)
    noise = uniforms(draws.seeds[:, None], base[:, None] + offsets[:-1] + 1, ACCEPTANCE)
    accepted = _prefix((noise < ratio) & judged)
    final = target[rows.gather(1, accepted[:, None])[:, 0]].exp().double()
    refused = accepted < num_rows - 1
    at = accepted.clamp(max=width - 1)[:, None, None].expand(-1, 1, proposals.shape[2])
    pi = proposals.gather(1, at)[:, 0].exp().double()
    residual = (final - (1 - RESIDUAL_SLACK) * pi).clamp(min=0)
    final = torch.where(refused[:, None], residual, final)
    stream = torch.where(refused, RESIDUAL, TARGET)
    new = draw(final, uniforms(draws.seeds, base + accepted + 1, stream))
    kept = torch.nn.functional.pad(torch.where(offsets[:-1] < accepted[:, None], drafts, 0), (0, 1))
    return Verified(accepted, kept.scatter(1, accepted[:, None], new[:, None]))


def _prefix(flags: Tensor) -> Tensor:
    """Returns how many leading flags of each row hold."""
    return flags.long().cumprod(1).sum(1)


def apply_bits(logits: Tensor, words: Tensor, which: Tensor) -> Tensor:
    """Takes away what a row's mask does not allow, in place.

    Args:
        words: [m, ceil(V / 32)] int32, bit t & 31 of word t >> 5; which: [n] mask of a row, or -1.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = (words[which.clamp(min=0)][:, ids >> 5] >> (ids & 31).int()) & 1
    refused = (bits == 0) & (which >= 0)[:, None]
    return logits.masked_fill_(refused, _ABSENT)
