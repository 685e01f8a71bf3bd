"""Faults put on purpose into what a sequence carries: a test hook, off unless a file is named.

`FaultyRunner` stands around a rank's runner and changes bytes as they come in: blocks and windows
at a hit, the state at a hand-over. Which fault, and into which blocks, stands in a file that is
read each time, so that a running stack can be given one fault after the other. What every fault
does to an answer is measured by `pelagos eval --faults` (docs/evaluation.md).
Source: small-model.md, section 6.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from services.engine.layout import KvLayout, Region
from services.engine.requests import Tokens
from services.engine.runner import Start

_NO_WORD: Final = 2  # the pad id: what an n-gram sees where there is nothing
_NGRAM_HISTORY: Final = 3

# Changes a state in place: its bytes, its layout, tokens cached, the foreign state seen before.
StateChange = Callable[[bytearray, KvLayout, int, bytes], None]


@dataclass(frozen=True)
class Places:
    """Where the parts of a block lie, per source layer: index keys, then main entries."""

    index: dict[int, tuple[int, int]]
    main: dict[int, tuple[int, int]]


# Returns the block that is loaded in place of one: its bytes, their places, a foreign block.
BlockChange = Callable[[bytes, Places, bytes], bytes]


@dataclass(frozen=True)
class Fault:
    """What goes wrong. At a hit blocks and window change, at a hand-over the state."""

    text: str
    block: BlockChange | None = None
    window: StateChange | None = None
    state: StateChange | None = None
    forgets_words: bool = False  # the n-gram history before the hand-over is lost
    reverses: bool = False  # the blocks of a hit are loaded in the opposite order


# --- states ---------------------------------------------------------------------------------------


def _lose(*names: str) -> StateChange:
    def change(data: bytearray, layout: KvLayout, num_cached: int, foreign: bytes) -> None:
        for region, part in _parts(layout, data):
            if region.name.startswith(names):
                data[part] = bytes(region.length_bytes)

    return change


def _lose_half(*, storable: bool) -> StateChange:
    def change(data: bytearray, layout: KvLayout, num_cached: int, foreign: bytes) -> None:
        for region, part in _parts(layout, data):
            if region.name.startswith("window.") and region.storable == storable:
                data[part] = bytes(region.length_bytes)

    return change


def _foreign_rings(data: bytearray, layout: KvLayout, num_cached: int, foreign: bytes) -> None:
    for region, part in _parts(layout, data):
        if region.name.startswith(("window.", "draft.")) and foreign:
            data[part] = foreign[part]


def _shift(data: bytearray, layout: KvLayout, num_cached: int, foreign: bytes) -> None:
    for region, part in _parts(layout, data):
        if region.name.startswith("window."):
            ring = bytes(data[part])
            data[part] = ring[-region.record_bytes :] + ring[: -region.record_bytes]


def _last_row(data: bytearray, layout: KvLayout, num_cached: int, foreign: bytes) -> None:
    for region, part in _parts(layout, data):
        if region.name.startswith("window."):
            size = region.record_bytes
            last, before = (part.start + (num_cached - n) % region.slots * size for n in (1, 2))
            data[last : last + size] = data[before : before + size]


def _one_on(data: bytearray, layout: KvLayout, num_cached: int, foreign: bytes) -> None:
    cursor = next(part for region, part in _parts(layout, data) if region.name == "cursor")
    data[cursor.start : cursor.start + 4] = (num_cached + 1).to_bytes(4, "little")


def _parts(layout: KvLayout, data: Sequence[int]) -> list[tuple[Region, slice]]:
    """Returns the regions that the bytes hold: all of a state, the first ones of a window."""
    at, found = 0, []
    for region in layout.regions:
        if at + region.length_bytes > len(data):
            break
        found.append((region, slice(at, at + region.length_bytes)))
        at += region.length_bytes
    return found


# --- blocks ---------------------------------------------------------------------------------------


def _zeroed(data: bytes, places: Places, foreign: bytes) -> bytes:
    return bytes(len(data))


def _foreign_block(data: bytes, places: Places, foreign: bytes) -> bytes:
    return foreign or bytes(len(data))


def _without_index(data: bytes, places: Places, foreign: bytes) -> bytes:
    return _cleared(data, places.index.values())


def _without_main(which: int) -> BlockChange:
    def change(data: bytes, places: Places, foreign: bytes) -> bytes:
        return _cleared(data, [places.main[sorted(places.main)[which]]])

    return change


def _cleared(data: bytes, ranges: Any) -> bytes:
    changed = bytearray(data)
    for low, high in ranges:
        changed[low:high] = bytes(high - low)
    return bytes(changed)


FAULTS: Final[dict[str, Fault]] = {
    "block-zeroed": Fault("blocks of a hit zeroed", block=_zeroed),
    "block-foreign": Fault("blocks of a hit are another conversation's", block=_foreign_block),
    "index-zeroed": Fault("index keys of blocks zeroed", block=_without_index),
    "main-decoder-zeroed": Fault("main entries of the decoder source zeroed", _without_main(-1)),
    "main-encoder-zeroed": Fault("main entries of the encoder source zeroed", _without_main(0)),
    "blocks-reversed": Fault("blocks of a hit in the opposite order", reverses=True),
    "window-lost": Fault("rings lost at a hit", window=_lose("window.")),
    "rings-lost": Fault("all rings lost at the hand-over", state=_lose("window.", "draft.")),
    "encoder-rings-lost": Fault("the encoder's rings lost", state=_lose_half(storable=True)),
    "layer-0-ring-lost": Fault("layer 0's ring lost", state=_lose("window.0")),
    "rings-foreign": Fault("another conversation's rings", state=_foreign_rings),
    "decoder-rings-lost": Fault("the decoder's rings lost", state=_lose_half(storable=False)),
    "one-ring-lost": Fault("one decoder ring lost", state=_lose("window.6")),
    "draft-rings-lost": Fault("the drafter's rings lost", state=_lose("draft.")),
    "rings-shifted": Fault("rings shifted by a slot", state=_shift),
    "last-row-wrong": Fault("the newest row of the rings is the one before it", state=_last_row),
    "ngrams-lost": Fault("n-gram history lost at the hand-over", forgets_words=True),
    "pooling-lost": Fault("pooling state lost at the hand-over", state=_lose("pool.")),
    "position-off": Fault("position off by one at the hand-over", state=_one_on),
}


class FaultyRunner:
    """A runner whose incoming bytes may be wrong; everything else is the inner one's."""

    def __init__(self, inner: Any, file: Path, *, for_prefill: bool) -> None:
        self._inner = inner
        self._file = file
        self._for_prefill = for_prefill
        self._foreign_state = b""
        self._foreign_block = b""
        self._request_id = ""  # of the sequence opened last
        self._loaded: list[tuple[int, bytes]] = []  # its blocks so far

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, start: Start) -> None:
        """Opens a sequence, which may have lost the words before its first step."""
        fault, _ = self._fault()
        self._request_id, self._loaded = start.request_id, []
        if fault is not None and fault.forgets_words and not self._for_prefill:
            start = replace(start, tokens=_forgetful(start))
        self._inner.open(start)

    def write_block(self, block: int, data: bytes) -> None:
        """Loads a block; in prefill they come in order behind `open`."""
        fault, blocks = self._fault()
        number = len(self._loaded)
        if fault is None:
            self._foreign_block = data
        elif self._for_prefill and fault.block is not None and number in blocks:
            data = fault.block(data, self._places(), self._foreign_block)
        self._inner.write_block(block, data)
        self._loaded.append((block, data))
        if self._for_prefill and fault is not None and fault.reverses:
            held = reversed([held for _, held in self._loaded])
            for (place, _), moved in zip(self._loaded, held, strict=True):
                self._inner.write_block(place, moved)

    def write_window(self, seq_id: int, boundary: int, data: bytes) -> None:
        """Loads a stored window."""
        fault, _ = self._fault()
        if fault is not None and fault.window is not None:
            changed = bytearray(data)
            fault.window(changed, self._inner.layout, boundary, b"")
            data = bytes(changed)
        self._inner.write_window(seq_id, boundary, data)

    def write_state(self, seq_id: int, data: bytes, num_cached: int) -> None:
        """Loads the state of a hand-over."""
        fault, _ = self._fault()
        if fault is None:
            self._foreign_state = data
        elif fault.state is not None:
            changed = bytearray(data)
            fault.state(changed, self._inner.layout, num_cached, self._foreign_state)
            data = bytes(changed)
        self._inner.write_state(seq_id, data, num_cached)

    def _places(self) -> Places:
        sources = self._inner.pool.sources
        return Places(
            {layer: (s.index_at, s.main_at) for layer, s in sources.items()},
            {layer: (s.main_at, s.end) for layer, s in sources.items()},
        )

    def _fault(self) -> tuple[Fault | None, frozenset[int]]:
        """Returns the fault that the file names now, and the blocks it is for, by request."""
        try:
            document = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None, frozenset()
        blocks = document.get("blocks", {}).get(self._request_id, ())
        return FAULTS.get(document.get("fault", "")), frozenset(blocks)


def _forgetful(start: Start) -> Tokens:
    tokens = start.tokens
    ids = array("I", tokens.ids)
    for at in range(max(0, start.num_computed - _NGRAM_HISTORY), start.num_computed):
        ids[at] = _NO_WORD
    return Tokens(tokens.geometry, ids, tokens.media)
