"""The thread that a device's work is given from, in the order it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

import torch

from services.engine.model.device import Device

_T = TypeVar("_T")


class Turn(Enum):
    """What a piece of work needs of the other ranks of an expert group (`lockstep.py`)."""

    LOCAL = "local"  # nothing
    PASS = "pass"  # the backbone's experts
    DRAFT = "draft"  # those of the draft layers


class Worker:
    """One thread, so that the event loop goes on while a step is computed or enqueued.

    `lock` is held by running work; whoever moves memory that work reads takes it.
    """

    def __init__(self, device: Device, num_threads: int = 1) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._pool = ThreadPoolExecutor(1, "model", torch.set_num_threads, (num_threads,))

    def run(self, work: Callable[[], _T], turn: Turn = Turn.LOCAL) -> Future[_T]:
        """Starts work after all that was started before. `turn`: which experts it asks."""
        return self._pool.submit(lambda: self.now(work))

    def now(self, work: Callable[[], _T]) -> _T:
        """Runs work in this thread."""
        device = self._device
        with self.lock, torch.inference_mode(), device.computing(), device.watched():
            return work()

    def wait(self, work: Callable[[], _T]) -> Future[_T]:
        """As `run` for work that only waits for a result: it holds no lock, and is not watched."""
        return self._pool.submit(work)

    def shut_down(self) -> None:
        """Ends the thread; work that was started is finished first."""
        self._pool.shutdown()
