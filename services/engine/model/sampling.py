"""From logits to tokens: masks, parameters of many requests, log-probabilities for callers.

Source: model.md, sections 14 and 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference import sampling as ops
from services.engine.requests import Sampling, TokenOut

Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleParams:
    """Sampling of B requests."""

    requests: tuple[Sampling, ...]
    kernel: ops.Params
    all_greedy: bool

    @staticmethod
    def of(requests: Sequence[Sampling]) -> SampleParams:
        kernel = ops.Params(
            np.array([r.temperature for r in requests], np.float32),
            np.array([r.top_p for r in requests], np.float32),
            np.array([r.top_k for r in requests], np.int64),
            np.array([r.seed for r in requests], np.uint64),
        )
        return SampleParams(tuple(requests), kernel, bool(kernel.greedy.all()))


def apply_masks(logits: Tensor, masks: Sequence[bytes | None]) -> Tensor:
    """Takes away the ids that a row's bit mask does not allow (bit t of the vocabulary, LE words).

    Raises: ValueError when a mask allows nothing.
    """
    for row, mask in enumerate(masks):
        if mask is None:
            continue
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = np.zeros(logits.shape[1], bool)
        width = min(len(bits), len(allowed))
        allowed[:width] = bits[:width] != 0
        if not allowed.any():
            raise ValueError("the mask allows no token")
        logits[row].masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))
    return logits


def sample_first(logits: Tensor, params: SampleParams, positions: Int) -> Int:
    """Draws the token at each position from its row's logits, [B]."""
    if params.all_greedy:
        best: Int = logits.argmax(1).cpu().numpy()
        return best
    logprobs = ops.target_logprobs(logits, params.kernel)
    return ops.sample_rows(logprobs, params.kernel.seeds, positions)


def verify(
    logits: Tensor,
    counts: Int,
    drafts: Int,
    proposals: Tensor | None,
    params: SampleParams,
    positions: Int,
    *,
    coupled: bool,
) -> tuple[Int, Int]:
    """Judges drafts by their rows and draws the token after the last accepted.

    Args:
        logits: [n, V], a request's rows one after the other; counts: [B] rows of each.
        drafts: [B, G]; proposals: [B, G, V] or None; positions: [B] of each first row.
    Returns: accepted [B], tokens [B, G + 1].
    """
    firsts = np.cumsum(counts) - counts
    if params.all_greedy:
        best = logits.argmax(1).cpu().numpy()
        offsets = np.arange(drafts.shape[1] + 1)
        used = offsets < counts[:, None]
        drawn = np.where(used, best[firsts[:, None] + np.where(used, offsets, 0)], 0)
        right = (drawn[:, :-1] == drafts) & used[:, 1:]
        accepted: Int = np.logical_and.accumulate(right, axis=1).sum(1)
        return accepted, np.where(offsets <= accepted[:, None], drawn, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    target = ops.target_logprobs(logits, params.kernel.take(owners))
    if proposals is None and not coupled:
        # Only greedy requests come without: their drafts are points.
        proposals = torch.full((*drafts.shape, logits.shape[1]), float("-inf"))
        proposals.scatter_(2, torch.from_numpy(drafts)[:, :, None], 0.0)
        proposals = proposals.to(logits.device)
    return ops.verify_rows(
        target,
        firsts,
        counts - 1,
        drafts,
        proposals,
        params.kernel.seeds,
        positions,
        coupled=coupled,
    )


def describe(logits: Tensor, token: int, sampling: Sampling) -> TokenOut:
    """Returns a token with the log-probabilities its caller asked for. logits: [V], masked.

    They are those of the distribution that was drawn from; of a greedy request those before
    temperature, since its own has a single point.
    """
    if not sampling.logprobs:
        return TokenOut(token)
    if sampling.greedy:
        logprobs = logits.log_softmax(0)
    else:
        logprobs = ops.target_logprobs(logits[None], SampleParams.of([sampling]).kernel)[0]
    count = min(sampling.top_logprobs, len(logprobs))
    best = logprobs.topk(count) if count else None
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best else ()
    kept = tuple((at, value) for at, value in top if value > float("-inf"))
    return TokenOut(token, float(logprobs[token]), kept)
