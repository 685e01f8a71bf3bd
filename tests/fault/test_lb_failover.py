"""Balancers that change their leader under load: nothing is lost, nothing is placed twice.

Two real servers of each share one store. A lease that is revoked in the store is what a killed or
frozen leader looks like to everybody else, without waiting ten seconds for it to run out.
"""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from pelagos.engine.v1 import records_pb2 as records

from services.common.drain import DrainTimes
from services.common.errors import Failure, Reason
from services.common.service import RuntimeConfig, running
from services.common.store_memory import MemoryStore
from services.lb.decode import client as decode_client
from services.lb.decode import main as decode_main
from services.lb.decode.config import DecodeLbConfig
from services.lb.prefill import client as prefill_client
from services.lb.prefill import main as prefill_main
from services.lb.prefill.config import PrefillLbConfig
from services.lb.prefill.state import BalancerConfig

pytestmark = pytest.mark.timeout(90)
RUNTIME = RuntimeConfig(drain=DrainTimes(notice_s=0.0, grace_s=5.0))
RULES = BalancerConfig(rebuild_s=0.2)


@asynccontextmanager
async def pair(name, config, build):
    """Runs two of one service on one store; yields the store and the two runtimes."""
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        runtimes = [
            await stack.enter_async_context(running(name, config, build, store=store))
            for _ in range(2)
        ]
        for runtime in runtimes:
            await runtime.view.wait_for(lambda view: view.leader(name) is not None)
        async with asyncio.timeout(60):
            yield store, runtimes


async def take_lease_away(store, runtimes, name):
    """Ends the leader's lease as the store would; returns (old leader, new leader)."""
    held = await store.get(runtimes[0].keys.leader(name))
    await store.revoke(held.lease_id)
    leader = runtimes[0].view.leader(name)
    await runtimes[0].view.wait_for(
        lambda view: (now := view.leader(name)) is not None and now.term != leader.term
    )
    return leader, runtimes[0].view.leader(name)


class Engine:
    """Pulls from whoever leads; keeps its work when the leader changes."""

    def __init__(self, queue, name):
        self.queue = queue
        self.name = name
        self.held = {}
        self.took = []
        self.terms = set()

    async def run(self):
        while True:
            try:
                hello = prefill_client.Hello(
                    self.name, "boot", f"{self.name}:1", 10**12, holding=tuple(self.held.values())
                )
                async with self.queue.pull(hello) as session:
                    async for command in session:
                        self.terms.add(command.term)
                        if isinstance(command, prefill_client.WorkCommand):
                            key = command.spec.key
                            self.took.append(key.request_id)
                            self.held[key.request_id] = key
                            session.accepted(key)
            except Failure:
                await asyncio.sleep(0.02)


def spec_of(request_id):
    return records.RequestSpec(
        key=records.RequestKey(request_id=request_id), prompt_tokens=b"\1\0\0\0" * 50
    )


async def test_p_02_submissions_go_on_at_the_next_prefill_leader():
    config = PrefillLbConfig(listen="127.0.0.1:0", tick_s=0.01, rules=RULES, runtime=RUNTIME)
    async with pair("prefill-lb", config, prefill_main.build) as (store, runtimes):
        queues = [
            prefill_client.PrefillLbClient(r.channels, prefill_client.leader_of(r.view))
            for r in runtimes
        ]
        places = [
            asyncio.create_task(prefill_client.place(queues[i % 2], spec_of(f"r{i}"), timeout_s=50))
            for i in range(40)
        ]
        # They all wait at the first leader when its lease ends; no engine has come yet.
        await until_waiting(queues[0], 40)
        await take_lease_away(store, runtimes, "prefill-lb")
        await until_waiting(queues[0], 40)
        engine = Engine(queues[0], "e1")
        task = asyncio.create_task(engine.run())
        assigned = await asyncio.gather(*places)
        assert {a.instance_id for a in assigned} == {"e1"}
        # A second change of leader: what the engine holds is not computed again.
        await take_lease_away(store, runtimes, "prefill-lb")
        again = await prefill_client.place(queues[1], spec_of("r0"), timeout_s=50)
        assert again.instance_id == "e1"
        assert sorted(engine.took) == sorted(f"r{i}" for i in range(40))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_waiting(queue, count):
    waiting = -1
    while waiting != count:
        try:
            waiting = sum(bucket.waiting for bucket in await queue.queues())
        except Failure as failure:
            waiting = -1 if failure.reason is not Reason.INTERNAL else count + 1
        await asyncio.sleep(0.01)


async def test_p_04_a_planned_stop_of_the_leader_loses_no_submission():
    config = PrefillLbConfig(listen="127.0.0.1:0", tick_s=0.01, rules=RULES, runtime=RUNTIME)
    async with pair("prefill-lb", config, prefill_main.build) as (_, runtimes):
        leader_id = runtimes[0].view.leader("prefill-lb").instance_id
        leading, standby = sorted(runtimes, key=lambda r: r.instance_id != leader_id)
        queue = prefill_client.PrefillLbClient(
            standby.channels, prefill_client.leader_of(standby.view)
        )
        places = [
            asyncio.create_task(prefill_client.place(queue, spec_of(f"r{i}"), timeout_s=50))
            for i in range(20)
        ]
        await until_waiting(queue, 20)
        await leading.stop()
        engine = Engine(queue, "e1")
        task = asyncio.create_task(engine.run())
        assert {a.instance_id for a in await asyncio.gather(*places)} == {"e1"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_p_21_requests_are_placed_while_the_store_is_away():
    config = DecodeLbConfig(listen="127.0.0.1:0", runtime=RUNTIME)
    async with pair("decode-lb", config, decode_main.build) as (store, runtimes):
        ranks = decode_client.DecodeLbClient(
            runtimes[0].channels, decode_client.leader_of(runtimes[0].view), answer_s=20.0
        )
        load = decode_client.RankLoad(0, 0, 0, 10**6, 10**4)
        async with ranks.report() as session:
            report = decode_client.LoadReport("d1", "boot", "d1:1", True, (load,))
            await session.send(report)
            store.set_down(True)
            for index in range(20):
                picked = await ranks.pick(decode_client.PickRequest(f"r{index}", 100))
                assert picked.instance_id == "d1"
            store.set_down(False)
            await session.send(report)
            assert (await ranks.pick(decode_client.PickRequest("last", 100))).instance_id == "d1"


async def test_the_next_decode_leader_knows_all_ranks_after_one_report():
    config = DecodeLbConfig(listen="127.0.0.1:0", runtime=RUNTIME)
    async with pair("decode-lb", config, decode_main.build) as (store, runtimes):
        ranks = decode_client.DecodeLbClient(
            runtimes[0].channels, decode_client.leader_of(runtimes[0].view), answer_s=20.0
        )
        load = decode_client.RankLoad(0, 500, 3, 10**6, 10**4)
        report = decode_client.LoadReport("d1", "boot", "d1:1", True, (load,))
        async with ranks.report() as session:
            first_term = await session.send(report)
            old, new = await take_lease_away(store, runtimes, "decode-lb")
            assert new.term > old.term == first_term
            ended = None
            while ended is None:  # the old leader learns of it by the view
                try:
                    await session.send(report)
                except Failure as failure:
                    ended = failure
            assert ended.reason is Reason.NO_INSTANCE
        async with ranks.report() as session:
            assert await session.send(report) == new.term
            picked = await ranks.pick(decode_client.PickRequest("r1", 100))
            assert (picked.instance_id, picked.term) == ("d1", new.term)
