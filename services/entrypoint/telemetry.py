"""Names and instruments of the entrypoint's telemetry.

The GenAI names are still incubating in OpenTelemetry's conventions: they stand here and nowhere
else, so that following a rename is one edit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.common.metrics import Metrics
from services.entrypoint.ledger import Entry, Outcome

# Span attributes, OpenTelemetry semantic conventions for generative AI (incubating).
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
GEN_AI_TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
# Ours.
API: Final = "pelagos.api"
TENANT: Final = "pelagos.tenant"
OUTCOME: Final = "pelagos.outcome"
ATTEMPTS: Final = "pelagos.attempts"
CACHE_ENDED_BY: Final = "pelagos.cache.ended_by"

_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class Instruments:
    """The metrics; one object per process."""

    def __init__(self, metrics: Metrics) -> None:
        self.accepted = metrics.counter(
            "requests_accepted_total", "Requests past authentication and quota", ("api",)
        )
        self.outcomes = metrics.counter(
            "requests_total", "Accepted requests by how they ended", ("api", "outcome")
        )
        self.refused = metrics.counter(
            "requests_refused_total", "Requests refused at the door, by reason", ("reason",)
        )
        self.first_tokens = metrics.counter(
            "first_tokens_total", "Requests that sent a first token", ("api",)
        )
        self.ttft = metrics.histogram(
            "time_to_first_token_seconds", "From arrival to the first token", ("api",)
        )
        self.per_token = metrics.histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first",
            ("api",),
            buckets=_TOKEN_BUCKETS,
        )
        self.duration = metrics.histogram(
            "request_duration_seconds", "From arrival to the end", ("api", "outcome")
        )
        self.prompt_tokens = metrics.counter("prompt_tokens_total", "Prompt tokens")
        self.cached_tokens = metrics.counter("cached_tokens_total", "Prompt tokens that were hits")
        self.output_tokens = metrics.counter("output_tokens_total", "Output tokens")
        self.retries = metrics.counter(
            "retries_total", "Requests run again, by the reason of the loss", ("reason",)
        )
        self.slow_readers = metrics.counter(
            "slow_readers_total", "Clients closed because they did not read"
        )

    def watch(self, metrics: Metrics, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        """Adds gauges that are read when they are scraped."""
        for name, (text, read) in gauges.items():
            metrics.gauge(name, text).set_function(read)

    def closed(self, entry: Entry, outcome: Outcome, now_s: float) -> None:
        """Records the end of a request."""
        self.outcomes.labels(api=entry.api, outcome=outcome.value).inc()
        self.duration.labels(api=entry.api, outcome=outcome.value).observe(now_s - entry.started_s)
        self.prompt_tokens.inc(entry.prompt_tokens)
        self.cached_tokens.inc(entry.hit_tokens)
        self.output_tokens.inc(entry.output_tokens)
        if entry.first_token_s is not None and entry.output_tokens > 1:
            per_token_s = (now_s - entry.first_token_s) / (entry.output_tokens - 1)
            self.per_token.labels(api=entry.api).observe(per_token_s)

    def first_token(self, entry: Entry, now_s: float) -> None:
        """Records a request's first token; called once per request."""
        entry.first_token_s = now_s
        self.first_tokens.labels(api=entry.api).inc()
        self.ttft.labels(api=entry.api).observe(now_s - entry.started_s)
