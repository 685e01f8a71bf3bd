"""The seam between the network and what it computes on.

Whatever a step may do with a device goes through here, so that one place knows about streams,
pinned memory, events and graphs, and so that everything above runs on a CPU in tests. The host
waits for a device in `Parcel.wait` and `Device.fetch` only; a decode step may do the first once.
Source: engine.md, section 2.2; model.md, section 23.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")
DType = torch.dtype  # a device has an attribute of the package's name
Mark = object  # a moment in the order of the device's work


class Parcel(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> npt.NDArray[np.generic]:
        """Waits until it has come, and returns it; the array is the caller's."""
        ...


class Outbox(Protocol):
    """Brings results of steps to the host without stopping the device."""

    def post(self, value: Tensor) -> Parcel:
        """Starts to copy a tensor as it is after the work given so far; it may change then."""
        ...


class Inbox(Protocol):
    """A tensor at a fixed address that the host fills before every step."""

    @property
    def data(self) -> Tensor: ...

    def send(self, values: npt.NDArray[np.generic]) -> None:
        """Fills the first len(values) elements, after the work given so far, before what follows.

        The array may be used again at once.
        """
        ...


class Device(Protocol):
    """One accelerator, or the CPU."""

    @property
    def torch(self) -> torch.device: ...

    @property
    def kind(self) -> str:
        """Returns the name under which kernels are looked up."""
        ...

    @property
    def is_resident(self) -> bool:
        """Returns whether decode steps keep their state on the device (`resident.py`)."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Makes this device's compute stream the current one."""
        ...

    def place(self, value: Tensor) -> Tensor:
        """Brings a tensor of the host here, as fast as the link is. Later work sees it whole."""
        ...

    def upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Returns a tensor of a small array, without waiting. The array may be used again."""
        ...

    def fetch(self, value: Tensor) -> Tensor:
        """Brings a tensor to the host and waits for it: for bytes in and out, never in a step."""
        ...

    def inbox(self, num_elements: int, dtype: DType) -> Inbox: ...

    def outbox(self) -> Outbox: ...

    def capture(self, body: Callable[[], T]) -> Callable[[], T]:
        """Returns what runs `body` again on the same addresses, cheaper where the device can.

        `body` has static shapes, reads and writes tensors that outlive it, never asks the host,
        and may be run a few times by this call.
        """
        ...

    def mark(self) -> Mark:
        """Returns a moment after the work given so far."""
        ...

    def elapsed_ms(self, first: Mark, last: Mark) -> float:
        """Returns the time between two moments, once a parcel posted after them has come."""
        ...

    def watched(self) -> AbstractContextManager[object]:
        """Wraps the work of a step; a test puts its counter of synchronisations here."""
        ...
