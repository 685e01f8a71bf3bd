"""The tables of the whole-path benchmark as Markdown, and their place in a document. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tests.bench.hops import HOPS, summary
from tests.bench.path_results import Results, Round

BEGIN: Final = "<!-- bench-path: written by make bench-path; edits between the marks are lost -->"
END: Final = "<!-- bench-path: end -->"
PELAGOS: Final = "pelagos"
ROUTER: Final = "sglang-router"
STUB: Final = "stub worker alone"


def splice(document: str, text: str) -> str:
    """Returns the document with the text between the marks. Raises: ValueError without marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the document has no marks for the tables")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def render(results: Results) -> str:
    """Returns all tables."""
    parts = [
        table(("", ""), results.facts.items()),
        "### What each hop adds",
        _hops(results),
        "The same calls made directly, one after the other, by a client that does nothing else:",
        _rpcs(results),
        "### Through the whole path",
        _paths(results),
        "### One entrypoint under load",
        results.peer,
        _rates(results),
        _ratios(results),
        "### CPU by process",
        _cpu(results),
        _split(results),
    ]
    if results.errors:
        parts += ["### Errors", "\n".join(f"- {text}" for text in results.errors[:20])]
    return "\n\n".join(part for part in parts if part)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def number(value: float) -> str:
    """Returns a number with the digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pair(values: Sequence[float]) -> str:
    """Returns median and 95th percentile; a dash for nothing measured."""
    if not values:
        return "–"
    median, high = summary(values)
    return f"{number(median)} / {number(high)}"


def _hops(results: Results) -> str:
    series = list(results.hops)
    rows = [
        (f"{name}", what, *(pair(results.hops[one].get(name, ())) for one in series))
        for name, what in HOPS.items()
        if any(name in results.hops[one] for one in series)
    ]
    head = ("hop", "what", *(f"{one}, ms" for one in series))
    lines = table(head, rows).split("\n")
    lines[1] = "|---|---|" + "---:|" * len(series)
    return "\n".join(lines)


def _rpcs(results: Results) -> str:
    return table(
        ("call", "median / p95, ms"), ((name, pair(v)) for name, v in results.rpcs.items())
    )


def _paths(results: Results) -> str:
    rows = []
    for row in results.paths:
        ttft, per_token = row.ttft_ms(), row.per_token_ms()
        rows.append(
            (
                f"`time_scale` {row.time_scale:g}",
                number(row.prompt_tokens),
                number(row.max_tokens),
                f"{number(ttft[0])} / {number(ttft[1])}",
                number(row.model_ttft_ms),
                f"{number(per_token[0])} / {number(per_token[1])}",
                number(row.tokens_per_event()),
                number(row.per_event_ms()),
                number(row.model_step_ms),
            )
        )
    return table(
        (
            "`sim`",
            "prompt tokens",
            "output tokens",
            "time to first token, ms",
            "of it the model's",
            "time per output token, ms",
            "tokens per event",
            "between events, ms",
            "a step of the model, ms",
        ),
        rows,
    )


def _systems(rounds: Sequence[Round]) -> list[str]:
    return list(dict.fromkeys(one.system for one in rounds))


def _of(rounds: Sequence[Round], system: str, concurrency: int) -> list[Round]:
    return [one for one in rounds if (one.system, one.concurrency) == (system, concurrency)]


def _spread(values: Sequence[float]) -> str:
    middle = number(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({number(min(values))}–{number(max(values))})"


def _rates(results: Results) -> str:
    rounds = results.rounds
    rows = []
    for concurrency in sorted({one.concurrency for one in rounds}):
        for system in _systems(rounds):
            some = _of(rounds, system, concurrency)
            if not some:
                continue
            rows.append(
                (
                    system,
                    str(concurrency),
                    _spread([one.requests_per_s for one in some]),
                    _spread([one.tokens_per_s for one in some]),
                    number(statistics.median(one.ttft_ms[0] for one in some)),
                    number(statistics.median(one.ttft_ms[1] for one in some)),
                    number(statistics.median(one.tokens_per_event for one in some)),
                    number(statistics.median(_all_cpu(one) for one in some)),
                    str(sum(one.num_errors for one in some)),
                )
            )
    return table(
        (
            "system",
            "concurrency",
            "requests/s",
            "tokens/s",
            "TTFT median, ms",
            "TTFT p95, ms",
            "tokens per event",
            "CPU µs per token, all its processes",
            "errors",
        ),
        rows,
    )


def _all_cpu(one: Round) -> float:
    return sum(one.cpu_us_per_token.values())


def _front_cpu(one: Round) -> float:
    """CPU of what stands where the router stands: takes HTTP in and streams it out."""
    return one.cpu_us_per_token.get(ROUTER, 0.0) or one.cpu_us_per_token.get("entrypoint", 0.0)


def _ratios(results: Results) -> str:
    rounds = results.rounds
    if ROUTER not in _systems(rounds):
        return ""
    wanted: dict[str, Callable[[Round], float]] = {
        "requests/s": lambda one: one.requests_per_s,
        "tokens/s": lambda one: one.tokens_per_s,
        "TTFT": lambda one: one.ttft_ms[0],
        "CPU per token, entrypoint ÷ router process": _front_cpu,
        "CPU per token, all processes": _all_cpu,
    }
    rows = []
    for concurrency in sorted({one.concurrency for one in rounds}):
        peers = {one.number: one for one in _of(rounds, ROUTER, concurrency)}
        ours = [one for one in _of(rounds, PELAGOS, concurrency) if one.number in peers]
        if ours:
            ratios = [
                _spread([_ratio(read(one), read(peers[one.number])) for one in ours])
                for read in wanted.values()
            ]
            rows.append((str(concurrency), *ratios))
    text = "Ratios Pelagos ÷ router, each within one round, their median (and range) over rounds:"
    return text + "\n\n" + table(("concurrency", *wanted), rows)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("nan")


def _cpu(results: Results) -> str:
    rounds = [one for one in results.rounds if one.system == PELAGOS]
    if not rounds:
        return ""
    levels = sorted({one.concurrency for one in rounds})
    roles = sorted({role for one in rounds for role in one.cpu_us_per_token})

    def cost(role: str, concurrency: int) -> float:
        some = _of(rounds, PELAGOS, concurrency)
        return statistics.median(one.cpu_us_per_token.get(role, 0.0) for one in some)

    roles.sort(key=lambda role: -cost(role, levels[-1]))
    rows = []
    for role in roles:
        costs = [number(cost(role, concurrency)) for concurrency in levels]
        idle = f"{100 * results.idle_cores.get(role, 0.0):.1f}"
        rows.append((role, *costs, idle))
    totals = [number(sum(cost(role, level) for role in roles)) for level in levels]
    idle = f"{100 * sum(results.idle_cores.values()):.1f}"
    rows.append(("all", *totals, idle))
    client = [
        number(statistics.median(one.client_us_per_token for one in _of(rounds, PELAGOS, level)))
        for level in levels
    ]
    rows.append(("(load client, its own process)", *client, "–"))
    head = ("process", *(f"µs per token at {level}" for level in levels), "idle, % of a core")
    return table(head, rows) + "\n\n" + _ceilings(results)


def _split(results: Results) -> str:
    """Says what a request costs and what each token adds; roles below 0.1 ms are left out."""
    rows = [
        (system, role, number(max(0.0, fixed) / 1e3), number(max(0.0, per_token)))
        for system, roles in results.split.items()
        for role, (fixed, per_token) in sorted(roles.items(), key=lambda item: -item[1][0])
        if fixed >= 100 or per_token >= 1
    ]
    if not rows:
        return ""
    head = ("system", "process", "ms per request", "µs per output token beyond")
    text = (
        "The same CPU told apart by two loads that differ in the length of their answers. "
        "Request and tokens, by process:"
    )
    return text + "\n\n" + table(head, rows)


def _ceilings(results: Results) -> str:
    """Says what a core of each would carry if it had one for itself: 1 over its CPU per token."""
    level = max(one.concurrency for one in results.rounds)
    parts = []
    for system, role in ((PELAGOS, "entrypoint"), (PELAGOS, "recipe"), (ROUTER, ROUTER)):
        costs = [one.cpu_us_per_token.get(role, 0.0) for one in _of(results.rounds, system, level)]
        if costs and statistics.median(costs) > 0:
            parts.append(f"{role} {number(1e6 / statistics.median(costs))}")
    return (
        f"Tokens/s that a whole core would carry by these figures, at {level} streams: "
        f"{', '.join(parts)}."
        if parts
        else ""
    )
