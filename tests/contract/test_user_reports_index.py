"""The page of user reports is whole, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "user-reports.md"
NUM_REPORTS = 81
STATES = {"kept", "part", "later"}
_ROW = re.compile(r"\| UR-(\d\d) \| (.+?) \| (.+?) \| (\w+) \|")
_TEST = re.compile(r"`([^`:]+)::(\w+)`")


def rows() -> dict[int, tuple[str, str]]:
    """Tests and state of every report."""
    found = [_ROW.fullmatch(line) for line in PAGE.read_text().splitlines()]
    listed = [(int(row[1]), (row[3], row[4])) for row in found if row]
    assert len(dict(listed)) == len(listed), "a report is listed twice"
    return dict(listed)


def test_every_report_is_listed_with_a_state() -> None:
    listed = rows()
    assert sorted(listed) == list(range(1, NUM_REPORTS + 1))
    assert {state for _, state in listed.values()} <= STATES


def test_every_test_named_exists_and_carries_the_id() -> None:
    for number, (tests, state) in rows().items():
        named = _TEST.findall(tests)
        assert bool(named) == (state != "later"), f"UR-{number:02}"
        for path, name in named:
            source = (ROOT / path).read_text(encoding="utf-8")
            pattern = rf"^\s*(async def|def|fn) {name}\b"
            assert re.search(pattern, source, re.MULTILINE), f"UR-{number:02}: {path}::{name}"
            assert f"ur_{number:02}" in name, f"UR-{number:02}: {path}::{name}"
