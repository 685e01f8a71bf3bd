"""The window-state directory, its owners, and the pools of the machines."""

import asyncio
import random
from dataclasses import replace

import pytest
from pelagos.engine.v1 import records_pb2
from pelagos.kvstore.v1 import swa_pb2, swa_pb2_grpc

from services.common.errors import Failure, Reason
from services.common.membership import Member
from services.common.rpc_client import Channels
from services.common.rpc_server import RpcServer
from services.kvstore.client import SwaDirectoryClient, fetch_state, swa_directory_servicer
from services.kvstore.swa.directory import Location, SwaDirectory, SwaKey, owner_of
from services.kvstore.swa.pool import SwaPool
from services.kvstore.swa.server import SwaPoolServicer

LAYOUT = bytes(32)
HERE = Location(128, "host-a", "a:1", 1, 10, b"d" * 16, False, 5)


def key(number: int) -> SwaKey:
    return SwaKey(random.Random(number).randbytes(16), LAYOUT)


def test_an_entry_lives_180_s_and_a_hit_renews_it() -> None:
    directory = SwaDirectory()
    assert directory.publish(key(1), HERE, now_s=0)
    assert directory.lookup([key(1), key(2)], now_s=179) == [HERE, None]
    assert directory.lookup([key(1)], now_s=179 + 179) == [HERE]
    assert directory.lookup([key(1)], now_s=179 + 179 + 180) == [None]
    assert len(directory) == 0
    assert (directory.num_hits, directory.num_misses) == (2, 2)


def test_the_newer_replaces_the_older_unless_it_is_approximate_and_that_is_exact() -> None:
    directory = SwaDirectory()
    rough = replace(HERE, approximate=True, host="host-b")
    assert directory.publish(key(1), rough, 0)
    assert directory.publish(key(1), replace(rough, slot=2), 0)
    assert directory.publish(key(1), HERE, 0)
    assert not directory.publish(key(1), rough, 1)
    assert directory.publish(key(1), replace(HERE, slot=3), 1)
    assert directory.lookup([key(1)], 1)[0].slot == 3
    # Once the exact one has expired the approximate one is better than nothing.
    assert directory.publish(key(1), rough, 500)


def test_a_new_life_of_a_host_ends_what_the_old_one_said() -> None:
    directory = SwaDirectory()
    directory.publish(key(1), HERE, 0)
    directory.publish(key(2), replace(HERE, host_epoch=6), 0)
    assert directory.lookup([key(1), key(2)], 1) == [None, replace(HERE, host_epoch=6)]
    assert not directory.publish(key(3), HERE, 1)
    assert directory.num_stale == 1


def test_a_later_life_of_one_instance_id_is_always_the_one_that_counts() -> None:
    """Where the instance id is given it stays; one life in two was refused when epochs were drawn
    by lot."""
    directory = SwaDirectory()
    for number in range(20):
        pool = SwaPool("decode-0", "a:1", 1 << 20)
        location, _ = pool.add(key(number), 128, b"state", False)
        assert directory.publish(key(number), location, 0.0)


def test_hosts_that_came_and_went_are_forgotten() -> None:
    directory = SwaDirectory(max_entries=10)
    for number in range(1_000):
        directory.publish(key(number), replace(HERE, host=f"host-{number}"), 0.0)
        assert len(directory._epochs) <= 21
    directory.publish(key(1), replace(HERE, host_epoch=9), 100.0)
    assert not directory.publish(key(2), HERE, 101.0)
    directory.publish(key(3), replace(HERE, host="other"), 200.0)
    directory.sweep(290.0)
    assert list(directory._epochs) == ["other"]
    # A host whose clock was set back is heard again, and not only when nobody else is.
    assert directory.publish(key(2), HERE, 291.0)


@pytest.mark.parametrize("field", ["host_instance_id", "address", "digest", "layout_digest"])
async def test_names_of_any_length_are_refused(field) -> None:
    servicer = swa_directory_servicer()
    long = b"x" * 100_000 if "digest" in field else "x" * 100_000
    where = {"host_instance_id": "a", "address": "a:1", "digest": b"d"}
    layout = LAYOUT
    if field == "layout_digest":
        layout = long
    else:
        where[field] = long
    request = swa_pb2.PublishRequest(
        key=swa_pb2.SwaKey(key16=bytes(16), layout_digest=layout),
        location=records_pb2.SwaLocation(**where),
    )
    with pytest.raises(Failure) as failure:
        await servicer.Publish(request, None)
    assert failure.value.reason is Reason.INVALID_REQUEST
    assert len(servicer.directory) == 0


def test_only_who_published_withdraws() -> None:
    directory = SwaDirectory()
    directory.publish(key(1), HERE, 0)
    assert not directory.withdraw(key(1), "host-b")
    assert directory.withdraw(key(1), "host-a")
    assert not directory.withdraw(key(1), "host-a")


