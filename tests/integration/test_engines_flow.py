"""A request from prefill to decode, on real servers."""

from __future__ import annotations

from tests.integration.engine_kit import ask, cluster, prompt_ids, spec


async def test_one_request_flows_from_prefill_to_decode(tmp_path):
    async with cluster(tmp_path) as found:
        answer = await ask(found, spec("r1", prompt_ids(100), max_tokens=40))
        assert answer.end == "finished"
        assert len(answer.token_ids) == 40
        assert len(answer.moves) == 1
        assert answer.event.finished.usage.prompt_tokens == 100
        assert answer.event.finished.usage.output_tokens == 40
