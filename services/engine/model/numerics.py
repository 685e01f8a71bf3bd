"""How numbers are computed and kept: float32 throughout, or the published storage types.

Source: model.md, conventions and sections 11 and 21.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.experts import fake_quant
from kernels.reference.products import product

ROW_TILE = 16  # rows of one matrix product in batch-invariant mode
ENTRY_TILE = 64  # index keys of one product in batch-invariant mode


@dataclass(frozen=True)
class Weight:
    """A matrix [out, in], expanded to float32; `fp8` where activations are quantised to E4M3."""

    data: Tensor
    fp8: bool = False


@dataclass(frozen=True)
class Numerics:
    """`native`: bf16 activations and quantised operands; `quantised_kv`: caches in FP4 and FP8.

    `invariant` makes the bits of a row independent of the other rows of a step: rows go through
    matrices in tiles of a fixed height, and attention pads every row to the same number of keys.
    """

    native: bool = False
    quantised_kv: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        if self.native and not self.quantised_kv:
            raise ValueError("native activations come with quantised caches")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.native else torch.float32

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x weight^T in float32. x: [n, in] float32; weight: [out, in]."""
        if not self.invariant:
            return product(x, weight)
        rows = x.shape[0]
        tail = -rows % ROW_TILE
        if tail:
            x = F.pad(x, (0, 0, 0, tail))
        out = [product(part, weight) for part in x.split(ROW_TILE)]
        return torch.cat(out)[:rows] if out else x.new_empty(0, weight.shape[0])

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """Returns the linear in the activation type, operands quantised as they are stored."""
        if not self.native:
            return self.project(x, weight.data)
        wide = fake_quant(x) if weight.fp8 else x.float()
        return self.project(wide, weight.data).to(torch.bfloat16)
