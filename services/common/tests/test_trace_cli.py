"""The timeline of a request, out of span files of several processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common import trace_cli, tracing
from services.common.call import Call, calling


def span(name: str, span_id: str, parent_id: str, start_ms: float, end_ms: float, **extra) -> dict:
    return {
        "trace_id": extra.pop("trace_id", "ab" * 16),
        "span_id": span_id,
        "parent_id": parent_id,
        "name": name,
        "service": extra.pop("service", "svc"),
        "start_ns": int(start_ms * 1e6),
        "end_ns": int(end_ms * 1e6),
        "status": extra.pop("status", "unset"),
        "attributes": extra,
    }


TREE = [
    span("generate", "1", "", 0, 100, service="entrypoint", **{"pelagos.request_id": "req-1"}),
    span("match", "2", "1", 5, 10, service="check", hit=256),
    span("prefill", "3", "1", 20, 60, service="prefill"),
    span("fetch", "4", "3", 25, 30, service="store", status="error"),
    span("lost parent", "5", "gone", 70, 80, service="decode"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, item in enumerate(TREE):
        (tmp_path / f"p{i}.jsonl").write_text(json.dumps(item) + "\n")
    (tmp_path / "torn.jsonl").write_text('{"trace_id": "x", "spa')
    (tmp_path / "odd.jsonl").write_text('[1]\n{"a": 1}\n\n')
    return tmp_path


def test_spans_stand_under_their_parents_in_order_of_time() -> None:
    lines = trace_cli.timeline(list(reversed(TREE)))
    assert [(line.depth, line.span["name"]) for line in lines] == [
        (0, "generate"),
        (1, "match"),
        (1, "prefill"),
        (2, "fetch"),
        (0, "lost parent"),
    ]
    assert (lines[3].offset_ms, lines[3].duration_ms) == (25.0, 5.0)


@pytest.mark.parametrize("wanted", ["req-1", "ab" * 16, "ABABAB"])
def test_a_request_is_found_by_its_id_or_its_trace(wanted: str, folder: Path, capsys) -> None:
    assert trace_cli.main([wanted, "--folder", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "100.0 ms, 5 spans, 5 services" in out
    assert "check: match  hit=256" in out
    assert "|! " in out.splitlines()[5]  # the failed one


def test_what_is_not_there_is_said(folder: Path, capsys) -> None:
    assert trace_cli.main(["req-2", f"--folder={folder}"]) == 1
    assert trace_cli.main(["a", "b"]) == 2
    assert trace_cli.main(["--folder"]) == 2
    assert trace_cli.main(["--folder", str(folder / "none")]) == 0
    captured = capsys.readouterr()
    assert "nothing for req-2" in captured.err
    assert "no spans" in captured.out


def test_without_an_id_the_newest_are_listed(folder: Path, capsys) -> None:
    assert trace_cli.main(["--folder", str(folder)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "req-1" in line
    assert "5 spans" in line
    assert "entrypoint generate" in line


def test_a_circle_of_parents_ends() -> None:
    circle = [span("a", "1", "2", 0, 1), span("b", "2", "1", 0, 1), span("c", "3", "", 0, 1)]
    assert [line.span["name"] for line in trace_cli.timeline(circle)] == ["c"]


def test_real_spans_are_read_back(tmp_path: Path, capsys) -> None:
    tracing.setup(tracing.TracingConfig(folder=str(tmp_path)), "decode", "decode-1")
    try:
        with calling(Call("req-9")), tracing.span("outer"), tracing.span("inner", {"n": 1}):
            pass
    finally:
        tracing.shutdown()
    assert trace_cli.main(["req-9", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "  decode: inner  n=1" in out


def test_the_folder_of_a_stack_is_as_good_as_that_of_its_traces(tmp_path: Path, capsys) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "p.jsonl").write_text(json.dumps(TREE[0]) + "\n")
    assert trace_cli.main(["req-1", "--folder", str(tmp_path)]) == 0
    assert "generate" in capsys.readouterr().out
