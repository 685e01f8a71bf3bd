"""Which engine serves which buckets, and how that changes from round to round (layer 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from services.lb.prefill import policy
from services.lb.prefill.policy import Lane


class LaneTable:
    """The division in force. It starts with one lane for everybody."""

    def __init__(self, num_buckets: int, min_per_bucket: int, max_moves: int) -> None:
        self._num_buckets = num_buckets
        self._min_per_bucket = min_per_bucket
        self._max_moves = max_moves
        self._targets: tuple[int, ...] | None = None
        self.lanes: tuple[Lane, ...] = (Lane(0, num_buckets),)
        self.lane_of: dict[str, int] = {}  # by engine id
        self.round_number = 0

    def join(self, engine_id: str) -> None:
        """Puts a new engine into the lane most below its target."""
        counts = [0] * len(self.lanes)
        for lane in self.lane_of.values():
            counts[lane] += 1
        targets = self._targets or (1,) * len(counts)
        self.lane_of[engine_id] = max(
            range(len(counts)), key=lambda lane: (targets[lane] - counts[lane], -lane)
        )

    def leave(self, engine_id: str) -> None:
        """Takes an engine out; its lane gets another at the next round."""
        self.lane_of.pop(engine_id, None)

    def redivide(self, demand: Sequence[float], idle: AbstractSet[str]) -> int | None:
        """Starts a round; returns how many engines moved, None when the division is kept."""
        division = policy.divide_into_lanes(len(self.lane_of), demand, self._min_per_bucket)
        if division is None:
            return None
        is_first = self._targets is None
        if division.lanes != self.lanes:
            old, self.lanes = self.lanes, division.lanes
            for engine_id, lane in self.lane_of.items():
                self.lane_of[engine_id] = self.lane_of_bucket(old[lane].first)
        self._targets = division.targets
        # The first division moves whom it must; later, only lanes left empty break the limit.
        num_empty = len(set(range(len(self.lanes))) - set(self.lane_of.values()))
        limit = len(self.lane_of) if is_first else max(self._max_moves, num_empty)
        moves = policy.plan_moves(self.lane_of, division.targets, idle, limit)
        self.lane_of.update(moves)
        self.round_number += 1
        return len(moves)

    def lane_of_bucket(self, bucket: int) -> int:
        """Returns the index of the lane that holds a bucket."""
        return next(index for index, lane in enumerate(self.lanes) if bucket in lane)

    def buckets_of(self) -> dict[str, tuple[int, ...]]:
        """Returns the buckets of every engine."""
        return {
            engine_id: tuple(range(self.lanes[lane].first, self.lanes[lane].end))
            for engine_id, lane in sorted(self.lane_of.items())
        }

    def restore(self, round_number: int, buckets_of: Mapping[str, Sequence[int]]) -> None:
        """Takes over what a former leader wrote down, as far as it is a whole division."""
        self.round_number = max(self.round_number, round_number)
        spans = sorted({(min(buckets), max(buckets) + 1) for buckets in buckets_of.values()})
        if [b for first, end in spans for b in range(first, end)] != list(range(self._num_buckets)):
            return
        self.lanes = tuple(Lane(first, end) for first, end in spans)
        counts = [0] * len(self.lanes)
        for engine_id, buckets in buckets_of.items():
            lane = self.lane_of_bucket(min(buckets))
            counts[lane] += 1
            if engine_id in self.lane_of:
                self.lane_of[engine_id] = lane
        self._targets = tuple(counts)
