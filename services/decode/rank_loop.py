"""The step loop of one decode rank: schedule, launch, post-process, sample, let go.

    CPU   | schedule(N) | launch forward(N) | post-process(N-1) | launch sample(N) | housekeeping(N)
    device| .......... forward(N-1) sample(N-1) | forward(N) ............... | sample(N) ...

A sequence that ends in N-1 is already part of N: N's result for it is dropped, it leaves at
schedule(N+1), and its blocks are free in housekeeping(N+1), after the last device write to them.
Its caller knows at post-process(N-1).
Source: engine.md, sections 2.2 to 2.7 and 3.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.decode import scheduler, speculation
from services.decode.scheduler import Running
from services.decode.sequence import Sequence
from services.decode.speculation import Curve, StepTimes
from services.engine.blocks import BlockManager, SlotPool
from services.engine.layout import Geometry
from services.engine.requests import FinishReason, TokenOut
from services.engine.runner import DecodeBatch, DecodeResult, DecodeRow, Masks, ModelRunner
from services.engine.stop import Stop

log = logging.getLogger(__name__)

_STEPS_KEPT = 64
_CURVE_STEPS = 16  # steps between two looks at what they took


@dataclass
class RankCounts:
    """What a rank has done; metrics and load reports read it."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    wasted_rows: int = 0
    preempted: int = 0
    copies_confirmed: int = 0
    copies_dropped: int = 0
    clamped_confidences: int = 0
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    @property
    def step_ms_p50(self) -> float:
        return median(self.step_ms) if self.step_ms else 0.0


@dataclass(frozen=True)
class Hooks:
    """What the loop asks of the engine around it; none of them may block."""

    persist: Callable[[DecodeRank, Sequence], None]
    released: Callable[[DecodeRank, Sequence], None]  # before blocks and slot are freed
    preempt: Callable[[DecodeRank, Sequence], None]


@dataclass(frozen=True)
class _InFlight:
    step: int
    rows: tuple[Sequence, ...]
    launched_s: float


