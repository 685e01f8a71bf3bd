"""What a prefill rank decides: which rank, which chunks, where a hit resumes, what is loaded.

Pure functions over integers; the shell (`rank_loop.py`) owns clocks, queues and bytes.
Source: engine.md, sections 1.4 and 1.6 to 1.9; kvcache-and-balancing.md, section 10.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.common.cost_model import CostModel
from services.engine.layout import Geometry


def pick_rank(outstanding_ns: Sequence[int]) -> int:
    """The rank with the least outstanding predicted work; ties to the lowest id (1.4)."""
    return min(range(len(outstanding_ns)), key=lambda rank: (outstanding_ns[rank], rank))


class Ledger:
    """Predicted work assigned to each rank and not finished, in whole nanoseconds (1.4).

    Integers, and a request gives back exactly what it was charged, so an empty rank is at 0.
    """

    def __init__(self, num_ranks: int) -> None:
        self.outstanding_ns = [0] * num_ranks
        self._left: dict[str, tuple[int, int]] = {}

    @property
    def total_ns(self) -> int:
        return sum(self.outstanding_ns)

    def charge(self, key: str, rank: int, cost_ns: int) -> None:
        if key in self._left:
            raise ValueError(f"request {key} is charged twice")
        self._left[key] = (rank, cost_ns)
        self.outstanding_ns[rank] += cost_ns

    def paid(self, key: str, cost_ns: int) -> None:
        """Takes a finished chunk off; cuts cost one k0 each, so never more than what is left."""
        rank, left = self._left[key]
        taken = min(left, cost_ns)
        self._left[key] = (rank, left - taken)
        self.outstanding_ns[rank] -= taken

    def settle(self, key: str) -> None:
        """Takes off whatever remains: at the last chunk, on abort and on failure. Idempotent."""
        rank, left = self._left.pop(key, (0, 0))
        self.outstanding_ns[rank] -= left


# --- planning one step (1.6) ----------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """An image's positions: [start, end)."""

    start: int
    end: int


@dataclass(frozen=True)
class Waiting:
    """One request of a rank's FIFO, as the planner sees it."""

    key: str
    num_tokens: int  # the whole prompt
    start: int  # positions below have KV or are replayed already: where the next chunk begins
    blocks_needed: int = 0  # still to allocate; 0 once the request holds its blocks and slot
    needs_slot: bool = False
    terminal: bool = False  # aborted, or a dependency failed: drop and emit its result
    images: tuple[Span, ...] = ()
    cut_points: tuple[int, ...] = ()

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.start


@dataclass(frozen=True)
class Pool:
    """What the rank can still give out."""

    num_blocks: int
    free_blocks: int
    free_slots: int


@dataclass(frozen=True)
class StepLimits:
    budget_ns: int
    max_batched_tokens: int
    max_seqs: int
    max_sum_k: int
    min_chunk: int = 128
    align: int = 1  # 2C with context parallelism of size C > 1
    scale: float = 1.0  # median measured/predicted of the last steps (1.5)


@dataclass(frozen=True)
class Chunk:
    key: str
    start: int
    num_tokens: int
    cost_ns: int
    last: bool


class StopReason(enum.Enum):
    """Why the walk over the FIFO ended."""

    FIFO_END = "fifo_end"
    BUDGET = "budget"
    BLOCKS = "blocks"
    SEQS = "seqs"
    SUM_K = "sum_k"


@dataclass
class StepPlan:
    chunks: list[Chunk] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # terminal already
    rejected: list[str] = field(default_factory=list)  # never fits the pool
    left_ns: int = 0
    stopped: StopReason = StopReason.FIFO_END


