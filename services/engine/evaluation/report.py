"""Tables of an evaluation: for a terminal and, the same text, for a document."""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.evaluation.scoring import Scores
from services.engine.evaluation.statistics import Interval


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are aligned in plain text too."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(text.ljust(w) for text, w in zip(cells, widths, strict=True))} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(head), rule, *map(line, rows)])


def scores_table(scores: Scores) -> str:
    """Returns the share of right answers by kind and mode, and the differences to the first."""
    modes = list(scores.by_mode)
    rows = []
    for kind in scores.kinds():
        cells = [scores.share(mode, kind) for mode in modes]
        rows.append([kind, *(_share(num, found) for num, found in cells)])
    rows.append(["**all**", *(_share(*scores.share(mode)) for mode in modes)])
    base = modes[0]
    rows.append(
        [f"minus {base}, 95 %", "", *(_difference(*scores.difference(base, m)) for m in modes[1:])]
    )
    rows.append(
        [
            f"answers other than {base}'s",
            "",
            *(
                f"{len(scores.changed(base, m))} of {scores.difference(base, m)[0]}"
                for m in modes[1:]
            ),
        ]
    )
    return table(["kind", *modes], rows)


def wrong_answers(scores: Scores, limit: int = 12) -> str:
    """Returns a few questions that the first mode got wrong, with what was said."""
    base = next(iter(scores.by_mode))
    lines: list[str] = []
    for item in scores.asked:
        graded = scores.by_mode[base].get(item.number)
        if graded is None or graded.right or len(lines) == limit:
            continue
        said = graded.said
        given = said.error or said.calls or said.content
        lines.append(
            f"- {item.kind}: {item.question.messages[-1]['content'][:90]!r}: expected "
            f"{item.question.expected!r}, said {given!r}"
        )
    return "\n".join(lines)


def _share(num: int, found: Interval) -> str:
    return f"{found.value:.2f} ({num})" if num else "-"


def _difference(num: int, found: Interval) -> str:
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]" if num else "-"
