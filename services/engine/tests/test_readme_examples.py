"""The examples of the engines' pages run, and print what the pages say."""

import re
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2]
PAGES = ("prefill", "decode", "encoder")


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_prints_what_the_page_says(page, capsys):
    text = (SERVICES / page / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    expected = re.search(r"```text\n(.*?)```", text, re.DOTALL).group(1)
    exec(compile(code, f"{page}/README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("page", PAGES)
def test_a_page_lists_the_metrics_that_its_service_has(page):
    text = (SERVICES / page / "README.md").read_text(encoding="utf-8")
    main = (SERVICES / page / "main.py").read_text(encoding="utf-8")
    block = main[main.index("for name, text, value in") :]
    block = block[: block.index("metrics.gauge(name")]
    names = re.findall(r"\(\s*\"(\w+)\",\s*\"", block)
    assert len(names) >= 7
    assert [name for name in names if f"`{name}`" not in text] == []
