"""Quantised linears, routing and routed experts. Source: model.md, sections 11 and 12."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import formats
from kernels.reference.index import ordered_topk
from kernels.reference.products import product

Project = Callable[[Tensor, Tensor], Tensor]
Matrices = Tensor | tuple[Tensor, Tensor]  # expanded, or packed E2M1 with its scales


def fake_quant(x: Tensor) -> Tensor:
    """Returns x as E4M3 activations with E8M0 scales would carry it, float32."""
    return formats.dequant_fp8_rows(*formats.quant_fp8_rows(x))


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, project: Project = product) -> Tensor:
    """Linear of E4M3 activations and E4M3 weights with a scale per 32 x 32 tile.

    Args:
        x: [n, in]; weight: [out, in] float8_e4m3fn; scale: [out / 32, in / 32] uint8.
    Returns: [n, out] float32, accumulated in float32.
    """
    return project(fake_quant(x), formats.dequant_fp8_tiles(weight, scale))


def gate_topk(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    bias_image: Tensor | None,
    image: Tensor | None,
    top_k: int,
    scaling: float,
    project: Project = product,
) -> tuple[Tensor, Tensor]:
    """Routes rows to experts: the bias chooses, the bare score weighs.

    Args:
        x: [n, d]; gate: [E, d] float32; bias, bias_image: [E] float32; image: [n] bool or None.
    Returns: ids [n, top_k] ascending, weights [n, top_k] float32.
    """
    scores = F.softplus(project(x.float(), gate)).sqrt()
    if image is None or bias_image is None:
        chosen_by = scores + bias
    else:
        chosen_by = scores + torch.where(image[:, None], bias_image, bias)
    ids = ordered_topk(chosen_by, top_k).sort(1).values
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * scaling
    return ids, weights


def swiglu(gate_up: Tensor, weights: Tensor | None, limit: float) -> Tensor:
    """Clamped SwiGLU of [n, 2 * I] (gate, then up), times a weight per row. [n, I] float32."""
    gate, up = gate_up.float().chunk(2, -1)
    out = F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
    return out if weights is None else out.mul_(weights[:, None])


def grouped_mlp(
    x: Tensor,
    pair_rows: Tensor,
    pair_experts: Tensor,
    pair_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    *,
    project: Project = product,
    before_down: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Runs (row, expert) pairs through their experts.

    Args:
        x: [n, d] float32; pair_*: [p], row and expert of each pair and its routing weight.
        w13: [E, 2 * I, d]; w2: [E, d, I], float32.
        before_down: what the clamped product goes through before the last matrix.
    Returns: [p, d] float32, in the order of the pairs.
    """
    order = pair_experts.argsort(stable=True)
    counts = torch.bincount(pair_experts, minlength=w13.shape[0]).tolist()
    hit = [expert for expert, count in enumerate(counts) if count]
    sizes = [counts[expert] for expert in hit]
    inputs = x[pair_rows[order]].split(sizes)
    gate_up = [project(part, w13[e]) for part, e in zip(inputs, hit, strict=True)]
    middle = swiglu(torch.cat(gate_up), pair_weights[order], limit)
    if before_down is not None:
        middle = before_down(middle)
    parts = [project(part, w2[e]) for part, e in zip(middle.split(sizes), hit, strict=True)]
    out = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    out[order] = torch.cat(parts)
    return out


def grouped_mlp_static(
    x: Tensor,
    pair_rows: Tensor,
    pair_experts: Tensor,
    pair_weights: Tensor,
    w13: Matrices,
    w2: Matrices,
    limit: float,
    *,
    project: Project = product,
    before_down: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """As `grouped_mlp` without asking how many pairs an expert has: all pairs go through all.

    Defines what kernels for captured steps compute; itself it is for tests and small networks.

    Args:
        w13, w2: [E, out, in], or (packed [E, out, in / 2], scales [E, out, in / 32]) uint8.
    """
    inputs = x[pair_rows]
    out = torch.zeros(len(pair_rows), x.shape[1], dtype=torch.float32, device=x.device)
    for expert in range((w13 if isinstance(w13, Tensor) else w13[0]).shape[0]):
        middle = swiglu(project(inputs, _matrix(w13, expert)), pair_weights, limit)
        if before_down is not None:
            middle = before_down(middle)
        mine = (pair_experts == expert)[:, None]
        out = torch.where(mine, project(middle, _matrix(w2, expert)), out)
    return out


def _matrix(held: Matrices, expert: int) -> Tensor:
    if isinstance(held, Tensor):
        return held[expert]
    return formats.dequant_fp4_index(held[0][expert], held[1][expert])


def grouped_mlp_fp4(
    x: Tensor,
    pair_rows: Tensor,
    pair_experts: Tensor,
    pair_weights: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
    limit: float,
) -> Tensor:
    """As `grouped_mlp` with packed E2M1 experts and E4M3 activations around both matrices.

    Args:
        w13, w2: (packed [E, out, in / 2] uint8, scales [E, out, in / 32] uint8).
    """
    return grouped_mlp(
        fake_quant(x),
        pair_rows,
        pair_experts,
        pair_weights,
        formats.dequant_fp4_index(*w13),
        formats.dequant_fp4_index(*w2),
        limit,
        before_down=fake_quant,
    )
