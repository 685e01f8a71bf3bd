"""Counts what would make the host wait for a GPU; runs on a CPU, where nothing waits.

    with SyncCounter() as found:
        step()
    assert not found.kinds

Two layers are watched. Calls on tensors (`item`, `tolist`, `cpu`, `bool(...)`, a copy out of
ordinary host memory) never reach the dispatcher on a CPU; operators whose result's shape depends on
values (`nonzero`, masks as indices, `unique`) do. A graph could hold neither of them.
Source: engine.md, section 2.2 ("a test hook must be able to assert this").
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Tensor methods that hand a value to the host.
_READS = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"),
    *("__len_of_value__", "__array__", "__contains__", "equal", "allclose"),
}
# Functions that make a tensor out of ordinary host memory: on a GPU a copy that blocks.
_COPIES = {"tensor", "as_tensor", "asarray", "frombuffer"}
# Operators whose output shape, or a check of theirs, depends on values.
_SHAPES = {
    *("aten.nonzero", "aten.nonzero_static", "aten.masked_select"),
    *("aten._unique2", "aten.unique_consecutive", "aten.unique_dim", "aten.bincount"),
    *("aten.repeat_interleave", "aten.equal", "aten.is_nonzero", "aten.multinomial"),
    *("aten._assert_async", "aten.histc"),
}
_INDEXED = {"aten.index", "aten.index_put", "aten.index_put_"}


class SyncCounter:
    """Counts in the thread that enters it. `kinds`: number by kind; `places`: where each was."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.places: list[str] = []
        self._calls, self._ops = _Calls(self), _Ops(self)
        self._thread = 0

    def __enter__(self) -> SyncCounter:
        self._thread = threading.get_ident()
        self._ops.__enter__()
        self._calls.__enter__()
        self._from_numpy = torch.from_numpy
        self._synchronize = torch.cuda.synchronize
        torch.from_numpy = self._counted(self._from_numpy, "from_numpy")
        torch.cuda.synchronize = self._counted(self._synchronize, "synchronize")
        return self

    def __exit__(self, *error: object) -> None:
        torch.from_numpy = self._from_numpy
        torch.cuda.synchronize = self._synchronize
        self._calls.__exit__(None, None, None)
        self._ops.__exit__(None, None, None)

    def count(self, kind: str) -> None:
        self.kinds[kind] += 1
        own = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
        at = next((f for f in reversed(own[:-1]) if f.filename != __file__), own[-1])
        self.places.append(f"{kind}: {at.filename.rpartition('/')[2]}:{at.lineno} {at.line}")

    def _counted(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.count(kind)
            return call(*args, **options)

        return counted


class _Calls(TorchFunctionMode):
    def __init__(self, counter: SyncCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        options = kwargs or {}
        copied = name in _COPIES and not (args and isinstance(args[0], Tensor))
        if copied or name in _READS or _leaves(name, args, options):
            self._counter.count(name)
        return func(*args, **options)


def _leaves(name: str, args: Any, options: Any) -> bool:
    """Returns whether a copy goes to the host, or comes from memory that is not pinned."""
    if name not in ("to", "copy_"):
        return False
    if name == "copy_":
        source, target = args[1], args[0]
        if not isinstance(source, Tensor):
            return isinstance(source, np.ndarray)
        return bool(source.device.type != target.device.type and not options.get("non_blocking"))
    wanted = options.get("device", args[1] if len(args) > 1 else None)
    return isinstance(wanted, str | torch.device) and torch.device(wanted).type == "cpu"


class _Ops(TorchDispatchMode):
    def __init__(self, counter: SyncCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = str(func).rsplit(".", 1)[0], kwargs or {}
        known = "output_size" in options or str(func).endswith(".self_int")
        if name in _SHAPES and not known:
            self._counter.count(name)
        elif name in _INDEXED and any(_is_mask(at) for at in args[1]):
            self._counter.count(f"{name} by mask")
        return func(*args, **(kwargs or {}))


def _is_mask(at: object) -> bool:
    return isinstance(at, Tensor) and at.dtype in (torch.bool, torch.uint8)
