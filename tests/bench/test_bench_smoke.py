"""The benchmark of the whole path stays runnable and its arithmetic right; no time is judged."""

from __future__ import annotations

import re
import socket
import statistics

import pytest

from tests.bench import bench_path, processes
from tests.bench.hops import HOPS, hops_of, percentile
from tests.bench.load_client import Load, LoadConfig, Seen
from tests.bench.path_report import BEGIN, END, render, splice
from tests.bench.path_results import Results, round_of, split_cost

# Of each service that every request passes, whatever the machine does to its times.
PASSED = ("recipe.Encode", "CHECK.Match", "prefill-lb: queue", "decode-lb.PickRank", "hand-off")


@pytest.mark.timeout(300)
def test_one_short_run_fills_every_table(tmp_path):
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    arguments = "--rounds 1 --seconds 0.4 --requests 4 --calls 3 --engines 1 --concurrency 1,4"
    arguments += " --path-words 40 --time-scales 0 --no-peer"
    assert bench_path.main([*arguments.split(), "--out", str(document)]) == 0
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "\nold\n" not in text
    for name in (*PASSED, "decode: first token", "parse and SSE", "time to first token"):
        [row] = re.findall(rf"^\| {re.escape(name)} \|.*$", text, re.MULTILINE)[:1]
        assert re.search(r"\d / \d", row.split("|")[3]), row
    for call in ("an RPC that does nothing", "recipe.Parse, a step of 64 streams"):
        assert re.search(rf"^\| {call} \| [\d.,]+ / [\d.,]+ \|$", text, re.MULTILINE)
    for system in ("pelagos", "stub worker alone"):
        for concurrency in (1, 4):
            [row] = re.findall(rf"^\| {system} \| {concurrency} \|.*$", text, re.MULTILINE)
            assert row.endswith("| 0 |"), f"errors: {row}"
    assert "left out by a flag" in text
    assert "told apart by two loads" in text
    assert re.search(r"^\| entrypoint \| [\d.,]+ \| [\d.,]+ \| [\d.]+ \|$", text, re.MULTILINE)


async def test_the_load_client_counts_what_a_worker_streams():
    async with processes.stub_workers(1, 4) as [stub]:
        load = await processes.run_load(
            LoadConfig(stub.address, concurrency=3, num_requests=7, max_tokens=10, prompt_words=5)
        )
    assert [seen.error for seen in load.requests] == [""] * 7
    assert {seen.output_tokens for seen in load.requests} == {10}
    assert {seen.num_events for seen in load.requests} == {3}  # 4 + 4 + 2
    assert all(s.sent_s <= s.first_s <= s.last_s <= s.end_s for s in load.requests)
    assert Load.from_json(load.to_json()) == load


async def test_nobody_at_the_address_is_said_and_not_measured():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # held, and never listened on
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(RuntimeError, match="the load client failed"):
            await processes.run_load(LoadConfig(address, num_requests=1))


def test_a_request_counts_by_the_share_of_its_life_inside_the_window():
    def seen(sent_s: float, end_s: float, error: str = "") -> Seen:
        return Seen("r", sent_s=sent_s, first_s=sent_s, end_s=end_s, output_tokens=100, error=error)

    # The window of 4 s from 0 on is [1, 4): half of the first, the second, a third of the third.
    requests = [seen(0, 2), seen(2, 3), seen(3, 6), seen(1, 3, error="timeout")]
    load = Load(cpu_s=0.3, start_s=0.0, startup_cpu_s=0.1, requests=requests)
    found = round_of("pelagos", 1, 2, 4.0, load, {"entrypoint": 0.6}, 2.0, 10.0)
    assert found.requests_per_s == pytest.approx((1 / 2 + 1 + 1 / 3) / 3)
    assert found.tokens_per_s == pytest.approx(100 * found.requests_per_s)
    assert found.cpu_us_per_token == {"entrypoint": pytest.approx(2000)}
    assert found.client_us_per_token == pytest.approx(1000)
    assert found.others == pytest.approx((2.0 - 1.0) / 10)
    assert found.num_errors == 1


def test_the_cost_of_a_request_is_told_from_that_of_its_tokens():
    found = split_cost({"a": 180.0, "b": 50.0}, {"a": 500.0, "b": 50.0}, 8, 40)
    assert found == {"a": (100.0, 10.0), "b": (50.0, 0.0)}


def test_hops_are_read_off_the_spans_of_one_request():
    def span(name: str, start_ms: int, end_ms: int, kind: str = "internal", events=()) -> dict:
        return {
            "name": name,
            "kind": kind,
            "start_ns": start_ms * 10**6,
            "end_ns": end_ms * 10**6,
            "events": [{"name": n, "time_ns": at * 10**6} for n, at in events],
        }

    spans = [
        span("entrypoint chat", 102, 180, "server"),
        span("entrypoint.encode", 105, 109),
        span("pelagos.recipe.v1.RecipeService/Encode", 106, 108, "client"),
        span("pelagos.recipe.v1.RecipeService/Encode", 107, 108, "server"),
        span("prefill_lb.queue_wait", 110, 114),
        span("prefill.request", 113, 150),
        span("pelagos.engine.v1.KvTransferService/Open", 120, 124, "client"),
        span("decode.commit", 126, 127, "server"),
        span("decode.request", 127, 170, events=[("first_token", 133)]),
    ]
    seen = Seen("r", sent_unix_ns=100 * 10**6, sent_s=5.0, first_s=5.040)
    seen.server_timing = "encoded;dur=7.0, first_token;dur=30.5"
    found = hops_of(spans, seen)
    assert found == {
        "entrypoint: HTTP in": 2.0,
        "entrypoint: admission": 3.0,
        "recipe.Encode": 4.0,
        "· in recipe": 1.0,
        "prefill-lb: queue": 4.0,
        "prefill-lb → engine": 3.0,
        "hand-off": 7.0,
        "decode: first token": 6.0,
        "parse and SSE": pytest.approx(40 - 2 - 30.5),
        "time to first token": pytest.approx(40.0),
    }
    assert found.keys() <= HOPS.keys()
    assert hops_of([], seen) == {}


@pytest.mark.parametrize("num", [1, 2, 19, 20, 21, 100])
def test_a_percentile_is_a_value_with_that_share_at_or_below_it(num):
    values = [float(value) for value in range(num, 0, -1)]
    high = percentile(values, 0.95)
    assert sum(value <= high for value in values) >= 0.95 * num
    assert sum(value < high for value in values) < 0.95 * num
    assert percentile(values, 0.5) <= statistics.median(values)


def test_tables_are_put_between_the_marks_and_nowhere_else():
    text = render(Results(facts={"seed": "1"}, peer="No peer in this run: none."))
    document = splice(f"a\n{BEGIN}\nx\n{END}\nb\n", text)
    assert splice(document, text) == document
    assert "| seed | 1 |" in document
    with pytest.raises(ValueError, match="no marks"):
        splice("a\nb\n", text)
