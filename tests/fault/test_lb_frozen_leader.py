"""A balancer that is frozen past its lease and wakes up again: real processes, a real etcd."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from deploy.local.etcd import running_etcd
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import ClusterView
from services.common.rpc_client import Channels
from services.common.store_etcd import EtcdStore
from services.lb.decode.client import (
    DecodeLbClient,
    LoadReport,
    PickRequest,
    RankLoad,
    leader_of,
    pick_rank,
)

pytestmark = pytest.mark.timeout(120)
LOAD = RankLoad(0, 0, 0, 10**6, 10**4)
REPORT = LoadReport("d1", "boot", "d1:1", True, (LOAD,))


@asynccontextmanager
async def balancer(endpoint, name):
    """Runs one decode balancer as a process; yields its process id."""
    arguments = ("serve", "decode-lb", "--listen", "127.0.0.1:0")
    runtime = ("--runtime.etcd", endpoint, "--runtime.instance_id", name)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.common.cli", *arguments, *runtime),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def report_for_ever(ranks):
    """Reports one rank to whoever leads, as a decode engine does."""
    while True:
        try:
            async with ranks.report() as session:
                while True:
                    await session.send(REPORT)
                    await asyncio.sleep(0.1)
        except Failure:
            await asyncio.sleep(0.05)


async def test_p_22_a_leader_frozen_past_its_lease_decides_nothing_when_it_wakes_up(tmp_path):
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_etcd(tmp_path))
        store = EtcdStore(etcd.endpoint)
        stack.push_async_callback(store.close)
        view = ClusterView(store, Keys("local"))
        pids = {
            name: await stack.enter_async_context(balancer(etcd.endpoint, name))
            for name in ("lb-1", "lb-2")
        }
        channels = Channels()
        stack.push_async_callback(channels.close)
        ranks = DecodeLbClient(channels, leader_of(view), answer_s=5.0)
        tasks = [asyncio.create_task(view.run()), asyncio.create_task(report_for_ever(ranks))]
        try:
            await view.wait_for(
                lambda v: v.leader("decode-lb") is not None and len(v.members("decode-lb")) == 2
            )
            first = await pick_rank(ranks, PickRequest("r1", 100), timeout_s=30)
            old = view.leader("decode-lb")
            os.kill(pids[old.instance_id], signal.SIGSTOP)
            # Asked again while the leader is frozen: the standby answers once the lease is over.
            second = await pick_rank(ranks, PickRequest("r2", 100), timeout_s=60)
            assert second.term > first.term
            os.kill(pids[old.instance_id], signal.SIGCONT)
            woken = DecodeLbClient(channels, lambda: old.address, answer_s=5.0)
            for index in range(20):
                with pytest.raises(Failure) as refused:
                    await woken.pick(PickRequest(f"w{index}", 100))
                assert refused.value.reason in (Reason.NO_INSTANCE, Reason.BACKEND_LOST)
            third = await pick_rank(ranks, PickRequest("r3", 100), timeout_s=30)
            assert third.term == second.term
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
