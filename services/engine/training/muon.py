"""Two optimisers: Muon for matrices of hidden layers, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest matrix whose singular values are all about one, so
that a step moves every direction alike. Source: small-model.md, section 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.engine.training.parameters import Params, is_buffer

_MUON_NAMES = (
    *("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight", "wgate.weight"),
    *("indexer.wk.weight", "weights_proj.weight", "main_proj.weight"),
    *("shared_experts.w1.weight", "shared_experts.w2.weight", "shared_experts.w3.weight"),
    *("experts.w1", "experts.w2", "experts.w3"),
    *("wqkv.weight", "attn.wo.weight", "mlp.w1.weight", "mlp.w2.weight"),
)
# Of an odd polynomial that pulls singular values of (0, 1] towards one, steep at zero.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def uses_muon(name: str) -> bool:
    return name.endswith(_MUON_NAMES)


def orthogonalised(x: Tensor) -> Tensor:
    """Returns matrices [b, r, c], r <= c, with singular values near one."""
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ROUNDS):
        gram = torch.bmm(x, x.transpose(1, 2))
        mixed = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, mixed, x, beta=a)
    return x


class _Stack:
    """Matrices of one size, held apart and moved as one batch."""

    def __init__(self, tall: bool) -> None:
        self.tall = tall  # transposed before, so that the shorter side comes first
        self.parameters: list[Tensor] = []
        self.momentum = torch.zeros(0)


class Muon:
    """Step `rate` * sqrt(max(1, rows / columns)) along the orthogonalised Nesterov momentum."""

    def __init__(self, params: Params, groups: int, momentum: float = 0.95) -> None:
        """`groups`: how many matrices lie below each other in a grouped output projection."""
        self._momentum = momentum
        self._stacks: dict[tuple[int, int, bool], _Stack] = {}
        for name, value in params.items():
            matrices = value.data
            if name.endswith("wo_a.weight"):
                matrices = matrices.view(groups, -1, value.shape[1])
            if matrices.dim() == 2:
                matrices = matrices[None]
            rows, columns = matrices.shape[1:]
            tall = rows > columns
            key = (min(rows, columns), max(rows, columns), tall)
            self._stacks.setdefault(key, _Stack(tall)).parameters.append(value)
        self._groups = groups
        for (short, long, _), stack in self._stacks.items():
            count = sum(p.numel() for p in stack.parameters) // (short * long)
            stack.momentum = torch.zeros(count, short, long)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (short, long, tall), stack in self._stacks.items():
            shape = (long, short) if tall else (short, long)
            grads = [_grad(p).reshape(-1, *shape) for p in stack.parameters]
            grad = torch.cat(grads)
            if tall:
                grad = grad.transpose(1, 2)
            stack.momentum.lerp_(grad, 1 - self._momentum)
            update = orthogonalised(torch.lerp(grad, stack.momentum, self._momentum))
            if tall:
                update = update.transpose(1, 2)
            step = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, part in zip(
                stack.parameters, update.split([len(g) for g in grads]), strict=True
            ):
                parameter.sub_(part.reshape(parameter.shape), alpha=step)

    def state(self) -> dict[str, Any]:
        return {str(key): stack.momentum for key, stack in self._stacks.items()}

    def load(self, state: dict[str, Any]) -> None:
        for key, stack in self._stacks.items():
            stack.momentum.copy_(state[str(key)])


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Optimiser:
    """Both, over the parameters that want a gradient."""

    def __init__(
        self, params: Params, groups: int, *, muon_rate: float = 0.03, adam_rate: float = 3e-3
    ) -> None:
        trained = {n: p for n, p in params.items() if p.requires_grad and not is_buffer(n)}
        self._params = list(trained.values())
        self._muon_rate, self._adam_rate = muon_rate, adam_rate
        self._muon = Muon({n: p for n, p in trained.items() if uses_muon(n)}, groups)
        rest = [p for n, p in trained.items() if not uses_muon(n)]
        self._adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=adam_rate,
            betas=(0.9, 0.98),
        )

    def step(self, factor: float, *, clip: float = 1.0) -> float:
        """Moves everything by its rate times `factor`; returns the gradient's norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self._params, clip)
        self._muon.step(self._muon_rate * factor)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_rate * factor
        self._adam.step()
        for parameter in self._params:
            parameter.grad = None
        return float(norm)

    def state(self) -> dict[str, Any]:
        return {"muon": self._muon.state(), "adam": self._adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._muon.load(state["muon"])
        self._adam.load_state_dict(state["adam"])
