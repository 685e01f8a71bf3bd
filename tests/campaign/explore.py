"""Tries the interleavings of a few actors over shared state, all of them or all up to a bound.

An actor is a coroutine that calls the code under test; what that code awaits at the bottom (a disk,
a node, a primary) waits at a gate until the explorer lets it take that step. One step runs at a
time, so a schedule is a list of choices and always runs the same. States that were seen before are
not explored again: what an actor knows is a function of what its steps have told it.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
current_actor: contextvars.ContextVar[str] = contextvars.ContextVar("actor")


class World(Protocol):
    """What the actors share; made anew for each schedule."""

    def actors(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Returns the actors by name."""
        ...

    def fingerprint(self) -> bytes:
        """Returns the shared state, whole."""
        ...

    def check(self) -> None:
        """Raises AssertionError when what happened was wrong; called when all have ended."""
        ...


@dataclass
class Gate:
    """Where actors wait for their next step."""

    waiting: list[tuple[str, str, asyncio.Future[None]]] = field(default_factory=list)
    heard: dict[str, Any] = field(default_factory=dict)

    async def step(self, label: str, act: Callable[[], T]) -> T:
        """Does `act` when it is this step's turn, and returns what it says."""
        actor = current_actor.get()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((actor, label, turn))
        await turn
        told = act()
        digest = self.heard.setdefault(actor, hashlib.sha256())
        digest.update(f"{label}={told!r};".encode())
        return told

    def choices(self) -> list[tuple[str, str]]:
        """Returns the next step of each actor. What an actor asks for at once is done in the order
        of its labels: which of its own messages is faster matters less than what others do."""
        self.waiting.sort(key=lambda item: item[:2])
        first: dict[str, str] = {}
        for name, label, _ in self.waiting:
            first.setdefault(name, label)
        return list(first.items())

    def take(self, choice: tuple[str, str]) -> None:
        """Lets an actor take its step."""
        at = next(n for n, item in enumerate(self.waiting) if item[:2] == choice)
        self.waiting.pop(at)[2].set_result(None)

    def state(self) -> bytes:
        """Returns what the actors have heard and wait for."""
        parts = [f"{name}:{digest.hexdigest()}" for name, digest in sorted(self.heard.items())]
        return repr((parts, [item[:2] for item in self.waiting])).encode()


@dataclass
class Explored:
    """How far an exploration went."""

    num_schedules: int = 0
    num_states: int = 0
    num_ends: int = 0


async def explore(
    make: Callable[[Gate], World], max_preemptions: int | None = None, max_schedules: int = 10**9
) -> Explored:
    """Runs schedules until all choices have been made in all states.

    Args:
        max_preemptions: schedules in which a running actor is left more often are not tried.
    Raises: AssertionError of a world, with the schedule that led there.
    """
    done = Explored()
    # What was explored from a state with fewer preemptions covers what would be with more.
    seen: dict[bytes, int] = {}
    stack: list[tuple[int, ...]] = [()]
    while stack and done.num_schedules < max_schedules:
        prefix = stack.pop()
        done.num_schedules += 1
        for more in await _run(make, prefix, max_preemptions, seen, done):
            stack.append(more)
    done.num_states = len(seen)
    return done


async def _run(
    make: Callable[[Gate], World],
    prefix: tuple[int, ...],
    max_preemptions: int | None,
    seen: dict[bytes, int],
    done: Explored,
) -> list[tuple[int, ...]]:
    """Runs one schedule; returns the schedules that branch off behind its prefix."""
    gate = Gate()
    world = make(gate)
    tasks = []
    for name, actor in world.actors().items():
        context = contextvars.copy_context()
        context.run(current_actor.set, name)
        tasks.append(asyncio.get_running_loop().create_task(_as_task(actor), context=context))
    branches: list[tuple[int, ...]] = []
    taken: list[int] = []
    trace: list[str] = []
    last, preemptions = "", 0
    try:
        while True:
            await _settle()
            choices = gate.choices()
            if not choices:
                break
            if len(taken) >= len(prefix):
                key = hashlib.sha256(world.fingerprint() + gate.state() + last.encode()).digest()
                if seen.get(key, 1 << 30) <= preemptions:
                    return branches
                seen[key] = preemptions
                allowed = [
                    number
                    for number, (name, _) in enumerate(choices)
                    if max_preemptions is None
                    or preemptions + _is_preempted(last, name, choices) <= max_preemptions
                ]
                branches += [(*taken, number) for number in allowed[1:]]
                number = allowed[0]
            else:
                number = prefix[len(taken)]
            name, label = choices[number]
            preemptions += _is_preempted(last, name, choices)
            last = name
            taken.append(number)
            trace.append(f"{name}: {label}")
            gate.take(choices[number])
        await asyncio.gather(*tasks)
        done.num_ends += 1
        world.check()
        return branches
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(trace)) from error
    finally:
        # Also what the code under test has started and not waited for.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _is_preempted(last: str, name: str, choices: list[tuple[str, str]]) -> bool:
    return name != last and any(other == last for other, _ in choices)


async def _as_task(actor: Callable[[], Awaitable[None]]) -> None:
    await actor()


async def _settle() -> None:
    """Waits until every task waits at the gate or has ended; there is nothing else to wait for."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(0)
        if not loop._ready:  # type: ignore[attr-defined]
            return