def test_entries_are_bounded_and_swept() -> None:
    directory = SwaDirectory(max_entries=100)
    for number in range(1000):
        directory.publish(key(number), HERE, number / 1000)
        assert len(directory) <= 100
    assert directory.lookup([key(999)], 1) == [HERE]
    assert directory.sweep(1000) == 100
    directory.publish(key(1), HERE, 0)
    assert directory.drop_host("host-a") == 1


def test_one_layout_never_answers_for_another() -> None:
    directory = SwaDirectory()
    directory.publish(key(1), HERE, 0)
    assert directory.lookup([SwaKey(key(1).key16, bytes([1]) * 32)], 0) == [None]


def test_a_member_that_leaves_moves_only_its_own_keys() -> None:
    members = [f"entrypoint-{n}" for n in range(8)]
    keys = [key(number).key16 for number in range(4000)]
    before = {k: owner_of(k, members) for k in keys}
    shares = [list(before.values()).count(member) for member in members]
    assert min(shares) > 4000 / 8 * 0.8
    assert max(shares) < 4000 / 8 * 1.2
    left = members[:3] + members[4:]
    for k in keys:
        if before[k] == members[3]:
            assert owner_of(k, left) in left
        else:
            assert owner_of(k, left) == before[k]
    assert owner_of(keys[0], list(reversed(members))) == before[keys[0]]
    assert owner_of(keys[0], []) is None


def test_the_pool_evicts_the_oldest_never_what_is_read() -> None:
    pool = SwaPool("h", "a:1", max_bytes=300)
    first, _ = pool.add(key(1), 128, bytes(100), False)
    pool.add(key(2), 128, bytes(100), False)
    pool.add(key(3), 128, bytes(100), False)
    with pool.reading(key(1), first.slot, pool.epoch) as data:
        assert data == bytes(100)
        _, evicted = pool.add(key(4), 128, bytes(150), False)
        assert evicted == [key(2), key(3)]
        assert pool.add(key(5), 128, bytes(250), False) == (None, [])
        # A newer state of a key that is being read waits for its turn.
        assert pool.add(key(1), 128, bytes(1), False) == (None, [])
    assert pool.num_bytes == 250
    _, evicted = pool.add(key(5), 128, bytes(300), False)
    assert sorted(evicted, key=repr) == sorted([key(1), key(4)], key=repr)
    assert pool.add(key(6), 128, bytes(301), False) == (None, [])
    assert len(pool) == 1


def test_an_exact_state_is_not_replaced_by_an_approximate_one() -> None:
    pool = SwaPool("h", "a:1", max_bytes=300)
    pool.add(key(1), 128, b"exact", False)
    assert pool.add(key(1), 128, b"rough", True) == (None, [])
    assert pool.get(key(1))[1] == b"exact"


@pytest.fixture
async def machine():
    """A directory of two shards and one pool, on real servers."""
    channels = Channels()
    shards = [RpcServer("127.0.0.1:0") for _ in range(2)]
    servicers = [swa_directory_servicer() for _ in shards]
    engine = RpcServer("127.0.0.1:0")
    pool = SwaPool("host-a", engine.bind(), 10 << 20)
    engine.add(swa_pb2_grpc.add_SwaPoolServiceServicer_to_server, SwaPoolServicer(pool))
    hosts = []
    for number, (server, servicer) in enumerate(zip(shards, servicers, strict=True)):
        server.add(swa_pb2_grpc.add_SwaDirectoryServiceServicer_to_server, servicer)
        hosts.append(Member("entrypoint", f"e{number}", server.bind()))
    for server in (*shards, engine):
        await server.start()
    yield channels, hosts, shards, servicers, pool
    for server in (*shards, engine):
        await server.stop(0)
    await channels.close()


async def test_states_are_found_through_the_shards_and_copied_from_the_pool(machine) -> None:
    channels, hosts, shards, servicers, pool = machine
    directory = SwaDirectoryClient(channels, lambda: hosts)
    states = {key(n): random.Random(n).randbytes(2_500_000 if n == 1 else 999) for n in range(20)}
    for name, data in states.items():
        location, _ = pool.add(name, 128, data, False)
        if location is not None:
            assert await directory.publish(name, location, timeout_s=30)
    assert all(len(servicer.directory) > 0 for servicer in servicers)
    names = list(states)
    found = await directory.lookup([*names, key(99)], timeout_s=30)
    assert found[-1] is None
    for name, location in zip(names, found, strict=False):
        assert await fetch_state(channels, name, location, timeout_s=30) == states[name]
    # Gone from the pool, or announced by another life, or damaged: nothing, and no error.
    gone = replace(found[0], slot=999)
    assert await fetch_state(channels, names[0], gone) is None
    assert await fetch_state(channels, names[0], replace(found[0], host_epoch=1)) is None
    assert await fetch_state(channels, names[0], replace(found[0], digest=bytes(16))) is None
    # One shard goes: its keys are misses, the others' are not.
    await shards[0].stop(0)
    left = await directory.lookup(names, timeout_s=30)
    assert 0 < sum(location is not None for location in left) < len(names)
    assert left[0] is None or left[0] == found[0]
    await asyncio.gather(*(directory.withdraw(name, "host-a") for name in names))
