"""Trains the draft head on the frozen backbone, then fits its confidences.

    python -m services.engine.training.draft --out build/training/pelagos-mini

Every step draws anchors inside answers: the backbone's next tokens after an anchor are what the
head must foresee. Source: model.md, section 15; small-model.md, section 5.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from kernels.reference.attention import sparse_attention
from kernels.reference.hyper import hc_collapse
from kernels.reference.norm import rotations
from services.engine.model.config import ModelConfig
from services.engine.model.presets import TINY
from services.engine.training.feed import batches, joined
from services.engine.training.losses import balance
from services.engine.training.muon import Optimiser
from services.engine.training.native import ops_for
from services.engine.training.network import TrainingNetwork, first_stream
from services.engine.training.ops import take_rows
from services.engine.training.parameters import Params, initial, is_buffer, is_draft
from services.engine.training.schedule import Part, Schedule
from services.engine.training.tasks.stages import Stage
from services.engine.training.train import DEFAULT_OUT, STATE, VOCABULARY

DRAFT = "draft.pt"
LOG = "draft.jsonl"
TEMPERATURES = "temperatures.json"
DEFAULT_STEPS = 600
_FADE = 0.8  # weight of each draft beside the one before it
_ANCHOR_SHARE = 8  # tokens per anchor


@dataclass(frozen=True)
class Anchors:
    """Places to draft from, flat positions. Drafts of anchor a are tokens at + 2 and on.

    at [a]: the last row that the head knows; inside [a, G]: whether a draft is still a token of
    the same answer.
    """

    at: Tensor
    inside: Tensor


def anchors(ids: Tensor, loss: Tensor, count: int, width: int, eos: int, seed: int) -> Anchors:
    """Draws anchors in answers, or takes all of them when there are no more than `count`."""
    rows, length = ids.shape
    position = torch.arange(length).expand(rows, length)
    golden = torch.zeros_like(loss)
    golden[:, :-1] = loss[:, 1:] & (ids[:, 1:] != eos)
    golden &= position < length - width - 1
    found = golden.flatten().nonzero()[:, 0]
    if len(found) > count:
        order = np.random.default_rng(seed).permutation(len(found))[:count]
        found = found[torch.from_numpy(np.sort(order))]
    flat_ids, flat_loss = ids.flatten(), loss.flatten()
    ahead = found[:, None] + 2 + torch.arange(width)
    inside = flat_loss[ahead] & (flat_ids[ahead - 1] != eos)
    return Anchors(found, inside.cummin(1).values)


class DraftTrainer:
    """The draft head over a backbone that does not change."""

    def __init__(
        self, params: Params, schedule: Schedule | None = None, config: ModelConfig = TINY
    ) -> None:
        self.network = TrainingNetwork(config, params, ops_for(config.text))
        self.params, self.config, self.text = params, config, config.text
        self.schedule = schedule
        self._last = f"mtp.{self.text.num_nextn_predict_layers - 1}"
        for name, value in params.items():
            value.requires_grad_(is_draft(name) and not is_buffer(name))
        self._optimiser = Optimiser(params, self.text.o_groups) if schedule else None
        self.step = 0

    # --- the head -------------------------------------------------------------------------------

    def hidden_rows(self, features: Tensor, ids: Tensor, length: int, at: Tensor) -> Tensor:
        """Returns the head's rows before their norm, [a, G, D]. features: [n, 3D]; ids: [n]."""
        text, network = self.text, self.network
        width, window = text.dspark_block_size, text.sliding_window
        main = network.norm(
            network.linear(features, "mtp.0.main_proj.weight"), "mtp.0.main_norm.weight"
        )
        frequencies = network.frequencies[False]
        row_turns = rotations(torch.arange(length), frequencies).repeat(len(ids) // length, 1)
        position = at % length
        own_turns = rotations((position[:, None] + 1 + torch.arange(width)).flatten(), frequencies)
        near = at[:, None] + torch.arange(1 - window, 1)
        present = (position[:, None] + torch.arange(1 - window, 1)) >= 0
        present = torch.cat((present, present.new_ones(len(at), width)), 1)
        tokens = torch.full((len(at), width), text.dspark_noise_token_id)
        tokens[:, 0] = ids[at + 1]
        h = self.params["embed.weight"][tokens.flatten()]
        h = h[:, None, :].expand(-1, text.hc_mult, -1).contiguous()
        pre = first_stream(h)
        for layer in range(text.num_nextn_predict_layers):
            name = f"mtp.{layer}"

            def attend(x: Tensor, at_: str = f"{name}.attn") -> Tensor:
                ring = network.window_keys(at_, main, row_turns)
                _, q, kv = network.project_in(at_, x, own_turns)
                keys = take_rows(ring, near.clamp(min=0).flatten()).view(len(at), window, -1)
                keys = torch.cat((keys, kv.view(len(at), width, -1)), 1)
                o = sparse_attention(
                    q.view(len(at), -1, text.head_dim),
                    keys,
                    present,
                    self.params[f"{at_}.attn_sink"].repeat(width),
                    text.softmax_scale,
                )
                return network.project_out(at_, o.view(q.shape), own_turns)

            h, pre = network.block(name, h, pre, attend, text.dspark_num_experts_per_tok)
        return hc_collapse(h, pre).view(len(at), width, -1)

    def base_logits(self, x: Tensor) -> Tensor:
        return self.network.logits(
            self.network.norm(x.flatten(0, 1), f"{self._last}.norm.weight")
        ).view(*x.shape[:2], -1)

    def bias(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the previous token's row and what it adds to the logits."""
        row = take_rows(self.params[f"{self._last}.markov_head.embed.weight"], previous.flatten())
        row = row.view(*previous.shape, -1)
        return row, self.network.linear(row, f"{self._last}.markov_head.head.weight")

    def confidence(self, x: Tensor, row: Tensor) -> Tensor:
        """Returns the logit of each draft's acceptance."""
        weight = self.params[f"{self._last}.confidence_head.proj.weight"]
        return F.linear(torch.cat((x, row), -1), weight)[..., 0]

    # --- training -------------------------------------------------------------------------------

    def advance(self, rows: Sequence[Any]) -> dict[str, float]:
        assert self.schedule is not None
        assert self._optimiser is not None
        width = self.text.dspark_block_size
        ids, loss = (torch.from_numpy(part) for part in joined(list(rows)))
        flat, length = ids.flatten(), ids.shape[1]
        drawn = anchors(
            ids, loss, ids.numel() // _ANCHOR_SHARE, width, self.config.eos_token_id, self.step
        )
        ahead = drawn.at[:, None] + 1 + torch.arange(width)
        with torch.no_grad():
            hidden = self.network.forward(ids)
            targets = self.network.logits(hidden.x[ahead.flatten()]).softmax(-1)
            targets = targets.view(*ahead.shape, -1)
        self.network.loads.clear()
        x = self.hidden_rows(hidden.features, flat, length, drawn.at)
        row, added = self.bias(flat[ahead])
        logprobs = (self.base_logits(x) + added).log_softmax(-1)
        weight = drawn.inside * _FADE ** torch.arange(width)
        total = weight.sum()
        soft = -((targets * logprobs).sum(-1) * weight).sum() / total
        overlap = torch.minimum(targets, logprobs.detach().exp()).sum(-1).clamp(0, 1)
        raw = self.confidence(x.detach(), row.detach())
        sure = F.binary_cross_entropy_with_logits(raw, overlap, reduction="none")
        sure = (sure * drawn.inside).sum() / drawn.inside.sum()
        (soft + sure).backward()  # type: ignore[no-untyped-call]
        norm = self._optimiser.step(self.schedule.rate(self.step))
        load = balance(self.params, self.network.loads)
        self.step += 1
        hits = (logprobs.argmax(-1) == targets.argmax(-1)) & drawn.inside
        return {
            "loss": float(soft.detach()),
            "confidence_loss": float(sure.detach()),
            "overlap": float((overlap * drawn.inside).sum() / drawn.inside.sum()),
            "first": float(hits[:, 0].sum() / drawn.inside[:, 0].sum()),
            "last": float(hits[:, -1].sum() / drawn.inside[:, -1].sum().clamp(min=1)),
            "norm": norm,
            "load": load,
        }


def draft_schedule(steps: int) -> Schedule:
    """Half the steps on rows of 384, half on rows of 768."""
    return Schedule((Part(Stage.LONG, 384, steps // 2), Part(Stage.TOOLS, 768, steps - steps // 2)))


def run(out: Path, steps: int, *, seed: int = 0) -> DraftTrainer:
    """Trains a head for the backbone in `out`; writes `draft.pt` beside it."""
    held = torch.load(out / STATE, weights_only=True)
    params: Params = dict(held["params"])
    fresh = initial(TINY, seed)
    params |= {name: value for name, value in fresh.items() if is_draft(name)}
    last = f"mtp.{TINY.text.num_nextn_predict_layers - 1}"
    params[f"{last}.norm.weight"] = params["norm.weight"].clone()
    trainer = DraftTrainer(params, draft_schedule(steps))
    schedule = trainer.schedule
    assert schedule is not None
    bar = tqdm(total=steps, unit="step", mininterval=5)
    began = time.monotonic()
    with (out / LOG).open("w") as log:
        # Seeds far from those that the backbone saw.
        for rows in batches(out / VOCABULARY, schedule, 0, seed_from=1 << 32):
            facts: dict[str, Any] = {"step": trainer.step + 1, **trainer.advance(rows)}
            facts["seconds"] = time.monotonic() - began
            bar.update()
            bar.set_postfix(loss=f"{facts['loss']:.3f}", refresh=False)
            if trainer.step % 10 == 0:
                log.write(json.dumps(facts) + "\n")
                log.flush()
    bar.close()
    part = out / f"{DRAFT}.part"
    torch.save({n: p.detach() for n, p in params.items() if is_draft(n)}, part)
    os.replace(part, out / DRAFT)
    return trainer


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    run(options.out, options.steps, seed=options.seed)


if __name__ == "__main__":
    main()
