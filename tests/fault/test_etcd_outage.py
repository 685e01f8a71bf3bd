"""etcd away, restarted or emptied under members, a view and a leader: on a real etcd.

Leases are short here so that an outage longer than a lease takes seconds; the same rules over 5,
30 and 120 s are tested on a virtual clock in services/common/tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.local.etcd import EtcdProcess, running_etcd
from services.common.election import Election
from services.common.layout import Keys
from services.common.membership import ClusterView, Member, MemberState, Registration
from services.common.store_etcd import EtcdStore

KEYS = Keys("test")
TTL_S = 3.0
NUM_MEMBERS = 4


@dataclass
class Cluster:
    """Members, a view and two candidates, each on a connection of its own."""

    etcd: EtcdProcess
    view: ClusterView
    registrations: list[Registration]
    elections: list[Election]
    fewest: int = NUM_MEMBERS
    most_leaders: int = 0

    def watch(self) -> None:
        """Notes the worst that anybody who asks the view could have seen."""
        self.fewest = min(self.fewest, len(self.view.members("decode")))
        leading = sum(election.is_leader for election in self.elections)
        self.most_leaders = max(self.most_leaders, leading)

    async def until(self, condition: Callable[[], bool], limit_s: float = 60) -> None:
        async with asyncio.timeout(limit_s):
            while True:
                self.watch()
                if condition():
                    return
                await asyncio.sleep(0.01)

    async def watch_for(self, seconds: float) -> None:
        end_s = asyncio.get_running_loop().time() + seconds
        await self.until(lambda: asyncio.get_running_loop().time() >= end_s)

    def all_registered(self) -> bool:
        written = {item.member.incarnation for item in self.registrations}
        seen = {member.incarnation for member in self.view.members("decode")}
        return self.view.is_healthy and written == seen


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    async with running_etcd(folder) as etcd:
        stores = [EtcdStore(etcd.endpoint) for _ in range(NUM_MEMBERS + 3)]
        made = Cluster(
            etcd,
            ClusterView(stores[0], KEYS),
            [
                Registration(
                    stores[1 + i],
                    KEYS,
                    Member("decode", f"decode-{i}", f"h:{i}", MemberState.READY),
                    ttl_s=TTL_S,
                )
                for i in range(NUM_MEMBERS)
            ],
            [
                Election(stores[-1 - i], KEYS, "decode-lb", f"lb-{i}", f"h:{i}", ttl_s=TTL_S)
                for i in range(2)
            ],
        )
        runners = (made.view, *made.registrations, *made.elections)
        tasks = [asyncio.ensure_future(runner.run()) for runner in runners]
        try:
            async with asyncio.timeout(60):
                await made.view.wait_for(lambda view: len(view.members("decode")) == NUM_MEMBERS)
            await made.until(lambda: any(item.is_leader for item in made.elections))
            yield made
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for store in stores:
                await store.close()
        # None of them gave up on the way.
        assert all(isinstance(result, asyncio.CancelledError) for result in ended), ended


async def test_ur_54_p_21_an_outage_longer_than_a_lease_changes_nobodys_view(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as found:
        await found.etcd.kill()
        await found.watch_for(TTL_S + 1)
        assert not found.view.is_healthy
        assert not any(item.is_leader for item in found.elections)  # nobody leads on hope
        await found.etcd.start()
        await found.until(found.all_registered)
        await found.until(lambda: any(item.is_leader for item in found.elections))
        assert found.fewest == NUM_MEMBERS
        assert found.most_leaders == 1


async def test_p_21_an_etcd_that_comes_back_empty_is_filled_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        before = {item.member.incarnation for item in found.registrations}
        store = EtcdStore(found.etcd.endpoint)
        for i in range(50):
            await store.put("/noise", str(i).encode())  # history that the new etcd lacks ...
        await store.close()
        await found.watch_for(TTL_S)  # ... and that the standby has seen
        await found.etcd.wipe()
        await found.etcd.start()
        await found.until(
            lambda: (
                found.all_registered()
                and not before & {item.member.incarnation for item in found.registrations}
            )
        )
        await found.until(lambda: any(item.is_leader for item in found.elections))
        assert found.fewest == NUM_MEMBERS
        assert found.most_leaders == 1


async def test_ur_55_compaction_all_the_time_and_a_restart_lose_no_member(tmp_path: Path) -> None:
    async with cluster(tmp_path) as found:
        store = EtcdStore(found.etcd.endpoint)
        for i in range(20):
            item = found.registrations[i % NUM_MEMBERS]
            item.update(capacity={"round": i})
            await store.compact(await store.put("/noise", str(i).encode()))
            if i == 10:
                await found.etcd.stop()
                await found.etcd.start()
            found.watch()
        await found.until(
            lambda: (
                {m.capacity.get("round") for m in found.view.members("decode")}
                == {16.0, 17.0, 18.0, 19.0}
            )
        )
        await found.until(found.all_registered)
        assert found.fewest == NUM_MEMBERS
        await store.close()
