"""Slots of shared memory between an engine and the STORE of its machine.

Payloads go through the slots, and only words about them through the RPC. A slot that the store may
still use is never used again: its ring is retired, and the next caller gets another one. Where
there is no room for a ring, payloads go through the RPC as between machines.
Source: kvcache-and-balancing.md, sections 6 and 7.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.common.errors import Failure
from services.common.service import Runtime
from services.common.shm_ring import SlotRing

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """A ring and how many leases are on it; it is closed when it is retired and has none."""

    ring: SlotRing
    num_leases: int = 0
    is_retired: bool = False

    def leave(self) -> None:
        self.num_leases -= 1
        self.close_if_over()

    def close_if_over(self) -> None:
        if self.is_retired and self.num_leases == 0:
            self.ring.close()


class Lease:
    """Some slots of one ring, for one fetch or put."""

    def __init__(self, held: _Held, slots: tuple[int, ...]) -> None:
        self.ring = held.ring
        self.slots = slots
        self._held = held

    def read(self, index: int, num_bytes: int) -> bytes:
        """Returns a copy of the first bytes of the slot with this number in the lease."""
        return bytes(self.ring.view(self.slots[index])[:num_bytes])

    def write(self, payload: bytes) -> None:
        """Fills the first slot. Raises: ValueError for what does not fit."""
        view = self.ring.view(self.slots[0])
        if len(payload) > len(view):
            raise ValueError(f"{len(payload)} bytes do not fit a slot of {len(view)}")
        view[: len(payload)] = payload

    def give_back(self) -> None:
        """The store is done with the slots."""
        if not self._held.is_retired:
            for slot in self.slots:
                self.ring.free(slot)
        self._held.leave()

    def abandon(self) -> None:
        """Nobody knows whether the store is done with them: the ring takes no other lease."""
        self._held.is_retired = True
        self._held.leave()


class StoreRing:
    """One per direction of an engine. Makes its ring at first use; not thread-safe.

    label: a lower-case word that says whose it is; num_slots: 0 for no shared memory at all.
    """

    def __init__(self, label: str, slot_bytes: int, num_slots: int) -> None:
        self._label = label
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._held: _Held | None = None
        self.num_taken = 0  # slots, ever
        self.num_retired = 0

    @property
    def num_leased(self) -> int:
        """Returns how many slots are in use; a row of the census."""
        return 0 if self._held is None else self._held.ring.num_used

    def take(self, wanted: int) -> Lease | None:
        """Returns up to `wanted` slots; None when none is free, or there is no shared memory."""
        if self._held is not None and self._held.is_retired:
            self._held = None
            self.num_retired += 1
        if self._held is None and self._num_slots:
            self._held = self._new()
        held = self._held
        if held is None:
            return None
        slots: list[int] = []
        while len(slots) < wanted and (slot := held.ring.allocate()) is not None:
            slots.append(slot)
        if not slots:
            return None
        held.num_leases += 1
        self.num_taken += len(slots)
        return Lease(held, tuple(slots))

    def turn_off(self) -> None:
        """Makes no ring any more: the store does not see ours."""
        self._num_slots = 0
        self.close()

    def close(self) -> None:
        """Removes the ring once its last lease has ended."""
        if self._held is not None:
            self._held.is_retired = True
            self._held.close_if_over()
            self._held = None

    def _new(self) -> _Held | None:
        try:
            return _Held(SlotRing.create(self._label, self._slot_bytes, self._num_slots))
        except (Failure, OSError) as error:
            log.warning("no shared memory for blocks", extra={"reason": str(error)})
            self._num_slots = 0
            return None


@contextmanager
def leased(lease: Lease | None) -> Iterator[None]:
    """Ends a lease behind a fetch or a put: a Failure says that the store may still be at it."""
    if lease is None:
        yield
        return
    try:
        yield
    except Failure:
        lease.abandon()
        raise
    except BaseException:
        lease.give_back()
        raise
    lease.give_back()


def watch_rings(runtime: Runtime[Any], *rings: StoreRing) -> None:
    """Counts an engine's rings, and removes them when it stops."""
    runtime.census.register(
        f"{runtime.role}.store_ring", "slots", lambda: sum(r.num_leased for r in rings)
    )
    for name, text, value in (
        (
            "ring_blocks",
            "Blocks that went by shared memory",
            lambda: sum(r.num_taken for r in rings),
        ),
        ("rings_retired", "Rings left to a lost store", lambda: sum(r.num_retired for r in rings)),
    ):
        runtime.metrics.gauge(name, text).set_function(value)

    async def close() -> None:
        for ring in rings:
            ring.close()

    runtime.on_stop(close)
