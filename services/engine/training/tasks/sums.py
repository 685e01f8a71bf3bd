"""Sums and products, with the steps written down where thinking is on."""

from __future__ import annotations

from typing import Final

from services.engine.training.tasks.draw import Draw
from services.engine.training.tasks.memory import Memory
from services.engine.training.tasks.turns import Turn

_FORMS: Final = (
    "What is {}?",
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "Calculate {}.",
    "How much is {}?",
    "{} = ?",
    "{}?",
    "{}",
    "Please calculate {}.",
    "Can you calculate {}?",
)
_MORE_FORMS: Final = ("Add {} to that.", "Now add {}.", "Add {} more.", "Plus {}?", "And plus {}?")


def sum1(draw: Draw, memory: Memory) -> Turn:
    """Returns a sum of two digits."""
    left, right = _operands(draw, "+", 0, 9)
    return _sum("sum1", draw, memory, left, right)


def sum2(draw: Draw, memory: Memory) -> Turn:
    """Returns a sum of two numbers of two digits."""
    left, right = _operands(draw, "+", 10, 99)
    return _sum("sum2", draw, memory, left, right)


def product(draw: Draw, memory: Memory) -> Turn:
    """Returns a product of two digits."""
    left, right = _operands(draw, "*", 0, 9)
    memory.total = left * right
    term = f"{left} {draw.one(('*', '*', '*', 'x', 'times'))} {right}"
    asked = draw.typed(draw.one(_FORMS)).format(term)
    answer = f"{left} * {right} = {left * right}."
    return Turn("product", asked, answer, "I know that product.", values=(_key(left, "*", right),))


def more(draw: Draw, memory: Memory) -> Turn | None:
    """Returns a sum that goes on from the last one; None where there was none."""
    if memory.total is None or memory.total > 90:
        return None
    total, digit = memory.total, draw.number(1, 9)
    memory.total = total + digit
    answer = f"{total} + {digit} = {total + digit}."
    return Turn(
        "refer",
        draw.typed(draw.one(_MORE_FORMS)).format(digit),
        answer,
        steps(total, digit),
        recalled=str(total),
    )


def steps(left: int, right: int) -> str:
    """Returns the written sum of two numbers below 100, column by column."""
    if left < 10 and right < 10:
        return f"{left} + {right} = {left + right}."
    ones = left % 10 + right % 10
    written = f"{left % 10} + {right % 10} = {ones}. "
    tens = [left // 10, right // 10]
    columns = [str(ten) for ten in tens] + (["1"] if ones > 9 else [])
    top = sum(tens) + (ones > 9)
    return f"{written}{' + '.join(columns)} = {top}. So {left + right}."


def _sum(kind: str, draw: Draw, memory: Memory, left: int, right: int) -> Turn:
    memory.total = left + right
    term = f"{left} {draw.one(('+', '+', '+', '+', 'plus'))} {right}"
    asked = draw.typed(draw.one(_FORMS)).format(term)
    answer = f"{left} + {right} = {left + right}."
    return Turn(kind, asked, answer, steps(left, right), values=(_key(left, "+", right),))


def _operands(draw: Draw, sign: str, low: int, high: int) -> tuple[int, int]:
    pair = draw.value(lambda: _key(draw.number(low, high), sign, draw.number(low, high)))
    left, right = (int(part) for part in pair.split(sign))
    return (right, left) if draw.chance(0.5) else (left, right)


def _key(left: int, sign: str, right: int) -> str:
    """Returns the value of the split: both orders of a pair are one."""
    return f"{min(left, right)}{sign}{max(left, right)}"
