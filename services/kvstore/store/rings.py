"""The engines' shared-memory rings that a STORE process has open.

A slot belongs to STORE from the request that names it to the answer (a FetchResponse for its
block, a PutResponse, or that of CancelFetch), and to the engine at all other times.
"""

from __future__ import annotations

from services.common.errors import Failure, Reason
from services.common.shm_ring import SHM_FOLDER, RingRef, SlotRing


class RingCache:
    """Rings by name and epoch; attached on first use, let go when their owner is dead or has
    removed them: what is mapped keeps its memory, whatever became of the file."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, int], SlotRing] = {}

    def __len__(self) -> int:
        return len(self._rings)

    def get(self, ref: RingRef) -> SlotRing:
        """Returns the ring.

        Raises: Failure(STALE_EPOCH) when it is gone or of another epoch; Failure(INVALID_REQUEST)
            for one of other sizes, or for what is no ring.
        """
        name = (ref.name, ref.owner_epoch)
        ring = self._rings.get(name)
        if ring is None:
            try:
                ring = SlotRing.attach(ref)
            except ValueError as error:
                raise Failure(Reason.INVALID_REQUEST, str(error)) from None
            self._rings[name] = ring
        if ring.ref != ref:
            raise Failure(Reason.INVALID_REQUEST, "not a ring of these sizes")
        return ring

    def sweep(self) -> int:
        """Lets go of rings whose owner is dead or has removed them; returns how many."""
        gone = [
            name
            for name, ring in self._rings.items()
            if not ring.is_owner_alive or not (SHM_FOLDER / ring.ref.name).exists()
        ]
        for name in gone:
            # A transfer under way holds views of its slots, and with them the mapping.
            self._rings.pop(name).close()
        return len(gone)

    def close(self) -> None:
        """Lets go of all."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
