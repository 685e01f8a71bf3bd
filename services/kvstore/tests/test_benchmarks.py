"""The benchmark measures what it says, and its report can be trusted; no time is judged."""

from __future__ import annotations

import pytest

from services.kvstore.benchmarks import part_codes, report
from services.kvstore.benchmarks.timing import Case, Section, Times, ratio, take_turns


def test_every_case_takes_every_turn_and_none_is_always_first() -> None:
    seen: list[tuple[int, str]] = []
    cases = [Case(name, lambda turn, name=name: seen.append((turn, name))) for name in "abc"]
    times = take_turns(cases, num_turns=4, num_warm=2)
    assert {name: len(of.cpu_s) for name, of in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert sorted(seen) == [(turn, name) for turn in range(6) for name in "abc"]
    assert {seen[3 * turn][1] for turn in range(6)} == {"a", "b", "c"}


def test_ratios_are_of_the_turn_and_not_of_the_medians() -> None:
    times = {"a": Times([1.0, 20.0, 3.0]), "b": Times([2.0, 10.0, 1.0])}
    assert ratio(times, "a", "b") == 2.0


@pytest.mark.parametrize(("measured", "cell"), [(3.4, "yes"), (3.6, "**no**"), (None, "-")])
def test_a_claim_says_whether_it_is_met(measured: float | None, cell: str) -> None:
    section = Section("Title", "A note.")
    section.claim_at_most("a thing", 3.5, measured, " ms")
    section.add({"ours": Times([0.002], [0.004])}, lambda s: 1e3 * s, "ms")
    text = report.to_markdown([section.to_json()], ["a peer left out"], "make bench-kv")
    [row] = [line for line in text.splitlines() if line.startswith("| a thing |")]
    assert row.endswith(f"| {cell} |")
    assert "| ours | 2 ms | 4 ms |" in text
    assert "- a peer left out" in text


def test_a_new_report_replaces_the_old_one_below_the_words(tmp_path) -> None:
    document = tmp_path / "kvstore.md"
    assert report.splice(document, "new") == "new"
    document.write_text(f"# Words\n\n{report.BEGIN}\nold\n", "utf-8")
    assert report.splice(document, f"{report.BEGIN}\nnew\n") == f"# Words\n\n{report.BEGIN}\nnew\n"


def test_the_blocks_that_are_measured_are_put_and_read_with_any_two_lost(tmp_path) -> None:
    nodes = part_codes.Nodes(tmp_path, 2)
    for block in range(2):
        nodes.put(block)
        nodes.write_slots(block)
    for lost in ((), (3,), (3, 7), (0, 11), (10, 11)):
        nodes.read(1, frozenset(lost))


def test_the_peer_encodes_memory_that_is_still_its_own() -> None:
    data = bytes(range(256)) * (part_codes.K * part_codes._LEN // 256)
    parity = part_codes.code_for(part_codes.DEFAULT_PROFILE).encode(data)
    encode = part_codes._isal(data, parity, print)
    if encode is None:
        pytest.skip("no shared library libisal")
    # What is freed too early is soon somebody else's.
    others = [
        bytes([number]) * part_codes._LEN * size for number in range(20) for size in (1, 2, 10)
    ]
    assert encode().raw == parity
    assert all(len(set(other)) == 1 for other in others)
