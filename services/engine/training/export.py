"""Writes the trained model in the published format: backbone, draft head, vocabulary, settings.

    python -m services.engine.training.export --out build/training/pelagos-mini [--to DIR]
    python -m services.engine.training.export --of deploy/models/pelagos-mini  # its quantised form

Embedding and head are one matrix while they are trained and two tensors in the file. The vision
tower keeps its first values unless it was trained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from services.engine.model.checkpoint import CheckpointReader, lay_tokenizer, write_checkpoint
from services.engine.model.config import ModelConfig
from services.engine.model.presets import TINY
from services.engine.training.draft import DRAFT, TEMPERATURES
from services.engine.training.parameters import Params, from_source, initial, published
from services.engine.training.train import DEFAULT_OUT, STATE, VOCABULARY

DEFAULT_TO = Path("deploy/models/pelagos-mini")
QUANTISED_TO = Path("deploy/models/pelagos-mini-quantised")
VISION = "vision.pt"


def gathered(out: Path, seed: int = 0) -> Params:
    """Returns every parameter of a run; what was not trained has its first values."""
    params = initial(TINY, seed)
    params |= torch.load(out / STATE, weights_only=True)["params"]
    for part in (DRAFT, VISION):
        if (out / part).exists():
            params |= torch.load(out / part, weights_only=True)
    for name in list(params):
        # Images were not routed apart in training, unless the run says so.
        if name.endswith("gate.bias_vl"):
            params[name] = params[name.removesuffix("_vl")].clone()
    return params


def configuration(out: Path, *, quantised: bool) -> ModelConfig:
    """Returns the model's settings, with the temperatures that its confidences were fitted to."""
    config = TINY if quantised else replace(TINY, quantization=None)
    path = out / TEMPERATURES
    if path.exists():
        fitted = tuple(json.loads(path.read_text()))
        config = replace(config, system=replace(config.system, confidence_temperatures=fitted))
    return config


def export(out: Path, to: Path, *, quantised: bool = False) -> ModelConfig:
    """Writes a run's model to a directory, over what was there, and reads it back once."""
    config = configuration(out, quantised=quantised)
    to.mkdir(parents=True, exist_ok=True)
    for stale in to.glob("*.safetensors"):
        stale.unlink()
    write_checkpoint(to, config, published(config, gathered(out)))
    source = out / VOCABULARY
    if source.read_bytes() != (
        (to / VOCABULARY).read_bytes() if (to / VOCABULARY).exists() else b""
    ):
        lay_tokenizer(to, config, source)
    CheckpointReader(to, ModelConfig.load(to)).close()
    return config


def quantise(of: Path, to: Path) -> ModelConfig:
    """Writes the quantised form of a checkpoint's files to another directory."""
    plain = ModelConfig.load(of)
    config = replace(plain, quantization=TINY.quantization)
    with CheckpointReader(of, plain) as source:
        params = from_source(plain, source)
    to.mkdir(parents=True, exist_ok=True)
    write_checkpoint(to, config, published(config, params))
    lay_tokenizer(to, config, of / VOCABULARY)
    CheckpointReader(to, ModelConfig.load(to)).close()
    return config


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--form", choices=["bf16", "quantised"], default="bf16")
    parser.add_argument("--of", type=Path, help="files to quantise, in place of a run")
    options = parser.parse_args(arguments)
    quantised = options.of is not None or options.form == "quantised"
    to = options.to or (QUANTISED_TO if quantised else DEFAULT_TO)
    if options.of is not None:
        quantise(options.of, to)
    else:
        export(options.out, to, quantised=quantised)
    size = sum(path.stat().st_size for path in to.glob("*.safetensors"))
    print(f"wrote {to}: {size / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
