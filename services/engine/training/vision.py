"""Trains the vision tower on the frozen backbone: four coloured squares, said as four words.

    python -m services.engine.training.vision --out build/training/pelagos-mini

A picture enters the prompt where words to copy would stand, so the backbone needs nothing new:
first each cell is drawn to the embedding of its colour's word, then the span as a whole is
trained by what the backbone says. Source: small-model.md, section 7; model.md, section 17.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from services.engine.model.presets import TINY
from services.engine.model.vision import VisionTower
from services.engine.training.export import VISION, gathered
from services.engine.training.losses import next_token_loss
from services.engine.training.muon import Optimiser
from services.engine.training.native import ops_for
from services.engine.training.network import TrainingNetwork
from services.engine.training.parameters import EMBED, Params, is_buffer, is_vision
from services.engine.training.schedule import Part, Schedule
from services.engine.training.tasks.draw import Draw, Split
from services.engine.training.tasks.pictures import Picture, picture
from services.engine.training.tasks.stages import Stage
from services.engine.training.tasks.words import COLORS
from services.engine.training.train import DEFAULT_OUT, VOCABULARY
from services.recipe.client import codec

DEFAULT_STEPS = 800
_SHADE = 8  # how far a training picture's colours are off, of 255
_QUESTIONS = ("Copy:", "Repeat after me:", "Say:", "Repeat:", "Write:")
_THOUGHT = "I repeat the words."
_WARM_STEPS = 60  # of the first part
# The frozen backbone copies from what is about as long as a word's embedding. At a rate of 0.01
# some cells grew to twenty times that and drowned the rest: no picture was right after 240 steps.
_MUON_RATE = 0.003
_ADAM_RATE = 6e-4
_MAX_LENGTH = 2.0  # of a span's entries, in lengths of words, free of charge
_LENGTH_WEIGHT = 0.02
_PIXEL = "data:image/png;base64,iVBORw0KGgo="  # a picture's place; its bytes are not looked at


def pixels(seen: Picture, rng: np.random.Generator | None) -> npt.NDArray[np.uint8]:
    """Returns a picture's pixels, [h, w, 3]; with `rng` in colours a little off."""
    data = np.frombuffer(seen.pixels(), np.uint8)
    side = int((len(data) // 3) ** 0.5)
    plain = data.reshape(side, side, 3)
    if rng is None:
        return plain
    half = side // 2
    shade = rng.integers(-_SHADE, _SHADE + 1, (2, 2, 3)).repeat(half, 0).repeat(half, 1)
    return (plain.astype(np.int64) + shade).clip(0, 255).astype(np.uint8)


class Prompts:
    """Prompts and answers as the running stack would have them."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = codec.Tokenizer(tokenizer, num_threads=1, cache_bytes=0)
        self._options = codec.Options(models={"pelagos-mini": "v4.1"}).native()

    def ids(self, question: str, thinking: bool, num_image_tokens: int) -> list[int]:
        """Returns a prompt with room for a picture's span."""
        content = [
            {"type": "text", "text": question},
            {"type": "image_url", "image_url": {"url": _PIXEL}},
        ]
        body = {
            "model": "pelagos-mini",
            "messages": [{"role": "user", "content": content}],
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        found = codec.convert("chat", json.dumps(body).encode(), self._options)
        data = self._tokenizer.encode_prompt(found.prompt, tuple(found.special_ranges))
        ids = np.frombuffer(data, "<u4").tolist()
        at = ids.index(TINY.image_token_id)
        return [*ids[:at], *[TINY.image_token_id] * num_image_tokens, *ids[at + 1 :]]

    def answer(self, colors: Sequence[str], thinking: bool) -> list[int]:
        words = np.frombuffer(self._tokenizer.encode_prompt(" ".join(colors), ()), "<u4").tolist()
        if not thinking:
            return [*words, TINY.eos_token_id]
        end = codec.DEFAULT_SPELLINGS["ThinkingEnd"]
        size = len(end.encode())
        start = len(_THOUGHT)
        data = self._tokenizer.encode_prompt(_THOUGHT + end, ((start, start + size),))
        return [*np.frombuffer(data, "<u4").tolist(), *words, TINY.eos_token_id]

    def word(self, text: str) -> int:
        """Returns the id of a word behind a space."""
        (found,) = np.frombuffer(self._tokenizer.encode_prompt(f" {text}", ()), "<u4").tolist()
        return int(found)


class _Source:
    """The parameters themselves, as what a tower reads its weights from."""

    def __init__(self, params: Params) -> None:
        self._params = params

    def matrix(self, name: str) -> Tensor:
        return self._params[name]

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        return self._params[name][rows]


class VisionTrainer:
    """The tower over a backbone that does not change."""

    def __init__(self, params: Params, tokenizer: Path, steps: int) -> None:
        for name, value in params.items():
            value.requires_grad_(is_vision(name) and not is_buffer(name))
        self.params = params
        self.network = TrainingNetwork(TINY, params, ops_for(TINY.text))
        self.tower = VisionTower(TINY, _Source(params))
        self.prompts = Prompts(tokenizer)
        self._words = {color: self.prompts.word(color) for color in COLORS}
        self._schedule = Schedule((Part(Stage.SHORT, 96, steps),), final=0.1)
        self._optimiser = Optimiser(
            params, TINY.text.o_groups, muon_rate=_MUON_RATE, adam_rate=_ADAM_RATE
        )
        words = params[EMBED].detach()[list(self._words.values())]
        self._word_energy = float(words.square().sum(-1).mean())
        self.step = 0

    def warm(self, rng: np.random.Generator) -> float:
        """Draws the cells of some pictures to the embeddings of their words."""
        pictures = self._pictures(32, rng, "train")
        spans = torch.stack([span[[1, 2, 4, 5]] for span in self._spans(pictures, rng)])
        wanted = torch.tensor([[self._words[c] for c in seen.colors] for seen in pictures])
        embed = self.params[EMBED].detach()[wanted]
        loss = F.mse_loss(spans, embed) / embed.var()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step(1.0)
        return float(loss.detach())

    def advance(self, rng: np.random.Generator) -> float:
        thinking = self.step % 3 == 2
        pictures = self._pictures(16 if thinking else 40, rng, "train")
        spans = self._spans(pictures, rng)
        loss, _ = self._loss(pictures, spans, thinking, rng)
        energy = torch.cat(spans).square().sum(-1) / self._word_energy
        too_long = F.relu(energy - _MAX_LENGTH**2).mean()
        (loss + _LENGTH_WEIGHT * too_long).backward()  # type: ignore[no-untyped-call]
        self._optimiser.step(self._schedule.rate(self.step))
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def exact(self, count: int, *, thinking: bool = False) -> float:
        """Returns the share of pictures of the test split whose four words are all right."""
        rng = np.random.default_rng(77)
        right = 0
        for begin in range(0, count, 20):
            pictures = self._pictures(min(20, count - begin), rng, "held_out")
            spans = self._spans(pictures, None)
            right += int(self._loss(pictures, spans, thinking, rng)[1].sum())
        return right / count

    def _loss(
        self,
        pictures: Sequence[Picture],
        spans: list[Tensor],
        thinking: bool,
        rng: np.random.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss over the answers, and which of them are wholly right."""
        rows, targets = [], []
        for seen, span in zip(pictures, spans, strict=True):
            question = _QUESTIONS[int(rng.integers(len(_QUESTIONS)))]
            prompt = self.prompts.ids(question, thinking, len(span))
            answer = self.prompts.answer(seen.colors, thinking)
            rows.append([*prompt, *answer])
            targets.append([False] * len(prompt) + [True] * len(answer))
        length = max(map(len, rows))
        length += length % 2
        ids = torch.tensor([row + [TINY.pad_token_id] * (length - len(row)) for row in rows])
        loss = torch.tensor([row + [False] * (length - len(row)) for row in targets])
        hidden = self.network.forward(ids, ids == TINY.image_token_id, torch.cat(spans))
        value, hits = next_token_loss(self.network, hidden, ids, loss)
        exact = torch.stack([part.all() for part in hits.split(loss.sum(1).tolist())])
        return value, exact

    def _pictures(self, count: int, rng: np.random.Generator, split: Split) -> list[Picture]:
        return [picture(Draw(f"picture/{rng.integers(1 << 40)}", split)) for _ in range(count)]

    def _spans(self, pictures: Sequence[Picture], rng: np.random.Generator | None) -> list[Tensor]:
        return self.tower.encode([pixels(seen, rng) for seen in pictures])


def run(out: Path, steps: int, *, seed: int = 0) -> float:
    """Trains the tower for the backbone in `out`; returns the share of exact answers."""
    params = gathered(out, seed)
    trainer = VisionTrainer(params, out / VOCABULARY, steps)
    rng = np.random.default_rng([seed, 5])
    for _ in range(_WARM_STEPS):
        loss = trainer.warm(rng)
    print(f"cells are {loss:.3f} of the embeddings' variance away")
    bar = tqdm(range(steps), unit="step", mininterval=5)
    for step in bar:
        loss = trainer.advance(rng)
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        if step % 50 == 49:
            bar.write(f"{step + 1}: loss {loss:.3f}, exact {trainer.exact(40):.2f}")
    part = out / f"{VISION}.part"
    torch.save({n: p.detach() for n, p in params.items() if is_vision(n)}, part)
    os.replace(part, out / VISION)
    return trainer.exact(200)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(f"exact, held out: {run(options.out, options.steps, seed=options.seed):.3f}")


if __name__ == "__main__":
    main()
