"""What the crash campaign expects of a store, from the words of the processes that used it. Pure.

The ledger knows of every block which bytes would be right, whether it must still be there, and
whether it must be gone. It hears of an act before it begins and after it was answered; in between
either outcome is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

Seen = Literal["miss", "exact", "approximate", "wrong"]
STORED: Final = ("committed", "exists")


@dataclass
class BlockFate:
    """What is known of one block."""

    was_put: bool = False  # a put of it has begun at some time
    must_be_there: bool = False
    must_be_exact: bool = False
    must_be_gone: bool = False
    survives_power: bool = False  # what was acknowledged is on the disk, and not only in its cache
    num_puts: int = 0  # on their way
    was_removed: bool = False  # while they were


@dataclass
class Ledger:
    """The fates of all blocks of a seed, by index key."""

    durable: bool
    fates: dict[bytes, BlockFate] = field(default_factory=dict)
    # Per erasure on its way: all blocks that it may take, and those that must be gone after it.
    going: dict[int, set[bytes]] = field(default_factory=dict)
    erasing: dict[int, set[bytes]] = field(default_factory=dict)
    num_acknowledged: int = 0
    num_checked: int = 0

    def of(self, key: bytes) -> BlockFate:
        """Returns the fate of a block, by its key or its index key."""
        return self.fates.setdefault(key[:16], BlockFate())

    def put_begins(self, key: bytes) -> None:
        """A put was sent."""
        fate = self.of(key)
        fate.was_put = True
        fate.must_be_gone = False
        fate.num_puts += 1
        for keys in self.erasing.values():
            keys.discard(key[:16])

    def put_answered(self, key: bytes, result: str, is_exact: bool) -> None:
        """A put was answered."""
        fate = self.of(key)
        fate.num_puts -= 1
        was_removed = fate.was_removed
        fate.was_removed = was_removed and fate.num_puts > 0
        if result not in STORED:
            return
        self.num_acknowledged += 1
        if was_removed or any(key[:16] in going for going in self.going.values()):
            return
        if result == "committed" or not fate.must_be_there:
            fate.survives_power = self.durable
        fate.must_be_there = True
        # "exists" may be said of a put whose record is not flushed yet; its bytes are.
        fate.must_be_exact |= is_exact and result == "committed"

    def removal_begins(self, keys: Iterable[bytes]) -> None:
        """Blocks may go from here on."""
        for key in keys:
            fate = self.of(key)
            fate.must_be_there = fate.must_be_exact = False
            fate.was_removed = fate.num_puts > 0

    def erasure_begins(self, number: int, keys: Iterable[bytes]) -> None:
        """A tenant's blocks are to go; those that are being put may be stored after it."""
        keys = list(keys)
        self.removal_begins(keys)
        self.going[number] = {key[:16] for key in keys}
        self.erasing[number] = {key[:16] for key in keys if not self.of(key).num_puts}

    def erasure_ended(self, number: int, is_done: bool) -> None:
        """A tenant's blocks are gone, said the store, or that it could not be done."""
        del self.going[number]
        for key in self.erasing.pop(number):
            self.of(key).must_be_gone |= is_done

    def died(self) -> None:
        """The process is gone: what it had begun may have happened or not."""
        self.erasing.clear()
        self.going.clear()
        for fate in self.fates.values():
            fate.num_puts = 0
            fate.was_removed = False

    def reopened(self) -> None:
        """A process has opened the store, and with that flushed what it found."""
        for fate in self.fates.values():
            fate.survives_power |= fate.must_be_there

    def power_lost(self) -> None:
        """What was not flushed may be gone, and what it replaced may be back."""
        for fate in self.fates.values():
            if not fate.survives_power:
                fate.must_be_there = fate.must_be_exact = False

    def damaged(self, keys16: Iterable[bytes]) -> None:
        """The disk has lost these blocks: nothing that keeps one copy can have them."""
        for key16 in keys16:
            fate = self.of(key16)
            fate.must_be_there = fate.must_be_exact = False

    def logs_damaged(self) -> None:
        """Both logs are hurt: what neither names is lost, and which put was in force too."""
        for fate in self.fates.values():
            fate.must_be_there = fate.must_be_exact = False

    def order_lost(self) -> None:
        """The log that says which put of a key is in force is hurt."""
        for fate in self.fates.values():
            fate.must_be_exact = False

    def check(self, key: bytes, seen: Seen) -> str | None:
        """Returns what is wrong with an answer to a read, else None."""
        fate = self.of(key)
        self.num_checked += 1
        name = key[:4].hex()
        if seen == "wrong" or (seen != "miss" and not fate.was_put):
            return f"wrong bytes of {name}"
        if seen == "miss" and fate.must_be_there:
            return f"{name} was acknowledged and is lost"
        if seen == "approximate" and fate.must_be_exact:
            return f"{name} fell back to its approximate bytes"
        if seen != "miss" and fate.must_be_gone:
            return f"{name} was erased and is back"
        return None
