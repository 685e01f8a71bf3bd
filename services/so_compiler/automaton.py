"""How many states a regular expression needs, found by building its automaton under a budget.

Counting the nodes of a schema does not see a pattern like `[ab]*a[ab]{13}`, whose automaton has
2^14 states (UR-65). So the automaton is built here, positions first (Glushkov), then sets of
positions, and the budget is enforced inside the construction: after so many states, or so much
work, it stops. No pattern is ever run against text, so nothing here can backtrack.
Source: reliability-and-security.md, section 3 and S-06.
"""

from __future__ import annotations

import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

MAX_POSITIONS: Final = 20_000
_TOP: Final = 0x110000
_CATEGORIES: Final = {
    sre.CATEGORY_DIGIT: (((48, 58),), False),
    sre.CATEGORY_NOT_DIGIT: (((48, 58),), True),
    sre.CATEGORY_SPACE: (((9, 14), (32, 33)), False),
    sre.CATEGORY_NOT_SPACE: (((9, 14), (32, 33)), True),
    sre.CATEGORY_WORD: (((48, 58), (65, 91), (95, 96), (97, 123)), False),
    sre.CATEGORY_NOT_WORD: (((48, 58), (65, 91), (95, 96), (97, 123)), True),
}
_ANCHORS: Final = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING, sre.AT_END, sre.AT_END_STRING)


class BudgetExceeded(Exception):
    """The automaton needs more than its budget."""


class UnsupportedPattern(Exception):
    """The pattern uses something an automaton cannot do, or does not parse."""


@dataclass
class Budget:
    """States and work that are left; shared by all patterns of one constraint."""

    max_states: int
    work: int = 4_000_000
    num_states: int = 0

    def add_state(self) -> None:
        """Counts one state."""
        self.num_states += 1
        if self.num_states > self.max_states:
            raise BudgetExceeded(f"more than {self.max_states} automaton states")

    def spend(self, amount: int) -> None:
        """Counts work."""
        self.work -= amount
        if self.work < 0:
            raise BudgetExceeded("too much work to build the automaton")


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Part:
    """A piece of the expression: may it be empty, where it can start, where it can end."""

    nullable: bool
    first: int  # bit set of positions
    last: int


_EMPTY: Final = _Part(True, 0, 0)


