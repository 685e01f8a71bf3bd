"""Whatever bytes come from a disk or a peer: a parser answers, and takes only what a writer makes.

kvcache-and-balancing.md, section 21, item 6.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.backends.segments_plain import PlainSegmentStore
from services.kvstore.checksums import native
from services.kvstore.formats import LOG_ENTRY_BYTES, ObjectHeader, Record, ShardHeader
from services.kvstore.index_table import OP_SET, PlainIndexTable, encode_entry
from services.kvstore.placement import Profile
from services.kvstore.storage.pgmap import build_map, from_values, to_values

relaxed = settings(deadline=None)  # a busy machine is no finding
RECORD = (7, 1, 0, 5, 0xFFF, 1, 1, 0)


@relaxed
@given(st.binary(max_size=300))
def test_headers_and_records_of_noise_are_none(noise: bytes) -> None:
    for parse in (ObjectHeader.parse, ShardHeader.parse, Record.parse):
        assert parse(noise) is None


@pytest.mark.parametrize("make", [native.IndexTable, PlainIndexTable])
@relaxed
@given(noise=st.binary(max_size=400), num_good=st.integers(0, 3), cut=st.integers(0, 240))
def test_a_log_is_taken_up_to_where_it_stops_being_one(make, noise, num_good, cut) -> None:
    table = make()
    good = b"".join(
        encode_entry(n + 1, OP_SET, bytes([n]) * 16, RECORD, bytes(16), 64) for n in range(num_good)
    )
    consumed, last_seq = table.apply_log(good[:cut] + noise if cut < len(good) else good + noise)
    whole = min(cut, len(good)) // LOG_ENTRY_BYTES
    assert consumed % LOG_ENTRY_BYTES == 0
    assert consumed == whole * LOG_ENTRY_BYTES
    assert (len(table), last_seq) == (whole, whole)


@relaxed
@given(st.dictionaries(st.text("0123456789", max_size=5), st.binary(max_size=60), max_size=4))
def test_a_placement_map_of_noise_is_none(values: dict[str, bytes]) -> None:
    assert from_values(values) is None


@relaxed
@given(st.data())
def test_a_placement_map_with_a_part_changed_is_whole_or_none(data) -> None:
    domains = {f"n{number}": f"d{number}" for number in range(4)}
    right = build_map(domains, 128, Profile(2, 1))
    values = dict(to_values(right))
    name = data.draw(st.sampled_from(sorted(values)))
    part = json.loads(values[name])
    field = data.draw(st.sampled_from(sorted(part)))
    part[field] = data.draw(
        st.none() | st.integers(-5, 5) | st.text(max_size=4) | st.lists(st.integers(-9, 9))
    )
    values[name] = json.dumps(part).encode()
    found = from_values(values)
    if found is not None:
        assert found.num_groups == 128
        assert all(len(group) == found.profile.num_shards for group in found.groups)


@settings(max_examples=40, deadline=None)
@given(log=st.binary(max_size=300), segment=st.binary(max_size=3 * 4096))
def test_a_store_opens_over_noise_and_finds_nothing_in_it(tmp_path_factory, log, segment) -> None:
    for make in (native.SegmentStore, PlainSegmentStore):
        folder = tmp_path_factory.mktemp("noise")
        (folder / "index.log").write_bytes(log)
        (folder / "seg-0000").write_bytes(segment)
        store = make(str(folder), 4096, 2 * 4096, 2)
        assert store.stat()[1] == 0
        assert store.headers(0, 10) == (b"", None)
        assert store.rescan() == 0
        store.unlock()
