"""When a sequence ends. Prefill asks for its first token, decode for every other.

Source: engine.md, section 2.3.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stop(enum.Enum):
    """Why no further token follows."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class StopRules:
    """A request's ends; `max_tokens` counts output over all attempts."""

    stop_token_ids: frozenset[int]
    max_tokens: int
    max_model_len: int
    ignore_stop: bool = False
    min_tokens: int = 0


def stop_after(token_id: int, num_tokens: int, num_output: int, rules: StopRules) -> Stop | None:
    """Whether the sequence ends with this token: stop token, model length, output length."""
    may_stop = not rules.ignore_stop and num_output >= rules.min_tokens
    if may_stop and token_id in rules.stop_token_ids:
        return Stop.STOP
    if num_tokens > rules.max_model_len:
        return Stop.LENGTH
    if num_output >= rules.max_tokens:
        return Stop.LENGTH
    return None
