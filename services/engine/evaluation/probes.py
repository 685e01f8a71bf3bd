"""Conversations made to show lost state: each fact told once, and asked for from an old block.

The answers to what is told do not repeat it, the question is short, and everything behind the last
block that a hit may take is short too. Every fact is asked for, so every block is needed once.
Source: small-model.md, section 6.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.engine.evaluation.modes import hit_end

_FIRST: Final = ("old", "small", "quiet", "dark", "happy", "long", "wet", "new", "cold", "bright")
_SECOND: Final = ("lake", "tree", "horse", "bridge", "paper", "river", "song", "table", "farm")
# Things of different kinds, so that a right answer is the fact's own and not a neighbour's.
_THINGS: Final[dict[str, tuple[str, ...]]] = {
    "project": (),  # two words of the lists above
    "door code": (),  # digits
    "favorite color": ("red", "blue", "green", "gold", "orange"),
    "favorite city": ("Paris", "London", "Berlin", "Tokyo", "Oxford"),
    "favorite food": ("bread", "cake", "rice", "fish"),
    "dog": ("Max", "Ruby", "Leo", "Rose"),
}
_FILLERS: Final = (
    "Note that Ben lives in Rome.",
    "Note that Ben lives in Rome and Anna in Boston.",
    "Note that Tom is late.",
    "Note that the old door is wet and the new door is dry.",
)
# Fewer tokens behind the hit than prefill sends through the decoder half, and what a cold run
# sends there would be cut elsewhere than a warm one's.
_MIN_SLACK: Final = 2


@dataclass(frozen=True)
class Probe:
    """A prompt, where a hit of it may end, and the blocks that hold what is asked for."""

    name: str
    prompt: array[int]
    expected: str
    position: int
    fact_blocks: tuple[int, ...]


async def build(
    num_conversations: int,
    block: int,
    ring: int,
    prompt_of: Callable[[Mapping[str, Any]], Awaitable[array[int]]],
    ids_of: Callable[[str], Awaitable[array[int]]],
    seed: int = 0,
) -> list[Probe]:
    """Returns probes of every fact of so many conversations.

    Args:
        prompt_of: the codec, for a request's body; ids_of: the codec, for plain text.
    """
    probes: list[Probe] = []
    for number in range(num_conversations):
        rng = random.Random(f"{seed}/{number}")
        facts = _facts(rng)
        for thing, value in facts:
            probe = await _probe(f"{number}/{thing}", facts, thing, value, block, ring, prompt_of)
            if probe is None:
                continue
            prompt, position = probe
            blocks = _blocks_of(prompt, await ids_of(f" {value}"), block)
            if blocks and blocks[-1] < position // block:
                said = f"Your {thing} is {value}."
                probes.append(Probe(f"{number}/{thing}", prompt, said, position, blocks))
    return probes


def _facts(rng: random.Random) -> list[tuple[str, str]]:
    facts = []
    for thing in rng.sample(tuple(_THINGS), len(_THINGS)):
        if thing == "project":
            value = f"{rng.choice(_FIRST)} {rng.choice(_SECOND)}"
        elif thing == "door code":
            value = "".join(str(rng.randrange(10)) for _ in range(5))
        else:
            value = rng.choice(_THINGS[thing])
        facts.append((thing, value))
    return facts


async def _probe(
    name: str,
    facts: Sequence[tuple[str, str]],
    thing: str,
    value: str,
    block: int,
    ring: int,
    prompt_of: Callable[[Mapping[str, Any]], Awaitable[array[int]]],
) -> tuple[array[int], int] | None:
    """Returns the prompt with the first filler that puts the end of a hit where it may be."""
    for filler in _FILLERS:
        messages: list[dict[str, str]] = []
        for what, told in facts:
            messages.append({"role": "user", "content": f"Note that my {what} is {told}."})
            messages.append({"role": "assistant", "content": "Noted."})
        messages.append({"role": "user", "content": filler})
        messages.append({"role": "assistant", "content": "Noted."})
        messages.append({"role": "user", "content": f"What is my {thing}?"})
        body = {"messages": messages, "thinking": {"type": "disabled"}}
        prompt = await prompt_of(body)
        position = hit_end(len(prompt), block, ring)
        if position and len(prompt) - ring - position >= _MIN_SLACK:
            return prompt, position
    return None


def _blocks_of(prompt: Sequence[int], value: Sequence[int], block: int) -> tuple[int, ...]:
    """Returns the blocks that hold the first mention of a value; none where it is not found."""
    wanted = list(value)
    listed = list(prompt)
    for at in range(len(listed) - len(wanted) + 1):
        if listed[at : at + len(wanted)] == wanted:
            return tuple(range(at // block, (at + len(wanted) - 1) // block + 1))
    return ()
