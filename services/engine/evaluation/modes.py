"""The ways of running a model whose answers must agree: one table, an entry per way.

A further way (another transport, another parallelism) is a further entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Cache(Enum):
    """What of a question's prompt is stored before it is asked."""

    NOTHING = "nothing"
    WITH_WINDOW = "blocks and the window state behind them"
    WITHOUT_WINDOW = "blocks only: one of them is computed again for its window"


@dataclass(frozen=True)
class Mode:
    """One way.

    Args:
        dspark: speculation of the decode engines, as Configure takes it.
        expert_ranks: ranks that share an engine's experts; another stack than with one.
        moves: each request goes from one decode engine to another while it is answered.
    """

    name: str
    text: str
    cache: Cache = Cache.NOTHING
    dspark: str = "variable"
    expert_ranks: int = 1
    moves: bool = False

    @property
    def stack(self) -> tuple[int, int]:
        """Returns what the stack needs: expert ranks, and decode engines at least."""
        return self.expert_ranks, 2 if self.moves else 1


# The first is what the others are compared with.
MODES: Final = (
    Mode("cold", "prefill, hand-off, decode; nothing stored"),
    Mode("warm", "the prompt's blocks and window state from the store", Cache.WITH_WINDOW),
    Mode("replay", "blocks without a window state: a block is replayed", Cache.WITHOUT_WINDOW),
    Mode("dspark off", "no speculation", dspark="none"),
    Mode("dspark fixed", "every draft verified", dspark="fixed"),
    Mode("moved", "to another decode engine after its first tokens", moves=True),
    Mode("moved warm", "warm, and moved", Cache.WITH_WINDOW, moves=True),
    Mode("ep2", "experts on two ranks", expert_ranks=2),
    Mode("ep2 warm", "experts on two ranks, warm", Cache.WITH_WINDOW, expert_ranks=2),
)


def named(names: str) -> tuple[Mode, ...]:
    """Returns the modes of a comma-separated list, in the table's order; all for "".

    Raises: ValueError naming what is not in the table.
    """
    if not names:
        return MODES
    wanted = {name.strip() for name in names.split(",")}
    known = [mode.name for mode in MODES]
    if unknown := sorted(wanted - set(known)):
        raise ValueError(f"no mode is named {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(mode for mode in MODES if mode.name in wanted)


def hit_end(num_tokens: int, block: int, ring: int) -> int:
    """Returns where a hit of a prompt ends when everything is stored: the last ring is computed."""
    return max(0, num_tokens - ring) // block * block
