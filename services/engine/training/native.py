"""The operations of `ops.py` from `native.cpp`, built for one configuration at first use.

The sizes of a configuration are constants of the build, so that every inner loop is unrolled.
Needs a C++ compiler; `ops_for` falls back to the plain ones where there is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.model.config import TextConfig
from services.engine.training.ops import Ops, PlainOps, Site

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("native.cpp")
_BUILD = Path(__file__).resolve().parents[3] / "build" / "training"
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC")


def ops_for(text: TextConfig) -> Ops:
    """Returns the fast operations where they can be built, else the plain ones, and says so."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.warning("no C++ compiler: training takes several times as long")
        return PlainOps(text)
    return NativeOps(text, compiler)


def _library(text: TextConfig, compiler: str) -> ctypes.CDLL:
    sizes = {
        "H": text.num_attention_heads,
        "DH": text.head_dim,
        "W": text.sliding_window,
        "K": text.index_topk,
        "HI": text.index_n_heads,
        "DI": text.index_head_dim,
        "M": text.hc_mult,
        "D": text.hidden_size,
        "ROUNDS": text.hc_sinkhorn_iters,
        "HC_EPS": text.hc_eps,
        "NORM_EPS": text.rms_norm_eps,
        "SCALE": text.softmax_scale,
        "LIMIT": text.swiglu_limit,
    }
    flags = [*_FLAGS, *(f"-D{name}={value}" for name, value in sizes.items())]
    key = repr(("linked apart", flags, compiler, platform.processor(), platform.node())).encode()
    digest = hashlib.sha256(key + _SOURCE.read_bytes()).hexdigest()[:16]
    path = _BUILD / f"native-{digest}.so"
    if not path.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
            code, made = f"{folder}/native.o", f"{folder}/native.so"
            subprocess.run([compiler, *flags, "-c", str(_SOURCE), "-o", code], check=True)
            # Linked without -ffast-math, with which GCC adds code that makes the thread that loads
            # the library flush denormal numbers, in every other operation of the process too.
            subprocess.run([compiler, "-shared", code, "-o", made], check=True)
            os.replace(made, path)
    return ctypes.CDLL(str(path))


