"""The native segment store and its twin find the same in the same files, however damaged."""

import collections
import random
import shutil

import pytest

from services.kvstore.backends.segments_plain import PlainSegmentStore
from services.kvstore.checksums import native
from services.kvstore.tests.backend_suite import shard

SECTOR_BYTES = 512
PUT, DELETE, SYNC, CLAIM = 1, 2, 3, 4  # kinds of records
GEOMETRY = (4096, 4 * 4096, 6)  # slot bytes, segment bytes, segments


def opened(make, folder):
    return make(str(folder), *GEOMETRY)


def found_in(store) -> dict[tuple[bytes, int], bytes]:
    """Everything that can be read, by name."""
    headers, at = [], 0
    while at is not None:
        part, at = store.headers(at, 100)
        headers += [part[n : n + 128] for n in range(0, len(part), 128)]
    found = {}
    for header in headers:
        name = (header[24:40], int.from_bytes(header[56:64], "little"))
        data, _ = store.get_shard(name[0], header[5], name[1])
        if data is not None:
            found[name] = data
    return found


def use(store, rng: random.Random) -> None:
    """Puts, deletes and flushes at random; what is full is full."""
    for number in range(40):
        if rng.random() < 0.75:
            try:
                store.put(shard(rng.randrange(30), put_id=number)[2])
            except OSError:
                continue
        else:
            names = [shard(rng.randrange(30), put_id=n)[0] for n in range(number)]
            store.delete([(ref.key16, ref.shard, ref.put_id) for ref in names[:8]])
        if rng.random() < 0.2:
            store.sync()


def hurt(folder, rng: random.Random) -> None:
    """Cuts, flips or overwrites some places."""
    for _ in range(rng.randrange(1, 4)):
        file = rng.choice(sorted([*folder.glob("seg-*"), folder / "index.log"]))
        data = bytearray(file.read_bytes())
        if not data:
            continue
        at = rng.randrange(len(data))
        kind = rng.randrange(3)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        else:
            end = min(at + SECTOR_BYTES, len(data))
            data[at:end] = bytes(end - at)
        file.write_bytes(data)


@pytest.mark.parametrize("writer", [native.SegmentStore, PlainSegmentStore])
def test_both_recover_the_same_from_the_same_damage(tmp_path, writer) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        folder, copy = tmp_path / f"{seed}", tmp_path / f"{seed}-copy"
        store = opened(writer, folder)
        use(store, rng)
        store.unlock()
        del store
        hurt(folder, rng)
        shutil.copytree(folder, copy)
        ours, twin = opened(native.SegmentStore, folder), opened(PlainSegmentStore, copy)
        assert ours.recovery() == twin.recovery(), f"seed {seed}"
        assert found_in(ours) == found_in(twin), f"seed {seed}"
        assert ours.rescan() == twin.rescan(), f"seed {seed}"
        assert found_in(ours) == found_in(twin), f"seed {seed}"
        assert ours.stat()[:2] == twin.stat()[:2], f"seed {seed}"
        # And they go on alike.
        more = random.Random(seed + 1000)
        use(ours, more)
        use(twin, random.Random(seed + 1000))
        assert found_in(ours).keys() == found_in(twin).keys(), f"seed {seed}"


@pytest.mark.parametrize("make", [native.SegmentStore, PlainSegmentStore])
def test_erased_shards_leave_no_byte_and_deleted_ones_no_header(tmp_path, make) -> None:
    store = opened(make, tmp_path)
    refs = []
    for number in range(3):
        ref, _, pieces = shard(number)
        store.put(pieces)
        refs.append((ref.key16, ref.shard, ref.put_id))
    assert store.delete([refs[0]]) == 1
    assert store.delete([refs[1]], True) == 1
    store.sync()
    content = b"".join(file.read_bytes() for file in sorted(tmp_path.glob("seg-*")))
    assert shard(0)[2][0] not in content
    for piece in shard(1)[2]:
        assert bytes(piece)[:64] not in content
    assert bytes(shard(2)[2][2]) in content
    (tmp_path / "index.log").unlink()
    store.unlock()
    del store
    again = opened(make, tmp_path)
    assert [name for name, _ in found_in(again)] == [refs[2][0]]


def logged(folder) -> collections.Counter:
    """How many records of each kind the log holds."""
    log = (folder / "index.log").read_bytes()
    return collections.Counter(log[at] for at in range(0, len(log), 48))


@pytest.mark.parametrize("make", [native.SegmentStore, PlainSegmentStore])
def test_a_put_is_in_the_log_by_its_claim_and_by_name_after_a_flush(tmp_path, make) -> None:
    store = opened(make, tmp_path)
    names = []
    for number in range(3):
        ref, _, pieces = shard(number)
        store.put(pieces)
        names.append((ref.key16, ref.put_id))
    assert logged(tmp_path) == {SYNC: 1, CLAIM: 1}, "four slots of the first segment"
    copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy"))
    store.sync()
    assert logged(tmp_path) == {SYNC: 2, CLAIM: 1, PUT: 3}
    # Dead before the flush: either implementation finds all of it, without a look at every slot.
    for other in (native.SegmentStore, PlainSegmentStore):
        again = opened(other, copy)
        assert again.recovery() == (3, 0, False)
        assert found_in(again).keys() == set(names)
        again.unlock()


@pytest.mark.parametrize("make", [native.SegmentStore, PlainSegmentStore])
def test_a_claimed_slot_that_was_written_in_part_is_torn(tmp_path, make) -> None:
    store = opened(make, tmp_path)
    store.put(shard(0)[2])
    store.put(shard(1)[2])
    store.unlock()
    del store
    segment = tmp_path / "seg-0000"
    data = bytearray(segment.read_bytes())
    data[4096 + 1000 : 2 * 4096] = bytes(4096 - 1000)
    segment.write_bytes(data)
    again = opened(make, tmp_path)
    assert again.recovery() == (1, 1, False)
    assert [name for name, _ in found_in(again)] == [shard(0)[0].key16]