class _Positions:
    """Glushkov's construction: one position per character class, who may follow whom."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.classes: list[Ranges] = []
        self.follow: list[int] = []

    def symbol(self, ranges: Ranges) -> _Part:
        if len(self.classes) >= MAX_POSITIONS:
            raise BudgetExceeded(f"more than {MAX_POSITIONS} positions")
        self.classes.append(ranges)
        self.follow.append(0)
        bit = 1 << (len(self.classes) - 1)
        return _Part(False, bit, bit)

    def join(self, left: _Part, right: _Part) -> _Part:
        self._link(left.last, right.first)
        return _Part(
            left.nullable and right.nullable,
            left.first | (right.first if left.nullable else 0),
            right.last | (left.last if right.nullable else 0),
        )

    def either(self, left: _Part, right: _Part) -> _Part:
        return _Part(
            left.nullable or right.nullable, left.first | right.first, left.last | right.last
        )

    def repeat(self, part: _Part) -> _Part:
        self._link(part.last, part.first)
        return _Part(True, part.first, part.last)

    def _link(self, sources: int, targets: int) -> None:
        if not targets:
            return
        for position in _bits(sources):
            self._budget.spend(1 + len(self.follow) // 64)
            self.follow[position] |= targets


def count_states(pattern: str, budget: Budget, *, is_search: bool) -> int:
    """Returns the states of the pattern's automaton; takes them from the budget.

    Args:
        is_search: whether the pattern may match inside of the text, as in JSON Schema.
    Raises: BudgetExceeded, UnsupportedPattern.
    """
    before = budget.num_states
    try:
        tree = sre_parser.parse(pattern)
    except (re_error, RecursionError, OverflowError) as error:
        raise UnsupportedPattern(f"it does not parse: {str(error)[:100]}") from None
    positions = _Positions(budget)
    try:
        part = _build(tree, positions)
    except RecursionError:
        raise UnsupportedPattern("it is nested too deeply") from None
    anchored = len(tree) > 0 and tree[0][0] is sre.AT and tree[0][1] in _ANCHORS[:2]
    anywhere = _EMPTY
    if is_search and not anchored:
        anywhere = positions.repeat(positions.symbol(((0, _TOP),)))
    whole = positions.join(anywhere, part)
    _determinize(positions, whole.first, budget)
    return budget.num_states - before


re_error: Final = sre_parser.error


def _build(tree: Iterable[Any], positions: _Positions) -> _Part:
    part = _EMPTY
    for op, argument in tree:
        part = positions.join(part, _build_one(op, argument, positions))
    return part


def _build_one(op: Any, argument: Any, positions: _Positions) -> _Part:
    if op is sre.LITERAL:
        return positions.symbol(((argument, argument + 1),))
    if op is sre.NOT_LITERAL:
        return positions.symbol(_inverse(((argument, argument + 1),)))
    if op is sre.ANY:
        return positions.symbol(_inverse(((10, 11),)))
    if op is sre.IN:
        return positions.symbol(_class(argument))
    if op is sre.BRANCH:
        branches = [_build(branch, positions) for branch in argument[1]]
        part = branches[0]
        for branch in branches[1:]:
            part = positions.either(part, branch)
        return part
    if op is sre.SUBPATTERN:
        return _build(argument[3], positions)
    if op is sre.AT and argument in _ANCHORS:
        return _EMPTY  # only narrows: the count is an upper bound
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return _repeat(argument, positions)
    raise UnsupportedPattern(f"{str(op).lower()} is not regular or not supported")


def _repeat(argument: tuple[Any, Any, Any], positions: _Positions) -> _Part:
    low, high, inner = argument
    unbounded = high is sre.MAXREPEAT
    part = _EMPTY
    for _ in range(int(low)):
        part = positions.join(part, _build(inner, positions))
    if unbounded:
        return positions.join(part, positions.repeat(_build(inner, positions)))
    optional = _EMPTY
    for _ in range(int(high) - int(low)):
        # a(a(a)?)?, not a?a?a?: each position has one follower instead of all later ones.
        joined = positions.join(_build(inner, positions), optional)
        optional = _Part(True, joined.first, joined.last)
    return positions.join(part, optional)


def _determinize(positions: _Positions, first: int, budget: Budget) -> None:
    """Walks the reachable sets of positions, one representative per class of characters."""
    cuts = sorted({edge for ranges in positions.classes for span in ranges for edge in span} | {0})
    # Characters between two cuts behave alike: one mask of accepting positions for each.
    masks = [0] * len(cuts)
    for number, ranges in enumerate(positions.classes):
        for low, high in ranges:
            start, end = bisect_right(cuts, low) - 1, bisect_right(cuts, high - 1)
            budget.spend(end - start)
            for index in range(start, end):
                masks[index] |= 1 << number
    alphabet = {mask for mask in masks if mask}
    seen = {first}
    todo = [first]  # the state's set holds where it may go next
    budget.add_state()
    while todo:
        state = todo.pop()
        for mask in alphabet:
            taken = state & mask
            if not taken:
                continue
            reached = 0
            for position in _bits(taken):
                reached |= positions.follow[position]
            size = 1 + state.bit_length() // 64
            budget.spend(size * (1 + taken.bit_count()))
            if reached not in seen:
                seen.add(reached)
                budget.add_state()
                todo.append(reached)


def _bits(mask: int) -> Iterable[int]:
    # Through text: taking bits off one by one would copy the whole number for each.
    digits = bin(mask)[:1:-1]
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)


def _class(items: Iterable[tuple[Any, Any]]) -> Ranges:
    negate = False
    ranges: list[tuple[int, int]] = []
    for op, argument in items:
        if op is sre.NEGATE:
            negate = True
        elif op is sre.LITERAL:
            ranges.append((argument, argument + 1))
        elif op is sre.RANGE:
            ranges.append((argument[0], argument[1] + 1))
        elif op is sre.CATEGORY and argument in _CATEGORIES:
            spans, inverted = _CATEGORIES[argument]
            ranges += _inverse(spans) if inverted else spans
        else:
            raise UnsupportedPattern(f"{str(op).lower()} in a class is not supported")
    merged = _merge(ranges)
    return _inverse(merged) if negate else merged


def _merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _inverse(ranges: Ranges) -> Ranges:
    inverted: list[tuple[int, int]] = []
    at = 0
    for low, high in _merge(ranges):
        if at < low:
            inverted.append((at, low))
        at = high
    if at < _TOP:
        inverted.append((at, _TOP))
    return tuple(inverted)
