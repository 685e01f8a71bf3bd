"""What training minimises, and the rule that keeps experts equally busy.

Source: small-model.md, section 4; model.md, section 12.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.training.network import Hidden, TrainingNetwork
from services.engine.training.parameters import Params

BALANCE_STEP = 0.005


def target_rows(loss: Tensor) -> Tensor:
    """Returns the flat index of each token whose next one is a target. loss: [rows, length]."""
    ahead = torch.zeros_like(loss)
    ahead[:, :-1] = loss[:, 1:]
    return ahead.flatten().nonzero()[:, 0]


def next_token_loss(
    network: TrainingNetwork, hidden: Hidden, ids: Tensor, loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the mean cross-entropy over targets, and whether each was the likeliest token."""
    at = target_rows(loss)
    logits = network.logits(hidden.x[at])
    wanted = ids.flatten()[at + 1]
    return F.cross_entropy(logits, wanted), logits.detach().argmax(1) == wanted


@torch.no_grad()
def balance(params: Params, loads: dict[str, list[int]], size: float = BALANCE_STEP) -> float:
    """Moves each routing bias towards equal load; returns the largest load over the mean."""
    worst = 1.0
    for at, counts in loads.items():
        load = torch.tensor(counts, dtype=torch.float32)
        params[f"{at}.gate.bias"] += size * torch.sign(load.mean() - load)
        worst = max(worst, float(load.max() / load.mean()))
    return worst
