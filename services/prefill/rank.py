"""One prefill rank: its pools, its FIFO, and what a step does to them.

The step loop of all ranks is in `engine.py`, for ranks step together. Source: engine.md, 1.2, 1.6.
"""

from __future__ import annotations

import bisect
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from services.common.cost_model import CostModel, budget_scale
from services.engine.blocks import BlockManager, SlotPool
from services.engine.runner import ModelRunner, PrefillBatch, PrefillRow, Start, StateFault
from services.prefill.deps import without_hit
from services.prefill.scheduler import Pool, StepLimits, StepPlan, plan_step, resume_point
from services.prefill.work import Phase, Work

log = logging.getLogger(__name__)

_STEPS_KEPT = 64


@dataclass
class RankCounts:
    steps: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    hits_shortened: int = 0
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    @property
    def step_ms_p50(self) -> float:
        return median(self.step_ms) if self.step_ms else 0.0


class PrefillRank:
    """Queue and pools of one rank. Every method is synchronous."""

    def __init__(
        self, rank: int, runner: ModelRunner, num_blocks: int, num_slots: int, model: CostModel
    ) -> None:
        self.rank = rank
        self.runner = runner
        self.blocks = BlockManager(num_blocks)
        self.slots = SlotPool(num_slots)
        self.counts = RankCounts()
        self.fifo: list[Work] = []  # ready to run, by arrival
        self._cost_model = model

    def enqueue(self, work: Work) -> None:
        """Puts a ready request at the place that its arrival gives it."""
        work.phase = Phase.QUEUED
        work.position = work.resume.start
        bisect.insort(self.fifo, work, key=lambda w: w.arrival)

    def plan(self, limits: StepLimits) -> StepPlan:
        pool = Pool(self.blocks.num_blocks, self.blocks.num_free, self.slots.num_free)
        return plan_step([w.waiting() for w in self.fifo], pool, limits, self._cost_model)

    def scale(self) -> float:
        """How much slower than predicted the last steps were."""
        return budget_scale(list(self.counts.ratios))

    def batch(self, plan: StepPlan) -> tuple[PrefillBatch, list[Work]]:
        """Takes memory for the new requests of a plan and makes the runner's rows."""
        by_id = {str(work.seq_id): work for work in self.fifo}
        rows, works = [], []
        for chunk in plan.chunks:
            work = by_id[chunk.key]
            if work.slot is None and not self._admit(work):
                continue  # its hit was foreign: it runs in the next step, from the start
            work.in_step, work.phase = True, Phase.RUNNING
            end = chunk.start + chunk.num_tokens
            rows.append(
                PrefillRow(
                    seq_id=work.seq_id,
                    start=chunk.start,
                    num_tokens=chunk.num_tokens,
                    valid_start=work.resume.valid_start,
                    write_from=work.resume.write_from,
                    last=chunk.last,
                    block_table=tuple(work.table),
                    mask=work.constraint.mask() if chunk.last and work.constraint else None,
                    embeddings=tuple(
                        (start, data)
                        for start, data in work.embeddings.items()
                        if chunk.start <= start < end
                    ),
                )
            )
            works.append(work)
        return PrefillBatch(tuple(rows)), works

    def _admit(self, work: Work) -> bool:
        """Gives a request its blocks and slot, and loads what it hit. False: no hit after all."""
        slot = self.slots.allocate()
        assert slot is not None, "the planner counts slots"
        work.slot = slot
        work.table = self.blocks.allocate(work.tokens.geometry.num_blocks(work.num_tokens))
        self.runner.open(
            Start(
                work.seq_id,
                work.key.request_id,
                work.tokens,
                work.sampling,
                work.num_tokens - work.num_resumed,
                work.num_tokens,
                slot,
            )
        )
        try:
            for block, payload in zip(work.table, work.blocks, strict=False):
                self.runner.write_block(block, payload)
            if work.window is not None and work.resume.load_state_at is not None:
                self.runner.write_window(work.seq_id, work.resume.load_state_at, work.window)
        except (StateFault, ValueError):
            self.restart(work)
            return False
        work.blocks, work.window = [], None
        self.counts.cached_tokens += work.resume.hit
        self.counts.replayed_tokens += work.resume.num_replayed
        return True

    def restart(self, work: Work) -> None:
        """Runs a request from its first token: what it had loaded was not its own."""
        log.warning("hit thrown away", extra={"request_id": work.key.request_id})
        self.counts.hits_shortened += 1
        self.free(work)
        if work.resume.load_state_at is not None and work.blocks:
            # Only the window was foreign: the blocks may still be good.
            stored = work.resume.write_from
            work.resume = resume_point(work.num_tokens, stored, (), work.tokens.geometry)
            work.approximate_from = work.approximate_from or work.resume.write_from
        else:
            work.resume, work.approximate_from = without_hit(work.resume), 0
            work.blocks = []
        work.window = None
        work.position = work.resume.start
        work.phase = Phase.QUEUED

    def free(self, work: Work) -> None:
        """Gives back what a request holds on the device; idempotent."""
        if work.slot is not None:
            self.runner.close(work.seq_id)
            self.blocks.free(work.table)
            self.slots.free(work.slot)
            work.table, work.slot = [], None

    def pinned(self, block: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Pins a block for the persister; returns how to unpin it."""
        self.blocks.pin([block])

        def unpin() -> None:
            self.blocks.free([block])
            wake()

        return unpin
