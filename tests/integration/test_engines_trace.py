"""One request id through the spans of the engines."""

from __future__ import annotations

from services.common import tracing
from tests.integration.engine_kit import ask, cluster, prompt_ids, spec


async def test_a_request_is_found_in_the_spans_of_prefill_and_decode_under_one_trace(tmp_path):
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    with tracing.in_memory() as spans:
        async with cluster(tmp_path) as found:
            request = spec("req-traced", prompt_ids(60))
            request.traceparent = parent
            assert (await ask(found, request)).end == "finished"
        ours = [
            span
            for span in spans.get_finished_spans()
            if span.attributes.get(tracing.REQUEST_ID) == "req-traced"
        ]
    names = {span.name for span in ours}
    assert {"prefill.request", "prefill.hand_off", "decode.commit", "decode.request"} <= names
    assert {f"{span.context.trace_id:032x}" for span in ours} == {"ab" * 16}
    [decoded] = [span for span in ours if span.name == "decode.request"]
    # What a first token waits for after the hand-off is read off the span.
    assert [event.name for event in decoded.events] == ["first_token"]
    assert decoded.start_time <= decoded.events[0].timestamp <= decoded.end_time
