"""A GPU of CUDA behind the seam: three streams, pinned staging, captured graphs.

Work is ordered by events, never by the host:

    upload   | pinned -> device ...e1
    compute  |                     (after e1) step ... e2
    download |                                        (after e2) device -> pinned ...e3
    host     |                                                    Parcel.wait: until e3

Source: engine.md, sections 2.2 and 3.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.model.device.base import Mark, T

_STAGING_BYTES = 64 << 20  # of one staging buffer for weights
_STAGING_BUFFERS = 2
_INBOX_SLABS = 3  # two steps are in flight at most, and a third is being written
_WARM_UPS = 2  # runs before a capture: libraries allocate and choose on their first calls


class CudaDevice:
    """One GPU. Every method but `Parcel.wait` and `fetch` returns without waiting for it."""

    kind = "cuda"
    is_resident = True

    def __init__(self, name: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"device {name!r}: this process sees no GPU")
        number = torch.device(name).index or 0
        if number >= torch.cuda.device_count():
            raise ValueError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs")
        self.torch = torch.device("cuda", number)
        self.watch: Callable[[], AbstractContextManager[object]] = nullcontext
        self._compute = torch.cuda.Stream(self.torch)
        self._uploads = torch.cuda.Stream(self.torch)
        self._downloads = torch.cuda.Stream(self.torch)
        self._staging: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._graph_pool: Any = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.device(self.torch), torch.cuda.stream(self._compute):
            yield

    def place(self, value: Tensor) -> Tensor:
        """Copies through two pinned buffers in turns: while one travels, the other is filled."""
        out = torch.empty(value.shape, dtype=value.dtype, device=self.torch)
        given = value.contiguous().view(-1).view(torch.uint8)
        target = out.view(-1).view(torch.uint8)
        # The memory may just have been freed by work that still runs on the compute stream.
        self._uploads.wait_stream(torch.cuda.current_stream(self.torch))
        for begin in range(0, len(given), _STAGING_BYTES):
            part = given[begin : begin + _STAGING_BYTES]
            buffer, sent = self._staging_buffer()
            buffer[: len(part)].copy_(part)
            with torch.cuda.stream(self._uploads):
                target[begin : begin + len(part)].copy_(buffer[: len(part)], non_blocking=True)
                sent.record()
        out.record_stream(self._uploads)
        torch.cuda.current_stream(self.torch).wait_stream(self._uploads)
        self._compute.wait_stream(self._uploads)
        return out

    def _staging_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        if len(self._staging) < _STAGING_BUFFERS:
            pinned = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            self._staging.append((pinned, torch.cuda.Event()))
        else:
            self._staging.rotate(-1)
            # Loading waits for its own copies only; no step does.
            self._staging[-1][1].synchronize()
        return self._staging[-1]

    def upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        given = torch.from_numpy(np.ascontiguousarray(values))
        # The allocator of pinned memory keeps the buffer until its copy is over.
        pinned = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
        pinned.copy_(given)
        return pinned.to(self.torch, non_blocking=True)

    def fetch(self, value: Tensor) -> Tensor:
        return _Outbox(self._downloads).send_off(value).tensor()

    def inbox(self, num_elements: int, dtype: torch.dtype) -> _Inbox:
        return _Inbox(self.torch, self._uploads, num_elements, dtype)

    def outbox(self) -> _Outbox:
        return _Outbox(self._downloads)

    def capture(self, body: Callable[[], T]) -> Callable[[], T]:
        side = torch.cuda.Stream(self.torch)
        side.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                body()
        torch.cuda.current_stream(self.torch).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after the other, so that they may share their scratch memory.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            result = body()
        if self._graph_pool is None:
            self._graph_pool = graph.pool()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def elapsed_ms(self, first: Mark, last: Mark) -> float:
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(last, torch.cuda.Event)
        return float(first.elapsed_time(last))

    def watched(self) -> AbstractContextManager[object]:
        return self.watch()


@dataclass(frozen=True)
class _Parcel:
    pinned: Tensor
    come: torch.cuda.Event

    def tensor(self) -> Tensor:
        self.come.synchronize()
        return self.pinned

    def wait(self) -> npt.NDArray[np.generic]:
        array: npt.NDArray[np.generic] = self.tensor().numpy()
        return array


@dataclass(frozen=True)
class _Outbox:
    stream: torch.cuda.Stream

    def post(self, value: Tensor) -> _Parcel:
        # The next step writes the same addresses: what travels is a copy of its own.
        return self.send_off(value.clone())

    def send_off(self, value: Tensor) -> _Parcel:
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(value.device))
        come = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            pinned.copy_(value, non_blocking=True)
            come.record()
        value.record_stream(self.stream)
        return _Parcel(pinned, come)


class _Inbox:
    """Pinned slabs in turns; the copy into the fixed address is part of the compute stream."""

    def __init__(
        self,
        device: torch.device,
        uploads: torch.cuda.Stream,
        num_elements: int,
        dtype: torch.dtype,
    ) -> None:
        self.data = torch.zeros(num_elements, dtype=dtype, device=device)
        self._uploads = uploads
        self._slabs = [
            _Slab(
                torch.empty(num_elements, dtype=dtype, pin_memory=True),
                torch.empty(num_elements, dtype=dtype, device=device),
                torch.cuda.Event(),
                torch.cuda.Event(),
            )
            for _ in range(_INBOX_SLABS)
        ]
        self._turn = 0

    def send(self, values: npt.NDArray[np.generic]) -> None:
        slab, count = self._slabs[self._turn], len(values)
        self._turn = (self._turn + 1) % len(self._slabs)
        # Three steps ago: its result has been read long since, so this never waits in practice.
        slab.sent.synchronize()
        slab.pinned[:count].copy_(torch.from_numpy(values))
        compute = torch.cuda.current_stream(self.data.device)
        with torch.cuda.stream(self._uploads):
            self._uploads.wait_event(slab.used)
            slab.landed[:count].copy_(slab.pinned[:count], non_blocking=True)
            slab.sent.record()
        compute.wait_event(slab.sent)
        self.data[:count].copy_(slab.landed[:count])
        slab.used.record(compute)


@dataclass(frozen=True)
class _Slab:
    pinned: Tensor
    landed: Tensor
    sent: torch.cuda.Event
    used: torch.cuda.Event
