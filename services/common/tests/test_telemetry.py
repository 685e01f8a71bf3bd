"""Traces, logs, metrics and the census."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import log as logs
from services.common import tracing
from services.common.call import Call, calling
from services.common.census import Census, differences
from services.common.errors import Failure, Reason
from services.common.log import MAX_LINE_BYTES, JsonFormatter
from services.common.metrics import MAX_LABEL_VALUES, Metrics

CANARY = "canary-prompt-4711"


# ---- traces -----------------------------------------------------------------------------------


def test_spans_nest_and_carry_the_request_id() -> None:
    with tracing.in_memory() as exporter, calling(Call("req-1")):
        with tracing.span("outer") as outer, tracing.span("inner", {"n": 1}):
            header = tracing.current_traceparent()
        spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["inner"].parent.span_id == outer.get_span_context().span_id
    assert spans["inner"].attributes == {"n": 1, "pelagos.request_id": "req-1"}
    assert header.split("-")[1] == f"{outer.get_span_context().trace_id:032x}"


def test_a_span_continues_the_trace_of_the_call_or_of_a_message() -> None:
    header = f"00-{'ab' * 16}-{'cd' * 8}-01"
    with tracing.in_memory() as exporter:
        with calling(Call("r", traceparent=header)), tracing.span("by call"):
            pass
        with tracing.span("by message", traceparent=header):
            assert tracing.current_trace_id() == "ab" * 16
        with tracing.span("alone"):
            pass
        by_call, by_message, alone = exporter.get_finished_spans()
    for span in (by_call, by_message):
        assert f"{span.context.trace_id:032x}" == "ab" * 16
        assert f"{span.parent.span_id:016x}" == "cd" * 8
    assert alone.parent is None


def test_s_09_a_failure_marks_its_span_without_its_text() -> None:
    with tracing.in_memory() as exporter:
        for error in (ValueError(CANARY), Failure(Reason.QUOTA, CANARY)):
            with pytest.raises(type(error)), tracing.span("s"):
                raise error
        spans = exporter.get_finished_spans()
    text = json.dumps([tracing.span_to_document(span) for span in spans])
    assert CANARY not in text
    assert [span.attributes["error.type"] for span in spans] == ["ValueError", "QUOTA"]
    assert [span.status.status_code.name for span in spans] == ["ERROR", "ERROR"]


def test_without_an_exporter_a_span_costs_nothing_and_context_still_travels() -> None:
    header = f"00-{'ab' * 16}-{'cd' * 8}-01"
    assert not tracing.enabled()
    with calling(Call("r", traceparent=header)), tracing.span("s") as span:
        assert not span.is_recording()
        assert tracing.current_traceparent() == header
    assert tracing.traceparent_of(span) == ""


def test_spans_land_in_a_file_of_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    tracing.setup(tracing.TracingConfig(folder=str(folder)), "decode", "decode-1")
    try:
        with calling(Call("req-1")), tracing.span("work", {"text": "x" * 5000}):
            pass
    finally:
        tracing.shutdown()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    file = folder / "decode-1.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (document,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert document["service"] == "decode"
    assert document["instance_id"] == "decode-1"
    assert document["name"] == "work"
    assert document["attributes"]["pelagos.request_id"] == "req-1"
    assert len(document["attributes"]["text"]) == 1024
    assert document["end_ns"] >= document["start_ns"]
    assert not tracing.enabled()


def test_p_41_a_collector_that_is_away_holds_up_nobody() -> None:
    tracing.setup(
        tracing.TracingConfig(otlp_endpoint="127.0.0.1:1", otlp_timeout_s=0.1), "decode", "d"
    )
    try:
        for _ in range(3 * tracing.MAX_QUEUED_SPANS):
            with tracing.span("s"):
                pass
        (processor,) = tracing._Switch.provider._active_span_processor._span_processors
        assert len(processor._batch_processor._queue) <= tracing.MAX_QUEUED_SPANS
    finally:
        tracing.shutdown()


async def test_spans_of_two_tasks_do_not_mix() -> None:
    async def work(name: str) -> None:
        with calling(Call(name)), tracing.span(name):
            await asyncio.sleep(0)
            with tracing.span(f"{name}-child"):
                await asyncio.sleep(0)

    with tracing.in_memory() as exporter:
        await asyncio.gather(work("a"), work("b"))
        spans = {span.name: span for span in exporter.get_finished_spans()}
    for name in "ab":
        assert spans[f"{name}-child"].parent.span_id == spans[name].context.span_id
    assert spans["a"].context.trace_id != spans["b"].context.trace_id


# ---- logs -------------------------------------------------------------------------------------


@pytest.fixture
def lines():
    """Logging of this test, parsed."""
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.setup("decode", "decode-1", "debug", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:], root.level = before[0], before[1]
    root.setLevel(before[1])


def test_a_line_is_json_with_its_fields(lines) -> None:
    logging.getLogger("x").info("request placed", extra={"request_id": "r", "rank": 3})
    (line,) = lines()
    assert line["message"] == "request placed"
    assert (line["service"], line["instance_id"], line["level"]) == ("decode", "decode-1", "info")
    assert (line["request_id"], line["rank"], line["logger"]) == ("r", 3, "x")
    assert line["time"].endswith("Z")


def test_a_line_belongs_to_the_call_it_was_written_in(lines) -> None:
    log = logging.getLogger("x")
    with calling(Call("req-5", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")):
        log.info("inside")
        log.info("of another", extra={"request_id": "req-6"})
    log.info("outside")
    inside, other, outside = lines()
    assert (inside["request_id"], inside["trace_id"]) == ("req-5", "ab" * 16)
    assert other["request_id"] == "req-6"
    assert "request_id" not in outside


def test_s_09_content_and_keys_are_left_out(lines) -> None:
    log = logging.getLogger("x")
    log.info("a", extra={"prompt": CANARY, "token_ids": [1], "nested": {"text": CANARY, "n": 1}})
    log.info("Authorization: Bearer sk-abcdefgh12345", extra={"header": "x-api-key: topsecret1"})
    log.info("b", extra={"payload": CANARY.encode()})
    try:
        raise ValueError(f"cannot parse {CANARY}")
    except ValueError:
        log.exception("failed")
    text = json.dumps(lines())
    for hidden in (CANARY, "sk-abcdefgh", "topsecret1"):
        assert hidden not in text
    first, _, third, fourth = lines()
    assert first["nested"] == {"text": "(redacted)", "n": 1}
    assert third["payload"] == f"{len(CANARY)} bytes"
    assert fourth["error_type"] == "ValueError"
    assert "test_telemetry.py" in fourth["error"]


def test_the_text_of_our_own_errors_is_kept(lines) -> None:
    try:
        raise OSError(28, "No space left on device")
    except OSError:
        logging.getLogger("x").exception("failed")
    assert "No space left" in lines()[0]["error"]


@given(
    st.dictionaries(
        st.text(max_size=20).filter(lambda name: name not in vars(logging.makeLogRecord({}))),
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text(max_size=3000) | st.binary(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ),
        max_size=12,
    )
)
def test_no_field_breaks_a_line_or_makes_it_longer_than_8_kib(fields) -> None:
    record = logging.makeLogRecord({"msg": "m", "levelname": "INFO", "name": "x", **fields})
    text = JsonFormatter("s", "i").format(record)
    assert len(text.encode()) <= MAX_LINE_BYTES
    assert "\n" not in text


def test_a_long_line_is_cut_and_stays_json(lines) -> None:
    logging.getLogger("x").info("m", extra={"a": "é" * 20000, "b": "y" * 20000, "rank": 7})
    (line,) = lines()
    assert line["rank"] == 7
    assert line["a"].endswith("...(cut)")


# ---- metrics ----------------------------------------------------------------------------------


def test_names_carry_the_service_and_counters_their_ending() -> None:
    metrics = Metrics("prefill-lb")
    metrics.counter("picks_total", "Picks").inc()
    metrics.histogram("wait_seconds", "Wait").observe(0.2)
    metrics.gauge("queued_requests", "Queued").set(3)
    text = metrics.render().decode()
    assert "pelagos_prefill_lb_picks_total 1.0" in text
    assert "pelagos_prefill_lb_queued_requests 3.0" in text
    assert 'pelagos_prefill_lb_wait_seconds_bucket{le="0.25"} 1.0' in text
    with pytest.raises(ValueError, match="_total"):
        metrics.counter("picks", "Picks")
    with pytest.raises(ValueError, match="metric name"):
        metrics.gauge("Bad-Name", "x")


def test_a_label_cannot_grow_without_bound() -> None:
    metrics = Metrics("x")
    counter = metrics.counter("calls_total", "Calls", ("tenant",))
    for i in range(MAX_LABEL_VALUES + 500):
        counter.labels(tenant=f"t{i}").inc()
    counter.labels(tenant="t3").inc()
    lines = [
        line
        for line in metrics.render().decode().splitlines()
        if line.startswith("pelagos_x_calls_total{")
    ]
    assert len(lines) == MAX_LABEL_VALUES + 1
    assert 'pelagos_x_calls_total{tenant="other"} 500.0' in lines
    assert 'pelagos_x_calls_total{tenant="t3"} 2.0' in lines
    counter.remove(tenant="t3")
    counter.labels(tenant="late").inc()
    assert 'tenant="late"' in metrics.render().decode()
    with pytest.raises(ValueError, match="declared"):
        counter.labels(user="x")


def test_two_services_in_one_process_do_not_share_metrics() -> None:
    one, two = Metrics("a"), Metrics("a")
    one.counter("x_total", "x").inc()
    assert "x_total" not in two.render().decode()


# ---- census -----------------------------------------------------------------------------------


def test_the_census_counts_by_owner_and_finds_what_did_not_come_back() -> None:
    census = Census()
    held = [1, 2]
    remove = census.register("pool", "blocks", lambda: len(held))
    census.register("pool", "slots", lambda: 0)
    before = census.snapshot()
    assert before["pool"] == {"blocks": 2, "slots": 0}
    held.append(3)
    assert differences(before, census.snapshot()) == {"pool.blocks": (2, 3)}
    held.pop()
    assert differences(before, census.snapshot()) == {}
    remove()
    assert differences(before, census.snapshot()) == {"pool.blocks": (2, 0)}
    assert before["process"]["descriptors"] > 0
    assert before["process"]["threads"] >= 1


def test_the_census_refuses_what_it_cannot_sum_and_survives_a_bad_gauge() -> None:
    census = Census()
    census.register("a", "blocks", lambda: 1 // 0)
    with pytest.raises(ValueError, match="twice"):
        census.register("a", "blocks", lambda: 1)
    with pytest.raises(ValueError, match="kind"):
        census.register("a", "widgets", lambda: 1)
    assert census.snapshot()["a"] == {"blocks": -1}
