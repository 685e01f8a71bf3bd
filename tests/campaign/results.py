"""Puts the last result of a campaign between its marks in docs/campaigns.md."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "campaigns.md"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(name: str, text: str, page: Path = PAGE) -> None:
    """Replaces what stands between the marks of a campaign. Raises ValueError without them."""
    content = page.read_text()
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, mark, rest = content.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise ValueError(f"{page.name} has no marks for {name}")
    page.write_text(f"{before}{begin}\n{_stamp()}\n\n{text}\n{end}{after}")


def _stamp() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, cwd=PAGE.parent, check=False,
    ).stdout.strip()  # fmt: skip
    today = datetime.datetime.now(datetime.UTC).date()
    python = platform.python_version()
    return f"{today}, commit {commit or 'unknown'}, {os.cpu_count()} cores, Python {python}"
