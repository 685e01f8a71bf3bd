"""The decode balancer: the same cases on the fake and on the real server."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.common.errors import Failure, Reason
from services.common.service import running
from services.common.store_memory import MemoryStore
from services.lb.decode import main as decode_main
from services.lb.decode.balancer import BalancerConfig
from services.lb.decode.client import (
    DecodeLbClient,
    LoadReport,
    PickRequest,
    RankLoad,
    leader_of,
    pick_rank,
)
from services.lb.decode.config import DecodeLbConfig
from services.lb.decode.fake import FakeDecodeLb

PATIENT_S = 20.0  # a loaded machine may be slow to answer; only what it answers is tested
RULES = BalancerConfig(max_waiting_requests=4)


@asynccontextmanager
async def real_ranks():
    config = DecodeLbConfig(listen="127.0.0.1:0", rules=RULES)
    store = MemoryStore()
    async with running("decode-lb", config, decode_main.build, store=store) as runtime:
        await runtime.view.wait_for(lambda view: view.leader("decode-lb") is not None)
        yield DecodeLbClient(runtime.channels, leader_of(runtime.view), PATIENT_S)


@pytest.fixture(params=["fake", "real"])
async def ranks(request):
    async with FakeDecodeLb(RULES) if request.param == "fake" else real_ranks() as opened:
        async with asyncio.timeout(30):
            yield opened


def report_of(name, free=10_000, requests=0, tokens=0, num_ranks=1, **more):
    loads = tuple(RankLoad(i, tokens, requests, free, 64) for i in range(num_ranks))
    fields = {"boot_id": f"{name}-boot", "accepting": True, **more}
    return LoadReport(instance_id=name, address=f"{name}:1", ranks=loads, **fields)


async def test_a_pick_names_the_rank_of_an_engine_that_reports(ranks):
    async with ranks.report() as session:
        assert await session.send(report_of("d1", num_ranks=2)) >= 1
        picked = await ranks.pick(PickRequest("r1", 900))
        assert (picked.instance_id, picked.boot_id) == ("d1", "d1-boot")
        assert (picked.address, picked.rank) == ("d1:1", 0)
        assert picked.term >= 1
        assert (await ranks.pick(PickRequest("r2", 900))).rank == 1


async def test_a_pick_is_idempotent_per_attempt(ranks):
    async with ranks.report() as session:
        await session.send(report_of("d1", num_ranks=4))
        first = await ranks.pick(PickRequest("r1", 900))
        assert await ranks.pick(PickRequest("r1", 900)) == first
        assert (await ranks.pick(PickRequest("r1", 900, attempt=1))).rank != first.rank


async def test_a_pick_waits_for_room_and_two_callers_share_the_answer(ranks):
    async with ranks.report() as session:
        await session.send(report_of("d1", free=100, tokens=1_000))
        picks = [
            asyncio.create_task(ranks.pick(PickRequest("r1", 500, max_wait_s=20))) for _ in range(2)
        ]
        await asyncio.wait(picks, timeout=0.05)
        assert not any(pick.done() for pick in picks)
        await session.send(report_of("d1", free=1_100))
        first, second = await asyncio.gather(*picks)
        assert first == second


async def test_without_room_a_pick_ends_engine_full_after_its_wait(ranks):
    async with ranks.report() as session:
        await session.send(report_of("d1", free=100, tokens=1_000))
        with pytest.raises(Failure) as refused:
            await ranks.pick(PickRequest("r1", 500, max_wait_s=0.05))
        assert refused.value.reason is Reason.ENGINE_FULL
        assert refused.value.retry_after_s > 0


async def test_without_any_engine_a_pick_ends_no_instance(ranks):
    with pytest.raises(Failure) as refused:
        await ranks.pick(PickRequest("r1", 500, max_wait_s=0.05))
    assert refused.value.reason is Reason.NO_INSTANCE


async def test_what_can_never_fit_is_refused_at_once(ranks):
    async with ranks.report() as session:
        await session.send(report_of("d1", free=100, tokens=300))
        with pytest.raises(Failure) as refused:
            await ranks.pick(PickRequest("r1", 401, max_wait_s=20))
        assert refused.value.reason is Reason.NOT_FITTING


@pytest.mark.parametrize("request_", [PickRequest("", 10), PickRequest("r", 0)])
async def test_malformed_picks_are_refused(ranks, request_):
    with pytest.raises(Failure) as refused:
        await ranks.pick(request_)
    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_the_queue_is_bounded(ranks):
    picks = [
        asyncio.create_task(ranks.pick(PickRequest(f"r{i}", 10, max_wait_s=20))) for i in range(5)
    ]
    done, waiting = await asyncio.wait(picks, return_when=asyncio.FIRST_COMPLETED)
    (full,) = done
    assert full.exception().reason is Reason.OVERLOADED
    for pick in waiting:
        pick.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_caller_that_leaves_frees_its_place(ranks):
    for index in range(12):  # three times what the queue holds
        pick = asyncio.create_task(ranks.pick(PickRequest(f"r{index}", 10, max_wait_s=20)))
        await asyncio.wait([pick], timeout=0.02)
        pick.cancel()
        await asyncio.gather(pick, return_exceptions=True)
    async with ranks.report() as session:
        await session.send(report_of("d1"))
        assert (await ranks.pick(PickRequest("last", 10, max_wait_s=20))).instance_id == "d1"


async def test_a_returned_pick_gives_its_room_back_once(ranks):
    async with ranks.report() as session:
        await session.send(report_of("d1", free=1_000))
        await ranks.pick(PickRequest("r1", 1_000))
        assert await ranks.return_rank("r1", 0, "d1")
        assert not await ranks.return_rank("r1", 0, "d1")
        assert (await ranks.pick(PickRequest("r2", 1_000))).instance_id == "d1"


async def test_handoffs_exclusions_and_layouts_are_obeyed(ranks):
    async with ranks.report() as one, ranks.report() as two:
        await one.send(report_of("d1", layout_signature="x"))
        await two.send(report_of("d2", layout_signature="y"))
        with_layout = PickRequest("r1", 10, layout_signature="y")
        assert (await ranks.pick(with_layout)).instance_id == "d2"
        excluding = PickRequest("r2", 10, exclude_instances=("d1",), is_handoff=True)
        assert (await ranks.pick(excluding)).instance_id == "d2"


async def test_an_engine_that_ends_its_call_is_gone(ranks):
    async with ranks.report() as session:
        await session.send(report_of("d1"))
        assert (await ranks.pick(PickRequest("r0", 10))).instance_id == "d1"
    for index in range(1_000):  # over gRPC the end of the call takes a moment to arrive
        request = PickRequest(f"r{index + 1}", 10, max_wait_s=0.01)
        (result,) = await asyncio.gather(ranks.pick(request), return_exceptions=True)
        if isinstance(result, Failure):
            break
    assert result.reason is Reason.NO_INSTANCE


async def test_an_engine_that_does_not_accept_takes_nothing_new(ranks):
    async with ranks.report() as one, ranks.report() as two:
        await two.send(report_of("d2", requests=30, tokens=5_000))
        await one.send(report_of("d1"))
        assert (await ranks.pick(PickRequest("r1", 10))).instance_id == "d1"
        await one.send(report_of("d1", accepting=False))
        assert (await ranks.pick(PickRequest("r2", 10))).instance_id == "d2"
        await one.send(report_of("d1"))
        assert (await ranks.pick(PickRequest("r3", 10))).instance_id == "d1"


async def test_p_26_a_burst_spreads_without_new_reports(ranks):
    async with ranks.report() as session:
        await session.send(report_of("d1", free=10**6, num_ranks=4))
        picks = await asyncio.gather(*(ranks.pick(PickRequest(f"r{i}", 900)) for i in range(80)))
    counts = [sum(pick.rank == rank for pick in picks) for rank in range(4)]
    assert max(counts) - min(counts) <= 2


async def test_a_pick_waits_for_the_first_engine(ranks):
    pick = asyncio.create_task(pick_rank(ranks, PickRequest("r1", 10), timeout_s=20))
    await asyncio.wait([pick], timeout=0.05)
    async with ranks.report() as session:
        await session.send(report_of("d1"))
        assert (await pick).instance_id == "d1"
