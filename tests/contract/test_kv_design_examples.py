"""Every worked example of the store's specification has a test that is named after it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# kvcache-and-balancing.md, sections 2 to 10.
EXAMPLES = (
    "T-KEY",
    "T-EC-SIZE",
    "T-PLACE",
    "T-EC-VEC",
    "T-EC-MIX",
    "T-MATCH",
    "T-MATCH-LAG",
    "T-MATCH-1M",
    "T-CRASH",
    "T-GC-1",
    "T-GC-2",
    "T-GC-3",
    "T-SWA-POS",
    "T-HIT-1",
    "T-HIT-2",
    "T-HIT-3",
    "T-HIT-4",
    "T-HIT-4b",
    "T-HIT-5",
    "T-HIT-6",
    "T-HIT-7",
    "T-HIT-8",
)


def _test_names() -> list[str]:
    files = [*ROOT.glob("services/kvstore/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]
    return [
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    ]


@pytest.fixture(scope="module")
def names() -> list[str]:
    return _test_names()


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_has_a_test_named_after_it(example: str, names: list[str]) -> None:
    wanted = example.lower().replace("-", "_")
    # "t_hit_4" is not "t_hit_4b", nor "t_match" "t_match_lag".
    longer = [
        other.lower().replace("-", "_")
        for other in EXAMPLES
        if other.startswith(example) and other != example
    ]
    found = [
        name
        for name in names
        if f"_{wanted}_" in f"_{name}_" and not any(f"_{more}_" in f"_{name}_" for more in longer)
    ]
    assert found, f"no test is named after {example}"
