"""Matrix products with float32 sums, whatever the matrix is held in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# A CPU's library walks a matrix in the order it is stored only where that comes first. With a few
# rows beside a wide matrix that is most of the time; long rows (and one row) it does well as given.
_FEW_ROWS, _LEAST_OUT, _MOST_IN = 8, 64, 512


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weight^T, [n, out] float32.

    Args:
        x: [n, in] float32; weight: [out, in] float32, or bfloat16, which takes x as bfloat16.
    """
    if weight.dtype == torch.float32:
        if 1 < x.shape[0] <= _FEW_ROWS and _is_wide(weight) and x.device.type == "cpu":
            return torch.mm(weight, x.t()).t().contiguous()
        return F.linear(x, weight)
    if x.device.type == "cpu":
        return F.linear(x.to(torch.bfloat16).float(), weight.float())
    return torch.mm(x.to(torch.bfloat16), weight.t(), out_dtype=torch.float32)


def _is_wide(weight: Tensor) -> bool:
    num_out, num_in = weight.shape
    return num_out >= _LEAST_OUT and num_in <= _MOST_IN


def products(x: Tensor, weight: Tensor) -> Tensor:
    """As `product` for a batch of them: x [b, n, in], weight [b, out, in]."""
    turned = weight.transpose(1, 2)
    if weight.dtype == torch.float32:
        return torch.bmm(x, turned)
    if x.device.type == "cpu":
        return torch.bmm(x.to(torch.bfloat16).float(), turned.float())
    return torch.bmm(x.to(torch.bfloat16), turned, out_dtype=torch.float32)
