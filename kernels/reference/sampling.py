"""Target distributions, counter-based noise, sampling and verification of drafts.

Noise is a function of (seed, absolute position, stream): no generator, no order of rows, so that a
hand-off, a chunk border or another batch changes nothing. Source: model.md, sections 14 and 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TARGET, ACCEPTANCE, RESIDUAL, DRAFT = range(4)  # streams of noise
GREEDY_BELOW = 1e-5
RESIDUAL_SLACK = 5e-5  # keeps the residual from being empty
_ABSENT = float("-inf")

Int = npt.NDArray[np.int64]
Seeds = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Params:
    """How rows are drawn: [n] each; top_k below 1 takes all."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: Int
    seeds: Seeds

    def take(self, rows: Int) -> Params:
        return Params(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seeds[rows])

    @property
    def greedy(self) -> npt.NDArray[np.bool_]:
        return self.temperature < GREEDY_BELOW


def uniforms(seeds: Seeds, positions: Int, stream: int | Int) -> npt.NDArray[np.float64]:
    """Returns noise in [0, 1) per (seed, position, stream)."""
    with np.errstate(over="ignore"):
        counter = (8 * positions + stream + 1).astype(np.uint64)
        z = seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * counter
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def target_logprobs(logits: Tensor, params: Params) -> Tensor:
    """Returns the distribution each row is drawn from, [n, V] float32 log-probabilities.

    Temperature, then top-p, then top-k; what is left out has -inf. A greedy row has all its mass
    on the largest logit, the lowest id of equals. Ids that are not allowed come with -inf.
    """
    greedy = torch.from_numpy(params.greedy).to(logits.device)
    result = torch.empty_like(logits)
    if bool(greedy.any()):
        rows = greedy.nonzero()[:, 0]
        best = logits[rows].argmax(1)
        point = torch.full((len(rows), logits.shape[1]), _ABSENT, device=logits.device)
        result[rows] = point.scatter_(1, best[:, None], 0.0)
    drawn = np.flatnonzero(~params.greedy)
    if len(drawn):
        rows = torch.from_numpy(drawn).to(logits.device)
        result[rows] = _restricted(logits[rows], params.take(drawn))
    return result


def _restricted(logits: Tensor, params: Params) -> Tensor:
    temperature = torch.from_numpy(params.temperature).to(logits.device)
    scaled = logits / temperature[:, None]
    free = (params.top_p >= 1) & (params.top_k < 1)
    if free.all():
        return scaled.log_softmax(1)
    ordered, ids = scaled.sort(dim=1, descending=True, stable=True)
    mass = ordered.softmax(1)
    before = mass.cumsum(1) - mass
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_p = torch.from_numpy(params.top_p).to(logits.device)
    limit = np.where(params.top_k < 1, logits.shape[1], params.top_k)
    dropped = (before > top_p[:, None]) | (rank >= torch.from_numpy(limit)[:, None].to(ids.device))
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, _ABSENT)
    cut = torch.empty_like(kept).scatter_(1, ids, kept).log_softmax(1)
    if not free.any():
        return cut
    # A row without limits keeps its bits, whoever else is in the batch.
    return torch.where(torch.from_numpy(free).to(ids.device)[:, None], scaled.log_softmax(1), cut)


def draw(mass: Tensor, noise: npt.NDArray[np.float64]) -> Int:
    """Returns the smallest id per row whose cumulated mass exceeds noise * total. mass: [n, V]."""
    cdf = mass.double().cumsum(1)
    total = cdf[:, -1]
    wanted = torch.from_numpy(noise).to(mass.device) * total
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cdf, wanted[:, None], right=True)[:, 0]
    result: Int = found.cpu().numpy()
    return result


def sample_rows(logprobs: Tensor, seeds: Seeds, positions: Int, stream: int = TARGET) -> Int:
    """Draws one id per row from `target_logprobs`; `positions` are those of the new tokens."""
    return draw(logprobs.exp(), uniforms(seeds, positions, stream))


