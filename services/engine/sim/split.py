"""The device's half of DSpark: which drafts a step verifies, given its total of rows.

Written on its own, as a kernel would be, and tested against `decode/speculation.split_budget`.
Source: engine.md, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_rows(budget: int, confidences: Sequence[Sequence[float]], max_draft: int) -> list[int]:
    """Rows per sequence; an empty list of confidences is a fresh sequence.

    A draft is verified when fewer than `budget - n` drafts have a larger survival, or an equal
    one and a smaller flat index.
    """
    num = len(confidences)
    survivals = [0.0] * (num * max_draft)
    for i, row in enumerate(confidences):
        product = 1.0
        for j, confidence in enumerate(row[:max_draft]):
            product *= min(1.0, max(0.0, confidence)) if confidence == confidence else 0.0
            survivals[i * max_draft + j] = product
    order = sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)
    rows = [1] * num
    # A stable sort in reverse keeps equal values in the order of their index.
    for index in order[: max(0, budget - num)]:
        rows[index // max_draft] += 1
    return rows
