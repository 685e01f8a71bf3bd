"""Finds the implementation of an op: the reference, or a faster one for the device.

An op is a function with one meaning, defined by its plain torch reference. Other implementations
are added under a name of their own and are tested against the reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Op = Callable[..., Any]

_REFERENCE = {
    "rms_norm": "norm",
    "rope_": "norm",
    "hc_mixes": "hyper",
    "hc_collapse": "hyper",
    "hc_expand": "hyper",
    "hc_expand_collapse_norm": "hyper",
    "quant_fp8_rows": "formats",
    "dequant_fp8_rows": "formats",
    "quant_fp4_kv": "formats",
    "dequant_fp4_kv": "formats",
    "quant_fp4_index": "formats",
    "dequant_fp4_index": "formats",
    "store_window": "stores",
    "store_block_kv": "stores",
    "pool_c2": "stores",
    "index_scores": "index",
    "topk_entries": "index",
    "candidate_blocks": "index",
    "sparse_attention": "attention",
    "paged_attention": "attention",
    "paged_scores": "index",
    "engram_gather": "engram",
    "grouped_out": "attention",
    "linear_fp8": "experts",
    "grouped_mlp_fp4": "experts",
    "grouped_mlp": "experts",
    "grouped_mlp_static": "experts",
    "gate_topk": "experts",
    "engram_gate": "engram",
    "sample_rows": "sampling",
    "verify_rows": "sampling",
    "assign_verify_lengths": "sampling",
    "vit_attention": "vision",
    "patchify": "vision",
}
# Faster ones, by device type, then op; a device without one takes the reference.
_DEVICE = {
    "cpu": {
        "rms_norm": "kernels.cpu.norm",
        "hc_mixes": "kernels.cpu.hyper",
        "hc_expand_collapse_norm": "kernels.cpu.hyper",
    },
    "cuda": {
        "rms_norm": "kernels.triton.norm",
        "rope_": "kernels.triton.norm",
        "hc_mixes": "kernels.triton.hyper",
        "hc_expand_collapse_norm": "kernels.triton.hyper",
        "store_window": "kernels.triton.stores",
        "store_block_kv": "kernels.triton.stores",
        "paged_attention": "kernels.triton.attention",
        "paged_scores": "kernels.triton.index",
        "grouped_mlp_static": "kernels.triton.experts",
        "engram_gather": "kernels.triton.engram",
    },
}


def get(name: str, device: str = "cpu", impl: str | None = None) -> Op:
    """Returns an op for a device type.

    Args:
        impl: "reference", a device type, or None for the fastest that the device has.
    Raises: KeyError for an op or an implementation that does not exist.
    """
    if name not in _REFERENCE:
        raise KeyError(f"no op {name!r}; known: {', '.join(sorted(_REFERENCE))}")
    wanted = device if impl is None else impl
    module = _DEVICE.get(wanted, {}).get(name)
    if module is None:
        if impl not in (None, "reference"):
            raise KeyError(f"op {name!r} has no implementation {impl!r}")
        module = f"kernels.reference.{_REFERENCE[name]}"
    found: Op = getattr(importlib.import_module(module), name)
    return found


def names() -> tuple[str, ...]:
    """Returns every op there is."""
    return tuple(sorted(_REFERENCE))


def implementations(name: str) -> tuple[str, ...]:
    """Returns the names that `get(name, impl=…)` takes for an op."""
    return ("reference", *(kind for kind, ops in _DEVICE.items() if name in ops))


def device_ops(kind: str) -> tuple[str, ...]:
    """Returns the ops that a device type has an implementation of its own for."""
    return tuple(sorted(_DEVICE.get(kind, {})))
