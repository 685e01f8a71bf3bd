"""Parameters while they are trained: published names, experts of a layer stacked, first values.

Source: model.md, section 18; small-model.md, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from services.engine.model.checkpoint import TensorSource
from services.engine.model.config import ModelConfig
from services.engine.model.names import TensorSpec, tensors

Params = dict[str, Tensor]

EMBED, HEAD = "embed.weight", "head.weight"
_EMBED_DEVIATION = 0.1
_TABLE_DEVIATION = 0.1
_MIX_SCALE = 0.3
_CLOSED, _OPEN = -2.5, 1.5  # base of a site's read weights: other streams, the one it starts with
_DIAGONAL = 4.0


def stacked_name(name: str) -> tuple[str, int | None]:
    """Returns the training name of a published tensor, and which expert of the stack it is."""
    head, marker, tail = name.partition(".ffn.experts.")
    if not marker:
        return name, None
    number, matrix, _ = tail.split(".")
    return f"{head}.ffn.experts.{matrix}", int(number)


def is_draft(name: str) -> bool:
    return name.startswith("mtp.")


def is_vision(name: str) -> bool:
    return name.startswith(("vision.", "aligner.", "image_"))


def is_buffer(name: str) -> bool:
    """Whether a tensor is moved by a rule of its own instead of by a gradient."""
    return name.endswith(("gate.bias", "gate.bias_vl"))


def _grouped(config: ModelConfig) -> Iterator[tuple[str, TensorSpec, list[str]]]:
    """Yields training names with the published spec and names that they stand for."""
    specs = tensors(config)
    members: dict[str, list[str]] = {}
    for name in specs:
        members.setdefault(stacked_name(name)[0], []).append(name)
    for name, published in members.items():
        yield name, specs[published[0]], published


def from_source(config: ModelConfig, source: TensorSource) -> Params:
    """Returns the tensors of a checkpoint, embedding and head apart."""
    found = {}
    for name, _, published in _grouped(config):
        parts = [source.matrix(part).float() for part in published]
        found[name] = torch.stack(parts) if name not in published else parts[0].clone()
    return found


def published(config: ModelConfig, params: Params) -> Iterator[tuple[str, Tensor]]:
    """Yields every published tensor as float32; a tied head is written beside its embedding."""
    for name in tensors(config):
        held, expert = stacked_name(name)
        if held == HEAD and HEAD not in params:
            held = EMBED
        value = params[held].detach().float()
        yield name, value if expert is None else value[expert]


def initial(config: ModelConfig, seed: int) -> Params:
    """Returns first values of everything, embedding and head tied; each tensor by (seed, name)."""
    text = config.text
    damped = (2 * text.num_hidden_layers) ** -0.5
    found = {}
    for name, spec, published_names in _grouped(config):
        if name == HEAD:
            continue
        shape = spec.shape if name in published_names else (len(published_names), *spec.shape)
        rng = np.random.default_rng([seed, *name.encode()])
        value = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        if "hc_" in name:
            value = _site_value(name, value, text.hc_mult)
        elif spec.kind == "norm" and spec.fan_in == 0:
            value = torch.ones(shape)
        elif name.endswith(("attn_sink", "gate.bias", "gate.bias_vl", ".bias")):
            value = torch.zeros(shape)
        elif name == EMBED or name.startswith("image_"):
            value = value * _EMBED_DEVIATION
        elif spec.kind == "table":
            value = value * _TABLE_DEVIATION
        elif name.endswith("markov_head.head.weight"):
            value = torch.zeros(shape)
        else:
            value = value * spec.fan_in**-0.5
            if name.endswith(("attn.wo_b.weight", "experts.w2", "shared_experts.w2.weight")):
                value = value * damped
        found[name] = value.contiguous()
    return found


def _site_value(name: str, drawn: Tensor, streams: int) -> Tensor:
    """First values of a hyper-connection: each site reads mostly one stream, in turn."""
    if name.endswith("_fn"):
        return drawn * float(drawn.shape[1] ** -0.5)
    if name.endswith("_scale"):
        return torch.full_like(drawn, _MIX_SCALE)
    site = 2 * int(name.split(".")[1]) + ("hc_ffn" in name)
    base = torch.zeros_like(drawn)
    base[:streams] = _CLOSED
    base[site % streams] = _OPEN
    base[2 * streams :].view(streams, streams).fill_diagonal_(_DIAGONAL)
    return base