def plan_step(
    fifo: Sequence[Waiting], pool: Pool, limits: StepLimits, cost_model: CostModel
) -> StepPlan:
    """Chooses the chunks of one step: first in, first out, sized by inverting the cost model.

    A budget that is too small slows the engine but never stops it: the first chunk of a step is
    at least `min_chunk` tokens (rule 8).
    """
    align = limits.align
    left_ns = limits.budget_ns / limits.scale - cost_model.step0_ns
    left_tokens = limits.max_batched_tokens
    free_blocks, free_slots = pool.free_blocks, pool.free_slots
    sum_k = 0
    plan = StepPlan()
    for request in fifo:
        if request.terminal:
            plan.dropped.append(request.key)
            continue
        if request.blocks_needed >= pool.num_blocks:
            plan.rejected.append(request.key)
            continue
        if request.blocks_needed > free_blocks or (request.needs_slot and free_slots < 1):
            plan.stopped = StopReason.BLOCKS
            break
        if len(plan.chunks) >= limits.max_seqs:
            plan.stopped = StopReason.SEQS
            break
        if plan.chunks and sum_k + request.num_tokens > limits.max_sum_k:
            plan.stopped = StopReason.SUM_K
            break
        first = not plan.chunks
        num = _chunk_tokens(request, left_ns, left_tokens, first, limits, cost_model)
        if num <= 0:
            plan.stopped = StopReason.BUDGET
            break
        cost_ns = cost_model.charge(num, request.start)
        plan.chunks.append(
            Chunk(request.key, request.start, num, cost_ns, num == request.remaining)
        )
        left_ns -= cost_ns
        left_tokens -= -(-num // align) * align
        free_blocks -= request.blocks_needed
        free_slots -= 1 if request.needs_slot else 0
        sum_k += request.num_tokens
        if num < request.remaining:
            plan.stopped = StopReason.BUDGET
            break
    plan.left_ns = int(left_ns)
    return plan


def _chunk_tokens(
    request: Waiting,
    left_ns: float,
    left_tokens: int,
    first: bool,
    limits: StepLimits,
    cost_model: CostModel,
) -> int:
    """Tokens of this request's next chunk; 0 or less ends the walk."""
    start, remaining, align = request.start, request.remaining, limits.align
    room = left_tokens // align * align
    num = min(remaining, cost_model.invert(left_ns, start, remaining), room)
    if num < remaining:
        num = num // align * align
    num = _cut_at(request, num)
    if num < min(limits.min_chunk, remaining) and not _ends_on_cut(request, num):
        if not first:
            return 0
        num = _cut_at(request, min(remaining, max(limits.min_chunk, align)))
    return cut_for_images(start, num, request.images, room, may_extend=first)


def _cut_at(request: Waiting, num: int) -> int:
    """Shortens a chunk to the first forced cut point inside it (rule 6)."""
    inside = [at for at in request.cut_points if request.start < at <= request.start + num]
    return min(inside) - request.start if inside else num


def _ends_on_cut(request: Waiting, num: int) -> bool:
    return num > 0 and request.start + num in request.cut_points


def cut_for_images(
    start: int, num_tokens: int, images: Sequence[Span], room: int, may_extend: bool
) -> int:
    """Moves a chunk's end out of an image span; returns its new length (rule 7).

    Ending exactly at an image's first token is fine. With `may_extend` and room for it the chunk
    grows to the image's end, else it shrinks to before the image. An image longer than a whole
    step's tokens must be cut: progress wins, a span may be split across chunks (model.md, 17.3).
    """
    if num_tokens <= 0:
        return num_tokens
    end = start + num_tokens
    for image in images:
        if image.start < end < image.end:
            if may_extend and image.end - start <= room:
                return image.end - start
            if image.start > start:
                return image.start - start
            return num_tokens if may_extend else 0
    return num_tokens


# --- hits, windows, truncation (1.8, 1.9) ---------------------------------------------------------


@dataclass(frozen=True)
class Resume:
    """Where a request starts computing.

    `hit`: leading tokens reused whole (what the APIs show as cached). `start`: first position
    computed. `valid_start`: smallest position an encoder window may see. `write_from`: first
    position whose block KV is written; positions in [start, write_from) are replayed.
    `load_state_at`: attach point of the window state to load, None for none.
    """

    hit: int
    start: int
    valid_start: int
    write_from: int
    load_state_at: int | None

    @property
    def num_replayed(self) -> int:
        return self.write_from - self.start

    @property
    def replayed_inexact(self) -> bool:
        """True when the windows were cut: results are not bit-equal to a cold run (1.8)."""
        return self.write_from > self.start and self.load_state_at is None and self.start > 0


def resume_point(
    num_tokens: int, num_stored: int, swa_at: Collection[int], geometry: Geometry
) -> Resume:
    """Applies the hit rule to a stored prefix and the attach points of stored window states.

    `num_stored` may be any count; it is floored to whole blocks and capped so that at least a
    ring of tokens is computed. Source: kvcache-and-balancing.md, section 10 (T-HIT-1 to T-HIT-8).
    """
    block = geometry.block_tokens
    cap = max(0, num_tokens - geometry.ring)
    matched = min(num_stored, cap) // block * block
    if matched == 0:
        return Resume(0, 0, 0, 0, None)
    if matched in swa_at:
        return Resume(matched, matched, 0, matched, matched)
    start = matched - block
    if start > 0 and start in swa_at:
        # Exact from an earlier state, at the cost of a replay: prefer it.
        return Resume(start, start, 0, matched, start)
    return Resume(start, start, start, matched, None)


def window_start(position: int, valid_start: int, geometry: Geometry) -> int:
    """First key the encoder window of a row may see, in every chunk (1.8)."""
    return max(position - geometry.window + 1, valid_start, 0)


def swa_store_position(num_tokens: int, geometry: Geometry) -> int:
    """Attach point of the window state stored after prefill; 0 stores nothing (T-SWA-POS).

    One token is left out so that the next turn always has a token to compute.
    """
    if num_tokens < 1:
        return 0
    return (num_tokens - 1) // geometry.block_tokens * geometry.block_tokens


def clip(num_tokens: int, start: int, chunk: int, geometry: Geometry) -> int:
    """Leading rows of a chunk that skip the decoder layers; the last row is always kept (1.9)."""
    return min(max(num_tokens - geometry.keep_tokens - start, 0), chunk - 1)


# --- load plan (1.7) ------------------------------------------------------------------------------

ZERO_FILL = -1


@dataclass(frozen=True)
class LoadRow:
    """One copy: slots [first_slot, end_slot) of `source` go to `destination` onward.

    `source` is a block id, a ring id, or ZERO_FILL.
    """

    source: int
    first_slot: int
    end_slot: int
    destination: int

    @property
    def length(self) -> int:
        return self.end_slot - self.first_slot


def window_segments(
    start: int, valid_start: int, ring_id: int, ring: int, window: int, destination: int = 0
) -> list[LoadRow]:
    """Rows that gather the history [start - window, start) of a sequence: exactly `window` long.

    The part below `valid_start` (or below 0) is zero-fill; the ring range is cut at its wrap.
    """
    rows: list[LoadRow] = []
    low = start - window
    first = min(max(low, valid_start, 0), start)
    if first > low:
        rows.append(LoadRow(ZERO_FILL, 0, first - low, destination))
    position = first
    while position < start:
        slot = position % ring
        num = min(ring - slot, start - position)
        rows.append(LoadRow(ring_id, slot, slot + num, destination + position - low))
        position += num
    return rows


def paged_segments(
    num_entries: int, block_table: Sequence[int], entries_per_block: int, destination: int = 0
) -> list[LoadRow]:
    """Rows that gather the first `num_entries` compressed entries of a sequence, block by block.

    A sequence without entries still contributes one destination row, zero-filled.
    """
    if num_entries == 0:
        return [LoadRow(ZERO_FILL, 0, 1, destination)]
    rows = []
    for index in range(-(-num_entries // entries_per_block)):
        at = index * entries_per_block
        num = min(entries_per_block, num_entries - at)
        rows.append(LoadRow(block_table[index], 0, num, destination + at))
    return rows


def load_deadline_s(
    num_tokens: int, base_s: float = 2.0, per_1k_s: float = 0.1, cap_s: float = 30.0
) -> float:
    """How long a cache load may take before the hit is shortened to what has arrived (1.7)."""
    return min(cap_s, base_s + per_1k_s * num_tokens / 1024)
