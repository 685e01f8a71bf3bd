"""Replays a trace over the bucket and stealing rules of the prefill balancer, on virtual time.

An engine serves one request at a time, so the waits show the price of buckets and not their gain
(homogeneous steps). Source: kvcache-and-balancing.md, section 12, case T-PRE-5.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.cost_model import CostModel
from services.lb.prefill import policy
from services.lb.prefill.policy import Steal
from services.lb.sim.trace import TraceRequest, cold_work_ns


@dataclass(frozen=True)
class PrefillSetup:
    """What is simulated. The defaults are those of T-PRE-5."""

    num_engines: int = 16
    start_lanes: tuple[int, ...] = (10, 4, 2)  # engines per bucket at the start
    bounds: tuple[int, ...] = (16 * 1024, 64 * 1024)
    load: float = 0.85
    round_s: float = 10.0
    max_moves: int = 2


@dataclass(frozen=True)
class Job:
    """A prompt with the seconds it occupies an engine."""

    arrived_s: float
    work_s: float
    bucket: int


@dataclass(frozen=True)
class Outcome:
    """Waits in order of start, and the seconds each engine was busy."""

    waits_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def mean_wait_s(self) -> float:
        """Returns the mean time between arrival and start."""
        return sum(self.waits_s) / len(self.waits_s)

    @property
    def p95_wait_s(self) -> float:
        """Returns the time that 95 of 100 requests do not wait longer than."""
        return sorted(self.waits_s)[int(0.95 * (len(self.waits_s) - 1))]

    @property
    def imbalance(self) -> float:
        """Returns the busiest engine over the mean."""
        return max(self.busy_s) * len(self.busy_s) / sum(self.busy_s)


@dataclass
class _Pool:
    """The engines, their lanes and the queues in front of them."""

    lane_of: list[int]
    steal: Steal
    num_buckets: int
    queues: list[deque[Job]] = field(init=False)
    idle: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.num_buckets)]
        self.idle = [True] * len(self.lane_of)

    def next_start(self) -> tuple[int, Job] | None:
        """Returns the next engine to start and its job; idle engines are asked in id order."""
        lengths = [len(queue) for queue in self.queues]
        for engine, lane in enumerate(self.lane_of):
            if not self.idle[engine]:
                continue
            source: int | None = lane
            if not lengths[lane]:
                source = policy.steal_from(lane, lengths, self.steal)
            if source is not None:
                self.idle[engine] = False
                return engine, self.queues[source].popleft()
        return None


def jobs_of(trace: Sequence[TraceRequest], setup: PrefillSetup, model: CostModel) -> list[Job]:
    """Returns the trace as jobs, scaled to the load that `setup` asks for."""
    work_ns = cold_work_ns(trace, model)
    span_s = trace[-1].arrived_s - trace[0].arrived_s
    scale = setup.load * setup.num_engines * span_s / sum(work_ns)
    return [
        Job(r.arrived_s, ns * scale, policy.bucket_of(r.num_prompt_tokens, setup.bounds))
        for r, ns in zip(trace, work_ns, strict=True)
    ]


def replay(jobs: Sequence[Job], setup: PrefillSetup, steal: Steal, buckets: bool = True) -> Outcome:
    """Returns how jobs and engines fared. `buckets=False`: one shared FIFO."""
    num_buckets = len(setup.start_lanes) if buckets else 1
    starts = setup.start_lanes if buckets else (setup.num_engines,)
    lanes = [lane for lane, count in enumerate(starts) for _ in range(count)]
    pool = _Pool(lanes, steal, num_buckets)
    arrived_work = [0.0] * num_buckets
    finishes: list[tuple[float, int, int]] = []
    order = itertools.count()
    next_round_s = setup.round_s
    waits_s: list[float] = []
    busy_s = [0.0] * setup.num_engines
    arrivals = deque(jobs)
    while len(waits_s) < len(jobs):
        now_s = min(
            arrivals[0].arrived_s if arrivals else float("inf"),
            finishes[0][0] if finishes else float("inf"),
            next_round_s,
        )
        while finishes and finishes[0][0] <= now_s:
            pool.idle[heapq.heappop(finishes)[2]] = True
        if next_round_s <= now_s:
            _redivide(pool, arrived_work, setup)
            arrived_work = [0.0] * num_buckets
            next_round_s += setup.round_s
        # One arrival at a time: two of the same instant are two decisions.
        if arrivals and arrivals[0].arrived_s <= now_s:
            job = arrivals.popleft()
            bucket = job.bucket if buckets else 0
            pool.queues[bucket].append(job)
            arrived_work[bucket] += job.work_s
        while (start := pool.next_start()) is not None:
            engine, job = start
            waits_s.append(now_s - job.arrived_s)
            busy_s[engine] += job.work_s
            heapq.heappush(finishes, (now_s + job.work_s, next(order), engine))
    return Outcome(tuple(waits_s), tuple(busy_s))


def replay_round_robin(jobs: Sequence[Job], num_engines: int) -> Outcome:
    """Returns how it goes when request i goes to engine i mod N, whatever it holds."""
    free_s, busy_s = [0.0] * num_engines, [0.0] * num_engines
    waits_s: list[float] = []
    for index, job in enumerate(jobs):
        engine = index % num_engines
        start_s = max(job.arrived_s, free_s[engine])
        waits_s.append(start_s - job.arrived_s)
        free_s[engine] = start_s + job.work_s
        busy_s[engine] += job.work_s
    return Outcome(tuple(waits_s), tuple(busy_s))


def _redivide(pool: _Pool, arrived_work: Sequence[float], setup: PrefillSetup) -> None:
    demand = [
        arrived + sum(job.work_s for job in queue)
        for arrived, queue in zip(arrived_work, pool.queues, strict=True)
    ]
    targets = policy.divide(len(pool.lane_of), demand)
    if targets is None:
        return
    # Zero-padded, so that the order of the names is the order of the engines.
    lanes = {f"{engine:06}": lane for engine, lane in enumerate(pool.lane_of)}
    idle = {f"{engine:06}" for engine, is_idle in enumerate(pool.idle) if is_idle}
    for name, lane in policy.plan_moves(lanes, targets, idle, setup.max_moves):
        pool.lane_of[int(name)] = lane
