"""The seam between an engine's loops and what computes: `sim`, and later the network.

A runner owns device memory: block pool, state slots, copy area. Loops own everything else: which
rows run, which blocks they use, when something is freed. Every method but the three that end a
step is synchronous and cheap; a runner that computes in another process proxies them.

The decode side is asynchronous: `launch` returns at once, rows of a sequence that also ran in the
step before take their golden token, drafts and length on the device; `sample` starts sampling
once masks are known; `result` waits. At most two steps are in flight.
Source: engine.md, sections 2.2 and 9; model.md, section 23.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from services.engine.layout import KvLayout
from services.engine.requests import Sampling, TokenOut, Tokens


class StateFault(Exception):
    """Bytes on the device are not those of the sequence: this request is run again elsewhere."""

    def __init__(self, seq_id: int, what: str) -> None:
        super().__init__(f"sequence {seq_id}: {what}")
        self.seq_id = seq_id
        self.what = what


@dataclass(frozen=True)
class Start:
    """A sequence as a runner gets to know it."""

    seq_id: int
    request_id: str
    tokens: Tokens  # shared with the loop, read-only here
    sampling: Sampling
    num_prompt: int  # tokens of the original prompt: output delivered before is not counted
    num_computed: int  # tokens the prefill computes or finds; equals num_prompt + resumed output
    state_slot: int


@dataclass(frozen=True)
class PrefillRow:
    """One sequence's chunk: positions [start, start + num_tokens)."""

    seq_id: int
    start: int
    num_tokens: int
    valid_start: int  # smallest position an encoder window may see (1.8)
    write_from: int  # block KV below is stored already and must not be written
    last: bool
    block_table: tuple[int, ...]
    # Embeddings of image spans, by first position; rows outside need none.
    embeddings: tuple[tuple[int, bytes], ...] = ()
    mask: bytes | None = None


@dataclass(frozen=True)
class PrefillBatch:
    rows: tuple[PrefillRow, ...]  # empty: the placeholder step of an idle rank


@dataclass(frozen=True)
class PrefillResult:
    """First tokens of the rows that were last, and sequences whose bytes were not theirs."""

    first: dict[int, TokenOut] = field(default_factory=dict)
    faults: dict[int, StateFault] = field(default_factory=dict)
    measured_ms: float = 0.0


@dataclass(frozen=True)
class DecodeRow:
    """One sequence of a step. `remap` is its row in the step before, -1 when it sat out."""

    seq_id: int
    remap: int
    num_cached: int  # as known on the CPU; final for a fresh row
    block_table: tuple[int, ...]
    max_rows: int  # golden and drafts: fewer near the sequence's length limits


@dataclass(frozen=True)
class DecodeBatch:
    rows: tuple[DecodeRow, ...]
    budget: int  # total rows B (3.2); the split is the device's


@dataclass(frozen=True)
class DecodeOutput:
    """What one sequence got out of a step."""

    tokens: tuple[TokenOut, ...]  # 1 to q of them
    num_rows: int  # q
    confidences: tuple[float, ...]  # of the drafts for the next step
    drafts: tuple[int, ...]  # their ids, for masks


@dataclass(frozen=True)
class DecodeResult:
    outputs: dict[int, DecodeOutput] = field(default_factory=dict)
    faults: dict[int, StateFault] = field(default_factory=dict)
    measured_ms: float = 0.0
    sampler_ms: float = 0.0


# Per sequence one mask per row (golden first); None leaves a row free (5.4).
Masks = dict[int, SequenceOf[bytes | None]]


class ModelRunner(Protocol):
    """What an engine's loops ask of `sim` and of the network alike."""

    @property
    def layout(self) -> KvLayout: ...

    def open(self, start: Start) -> None:
        """Makes a sequence known. Its state slot is zeroed."""

    def close(self, seq_id: int) -> None:
        """Forgets a sequence; idempotent. Blocks and slots are the loop's to free."""

    async def prefill(self, batch: PrefillBatch) -> PrefillResult: ...

    def launch(self, batch: DecodeBatch) -> int:
        """Starts a forward pass; returns the step's number."""

    def sample(self, step: int, masks: Masks) -> None:
        """Starts the sampling of a launched step."""

    async def result(self, step: int) -> DecodeResult:
        """Waits for a sampled step. Steps end in the order of their launch."""

    def read_block(self, block: int) -> bytes:
        """Bytes of a block in the stored form, `layout.block_bytes` long."""

    def write_block(self, block: int, data: bytes) -> None: ...

    def read_state(self, seq_id: int) -> bytes:
        """The whole state of a sequence, `layout.state_bytes` long, rings re-laid by position."""

    def write_state(self, seq_id: int, data: bytes, num_cached: int) -> None: ...

    def copy_state(self, seq_id: int, copy: int) -> None:
        """Copies a sequence's state slot to copy area 0 or 1, after the step launched last."""

    def read_window(self, seq_id: int, boundary: int, copy: int | None) -> bytes:
        """Storable window [boundary - window, boundary), `layout.window_bytes` long.

        Taken from a copy area, or from the state itself when `copy` is None.
        """

    def write_window(self, seq_id: int, boundary: int, data: bytes) -> None:
        """Loads a stored window into a sequence that resumes at `boundary`."""

    def verify(self, seq_id: int, num_cached: int, block_table: SequenceOf[int]) -> None:
        """Checks what was delivered where the runner can tell. Raises: StateFault."""
