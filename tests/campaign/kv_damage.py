"""What the campaign does to the files of a dead store: lost writes, cuts, flips, torn sectors.

Each function says which blocks the damage took, by the headers that lay in the damaged slots.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from services.kvstore.formats import ShardHeader
from services.kvstore.placement import SHARD_HEADER_BYTES
from tests.campaign.kv_plan import SLOT_BYTES, Fault

SECTOR_BYTES: Final = 512
INDEX_LOG: Final = "segments/index.log"
META_LOG: Final = "meta.log"
# What is flushed together.
Part = Literal["segments", "meta"]
PARTS: Final[tuple[Part, ...]] = ("segments", "meta")


@dataclass(frozen=True)
class Damage:
    """Where it was, and which blocks have lost bytes."""

    files: tuple[str, ...]
    keys16: frozenset[bytes]


def _files(store: Path, part: Part) -> list[Path]:
    if part == "meta":
        return list(store.glob(META_LOG))
    return sorted([*store.glob("segments/seg-*"), *store.glob(INDEX_LOG)])


def _keys_in(data: bytes, first: int, end: int) -> set[bytes]:
    """Returns the keys of the shards in a segment that have bytes in [first, end)."""
    keys = set()
    for slot in range(first // SLOT_BYTES, -(-min(end, len(data)) // SLOT_BYTES)):
        at = slot * SLOT_BYTES
        header = ShardHeader.parse(data[at : at + SHARD_HEADER_BYTES])
        if header is None:
            continue
        shard_end = at + SHARD_HEADER_BYTES + header.shard_bytes
        if first < shard_end and at < end:
            keys.add(header.key16)
    return keys


def damage(store: Path, fault: Fault, rng: random.Random) -> Damage:
    """Cuts, flips or tears some places of some files."""
    names: list[str] = []
    keys: set[bytes] = set()
    # One log at most in most seeds: each can be made good from the other and the headers.
    both = rng.random() < 0.1
    logs = [rng.choice((INDEX_LOG, META_LOG))] if not both else [INDEX_LOG, META_LOG]
    segments = [f"segments/{path.name}" for path in store.glob("segments/seg-*")]
    candidates = sorted(segments) + logs
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(candidates)
        path = store / name
        data = path.read_bytes() if path.exists() else b""
        if not data:
            continue
        first, end = _hurt(path, data, fault, rng)
        names.append(name)
        if "seg-" in name:
            keys |= _keys_in(data, first, end)
    return Damage(tuple(sorted(set(names))), frozenset(keys))


def _hurt(path: Path, data: bytes, fault: Fault, rng: random.Random) -> tuple[int, int]:
    """Damages one file and returns the range of bytes that changed."""
    at = rng.randrange(len(data))
    if fault == "truncate":
        if rng.random() < 0.2:
            path.unlink()
            return 0, len(data)
        with path.open("r+b") as file:
            file.truncate(at)
        return at, len(data)
    if fault == "flip":
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << rng.randrange(8)]))
        return at, at + 1
    # Torn: a run of sectors that never got there, or holds what was there before.
    first = at // SECTOR_BYTES * SECTOR_BYTES
    end = min(first + SECTOR_BYTES * rng.randrange(1, 9), len(data))
    fillings = [bytes(end - first), rng.randbytes(end - first)]
    if path.name.startswith("seg-"):
        fillings.append(data[: end - first])  # a write that went to the wrong place
    filling = rng.choice(fillings)
    with path.open("r+b") as file:
        file.seek(first)
        file.write(filling[: end - first])
    return first, end


def lose_power(store: Path, flushed: Path, rng: random.Random) -> None:
    """Leaves on the disk what was flushed, and of what came later any sectors in any order.

    Args:
        flushed: copies of the files as they were when the last flush that has ended began, in a
            folder of that flush's number, per part.
    """
    kept = rng.choice((0.0, 0.3, 0.7, 1.0))
    for part in PARTS:
        copies = [path for path in (flushed / part).iterdir() if path.name.isdigit()]
        newest = max(copies, key=lambda path: int(path.name))
        for path in _files(store, part):
            now = path.read_bytes()
            copy = newest / path.relative_to(store)
            old = copy.read_bytes() if copy.exists() else bytes(len(now))
            path.write_bytes(_mixed(old, now, kept, rng))


def _mixed(old: bytes, now: bytes, kept: float, rng: random.Random) -> bytes:
    """Returns each sector as it was or as it is; files only grow, so what was there stays."""
    size = rng.randrange(len(old), max(len(old), len(now)) + 1)
    sectors = []
    for at in range(0, size, SECTOR_BYTES):
        end = min(at + SECTOR_BYTES, size)
        source = now if rng.random() < kept else old
        sectors.append(source[at:end].ljust(end - at, b"\0"))
    return b"".join(sectors)


def copy_files(store: Path, into: Path, part: Part) -> None:
    """Copies a part of the files of a store that may be changing."""
    (into / "segments").mkdir(parents=True, exist_ok=True)
    for path in _files(store, part):
        shutil.copyfile(path, into / path.relative_to(store))
