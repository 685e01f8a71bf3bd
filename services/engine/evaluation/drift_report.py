"""The document of the log-probability comparison: what agreed, and what each fault left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from services.engine.evaluation.drift import TOLERANCE, Finding
from services.engine.evaluation.guard import Turn
from services.engine.evaluation.report import table


def modes_table(findings: Sequence[Finding]) -> str:
    """Returns what every way of running did to the answers' log-probabilities."""
    rows = [
        [
            found.name,
            str(len(found.differences)),
            str(found.num_changed + found.num_refused),
            _number(found.median),
            _number(found.largest),
            "yes" if found.num_moved + found.num_refused == 0 else "**no**",
        ]
        for found in findings
    ]
    head = [
        "way",
        "answers",
        "other words",
        "median step",
        "largest step",
        f"all within {TOLERANCE:g}",
    ]
    return table(head, rows)


def faults_table(findings: Sequence[Finding], texts: Mapping[str, str]) -> str:
    """Returns which fault shows in words, which in log-probabilities, and which nowhere."""
    rows = []
    for found in findings:
        answered = len(found.differences) - found.num_refused
        rows.append(
            [
                texts.get(found.name, found.name),
                f"{found.num_changed} of {answered}" if answered else "-",
                f"{found.num_moved} of {answered}" if answered else "-",
                _number(found.median),
                str(found.num_refused or "-"),
                found.caught_by,
            ]
        )
    head = ["fault", "other words", "outside tolerance", "median step", "refused", "caught by"]
    return table(head, rows)


def guard_table(with_guard: Sequence[Turn], without: Sequence[Turn]) -> str:
    """Returns turn by turn how far answers drift with the guard and without."""
    rows = [
        [
            str(number + 1),
            str(one.num_tokens),
            _drift(one),
            str(one.num_approximate),
            _drift(other),
            str(other.num_approximate),
        ]
        for number, (one, other) in enumerate(zip(with_guard, without, strict=True))
    ]
    head = ["turn", "tokens", "with guard", "blocks off", "without", "blocks off"]
    return table(head, rows)


def _drift(turn: Turn) -> str:
    return "other words" if turn.changed else _number(turn.moved)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"
