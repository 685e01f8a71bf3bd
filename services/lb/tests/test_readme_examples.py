"""The examples of the pages run, and print what the pages say."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
PAGES = ("prefill", "decode", "vision", "expert", "autoscaler")


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_prints_what_the_page_says(page, capsys):
    text = (FOLDER / page / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    expected = re.search(r"```text\n(.*?)```", text, re.DOTALL).group(1)
    exec(compile(code, f"{page}/README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("page", PAGES)
def test_a_page_lists_the_metrics_that_its_service_has(page):
    text = (FOLDER / page / "README.md").read_text(encoding="utf-8")
    server = (FOLDER / page / "server.py").read_text(encoding="utf-8")
    names = re.findall(r"metrics\.(?:counter|gauge|histogram)\(\s*\"(\w+)\"", server)
    assert names or page == "autoscaler"
    missing = [name for name in names if name not in text]
    assert missing == []
