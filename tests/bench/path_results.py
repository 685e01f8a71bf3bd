"""What the benchmark of the whole path found: values, and rates from what clients saw."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.bench.hops import summary
from tests.bench.load_client import Load, Seen

WARM_SHARE: Final = 0.25  # of a round: connections open, pools fill


@dataclass(frozen=True)
class PathRow:
    """Requests one after the other through the whole path.

    Args:
        model_ttft_ms: what the simulated model itself takes until the first token.
        model_step_ms: what one of its decode steps takes.
    """

    time_scale: float
    prompt_tokens: int
    max_tokens: int
    model_ttft_ms: float
    model_step_ms: float
    seen: Sequence[Seen]

    def ttft_ms(self) -> tuple[float, float]:
        """Returns median and 95th percentile of the time to the first token."""
        return summary([1e3 * (one.first_s - one.sent_s) for one in self.seen])

    def per_token_ms(self) -> tuple[float, float]:
        """Returns median and 95th percentile of the mean time per token after the first."""
        return summary(
            [1e3 * (s.last_s - s.first_s) / max(1, s.output_tokens - 1) for s in self.seen]
        )

    def per_event_ms(self) -> float:
        """Returns the median time between two events with text."""
        return statistics.median(
            1e3 * (s.last_s - s.first_s) / max(1, s.num_events - 1) for s in self.seen
        )

    def tokens_per_event(self) -> float:
        """Returns how many tokens an event carries."""
        return sum(s.output_tokens for s in self.seen) / max(
            1, sum(s.num_events for s in self.seen)
        )


@dataclass(frozen=True)
class Round:
    """One system under one concurrency for some seconds.

    Args:
        cpu_us_per_token: by role of the system's processes; the client is not among them.
        others: share of the machine's CPU that neither the system nor its client took.
    """

    system: str
    number: int
    concurrency: int
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: tuple[float, float]
    tokens_per_request: float
    tokens_per_event: float
    cpu_us_per_token: Mapping[str, float]
    client_us_per_token: float
    others: float
    num_errors: int


@dataclass
class Results:
    """Everything that goes into the tables."""

    facts: dict[str, str] = field(default_factory=dict)
    hops: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # series -> hop -> ms
    rpcs: dict[str, list[float]] = field(default_factory=dict)
    paths: list[PathRow] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    idle_cores: dict[str, float] = field(default_factory=dict)  # by role
    # system -> role -> CPU µs of a request, and of each of its output tokens
    split: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    peer: str = ""  # what is compared with, or why nothing is
    errors: list[str] = field(default_factory=list)


def split_cost(
    short: Mapping[str, float], long: Mapping[str, float], num_short: int, num_long: int
) -> dict[str, tuple[float, float]]:
    """Returns by role what a request costs and what each of its tokens adds.

    Args:
        short, long: cost of a request with few and with many output tokens, by role.
    """
    found = {}
    for role in short:
        per_token = (long[role] - short[role]) / (num_long - num_short)
        found[role] = (short[role] - num_short * per_token, per_token)
    return found


def round_of(
    system: str,
    number: int,
    concurrency: int,
    seconds: float,
    load: Load,
    cpu: Mapping[str, float],
    machine_busy_s: float,
    machine_s: float,
) -> Round:
    """Returns the figures of one round.

    Rates are those of the window after the warm-up: a request counts by the share of its life that
    lies in it, so that neither those cut at the start nor those cut at the end tilt the result.

    Args:
        cpu: seconds by role during the whole round, its last requests included.
        machine_busy_s, machine_s: of all cores, busy and in total, over the same time.
    """
    good = [seen for seen in load.requests if not seen.error]
    begin_s = load.start_s + WARM_SHARE * seconds
    end_s = load.start_s + seconds
    num_requests = num_tokens = 0.0
    for seen in good:
        inside_s = min(seen.end_s, end_s) - max(seen.sent_s, begin_s)
        if inside_s > 0:
            share = inside_s / (seen.end_s - seen.sent_s)
            num_requests += share
            num_tokens += share * seen.output_tokens
    window_s = end_s - begin_s
    total = max(1, sum(seen.output_tokens for seen in good))
    used_s = sum(cpu.values()) + load.cpu_s + load.startup_cpu_s
    return Round(
        system=system,
        number=number,
        concurrency=concurrency,
        requests_per_s=num_requests / window_s,
        tokens_per_s=num_tokens / window_s,
        ttft_ms=summary([1e3 * (s.first_s - s.sent_s) for s in good]) if good else (0.0, 0.0),
        tokens_per_request=total / max(1, len(good)),
        tokens_per_event=total / max(1, sum(seen.num_events for seen in good)),
        cpu_us_per_token={role: 1e6 * used / total for role, used in cpu.items()},
        client_us_per_token=1e6 * load.cpu_s / total,
        others=max(0.0, machine_busy_s - used_s) / max(1e-9, machine_s),
        num_errors=len(load.requests) - len(good),
    )
