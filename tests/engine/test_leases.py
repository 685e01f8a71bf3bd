"""Room on a decode engine while its prompt is computed and sent: kept, or asked for again.

Source: engine.md, sections 2.1, 7.4 to 7.7.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.rpc_errors import from_proto
from services.engine import transfer_client
from services.entrypoint.retry import RetryBudget, RetryPolicy, RunAgain, decide
from tests.integration.engine_kit import Cluster, ask, cluster, nothing_held, prompt_ids, spec

LEASE_S = 0.4
# Chunks of 1 KB on as much credit: a transfer waits for the receiver at every one.
SMALL = {"lease_ms": round(1e3 * LEASE_S), "max_chunk_bytes": 1000, "transfer_credit_bytes": 1000}
REQUEST = spec("r", prompt_ids(100), max_tokens=20)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[int]:
    async def undisturbed() -> list[int]:
        async with cluster(tmp_path_factory.mktemp("leases")) as found:
            return (await ask(found, REQUEST)).token_ids

    return asyncio.run(undisturbed())


def delayed(call, seconds: float, times: int):
    """A call that waits before it is made, so many times."""
    left = [times]

    async def made(*args, **options):
        if left[0]:
            left[0] -= 1
            await asyncio.sleep(seconds)
        return await call(*args, **options)

    return made


def without_renewals(found: Cluster) -> None:
    async def renew(address, reservation_id, lease_ms=0) -> float:
        return LEASE_S

    found.prefills[0].core._handoff._client.renew = renew


def num_lapsed(found: Cluster) -> int:
    return found.decodes[0].core.num_lapsed


async def test_2_1_a_long_step_and_a_long_transfer_keep_the_room_they_reserved(tmp_path, expected):
    async with cluster(tmp_path, decode=SMALL) as found:
        core = found.prefills[0].core
        runner, client = core.ranks[0].runner, core._handoff._client
        runner.prefill = delayed(runner.prefill, 3 * LEASE_S, 1)
        client.push = delayed(client.push, 3 * LEASE_S, 1)
        assert (await ask(found, REQUEST)).token_ids == expected
        assert num_lapsed(found) == 0
        await nothing_held(found)


@pytest.mark.parametrize("where", ["the step", "before the transfer", "within the transfer"])
async def test_room_that_lapses_is_asked_for_again_and_nobody_notices(
    tmp_path, expected, monkeypatch, where
):
    async with cluster(tmp_path, decode=SMALL) as found:
        without_renewals(found)
        core = found.prefills[0].core
        runner, client = core.ranks[0].runner, core._handoff._client
        if where == "the step":
            runner.prefill = delayed(runner.prefill, 3 * LEASE_S, 1)
        elif where == "before the transfer":
            client.push = delayed(client.push, 3 * LEASE_S, 1)
        else:
            slow_acknowledgements(monkeypatch, 1)
        answer = await ask(found, REQUEST)
        assert (answer.end, answer.token_ids) == ("finished", expected)
        assert num_lapsed(found) == 1
        await nothing_held(found)


def slow_acknowledgements(monkeypatch, times: int) -> None:
    """Makes so many transfers stand still for longer than a lease, at their first chunk."""
    heard, seen = transfer_client._acknowledged, set()

    async def acknowledged(stream):
        if stream not in seen and len(seen) < times:
            seen.add(stream)
            await asyncio.sleep(3 * LEASE_S)
        return await heard(stream)

    monkeypatch.setattr(transfer_client, "_acknowledged", acknowledged)


@pytest.mark.parametrize("within", [False, True], ids=["before", "within"])
async def test_7_7_a_request_that_loses_its_room_again_and_again_is_run_again(
    tmp_path, expected, monkeypatch, within
):
    async with cluster(tmp_path, decode=SMALL, prefill={"handoff_attempts": 2}) as found:
        without_renewals(found)
        client = found.prefills[0].core._handoff._client
        if within:
            slow_acknowledgements(monkeypatch, 2)
        else:
            client.push = delayed(client.push, 3 * LEASE_S, 2)
        first = await ask(found, REQUEST)
        assert first.end == "failed"
        failure = from_proto(first.event.failed)
        assert failure.reason is Reason.BACKEND_LOST
        assert first.event.failed.retryable
        assert isinstance(decided(failure), RunAgain)
        ids = prompt_ids(100)
        ids.extend(first.token_ids)
        again = spec("r", ids, max_tokens=20, attempt=1, resumed=len(first.token_ids))
        second = await ask(found, again)
        assert first.token_ids + second.token_ids == expected
        assert second.event.finished.reason == pb.FINISH_REASON_LENGTH
        await nothing_held(found)


def decided(failure: Failure):
    """What the entrypoint does after a first attempt that failed like this."""
    policy = RetryPolicy()
    return decide(
        failure,
        attempt=1,
        incident="prefill-1",
        remaining_s=60.0,
        policy=policy,
        budget=RetryBudget(policy),
        rng=random.Random(1),
    )
