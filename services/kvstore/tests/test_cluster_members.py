"""Nodes that come, go and come back while others look elsewhere."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from services.common.clock import VirtualClock
from services.kvstore.placement import Profile
from services.kvstore.storage.keeper import MapKeeper
from services.kvstore.storage.pgmap import PgMap, build_map, replace_node
from services.kvstore.tests.cluster_kit import Pause, cluster, leader_of_key, num_used
from services.kvstore.tests.kit import until

pytestmark = pytest.mark.timeout(120)

NODES = {f"n{number:02d}": f"rack-{number}" for number in range(8)}


def there(*away: str) -> dict[str, str]:
    return {node: domain for node, domain in NODES.items() if node not in away}


def first_map() -> PgMap:
    return PgMap(1, Profile(2, 2), (("n00", "n01", "n02", "n03"), ("n00", "n04", "n05", "n06")))


def test_a_group_keeps_members_whose_shards_nobody_could_rebuild() -> None:
    """Three of 2+2 are away: replaced one after the other, what the last one has would count as
    lost, and a return of the three would heal nothing."""
    away = ("n00", "n01", "n02")
    mended = replace_node(first_map(), "n00", there(*away))
    assert mended is not None
    assert mended.groups[0] == first_map().groups[0]
    assert "n00" not in mended.groups[1]
    assert replace_node(mended, "n01", there(*away)) is None
    # One is back: the other two can be rebuilt.
    healed = replace_node(mended, "n00", there("n00", "n01"))
    assert healed is not None
    assert "n00" not in healed.groups[0]


def test_a_map_that_the_cluster_store_lost_is_written_again() -> None:
    pgmap = build_map(NODES, 8, Profile(2, 2))
    stored = {"map": 7}
    view = SimpleNamespace(pgmap=pgmap, stored=stored, domains=lambda: NODES)
    keeper = MapKeeper(view, None, None, Profile(2, 2), 8, out_after_s=900, clock=VirtualClock())  # type: ignore[arg-type]
    assert keeper._wanted() is None
    stored.clear()
    assert keeper._wanted() == pgmap


async def test_a_node_that_is_back_at_its_address_before_anybody_saw_it_go_is_looked_at(
    tmp_path,
) -> None:
    """A killed node with a port of its own is back in a second; its disk may be an older one."""
    async with cluster(tmp_path, 3, profile="2+1") as c:
        blocks = await c.put(1)
        leader = leader_of_key(c, blocks[0].key)
        number = next(n for n in range(3) if f"n{n:02d}" != leader._node)
        pause = Pause(leader, "_follow", after=False)
        leader.poke()
        await pause.begun.wait()
        address = c.runtimes[number].address
        await c.stop(number)
        shutil.rmtree(tmp_path / f"node-{number}")
        c.more["listen"] = address
        await c.start(number)
        await until(lambda: leader._view.up().get(f"n{number:02d}") == address)
        pause.go.set()
        await c.settled()
        await c.repaired()
        assert leader.meta.get(blocks[0].key[:16])[4] == 0b111
        assert await c.read(blocks) == [True] * len(blocks)
        mine = [block for block in blocks if leader.leads(block.key)]
        assert leader.counts.repaired >= len(mine) > 0
        assert await num_used(c) == 3 * len(blocks)
