"""The CPU behind the seam: everything has happened by the time a call returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.model.device.base import DType, Mark, T


@dataclass(frozen=True)
class _Parcel:
    value: Tensor
    waited: Callable[[], None]

    def wait(self) -> npt.NDArray[np.generic]:
        self.waited()
        array: npt.NDArray[np.generic] = self.value.numpy()
        return array


@dataclass(frozen=True)
class _Outbox:
    waited: Callable[[], None]

    def post(self, value: Tensor) -> _Parcel:
        return _Parcel(value.clone(), self.waited)


@dataclass(frozen=True)
class _Inbox:
    data: Tensor

    def send(self, values: npt.NDArray[np.generic]) -> None:
        self.data[: len(values)].copy_(torch.from_numpy(values))


@dataclass
class CpuDevice:
    """Computes where the host does. `num_waits` counts what would have waited for a GPU.

    is_resident: decode as on a GPU; slower here, for tests.
    watch: makes the context around the work of a step.
    """

    is_resident: bool = False
    watch: Callable[[], AbstractContextManager[object]] = nullcontext
    num_waits: int = 0
    num_captures: int = 0
    torch: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kind: str = "cpu"

    def _waited(self) -> None:
        self.num_waits += 1

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def place(self, value: Tensor) -> Tensor:
        return value

    def upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    def fetch(self, value: Tensor) -> Tensor:
        self._waited()
        return value

    def inbox(self, num_elements: int, dtype: DType) -> _Inbox:
        return _Inbox(torch.zeros(num_elements, dtype=dtype))

    def outbox(self) -> _Outbox:
        return _Outbox(self._waited)

    def capture(self, body: Callable[[], T]) -> Callable[[], T]:
        self.num_captures += 1
        return body

    def mark(self) -> Mark:
        return time.perf_counter()

    def elapsed_ms(self, first: Mark, last: Mark) -> float:
        assert isinstance(first, float)
        assert isinstance(last, float)
        return 1e3 * (last - first)

    def watched(self) -> AbstractContextManager[object]:
        return self.watch()