class NativeOps:
    """Each method is one pass over the tokens, and one for its gradient."""

    def __init__(self, text: TextConfig, compiler: str) -> None:
        self.text = text
        self._library = _library(text, compiler)

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Calls a function. Tensors must be contiguous, of the type that it reads."""
        getattr(self._library, name)(*map(_passed, arguments))

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Rms.apply(self, x.contiguous(), weight)  # type: ignore[no-any-return]

    def rotate(self, x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
        return _Rotate.apply(self, x.contiguous(), turns, -1.0 if inverse else 1.0)  # type: ignore[no-any-return]

    def mixes(self, h: Tensor, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        z = F.linear(h.flatten(1), site.fn)
        return _Mixes.apply(self, z, h, site.base, site.scale)  # type: ignore[no-any-return]

    def collapse_norm(self, h: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
        return _CollapseNorm.apply(self, h, pre, weight)  # type: ignore[no-any-return]

    def expand(self, y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return _Expand.apply(self, y.contiguous(), h, post, comb)  # type: ignore[no-any-return]

    def swiglu(self, gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
        return _Swiglu.apply(self, gate, up, weights)  # type: ignore[no-any-return]

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        at: Tensor | None,
        sink: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor | None]:
        o, mass = _Attention.apply(self, q, kv, entries, at, sink, length)
        return o, None if at is None else mass

    def choose(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: Tensor,
        length: int,
        ratio: int,
        candidates: Tensor | None,
        wants_candidates: bool,
    ) -> tuple[Tensor, Tensor | None]:
        text, rows = self.text, len(queries)
        out = torch.empty(rows, text.index_topk, dtype=torch.long)
        count = text.candidate_topk_blocks
        made = torch.empty(rows, count, dtype=torch.long) if wants_candidates else None
        self.call(
            "choose",
            rows,
            length,
            ratio,
            queries,
            weights,
            keys,
            text.candidate_block_size,
            count,
            int(candidates is not None),
            made if candidates is None else candidates,
            out,
        )
        return out, made

    def scores(self, queries: Tensor, weights: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        return _Scores.apply(self, queries, weights, keys, at)  # type: ignore[no-any-return]


def _passed(argument: Tensor | int | float | None) -> Any:
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


class _Rms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: NativeOps, x: Tensor, weight: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x)
        ops.call("rms", *x.shape, x, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        ctx.ops.call("rms_back", *x.shape, x, weight, grads[0].contiguous(), dx, dw)
        return None, dx, dw


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: NativeOps, x: Tensor, turns: Tensor, sign: float) -> Tensor:
        ctx.ops, ctx.sign = ops, sign
        ctx.save_for_backward(turns)
        return _turned(ops, x, turns, sign)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (turns,) = ctx.saved_tensors
        return None, _turned(ctx.ops, grads[0].contiguous(), turns, -ctx.sign), None, None


def _turned(ops: NativeOps, x: Tensor, turns: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x)
    ops.call("rotate", *x.shape, turns.shape[1], x, turns, sign, out)
    return out


class _Mixes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: NativeOps, z: Tensor, h: Tensor, base: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.ops = ops
        ctx.save_for_backward(z, h, base, scale)
        rows, streams = h.shape[:2]
        pre, post = z.new_empty(rows, streams), z.new_empty(rows, streams)
        comb = z.new_empty(rows, streams, streams)
        ops.call("mixes", rows, z, h, base, scale, pre, post, comb)
        return pre, post, comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, h, base, scale = ctx.saved_tensors
        out = tuple(torch.empty_like(x) for x in (z, h, base, scale))
        given = (grad.contiguous() for grad in grads)
        ctx.ops.call("mixes_back", len(h), z, h, base, scale, *given, *out)
        return None, *out


class _CollapseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: NativeOps, h: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(h, pre, weight)
        out = h.new_empty(h.shape[0], h.shape[2])
        ops.call("collapse_norm", len(h), h, pre, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        held = ctx.saved_tensors
        out = tuple(torch.empty_like(x) for x in held)
        ctx.ops.call("collapse_norm_back", len(held[0]), *held, grads[0].contiguous(), *out)
        return None, *out


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: NativeOps, y: Tensor, h: Tensor, post: Tensor, comb: Tensor
    ) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(y, h, post, comb)
        out = torch.empty_like(h)
        ops.call("expand", len(h), y, h, post, comb, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        held = ctx.saved_tensors
        out = tuple(torch.empty_like(x) for x in held)
        ctx.ops.call("expand_back", len(held[0]), *held, grads[0].contiguous(), *out)
        return None, *out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: NativeOps, gate: Tensor, up: Tensor, weights: Tensor | None
    ) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(gate, up, weights)
        out = torch.empty_like(gate)
        ops.call("swiglu", *gate.shape, gate, up, weights, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weights = ctx.saved_tensors
        out = [None if x is None else torch.empty_like(x) for x in (gate, up, weights)]
        ctx.ops.call("swiglu_back", *gate.shape, gate, up, weights, grads[0].contiguous(), *out)
        return None, *out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: NativeOps,
        q: Tensor,
        kv: Tensor,
        entries: Tensor | None,
        at: Tensor | None,
        sink: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.ops, ctx.length = ops, length
        ctx.save_for_backward(q, kv, entries, at, sink)
        out = torch.empty_like(q)
        mass = q.new_empty(len(q), 0 if at is None else at.shape[1])
        ops.call("attention", len(q), length, q, kv, entries, at, sink, out, mass)
        ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, entries, _, sink = held = ctx.saved_tensors
        dq, dkv, dsink = torch.empty_like(q), torch.zeros_like(kv), torch.empty_like(sink)
        dentries = None if entries is None else torch.zeros_like(entries)
        given = grads[0].contiguous()
        ctx.ops.call("attention_back", len(q), ctx.length, *held, given, dq, dkv, dentries, dsink)
        return None, dq, dkv, dentries, None, dsink, None


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: NativeOps, queries: Tensor, weights: Tensor, keys: Tensor, at: Tensor
    ) -> Tensor:
        ctx.ops = ops
        ctx.save_for_backward(queries, weights, keys, at)
        out = weights.new_empty(at.shape)
        ops.call("scores", len(at), queries, weights, keys, at, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, weights, keys, at = held = ctx.saved_tensors
        dq, dw, dk = torch.empty_like(queries), torch.empty_like(weights), torch.zeros_like(keys)
        ctx.ops.call("scores_back", len(at), *held, grads[0].contiguous(), dq, dw, dk)
        return None, dq, dw, dk, None
