"""The page's table of keywords is the code's."""

from __future__ import annotations

from pathlib import Path

import services.so_compiler
from services.so_compiler.schema_check import ENFORCED, FORMATS, REFUSED


def test_ur_66_the_support_table_is_the_codes() -> None:
    page = (Path(str(services.so_compiler.__file__)).parent / "README.md").read_text()
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and cells[1].startswith("`"):
            rows[cells[0]] = set(cells[1].strip("`").split())
    assert rows["enforced"] == ENFORCED
    assert rows["formats"] == FORMATS
    assert rows["refused"] == REFUSED