def verify_rows(
    target: Tensor,
    first_rows: Int,
    num_drafts: Int,
    drafts: Int,
    proposals: Tensor | None,
    seeds: Seeds,
    positions: Int,
    *,
    coupled: bool,
) -> tuple[Int, Int]:
    """Accepts drafts from the left and draws the token after the last accepted one.

    Args:
        target: [n, V] log-probabilities; a request's rows are first_rows[b] and the num_drafts[b]
            after it. Row i judges draft i and stands for position positions[b] + i + 1.
        drafts: [B, G] ids; proposals: [B, G, V] log-probabilities the drafts were drawn from,
            not needed when coupled.
        positions: [B], position of each request's first row.
        coupled: a draft is accepted iff it is what would have been drawn anyway.
    Returns: accepted [B], tokens [B, G + 1] (accepted drafts, then the new token; rest 0).
    """
    batch, width = drafts.shape
    steps = np.arange(width)
    judged = steps < num_drafts[:, None]
    if coupled:
        offsets = np.arange(width + 1)
        rows = first_rows[:, None] + np.minimum(offsets, num_drafts[:, None])
        where = positions[:, None] + offsets + 1
        used = offsets <= num_drafts[:, None]
        drawn = np.zeros((batch, width + 1), np.int64)
        flat = torch.from_numpy(rows[used])
        drawn[used] = sample_rows(
            target[flat.to(target.device)],
            np.broadcast_to(seeds[:, None], used.shape)[used],
            where[used],
        )
        accepted = _prefix((drawn[:, :-1] == drafts) & judged)
        tokens = np.where(offsets <= accepted[:, None], drawn, 0)
        return accepted, tokens
    accepts = np.zeros((batch, width), bool)
    b_index, i_index = np.nonzero(judged)
    if len(b_index):
        assert proposals is not None, "rejection needs what the drafts were drawn from"
        judging = torch.from_numpy(first_rows[b_index] + i_index).to(target.device)
        ids = torch.from_numpy(drafts[b_index, i_index]).to(target.device)
        wanted = target[judging, ids].double()
        offered = proposals[torch.from_numpy(b_index), torch.from_numpy(i_index), ids].double()
        ratio = (wanted - offered).exp().clamp(max=1.0).cpu().numpy()
        noise = uniforms(seeds[b_index], positions[b_index] + i_index + 1, ACCEPTANCE)
        accepts[b_index, i_index] = noise < ratio
    accepted = _prefix(accepts)
    final = target[torch.from_numpy(first_rows + accepted).to(target.device)].exp().double()
    refused = np.flatnonzero(accepted < num_drafts)
    if len(refused):
        at = torch.from_numpy(refused).to(target.device)
        offered = proposals[at, torch.from_numpy(accepted[refused])].exp().double()  # type: ignore[index]
        final[at] = (final[at] - (1 - RESIDUAL_SLACK) * offered).clamp(min=0)
    stream = np.where(accepted < num_drafts, RESIDUAL, TARGET)
    new = draw(final, uniforms(seeds, positions + accepted + 1, stream))
    tokens = np.zeros((batch, width + 1), np.int64)
    tokens[:, :-1] = np.where(steps < accepted[:, None], drafts, 0)
    tokens[np.arange(batch), accepted] = new
    return accepted, tokens


def _prefix(flags: npt.NDArray[np.bool_]) -> Int:
    """Returns how many leading flags of each row hold."""
    return np.logical_and.accumulate(flags, axis=1).sum(1)


def assign_verify_lengths(survivals: npt.NDArray[np.float64], budget: int) -> Int:
    """Splits `budget` rows over requests by the survival of their drafts; one row each at least.

    Args:
        survivals: [B, G], not increasing along a row. Equal ones go to the lower flat index.
    Returns: rows per request, [B].
    """
    batch, width = survivals.shape
    order = np.argsort(-survivals.reshape(-1), kind="stable")[: max(0, budget - batch)]
    return 1 + np.bincount(order // width, minlength=batch)
