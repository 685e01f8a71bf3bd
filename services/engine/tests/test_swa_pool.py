import pytest
from pelagos.kvstore.v1 import swa_pb2

from services.common.errors import Failure, Reason
from services.engine.swa_pool import SwaPool, SwaPoolServicer, location_of


def test_the_oldest_state_makes_room_and_a_read_one_is_young():
    evicted = []
    pool = SwaPool(30, b"layout", evicted.append)
    for name in (b"a", b"b", b"c"):
        pool.put(name * 16, 128, bytes(10), approximate=False)
    assert pool.get(b"a" * 16) is not None
    pool.put(b"d" * 16, 128, bytes(10), approximate=False)
    assert evicted == [b"b" * 16]
    assert (len(pool), pool.num_bytes) == (3, 30)
    assert pool.put(b"e" * 16, 128, bytes(31), approximate=False) is None


def test_an_approximate_state_never_replaces_an_exact_one():
    pool = SwaPool(100, b"layout")
    exact = pool.put(b"k" * 32, 128, b"exact", approximate=False)
    assert pool.put(b"k" * 32, 128, b"cut..", approximate=True) is exact
    newer = pool.put(b"k" * 32, 128, b"again", approximate=False)
    assert pool.get(b"k" * 16) is newer
    assert newer.slot != exact.slot


async def test_a_state_is_read_under_its_own_slot_epoch_and_layout_only():
    pool = SwaPool(100, b"layout")
    entry = pool.put(b"k" * 16, 128, b"window", approximate=False)
    servicer = SwaPoolServicer(pool, host_epoch=7)
    location = location_of(entry, "host", "address", 7)

    async def read(**change):
        fields = {"slot": location.slot, "host_epoch": location.host_epoch} | change
        layout = fields.pop("layout", b"layout")
        key = swa_pb2.SwaKey(key16=b"k" * 16, layout_digest=layout)
        request = swa_pb2.GetStateRequest(key=key, **fields)
        return b"".join([piece.data async for piece in servicer.GetState(request, None)])

    assert await read() == b"window"
    for change in ({"slot": 99}, {"host_epoch": 8}, {"layout": b"other"}):
        with pytest.raises(Failure) as failure:
            await read(**change)
        assert failure.value.reason is Reason.NOT_FOUND
