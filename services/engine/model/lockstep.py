"""Expert ranks in processes of their own step together: a vote before every round of collectives.

The experts' exchange is collective, so a rank without work still answers for its experts. A round
is one of these, agreed by a vote of all ranks: a pass through the backbone, one through the draft
layers, a look at the loads, a change of placement. A rank that wants what was chosen does it; the
others take part without rows. What was not chosen waits for the next round: drafts go before
passes, since a step that is half done holds its requests.
Source: engine.md, sections 1.1, 2.10, 4.2 and 4.5.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from services.engine.model.device import Device
from services.engine.model.exchange import DistributedGroup
from services.engine.model.parallel import Placement
from services.engine.model.worker import Turn, Worker

_T = TypeVar("_T")
Loads = npt.NDArray[np.int64]  # [layers, experts]
Slots = tuple[tuple[int, ...], ...]  # by layer, the expert of every slot


class GroupLost(RuntimeError):
    """A rank of the group is gone: this instance cannot compute any more."""


class _Want(IntEnum):
    NOTHING = 0
    PASS = 1
    DRAFT = 2
    LOADS = 3
    MOVE = 4


@dataclass
class _Item:
    want: _Want
    work: Callable[[], Any]
    future: Future[Any]
    slots: Slots = ()


class GroupWorker(Worker):
    """A worker whose thread runs the rounds of a group.

    idle_s: how long a rank without work waits before it votes again; others wait for it.
    """

    def __init__(
        self, device: Device, group: DistributedGroup, num_threads: int = 1, idle_s: float = 0.005
    ) -> None:
        super().__init__(device, num_threads)
        self._group = group
        self._idle_s = idle_s
        self._num_threads = num_threads
        self._items: queue.Queue[_Item] = queue.Queue()
        self._plans = {
            _Want.PASS: [name for name in group.placements if name.startswith("layers.")],
            _Want.DRAFT: [name for name in group.placements if not name.startswith("layers.")],
        }
        self._stopping = threading.Event()
        self._lost: GroupLost | None = None
        self.num_rounds = 0
        self.num_placements = 0
        self._thread = threading.Thread(target=self._rounds, name="experts", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], _T], turn: Turn = Turn.LOCAL) -> Future[_T]:
        """Starts work after all that was started before; its round comes when all ranks take it."""
        want = {Turn.LOCAL: _Want.NOTHING, Turn.PASS: _Want.PASS, Turn.DRAFT: _Want.DRAFT}[turn]
        return self._put(want, lambda: self.now(work))

    def wait(self, work: Callable[[], _T]) -> Future[_T]:
        return self._put(_Want.NOTHING, work)

    def loads(self) -> Future[Loads]:
        """Returns tokens per backbone layer and expert since the last look, over all ranks."""
        return self._put(_Want.LOADS, lambda: None)

    def place(self, slots: Slots) -> Future[None]:
        """Brings all ranks into a new placement of the backbone's layers, between two rounds."""
        return self._put(_Want.MOVE, lambda: None, slots)

    def shut_down(self) -> None:
        """Leaves once all ranks want to."""
        self._stopping.set()
        self._thread.join()
        super().shut_down()
        self._group.close()

    def _put(self, want: _Want, work: Callable[[], Any], slots: Slots = ()) -> Future[Any]:
        if self._lost is not None:
            raise self._lost
        future: Future[Any] = Future()
        self._items.put(_Item(want, work, future, slots))
        return future

    # --- the thread -----------------------------------------------------------------------------

    def _rounds(self) -> None:
        torch.set_num_threads(self._num_threads)
        held: _Item | None = None
        try:
            while True:
                held = held or self._next()
                if held is not None and held.want is _Want.NOTHING:
                    _finish(held, held.work)
                    held = None
                    continue
                leaving = held is None and self._stopping.is_set()
                votes = self._group.gather(
                    torch.tensor([held.want if held else 0, int(leaving)])
                ).tolist()
                if all(vote[1] for vote in votes):
                    return
                chosen = _Want(max(vote[0] for vote in votes))
                own = held if held is not None and held.want is chosen else None
                if chosen is not _Want.NOTHING:
                    leader = next(rank for rank, vote in enumerate(votes) if vote[0] == chosen)
                    self._round(chosen, own, leader)
                held = None if own is not None else held
        except RuntimeError as error:
            self._lost = GroupLost(f"a rank of the expert group is gone: {error}")
            self._fail(held)

    def _next(self) -> _Item | None:
        try:
            return self._items.get(timeout=self._idle_s)
        except queue.Empty:
            return None

    def _round(self, chosen: _Want, own: _Item | None, leader: int) -> None:
        self.num_rounds += 1
        if chosen is _Want.LOADS:
            found = self._group.take_loads(self._plans[_Want.PASS])
            if own is not None:
                own.future.set_result(found)
        elif chosen is _Want.MOVE:
            self._move(own, leader)
        else:
            self._group.begin(self._plans[chosen])
            if own is not None:
                _finish(own, own.work)
            with torch.inference_mode():
                self._group.finish()

    def _move(self, own: _Item | None, leader: int) -> None:
        """The leader's table reaches all; each rank moves alone what it must."""
        layers = self._plans[_Want.PASS]
        old = [self._group.placements[layer] for layer in layers]
        own_slots = own.slots if own is not None else tuple(p.logical for p in old)
        table = self._group.gather(torch.tensor(own_slots))[leader].tolist()
        with self.lock, torch.inference_mode():
            for layer, held, slots in zip(layers, old, table, strict=True):
                if tuple(slots) != held.logical:
                    placed = Placement(tuple(slots), held.num_experts, held.num_ranks)
                    self._group.move(layer, placed)
        self.num_placements += 1
        if own is not None:
            own.future.set_result(None)

    def _fail(self, held: _Item | None) -> None:
        """Ends what waits; nothing else will."""
        assert self._lost is not None
        while held is not None:
            if not held.future.done():
                held.future.set_exception(self._lost)
            held = self._next()


def _finish(item: _Item, work: Callable[[], Any]) -> None:
    try:
        item.future.set_result(work())
    except (RuntimeError, ValueError, AssertionError, KeyError, IndexError, TypeError) as error:
        item.future.set_exception(error)


def check_slots(slots: Sequence[Sequence[int]], placements: Sequence[Placement]) -> Slots:
    """Returns slots as a placement. Raises: ValueError where an expert would have none."""
    if len(slots) != len(placements):
        raise ValueError(f"{len(slots)} layers are placed, the network has {len(placements)}")
    for given, held in zip(slots, placements, strict=True):
        if len(given) != len(held.logical):
            raise ValueError(f"{len(given)} slots are placed, a layer has {len(held.logical)}")
        Placement(tuple(given), held.num_experts, held.num_ranks)
    return tuple(tuple(given) for given in slots)
