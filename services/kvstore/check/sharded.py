"""CHECK without a copy of the index: the groups' primaries are asked, batched, three times at most.

For clusters whose index does not fit every entrypoint machine. A primary that does not answer in
time makes its blocks look absent: a shorter hit, never an error.
Source: kvcache-and-balancing.md, section 5.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Final

from pelagos.kvstore.v1 import storage_pb2 as pb

from services.common.clock import SYSTEM_CLOCK, Clock
from services.common.errors import Failure
from services.common.rpc_client import call
from services.kvstore.check.gallop import search
from services.kvstore.checksums import Buffer
from services.kvstore.formats import TtlClass
from services.kvstore.hit_policy import EndedBy
from services.kvstore.index_table import EPOCH_S
from services.kvstore.storage.keeper import MapView
from services.kvstore.storage.links import Links

_STRIDE: Final = 32
_MAX_TOUCHED: Final = 100_000


class ShardedIndex:
    """Answers what a `Replica` answers, by asking."""

    is_level = True  # there is no copy that could lag

    def __init__(
        self,
        view: MapView,
        links: Links,
        *,
        timeout_s: float = 0.05,
        budget_s: float = 0.002,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._view = view
        self._links = links
        self._timeout_s = timeout_s
        self._budget_s = budget_s
        self._clock = clock
        # Last block of a hit -> (epoch, class) of its last touch: the primaries need no more.
        self._touched: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.num_round_trips = 0
        self.num_unanswered = 0

    def __len__(self) -> int:
        return 0

    @property
    def memory_bytes(self) -> int:
        """Returns nothing: there is no copy."""
        return 0

    def lag_ms(self, now_s: float) -> float:
        """Returns nothing: what primaries say is of now."""
        return 0.0

    async def find(self, keys: Buffer, hint: int = 0) -> tuple[int, EndedBy]:
        """Returns how many leading blocks (32-byte keys) are stored, and why not more."""
        raw = bytes(keys)
        keys16 = [raw[at : at + 16] for at in range(0, len(raw), _STRIDE)]
        end_s = self._clock.now_s() + self._budget_s
        before = self.num_unanswered
        steps = search(len(keys16), hint, lambda: self._clock.now_s() < end_s)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(await self._look_up([keys16[at] for at in wanted]))
        except StopIteration as done:
            is_unsure = self.num_unanswered > before
            return done.value, EndedBy.LAGGING if is_unsure else EndedBy.ABSENT

    async def _look_up(self, keys16: Sequence[bytes]) -> list[bool]:
        """Returns whether each is stored: one message to each primary, all at once."""
        self.num_round_trips += 1
        found = [False] * len(keys16)
        pgmap = self._view.pgmap
        if pgmap is None:
            self.num_unanswered += 1
            return found
        up = self._view.up()
        by_primary: dict[str | None, list[int]] = defaultdict(list)
        for number, key16 in enumerate(keys16):
            by_primary[pgmap.primary_of(pgmap.group_of(key16), up)].append(number)

        async def ask(node: str | None, numbers: list[int]) -> None:
            link = self._links.get(node) if node is not None else None
            request = pb.LookupRequest(keys16=b"".join(keys16[number] for number in numbers))
            try:
                if link is None:
                    raise TimeoutError
                answer = await call(link.meta.Lookup, request, timeout_s=self._timeout_s)
            except (Failure, TimeoutError):
                self.num_unanswered += 1
                return
            # A primary names only blocks that can be read now.
            for number, record in zip(numbers, answer.objects, strict=False):
                found[number] = bool(record.record)

        await asyncio.gather(*(ask(node, numbers) for node, numbers in by_primary.items()))
        return found

    def needs_touch(self, keys: bytes, ttl_class: TtlClass, wall_s: int) -> bool:
        """Returns whether a hit of these blocks is to be told: once an epoch, or a higher class."""
        if not keys:
            return False
        last, epoch = keys[-_STRIDE:-16], wall_s // EPOCH_S
        known = self._touched.pop(last, (-1, 0))
        self._touched[last] = (epoch, max(ttl_class, known[1]) if known[0] == epoch else ttl_class)
        if len(self._touched) > _MAX_TOUCHED:
            self._touched.popitem(last=False)
        return known[0] < epoch or known[1] < ttl_class