class DecodeRank:
    """One data-parallel rank: its pools, its running sequences, its loop."""

    def __init__(
        self,
        rank: int,
        runner: ModelRunner,
        *,
        num_blocks: int,
        max_seqs: int,
        hooks: Hooks,
        curve: Curve,
        dspark: str,
        async_steps: bool,
        clock: Clock,
        learns_curve: bool = False,
    ) -> None:
        self.rank = rank
        self.runner = runner
        self.blocks = BlockManager(num_blocks)
        self.slots = SlotPool(scheduler.num_state_slots(max_seqs))
        self.max_seqs = max_seqs
        self.running: dict[int, Sequence] = {}
        self.counts = RankCounts()
        self.dspark = dspark
        self._geometry: Geometry = runner.layout.geometry
        self.curve = curve
        self._times = StepTimes(curve) if learns_curve else None
        self._async = async_steps
        self._hooks = hooks
        self._clock = clock
        self._prev: _InFlight | None = None
        self._wake = asyncio.Event()
        self._turned = asyncio.Event()
        self.last_progress_s = clock.now_s()

    @property
    def num_kv_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.running.values())

    @property
    def is_busy(self) -> bool:
        """Whether a step is due: the health check expects progress then."""
        return any(s.runnable or s.finished for s in self.running.values())

    def add(self, sequence: Sequence) -> None:
        """Takes a committed sequence into the running set."""
        self.running[sequence.seq_id] = sequence
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    async def settled(self, sequence: Sequence) -> None:
        """Waits until no step of a paused or finished sequence is in flight."""
        while self._prev is not None and sequence in self._prev.rows:
            self._turned.clear()
            self.wake()
            await self._turned.wait()

    async def run(self) -> None:
        """Steps for as long as there is something to do; sleeps otherwise."""
        while True:
            if self._prev is None and not self.is_busy:
                self._wake.clear()
                self.last_progress_s = self._clock.now_s()
                await self._wake.wait()
            await self._turn()

    async def _turn(self) -> None:
        prev, now_s = self._prev, self._clock.now_s()
        leaving = [s for s in self.running.values() if s.finished]
        for sequence in leaving:
            del self.running[sequence.seq_id]
        self.expire(now_s)
        current = self._launch(prev, now_s)
        if prev is not None:
            self._post_process(prev, await self.runner.result(prev.step))
        if current is not None:
            self.runner.sample(current.step, self._masks(current))
        for sequence in leaving:
            self._release(sequence)
        self._prev = current
        if current is not None and not self._async:
            self._post_process(current, await self.runner.result(current.step))
            self._prev = None
        self.last_progress_s = self._clock.now_s()
        self._turned.set()
        if prev is None and current is None and not leaving:
            # Sequences without room, or only paused ones: nothing changes within this loop.
            self._wake.clear()
            if not any(s.finished for s in self.running.values()):
                await self._wake.wait()

    # --- schedule(N) ----------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """Ends what is past its deadline; also called from outside while nothing steps."""
        for sequence in self.running.values():
            if now_s >= sequence.deadline_s and not sequence.finished:
                self.fail(sequence, Failure(Reason.DEADLINE, "the deadline has passed"))

    def _launch(self, prev: _InFlight | None, now_s: float) -> _InFlight | None:
        in_flight = set(prev.rows) if prev is not None else set()
        runnable = [s for s in self.running.values() if s.runnable]
        batch = scheduler.next_batch(
            [
                Running(s.seq_id, len(s.tokens), s.num_output, len(s.table), s in in_flight)
                for s in runnable
            ],
            self.blocks.num_free,
            self.max_seqs,
            self._geometry,
        )
        for seq_id in batch.victims:
            self.counts.preempted += 1
            sequence = self.running[seq_id]
            sequence.paused = True
            self._hooks.preempt(self, sequence)
        self._copy_windows(in_flight)
        rows: list[Sequence] = []
        for seq_id in batch.seq_ids:
            num = batch.grow[seq_id]
            if num > self.blocks.num_free:
                continue  # a victim's blocks come back only once it is exported: sit out
            sequence = self.running[seq_id]
            sequence.table += self.blocks.allocate(num)
            rows.append(sequence)
        if not rows:
            return None
        budget = self._budget(rows)
        step = self.runner.launch(
            DecodeBatch(
                tuple(
                    DecodeRow(
                        s.seq_id,
                        s.row if s in in_flight else -1,
                        s.num_cached,
                        tuple(s.table),
                        self._max_rows(s, s in in_flight),
                    )
                    for s in rows
                ),
                budget,
            )
        )
        for index, sequence in enumerate(rows):
            sequence.step, sequence.row = step, index
        return _InFlight(step, tuple(rows), time.monotonic())

    def _max_rows(self, sequence: Sequence, in_flight: bool) -> int:
        """Rows that can still count: near its length limits a sequence needs fewer drafts."""
        ahead = self._geometry.back if in_flight else 0
        left = min(
            sequence.rules.max_tokens - sequence.num_output,
            sequence.rules.max_model_len + 1 - len(sequence.tokens),
        )
        # With a step in flight the true count is unknown, so the limit is only a hint.
        return max(1, min(self._geometry.back, left + ahead))

    def _budget(self, rows: list[Sequence]) -> int:
        max_draft = self._geometry.max_draft
        if self.dspark == "none":
            return len(rows)
        if self.dspark == "fixed":
            return len(rows) * (1 + max_draft)
        survivals = []
        for sequence in rows:
            clean, bad = speculation.clamp_confidences(sequence.confidences)
            self.counts.clamped_confidences += bad
            survivals.append(speculation.survival(clean))
        return speculation.choose_budget(survivals, self.curve, max_draft)

    def _copy_windows(self, in_flight: set[Sequence]) -> None:
        """Copies states at boundaries before forward(N): early when N-1 may cross one (2.6)."""
        for sequence in self.running.values():
            if sequence.finished:
                continue
            flying = sequence in in_flight
            boundary = scheduler.copy_decision(
                sequence.num_cached, flying, sequence.attached, self._geometry
            )
            if not boundary:
                continue
            area = 1 if sequence.copy == 0 else 0
            self.runner.copy_state(sequence.seq_id, area)
            sequence.tentative = (boundary, area)
            if not flying:
                self._confirm_copy(sequence)

    def _confirm_copy(self, sequence: Sequence) -> None:
        if sequence.tentative is None:
            return
        boundary, area = sequence.tentative
        sequence.tentative = None
        if scheduler.copy_confirmed(boundary, sequence.num_cached):
            sequence.attached, sequence.copy = boundary, area
            self.counts.copies_confirmed += 1
        else:
            self.counts.copies_dropped += 1

    # --- post-process(N-1) ----------------------------------------------------------------------

    def _post_process(self, step: _InFlight, result: DecodeResult) -> None:
        self.counts.steps += 1
        self._learn(result)
        self.counts.step_ms.append(1e3 * (time.monotonic() - step.launched_s))
        for sequence in step.rows:
            output = result.outputs.get(sequence.seq_id)
            if sequence.finished:
                self.counts.wasted_rows += output.num_rows if output else 0
                continue
            fault = result.faults.get(sequence.seq_id)
            if fault is not None:
                log.error(
                    "foreign bytes on the device",
                    extra={"request_id": sequence.key.request_id, "what": fault.what},
                )
                self.fail(sequence, Failure(Reason.BLOCK_CORRUPT, "the sequence's state is lost"))
                continue
            if output is None:
                raise AssertionError(f"step {step.step} has no output for {sequence.seq_id}")
            self.counts.rows += output.num_rows
            sequence.confidences, sequence.drafts = output.confidences, output.drafts
            self._append(sequence, output.tokens, output.num_rows)

    def _learn(self, result: DecodeResult) -> None:
        """Follows what steps take, now and then: the budget is chosen by the curve (3.6)."""
        if self._times is None:
            return
        rows = sum(output.num_rows for output in result.outputs.values())
        self._times.add(rows, result.measured_ms)
        if self.counts.steps % _CURVE_STEPS == 0:
            self.curve = self._times.curve()

    def _append(self, sequence: Sequence, tokens: tuple[TokenOut, ...], num_rows: int) -> None:
        outcome = scheduler.on_result(
            [token.token_id for token in tokens],
            sequence.num_cached,
            len(sequence.tokens),
            sequence.num_output,
            sequence.rules,
        )
        kept = tokens[: outcome.kept]
        sequence.tokens.append([token.token_id for token in kept])
        sequence.num_cached = outcome.num_cached
        usage = sequence.usage
        usage.drafted_tokens += num_rows - 1
        usage.accepted_tokens += len(kept) - 1
        self.counts.tokens += len(kept)
        self.counts.drafted += num_rows - 1
        self.counts.accepted += len(kept) - 1
        self._confirm_copy(sequence)
        if not self._obeys(sequence, kept):
            self.finish(sequence, FinishReason.GRAMMAR_ERROR)
            return
        said = kept[:-1] if outcome.stop is Stop.STOP else kept
        count_usage(sequence, said)
        sequence.said.extend(said)
        if said:
            if not sequence.has_emitted:
                sequence.has_emitted = True
                if sequence.span is not None:
                    sequence.span.add_event("first_token")
            sequence.stream.emit(said)
        self._hooks.persist(self, sequence)
        if outcome.stop is not None:
            reason = FinishReason.STOP if outcome.stop is Stop.STOP else FinishReason.LENGTH
            self.finish(sequence, reason)

    def _masks(self, current: _InFlight) -> Masks:
        """Masks of the constrained rows, now that N-1's tokens and drafts are known (5.4).

        A matcher that fails ends its own request, never the batch (UR-69).
        """
        masks: Masks = {}
        for sequence in current.rows:
            if sequence.constraint is None or sequence.finished:
                continue
            try:
                masks[sequence.seq_id] = sequence.constraint.masks(sequence.drafts)
            except Exception:
                log.exception("matcher failed", extra={"request_id": sequence.key.request_id})
                self.finish(sequence, FinishReason.GRAMMAR_ERROR)
        return masks

    def _obeys(self, sequence: Sequence, tokens: tuple[TokenOut, ...]) -> bool:
        """Takes committed tokens into the matcher; False when it forbids one."""
        if sequence.constraint is None:
            return True
        try:
            return all(sequence.constraint.advance(token.token_id) for token in tokens)
        except Exception:
            log.exception("matcher failed", extra={"request_id": sequence.key.request_id})
            return False

    # --- ends -----------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a request for its caller now; its memory follows when no step uses it."""
        if not sequence.finished:
            sequence.finished = True
            sequence.stream.finish(reason, sequence.usage)
            self.wake()

    def fail(self, sequence: Sequence, failure: Failure) -> None:
        if not sequence.finished:
            sequence.finished = True
            sequence.stream.fail(failure, sequence.usage)
            self.wake()

    def leave(self, sequence: Sequence) -> None:
        """Lets a sequence go whose stream has ended already (it moved)."""
        sequence.finished = True
        self.wake()

    def _release(self, sequence: Sequence) -> None:
        self._hooks.released(self, sequence)
        self.runner.close(sequence.seq_id)
        self.blocks.free(sequence.table)
        self.slots.free(sequence.slot)
        sequence.table = []
        sequence.released.set()


def count_usage(sequence: Sequence, said: tuple[TokenOut, ...]) -> None:
    """Counts delivered tokens; those of the reasoning part up to and including its end."""
    sequence.usage.output_tokens += len(said)
    for token in said:
        if sequence.in_reasoning:
            sequence.usage.reasoning_tokens += 1
            if token.token_id == sequence.sampling.end_of_thinking_id:
                sequence.in_reasoning = False
