"""How many drafts the backbone accepts, and how well the head knows it; temperatures to fit that.

    python -m services.engine.training.acceptance --out build/training/pelagos-mini

Drafts are chained greedily, each on the one before it, as the engine does; a draft counts while
the row's own text is what the backbone would have said.
Source: model.md, sections 15 and 16; small-model.md, section 5.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from services.engine.training.draft import DRAFT, TEMPERATURES, DraftTrainer, anchors
from services.engine.training.feed import joined
from services.engine.training.parameters import Params
from services.engine.training.rows import Corpus, Row
from services.engine.training.tasks.stages import Stage
from services.engine.training.train import DEFAULT_OUT, STATE, VOCABULARY

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_BINS = 10
_FIT_SEED = 1 << 40  # far from the rows that anything was trained on


@dataclass(frozen=True)
class Trials:
    """Drafts from A anchors, G each.

    raw [A, G]: logits of the confidences; right [A, G]: whether the backbone says the same;
    tested [A, G]: whether all drafts before were accepted and this one is inside the answer;
    inside [A, G]: the latter alone; kinds [A]: of the answer.
    """

    raw: Floats
    right: Flags
    tested: Flags
    inside: Flags
    kinds: npt.NDArray[np.str_]

    def by_position(self) -> list[float]:
        """Returns the share of accepted drafts at each position, given all before it."""
        return [
            float(self.right[self.tested[:, i], i].mean()) if self.tested[:, i].any() else 0.0
            for i in range(self.right.shape[1])
        ]

    @property
    def accepted(self) -> npt.NDArray[np.int64]:
        """Number of accepted drafts of each anchor, [A]."""
        return np.asarray((self.right & self.tested).sum(1))

    @property
    def whole(self) -> Flags:
        """Which anchors have room for every draft, [A]."""
        return self.inside[:, -1]

    def by_kind(self) -> dict[str, tuple[float, int]]:
        """Returns mean accepted where all fit, and the number of anchors, by kind."""
        found = {}
        for kind in sorted(set(self.kinds.tolist())):
            at = self.whole & (self.kinds == kind)
            if at.any():
                found[kind] = (float(self.accepted[at].mean()), int(at.sum()))
        return found


@torch.no_grad()
def trials(head: DraftTrainer, rows: Iterable[Row]) -> Trials:
    """Drafts from every place in the answers of some rows."""
    width, parts = head.text.dspark_block_size, []
    for row in rows:
        ids, loss = (torch.from_numpy(part) for part in joined([row]))
        flat = ids[0]
        hidden = head.network.forward(ids)
        said = head.network.logits(hidden.x).argmax(-1)
        drawn = anchors(ids, loss, ids.numel(), width, head.config.eos_token_id, 0)
        if len(drawn.at) == 0:
            continue
        ahead = drawn.at[:, None] + 1 + torch.arange(width)
        wanted, true = said[ahead], flat[ahead + 1]
        x = head.hidden_rows(hidden.features, flat, len(flat), drawn.at)
        base = head.base_logits(x)
        previous = flat[drawn.at + 1]
        right, raw = [], []
        for i in range(width):
            token, added = head.bias(previous)
            previous = (base[:, i] + added).argmax(-1)
            right.append(previous == wanted[:, i])
            raw.append(head.confidence(x[:, i], token))
        hits = torch.stack(right, 1)
        # A draft is tried when those before it were accepted and are what the row really says.
        going = (hits & (wanted == true)).cummin(1).values
        before = torch.cat((going.new_ones(len(going), 1), going[:, :-1]), 1)
        kinds = np.full(len(flat), "", "U16")
        for answer in row.answers:
            kinds[answer.start : answer.end] = answer.kind
        found = (torch.stack(raw, 1), hits, before & drawn.inside, drawn.inside)
        parts.append((*(part.numpy() for part in found), kinds[drawn.at.numpy() + 1]))
    logits, said_right, tested, inside, kind = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    return Trials(logits.astype(np.float64), said_right, tested, inside, kind)


def survivals(found: Trials, temperatures: Floats) -> Floats:
    """Returns the chance that a draft and all before it are accepted, [A, G]."""
    chances: Floats = 1 / (1 + np.exp(-found.raw / temperatures))
    return np.cumprod(chances, axis=1, dtype=np.float64)


def calibration(chance: Floats, happened: Flags) -> tuple[float, list[tuple[float, float, int]]]:
    """Returns the mean distance of chance and share over bins of chance, and the bins."""
    at = np.minimum((chance * _BINS).astype(int), _BINS - 1)
    bins = []
    for number in range(_BINS):
        inside = at == number
        if inside.any():
            bins.append(
                (float(chance[inside].mean()), float(happened[inside].mean()), int(inside.sum()))
            )
    total = sum(count for _, _, count in bins)
    error = sum(abs(mean - share) * count for mean, share, count in bins) / max(1, total)
    return error, bins


def fit_temperatures(found: Trials) -> Floats:
    """Returns a temperature per position, fitted from left to right on the survival."""
    width = found.raw.shape[1]
    chosen = np.ones(width)
    happened = np.logical_and.accumulate(found.right, axis=1)
    for i in range(width):
        fits = found.inside[:, i]
        errors = []
        grid = np.geomspace(0.25, 4.0, 49)
        for value in grid:
            chosen[i] = value
            errors.append(calibration(survivals(found, chosen)[fits, i], happened[fits, i])[0])
        chosen[i] = grid[int(np.argmin(errors))]
    return chosen


def fit(out: Path, *, num_rows: int = 60) -> Floats:
    """Fits the temperatures of a run's head on rows that it did not train on; writes them down."""
    params: Params = dict(torch.load(out / STATE, weights_only=True)["params"])
    params |= torch.load(out / DRAFT, weights_only=True)
    corpus = Corpus(out / VOCABULARY, "train")
    rows = [corpus.row(Stage.TOOLS, 768, _FIT_SEED + seed) for seed in range(num_rows)]
    fitted = fit_temperatures(trials(DraftTrainer(params), rows))
    (out / TEMPERATURES).write_text(json.dumps([round(float(value), 3) for value in fitted]))
    return fitted


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print("temperatures:", fit(options.out).round(3).tolist())


if __name__ == "__main__":
    main()
