"""The prefill balancer: the same cases on the fake and on the real server."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from pelagos.engine.v1 import records_pb2 as records

from services.common.errors import Failure, Reason
from services.common.service import running
from services.common.store_memory import MemoryStore
from services.lb.prefill import main as prefill_main
from services.lb.prefill.client import (
    Assignment,
    Hello,
    PrefillLbClient,
    Queued,
    Rematch,
    RevokeCommand,
    WorkCommand,
    leader_of,
    place,
)
from services.lb.prefill.config import PrefillLbConfig
from services.lb.prefill.fake import FakePrefillLb
from services.lb.prefill.state import BalancerConfig

RULES = BalancerConfig(rebuild_s=0.0, max_waiting_requests=8, max_tenant_share=1.0)
QUOTA_NS = 10**12
TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"


@asynccontextmanager
async def real_queue():
    config = PrefillLbConfig(listen="127.0.0.1:0", tick_s=0.01, rules=RULES)
    store = MemoryStore()
    async with running("prefill-lb", config, prefill_main.build, store=store) as runtime:
        await runtime.view.wait_for(lambda view: view.leader("prefill-lb") is not None)
        yield PrefillLbClient(runtime.channels, leader_of(runtime.view))


@pytest.fixture(params=["fake", "real"])
async def queue(request):
    async with FakePrefillLb(RULES) if request.param == "fake" else real_queue() as opened:
        async with asyncio.timeout(30):
            yield opened


def spec_of(request_id, num_tokens=100, block_keys=b"", hit=0, **more):
    return records.RequestSpec(
        key=records.RequestKey(request_id=request_id, attempt=more.pop("attempt", 0)),
        prompt_tokens=b"\1\0\0\0" * num_tokens,
        hit=records.CacheHit(hit_tokens=hit, block_keys=block_keys),
        namespace=records.Namespace(tenant="acme"),
        **more,
    )


def hello_of(name, **more):
    fields = {"quota_ns": QUOTA_NS, "address": f"{name}:1", "boot_id": f"{name}-boot", **more}
    return Hello(instance_id=name, **fields)


@asynccontextmanager
async def engine(queue, name="e1", accepts=True, **more):
    """An engine that takes whatever it is offered; yields the keys it took."""
    took = []
    async with queue.pull(hello_of(name, **more)) as session:

        async def work():
            async for command in session:
                if isinstance(command, WorkCommand) and accepts:
                    took.append(command.spec.key.request_id)
                    session.accepted(command.spec.key)

        task = asyncio.create_task(work())
        try:
            yield session, took
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def news_of(queue, spec, timeout_s=20.0):
    async with queue.submit(spec, timeout_s=timeout_s) as news:
        return [item async for item in news]


async def test_a_submission_waits_and_is_assigned_to_the_engine_that_accepts(queue):
    task = asyncio.create_task(news_of(queue, spec_of("r1")))
    await wait_waiting(queue, 1)
    async with engine(queue) as (_, took):
        queued, assigned = await task
        assert queued == Queued(0, 0, False)
        assert isinstance(assigned, Assignment)
        assert (assigned.instance_id, assigned.boot_id) == ("e1", "e1-boot")
        assert assigned.address == "e1:1"
        assert took == ["r1"]


async def until(queue, condition):
    """Waits until the queues look as wanted; the server offers no event for it."""
    while not condition(await queue.queues()):  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def wait_waiting(queue, count):
    await until(queue, lambda buckets: sum(bucket.waiting for bucket in buckets) == count)


async def wait_engine(queue):
    await until(queue, lambda buckets: any(bucket.instance_ids for bucket in buckets))


async def test_the_work_an_engine_gets_is_the_spec_as_submitted(queue):
    spec = spec_of(
        "r1", num_tokens=300, priority=3, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    )
    task = asyncio.create_task(news_of(queue, spec))
    async with queue.pull(hello_of("e1")) as session:
        command = await anext(aiter(session))
        assert command.spec == spec
        assert command.term >= 1
        session.accepted(command.spec.key)
        assert isinstance((await task)[-1], Assignment)


async def test_submitting_a_key_again_joins_the_first(queue):
    tasks = [asyncio.create_task(news_of(queue, spec_of("r1"))) for _ in range(2)]
    await wait_waiting(queue, 1)
    async with engine(queue) as (_, took):
        ends = [(await task)[-1] for task in tasks]
        assert ends[0] == ends[1]
        again = await news_of(queue, spec_of("r1"))
        assert again == [ends[0]]
        assert took == ["r1"]


async def test_leaving_a_submission_takes_it_out_of_the_queue(queue):
    async with queue.submit(spec_of("r1"), timeout_s=20) as news:
        assert isinstance(await anext(aiter(news)), Queued)
        await wait_waiting(queue, 1)
    await wait_waiting(queue, 0)


async def test_p_06_leaving_revokes_what_was_offered_and_not_accepted(queue):
    async with queue.pull(hello_of("e1")) as session:
        commands = aiter(session)
        async with queue.submit(spec_of("r1"), timeout_s=20) as news:
            assert isinstance(await anext(aiter(news)), Queued)
            offered = await anext(commands)
            assert offered.spec.key.request_id == "r1"
        revoked = await anext(commands)
        assert isinstance(revoked, RevokeCommand)
        assert revoked.key.request_id == "r1"


async def test_offers_of_an_engine_that_leaves_go_to_the_next(queue):
    task = asyncio.create_task(news_of(queue, spec_of("r1")))
    async with queue.pull(hello_of("e1")) as session:
        await anext(aiter(session))
    async with engine(queue, "e2"):
        assert (await task)[-1].instance_id == "e2"


async def test_a_rejection_moves_the_request_and_a_clients_fault_ends_it(queue):
    task = asyncio.create_task(news_of(queue, spec_of("r1")))
    async with queue.pull(hello_of("e1")) as session:
        commands = aiter(session)
        command = await anext(commands)
        session.rejected(command.spec.key, Reason.ENGINE_FULL)
        async with engine(queue, "e2"):
            assert (await task)[-1].instance_id == "e2"
        session.capacity(QUOTA_NS, 0)
        bad = asyncio.create_task(news_of(queue, spec_of("r2")))
        command = await anext(commands)
        session.rejected(command.spec.key, Reason.CONTEXT_LENGTH)
        with pytest.raises(Failure) as refused:
            await bad
        assert refused.value.reason is Reason.CONTEXT_LENGTH


async def test_ur_61_a_deadline_that_passes_in_the_queue_is_answered_as_deadline(queue):
    with pytest.raises(Failure) as refused:
        await news_of(queue, spec_of("r1"), timeout_s=0.3)
    assert refused.value.reason is Reason.DEADLINE
    await wait_waiting(queue, 0)
    async with engine(queue) as (_, took):
        assert isinstance((await news_of(queue, spec_of("r2")))[-1], Assignment)
        assert took == ["r2"]


async def test_the_queue_is_bounded_and_says_when_to_come_back(queue):
    tasks = [asyncio.create_task(news_of(queue, spec_of(f"r{i}"))) for i in range(8)]
    await wait_waiting(queue, 8)
    with pytest.raises(Failure) as refused:
        await news_of(queue, spec_of("r8"))
    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.retry_after_s > 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wait_waiting(queue, 0)


@pytest.mark.parametrize(
    "spec",
    [
        records.RequestSpec(prompt_tokens=b"\1\0\0\0"),
        spec_of("r1", num_tokens=0),
        records.RequestSpec(key=records.RequestKey(request_id="r1"), prompt_tokens=b"\1\0\0"),
        spec_of("r1", num_tokens=100, hit=100),
    ],
    ids=["no id", "empty", "ragged", "nothing left"],
)
async def test_malformed_submissions_are_refused(queue, spec):
    with pytest.raises(Failure) as refused:
        await news_of(queue, spec)
    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_a_prompt_longer_than_every_engine_takes_is_refused(queue):
    async with engine(queue, max_tokens=50):
        await wait_engine(queue)
        with pytest.raises(Failure) as refused:
            await news_of(queue, spec_of("r1", num_tokens=51))
    assert refused.value.reason is Reason.NOT_FITTING


async def test_p_35_followers_of_a_cold_prefix_are_matched_again_when_it_is_committed(queue):
    num_tokens = 4_096
    keys = b"".join(bytes([i]) * 32 for i in range(32))  # blocks of 128
    async with engine(queue) as (session, took):
        leader = spec_of("r0", num_tokens, keys)
        assert isinstance((await news_of(queue, leader))[-1], Assignment)
        matched = []

        async def match_again(spec):
            matched.append(spec.key.request_id)
            return spec_of(spec.key.request_id, num_tokens, keys, hit=3_840)

        following = asyncio.Semaphore(0)
        followers = [
            asyncio.create_task(
                place(
                    queue,
                    spec_of(f"r{i}", num_tokens, keys),
                    timeout_s=20,
                    rematch=match_again,
                    on_queued=lambda queued: following.release() if queued.following else None,
                )
            )
            for i in (1, 2, 3)
        ]
        for _ in followers:
            await following.acquire()
        session.finished(leader.key, committed=True)
        for follower in followers:
            assert (await follower).instance_id == "e1"
        assert sorted(matched) == ["r1", "r2", "r3"]
        assert took[0] == "r0"
        assert sorted(took) == ["r0", "r1", "r2", "r3"]


async def test_a_follower_that_is_matched_again_is_told_so(queue):
    keys = b"".join(bytes([i]) * 32 for i in range(32))
    async with engine(queue) as (session, _):
        leader = spec_of("r0", 4_096, keys)
        await news_of(queue, leader)
        async with queue.submit(spec_of("r1", 4_096, keys), timeout_s=20) as news:
            reader = aiter(news)
            assert (await anext(reader)).following
            session.finished(leader.key, committed=True)
            assert await anext(reader) == Rematch()


async def test_two_pulls_of_one_engine_the_newer_wins(queue):
    async with queue.pull(hello_of("e1")) as first:
        old = asyncio.create_task(anext(aiter(first)))
        await wait_engine(queue)
        async with engine(queue, "e1", boot_id="second"):
            with pytest.raises(Failure) as ended:
                await old
            assert ended.value.reason is Reason.STALE_EPOCH
            assigned = (await news_of(queue, spec_of("r1")))[-1]
            assert assigned.boot_id == "second"


async def test_nothing_is_left_after_many_cancelled_submissions(queue):
    async with engine(queue, accepts=False):

        async def start_and_leave(index):
            async with queue.submit(spec_of(f"r{index}"), timeout_s=20) as news:
                await anext(aiter(news))

        for start in range(0, 40, 8):
            await asyncio.gather(*(start_and_leave(i) for i in range(start, start + 8)))
        await wait_waiting(queue, 0)
        assert len(await queue.queues()) == 4
