"""Erasure coding: the arithmetic, a put of twelve shards, a read of ten.

Peers: ISA-L itself and pyeclib over it; plain writes of the same slots.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from services.kvstore.benchmarks.timing import Case, Section, ratio, take_turns
from services.kvstore.checksums import native
from services.kvstore.erasure import code_for, join
from services.kvstore.placement import (
    DEFAULT_PROFILE,
    OBJECT_HEADER_BYTES,
    SHARD_HEADER_BYTES,
    shard_bytes,
    slot_bytes,
)
from services.kvstore.store.blocks import NewBlock, cut_shards

PAYLOAD: Final = 114_688
LAYOUT: Final = bytes(32)
K: Final = DEFAULT_PROFILE.k
M: Final = DEFAULT_PROFILE.m
_LEN: Final = shard_bytes(PAYLOAD + OBJECT_HEADER_BYTES, DEFAULT_PROFILE)
_SLOT: Final = slot_bytes(PAYLOAD, DEFAULT_PROFILE)
_BATCH: Final = 32  # blocks a turn


def run(quick: bool, log: Callable[[str], None], directory: Path) -> list[Section]:
    """Measures everything of this part, in files below `directory`."""
    num_turns = 6 if quick else 15
    with tempfile.TemporaryDirectory(dir=directory) as work:
        nodes = Nodes(Path(work), (num_turns + 2) * _BATCH)
        return [_arithmetic(num_turns, log), _put(nodes, num_turns), _read(nodes, num_turns)]


# ---- arithmetic -------------------------------------------------------------------------------


def _arithmetic(num_turns: int, log: Callable[[str], None]) -> Section:
    section = Section(
        "Encoding 10+2",
        f"Parity of blocks of {K} shards of {_LEN:,} bytes, the same block again and again, in"
        " bytes of data per second; decoding rebuilds one or two lost data shards, matrix"
        " inversion included. pyeclib also copies the data into fragments with headers of its own.",
    )
    data = os.urandom(K * _LEN)
    code: Any = code_for(DEFAULT_PROFILE)
    parity = code.encode(data)
    whole = [data[i * _LEN : (i + 1) * _LEN] for i in range(K)]
    whole += [parity[:_LEN], parity[_LEN:]]

    def decode(lost: list[int]) -> None:
        code.decode([(i, shard) for i, shard in enumerate(whole) if i not in lost], lost)

    cases = [
        Case("ours, encode", partial(_repeat, lambda: code.encode(data))),
        Case("ours, decode, one lost", partial(_repeat, lambda: decode([3]))),
        Case("ours, decode, two lost", partial(_repeat, lambda: decode([3, 7]))),
    ]
    isal = _isal(data, parity, log)
    if isal is not None:
        cases.append(Case("ISA-L, ec_encode_data", partial(_repeat, isal)))
    try:
        from pyeclib.ec_iface import ECDriver

        driver = ECDriver(k=K, m=M, ec_type="isa_l_rs_cauchy")
        driver.encode(data)
    except Exception as error:  # no package, or no back end behind it
        log(f"pyeclib left out: {error!r}")
        driver = None
    if driver is not None:
        cases.append(Case("pyeclib, encode", partial(_repeat, lambda: driver.encode(data))))
    times = take_turns(cases, 5 * num_turns)
    section.add(times, lambda s: _BATCH * len(data) / s / 1e9, "GB/s")
    name = "ISA-L, ec_encode_data"
    section.claim_at_least("encoding, bytes per second", 7, _speed(times["ours, encode"].cpu), "")
    against = ratio(times, name, "ours, encode") if name in times else None
    section.claim_at_least("encoding over ISA-L, bytes per second", 1, against, "")
    return section


def _speed(seconds: float) -> float:
    return _BATCH * K * _LEN / seconds / 1e9


def _repeat(work: Callable[[], Any], turn: int) -> None:
    for _ in range(_BATCH):
        work()


def _isal(data: bytes, parity: bytes, log: Callable[[str], None]) -> Callable[[], Any] | None:
    """Returns ISA-L's encode on the same data, None when the library is not there.

    Its parity must be ours: the same matrix.
    """
    found = ctypes.util.find_library("isal")
    if found is None:
        log("ISA-L left out: no shared library libisal (Debian: libisal2)")
        return None
    lib = ctypes.CDLL(found)
    matrix = ctypes.create_string_buffer((K + M) * K)
    lib.gf_gen_cauchy1_matrix(matrix, K + M, K)
    tables = ctypes.create_string_buffer(32 * K * M)
    rows = ctypes.cast(ctypes.addressof(matrix) + K * K, ctypes.c_char_p)
    lib.ec_init_tables(K, M, rows, tables)
    source = ctypes.create_string_buffer(data, len(data))
    target = ctypes.create_string_buffer(M * _LEN)
    sources = (ctypes.c_void_p * K)(*(ctypes.addressof(source) + i * _LEN for i in range(K)))
    targets = (ctypes.c_void_p * M)(*(ctypes.addressof(target) + i * _LEN for i in range(M)))

    # The library is given addresses only: what they are of must live as long as the function.
    def encode(owned: Any = (source, target)) -> Any:
        lib.ec_encode_data(_LEN, K, M, tables, sources, targets)
        return owned[1]

    assert encode().raw == parity
    return encode


# ---- put and read -----------------------------------------------------------------------------


class Nodes:
    """The segment stores of twelve nodes, and twelve plain files beside them."""

    def __init__(self, directory: Path, num_blocks: int) -> None:
        size = num_blocks * _SLOT
        self.stores = [
            native.SegmentStore(str(directory / f"node-{node}"), _SLOT, size, 1)
            for node in range(K + M)
        ]
        self._files = []
        for node in range(K + M):
            file = os.open(directory / f"plain-{node}", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(file, 0, size)
            self._files.append(file)
        payloads = [os.urandom(PAYLOAD) for _ in range(64)]
        self.blocks = [
            NewBlock(
                key=os.urandom(32),
                parent=bytes(32),
                layout=LAYOUT,
                block_index=1,
                num_tokens=128,
                ttl_class=1,
                payload=payloads[number % len(payloads)],
            )
            for number in range(num_blocks)
        ]
        # As many different bytes as `put` reads: one block would stay in the nearest cache.
        self._plain = [
            [shard.ljust(_SLOT, b"\0") for shard in self.cut(number)]
            for number in range(min(len(payloads), num_blocks))
        ]

    def cut(self, block: int) -> list[bytes]:
        """Returns the shards of a block."""
        return cut_shards(self.blocks[block], block, 1e9, DEFAULT_PROFILE)

    def put(self, block: int) -> None:
        """Cuts a block and stores its shards, one in each node."""
        for store, shard in zip(self.stores, self.cut(block), strict=True):
            store.put([shard])

    def write_slots(self, block: int) -> None:
        """Writes twelve whole slots with the shards of a block, cut before."""
        shards = self._plain[block % len(self._plain)]
        for file, shard in zip(self._files, shards, strict=True):
            os.pwrite(file, shard, block * _SLOT)

    def read(self, block: int, lost: frozenset[int]) -> None:
        """Reads ten shards, each checked, and puts the block together, checked in full."""
        key = self.blocks[block].key
        good = {}
        for node, store in enumerate(self.stores):
            if node in lost:
                continue
            shard, failed = store.get_shard(key[:16], node, block)
            assert failed == 0
            good[node] = memoryview(shard)[SHARD_HEADER_BYTES:]
            if len(good) == K:
                break
        data = join(good, PAYLOAD + OBJECT_HEADER_BYTES, DEFAULT_PROFILE)
        assert data is not None
        header, payload = data[:OBJECT_HEADER_BYTES], memoryview(data)[OBJECT_HEADER_BYTES:]
        assert native.verify_object(header, payload, key, LAYOUT) == 0


def _batch(work: Callable[[int], None], turn: int) -> None:
    for block in range(turn * _BATCH, (turn + 1) * _BATCH):
        work(block)


def _put(nodes: Nodes, num_turns: int) -> Section:
    section = Section(
        "Put of a block as 10+2",
        "Twelve segment stores in this process, into the page cache, nothing synced. Ours makes the"
        " headers, the digest, the parity and thirteen checksums, writes twelve slots and appends"
        " twelve log records. The plain writes are of whole slots, of shards cut before; both read"
        " as many different blocks, more than the near caches hold.",
    )
    plain = "12 plain slot writes"
    cases = [
        Case("ours", partial(_batch, nodes.put)),
        Case("ours, cutting alone", partial(_batch, nodes.cut)),
        Case(plain, partial(_batch, nodes.write_slots)),
    ]
    times = take_turns(cases, num_turns)
    section.add(times, lambda s: 1e6 * s / _BATCH, "µs")
    section.claim_at_most("EC put over 12 plain slot writes", 1.3, ratio(times, "ours", plain), "")
    return section


def _read(nodes: Nodes, num_turns: int) -> Section:
    section = Section(
        "Read of a block from ten shards",
        "Every shard's header and checksum, then the object's header, key, layout, length and"
        " digest are checked. Degraded: one or two data shards are gone and rebuilt from parity.",
    )
    cases = [
        Case("healthy", partial(_batch, partial(nodes.read, lost=frozenset()))),
        Case("degraded, one lost", partial(_batch, partial(nodes.read, lost=frozenset({3})))),
        Case("degraded, two lost", partial(_batch, partial(nodes.read, lost=frozenset({3, 7})))),
    ]
    times = take_turns(cases, num_turns)
    section.add(times, lambda s: _BATCH * PAYLOAD / s / 1e9, "GB/s")
    share = ratio(times, "healthy", "degraded, two lost")
    section.claim_at_least("degraded read over a healthy one, two shards lost", 0.7, share, "")
    return section
