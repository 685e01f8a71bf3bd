"""CHECK's copy of the index, fed by the commit log of a store.

A copy that lags, or is of yesterday, gives shorter hits or promises that a fetch does not keep;
never wrong bytes. Source: kvcache-and-balancing.md, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.checksums import Buffer
from services.kvstore.formats import TtlClass
from services.kvstore.hit_policy import EndedBy
from services.kvstore.index_table import EPOCH_S, TTL_S, Fields, IndexTable, Stop, new_table


class Replica:
    """The copy and how fresh it is. Pure: what arrives, and the time, come in as arguments."""

    def __init__(self, ttl_s: Sequence[int] = TTL_S) -> None:
        self._ttl_s = tuple(ttl_s)
        self._table: IndexTable = new_table()
        self._incoming: IndexTable | None = None
        self.log_id = ""
        self.next_seq = 0
        self.is_level = False
        self._heard_s = float("-inf")
        self.num_damaged = 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def table(self) -> IndexTable:
        """Returns the table that answers now."""
        return self._table

    def get(self, key16: bytes) -> Fields | None:
        """Returns the record of a key as the log last told it."""
        return self._table.get(key16)

    @property
    def memory_bytes(self) -> int:
        """Returns the memory of the table."""
        return self._table.memory_bytes()

    def take(
        self, log_id: str, entries: bytes, next_seq: int, reset: bool, level: bool, now_s: float
    ) -> bool:
        """Applies one message of the log; False when it is damaged and the log must be asked anew.

        A snapshot is gathered beside the old copy, which answers until the new one is whole.
        """
        if reset:
            self._incoming = new_table()
        table = self._incoming if self._incoming is not None else self._table
        consumed, _ = table.apply_log(entries)
        if consumed != len(entries):
            self.num_damaged += 1
            self.forget_position()
            return False
        if level and self._incoming is not None:
            self._table, self._incoming = self._incoming, None
        if self._incoming is None:
            self.log_id, self.next_seq = log_id, next_seq
        self.is_level = level
        self._heard_s = now_s
        return True

    def forget_position(self) -> None:
        """Makes the next request for the log start with a snapshot."""
        self.log_id, self.next_seq = "", 0
        self._incoming = None

    def disconnected(self) -> None:
        """The stream ended; what is known stays, the rest of a snapshot is asked anew."""
        self.is_level = False
        if self._incoming is not None:
            self.forget_position()

    def lag_ms(self, now_s: float) -> float:
        """Returns how long ago the copy was known to be level with the log; inf for never."""
        return (now_s - self._heard_s) * 1000

    def num_stored(self, keys: Buffer, wall_s: int, is_lagging: bool) -> tuple[int, EndedBy]:
        """Returns how many leading blocks (32-byte keys) are stored, and why not more."""
        count, stop = self._table.match_prefix(keys, 32, wall_s, self._ttl_s)
        if stop == Stop.EVICTED:
            return count, EndedBy.EVICTED
        return count, EndedBy.LAGGING if is_lagging else EndedBy.ABSENT

    def needs_touch(self, keys: bytes, ttl_class: TtlClass, wall_s: int) -> bool:
        """Returns whether a hit of these blocks would move their access epoch or class.

        The last block tells for all: a parent is touched whenever its child is.
        """
        if not keys:
            return False
        fields = self._table.get(keys[-32:-16])
        if fields is None:
            return False
        return fields[3] < wall_s // EPOCH_S or fields[6] < ttl_class
