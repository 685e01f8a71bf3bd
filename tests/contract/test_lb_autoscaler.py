"""The autoscaler: the same cases on the fake and on the real server."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.common.errors import Failure, Reason
from services.common.service import running
from services.lb.autoscaler import main as autoscaler_main
from services.lb.autoscaler.client import AutoscalerClient, DemandReporter, leader_of
from services.lb.autoscaler.config import AutoscalerConfig
from services.lb.autoscaler.fake import FakeAutoscaler
from services.lb.autoscaler.policy import PoolConfig

PATIENT_S = 20.0  # a loaded machine may be slow to answer; only what it answers is tested
POOL = PoolConfig(
    capacity=100, max_instances=9, up_every_s=0, down_every_s=0, down_stable_s=0, smoothing_s=0
)


def config_of():
    return AutoscalerConfig(listen="127.0.0.1:0", look_s=0.02, decode=POOL)


@asynccontextmanager
async def real_autoscaler():
    async with running("autoscaler", config_of(), autoscaler_main.build) as runtime:
        await runtime.view.wait_for(lambda view: view.leader("autoscaler") is not None)
        yield AutoscalerClient(runtime.channels, leader_of(runtime.view), PATIENT_S)


@asynccontextmanager
async def fake_autoscaler():
    fake = FakeAutoscaler(config_of())
    stop = asyncio.Event()

    async def look_again():
        while not stop.is_set():  # the real one looks by itself
            await fake.look()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(look_again())
    try:
        yield fake
    finally:
        stop.set()
        await task


@pytest.fixture(params=["fake", "real"])
async def autoscaler(request):
    async with fake_autoscaler() if request.param == "fake" else real_autoscaler() as opened:
        async with asyncio.timeout(60):
            yield opened


async def test_demand_raises_the_count_step_by_step_and_watchers_see_it(autoscaler):
    async with autoscaler.decisions() as decisions:
        changes = aiter(decisions)
        first = asyncio.ensure_future(anext(changes))
        reporter = DemandReporter(autoscaler, "decode", "lb-1", lambda: 400.0, every_s=0.1)
        task = asyncio.create_task(reporter.run())
        try:
            seen = [await first]
            while seen[-1].after != 7:
                seen.append(await anext(changes))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert [change.pool for change in seen] == ["decode"] * len(seen)
    assert all(0 < change.after - change.before <= 2 for change in seen)
    numbers = [change.plan_number for change in seen]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert min(change.term for change in seen) >= 1
    (pool,) = [pool for pool in await autoscaler.pools() if pool.pool == "decode"]
    assert (pool.need, pool.want, pool.desired) == (6, 7, 7)


async def test_pools_are_listed_by_name_with_their_bounds(autoscaler):
    pools = await autoscaler.pools()
    assert [pool.pool for pool in pools] == ["decode", "prefill", "vision"]
    assert (pools[0].min_instances, pools[0].max_instances) == (1, 9)


async def test_bounds_can_be_set_and_are_checked(autoscaler):
    changed = await autoscaler.set_bounds("decode", 2, 5)
    assert (changed.min_instances, changed.max_instances) == (2, 5)
    assert await autoscaler.set_bounds("decode", 2, 5) == changed
    for pool, minimum, maximum in (("decode", 3, 2), ("decode", 0, 2), ("nowhere", 1, 2)):
        with pytest.raises(Failure) as refused:
            await autoscaler.set_bounds(pool, minimum, maximum)
        assert refused.value.reason is Reason.INVALID_REQUEST
