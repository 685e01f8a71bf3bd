"""What a decode rank decides: who runs, who is preempted, what is copied, kept and persisted.

Pure functions over integers; `rank_loop.py` owns the clock, the queues and the bytes.
Source: engine.md, sections 2.1 to 2.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.engine.layout import Geometry
from services.engine.stop import Stop, StopRules, stop_after


def blocks_needed(num_tokens: int, in_flight: bool, geometry: Geometry) -> int:
    """Blocks to own before a step is launched, with the length known at schedule time (2.2)."""
    ahead = geometry.back if in_flight else 0
    return geometry.num_blocks(num_tokens + ahead + geometry.max_draft)


def blocks_reserved(num_tokens: int, geometry: Geometry) -> int:
    """Blocks a reservation holds for a sequence of `num_tokens` (2.1)."""
    return geometry.num_blocks(num_tokens + geometry.max_draft + geometry.back)


def num_state_slots(max_seqs: int) -> int:
    """State slots of a rank, the padding slot included; the copy area is as large again (2.1)."""
    return max_seqs * 6 // 5 + 1


def max_positions(max_model_len: int, geometry: Geometry) -> int:
    """Size of every table that is indexed by position (2.2)."""
    return max_model_len + 2 * geometry.max_draft + geometry.back


def key_length(
    num_cached: int, in_flight: bool, num_rows: int, num_accepted: int, geometry: Geometry
) -> int:
    """Keys a sequence's rows see on the device (k in 2.2).

    `num_cached` is known through N-2; with N-1 in flight the device adds its own count: golden
    plus accepted drafts of N-1, then this step's rows.
    """
    if not in_flight:
        return num_cached + num_rows
    return num_cached + geometry.back + num_rows - (geometry.max_draft - num_accepted)


# --- who runs (2.5) -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A running sequence as the scheduler knows it: committed through N-2."""

    seq_id: int
    num_tokens: int
    num_output: int
    num_blocks: int
    in_flight: bool = False


@dataclass
class Batch:
    seq_ids: list[int] = field(default_factory=list)  # in order of service
    grow: dict[int, int] = field(default_factory=dict)  # blocks to add before launch
    victims: list[int] = field(default_factory=list)
    sat_out: list[int] = field(default_factory=list)  # wait for blocks still being written


def pick_victim(running: Sequence[Running]) -> Running:
    """The sequence with the longest output; ties to the highest id (2.5)."""
    return max(running, key=lambda seq: (seq.num_output, seq.seq_id))


def next_batch(
    running: Sequence[Running], free_blocks: int, max_seqs: int, geometry: Geometry
) -> Batch:
    """Chooses the sequences of a step, shortest output first, and the victims if blocks run out.

    A victim with a step in flight loses that step's result, and its blocks come back only after
    it; until then a sequence that needs them sits out.
    """
    batch = Batch()
    alive = {seq.seq_id: seq for seq in running}
    for seq in sorted(running, key=lambda s: (s.num_output, s.seq_id)):
        if seq.seq_id not in alive:
            continue
        if len(batch.seq_ids) == max_seqs:
            break
        need = blocks_needed(seq.num_tokens, seq.in_flight, geometry) - seq.num_blocks
        pending = False
        while need > free_blocks:
            # Served sequences have shorter outputs, so the victim is never one of them.
            victim = pick_victim([s for s in alive.values() if s.seq_id not in batch.grow])
            if victim.seq_id == seq.seq_id and pending:
                break
            del alive[victim.seq_id]
            batch.victims.append(victim.seq_id)
            if victim.in_flight:
                pending = True
            else:
                free_blocks += victim.num_blocks
            if victim.seq_id == seq.seq_id:
                break
            if pending:
                break
        if seq.seq_id not in alive:
            continue
        if need > free_blocks:
            batch.sat_out.append(seq.seq_id)
            continue
        free_blocks -= max(0, need)
        batch.grow[seq.seq_id] = max(0, need)
        batch.seq_ids.append(seq.seq_id)
    return batch


# --- results (2.3) --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """`kept`: how many of the step's tokens count. `num_cached`: after the step."""

    kept: int
    num_cached: int
    stop: Stop | None


def on_result(
    token_ids: Sequence[int], num_cached: int, num_tokens: int, num_output: int, rules: StopRules
) -> StepResult:
    """Appends a step's tokens one by one and checks the stops in order (2.3).

    A stop inside an accepted run drops what follows it, and `num_cached` counts tokens kept, not
    drafts accepted: drafts that were not accepted hold no cache positions.
    """
    for index, token_id in enumerate(token_ids):
        kept = index + 1
        stop = stop_after(token_id, num_tokens + kept, num_output + kept, rules)
        if stop is not None:
            return StepResult(kept, num_cached + kept, stop)
    return StepResult(len(token_ids), num_cached + len(token_ids), None)


# --- window copies (2.6) --------------------------------------------------------------------------


def copy_decision(num_cached: int, in_flight: bool, attached: int, geometry: Geometry) -> int:
    """Boundary whose window must be copied before the next forward; 0 for none.

    Strategy A, "copy early, confirm late": `num_cached` is known through N-2 while the ring
    already holds N-1's writes, so with N-1 in flight a boundary up to `back` ahead is copied
    tentatively and confirmed by N-1's result. Without a step in flight the count is exact.
    """
    block = geometry.block_tokens
    if in_flight:
        boundary = (num_cached + geometry.back) // block * block
        return boundary if boundary > num_cached and boundary > attached else 0
    boundary = num_cached // block * block
    # Older boundaries are gone from the ring: at most `back` - 1 positions may lie behind it.
    if boundary > attached and num_cached - boundary < geometry.back:
        return boundary
    return 0


def copy_confirmed(boundary: int, num_cached: int) -> bool:
    """Whether a tentative copy holds a boundary that was really crossed."""
    return num_cached >= boundary


def persist_range(num_persisted: int, num_cached: int, geometry: Geometry) -> range:
    """Indices of the full, committed blocks not yet handed to the store (2.7)."""
    return range(num_persisted, num_cached // geometry.block_tokens)
