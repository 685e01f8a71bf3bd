"""The index table and its twin, the log between them, and what garbage collection asks of it."""

import random

import pytest

from services.kvstore.checksums import native
from services.kvstore.formats import LOG_ENTRY_BYTES, State, TtlClass
from services.kvstore.gc.policy import Waterlines, admits_put, choose, num_to_evict, relief_shares
from services.kvstore.index_table import (
    OP_REMOVE,
    OP_SET,
    TTL_S,
    PlainIndexTable,
    Stop,
    decode_entry,
    encode_entry,
    is_expired,
    new_table,
)

TABLES = {"native": native.IndexTable, "plain": PlainIndexTable}
tables = pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def fields(index: int = 1, epoch: int = 0, state: int = 1, ttl: int = 1, put_id: int = 7):
    return (put_id, index, 0, epoch, 0xFFF, state, ttl, 0)


def test_the_native_table_is_the_one_in_use() -> None:
    assert isinstance(new_table(), native.IndexTable)


@tables
def test_t_match_a_hole_ends_the_prefix(make) -> None:
    table = make()
    for number in (1, 2, 3, 4, 5, 7):
        table.set(key(number), fields(number))
    keys = b"".join(key(number) for number in range(1, 9))
    assert table.match_prefix(keys, 16, 0, TTL_S) == (5, Stop.ABSENT)
    assert 128 * 5 == 640
    full = b"".join(key(number) + bytes(16) for number in range(1, 9))
    assert table.match_prefix(full, 32, 0, TTL_S) == (5, Stop.ABSENT)
    assert table.match_prefix(full[: 5 * 32], 32, 0, TTL_S) == (5, Stop.ALL)
    assert table.match_prefix(b"", 32, 0, TTL_S) == (0, Stop.ALL)


@tables
def test_t_match_1m_names_a_million_tokens(make) -> None:
    table = make()
    keys = [key(number) for number in range(8_190)]
    log = b"".join(encode_entry(1, OP_SET, k, fields(n + 1)) for n, k in enumerate(keys))
    assert table.apply_log(log) == (len(log), 1)
    count, _ = table.match_prefix(b"".join(keys), 16, 0, TTL_S)
    assert count * 128 == 1_048_320


@tables
@pytest.mark.parametrize("state", [State.EVICTING, State.TOMBSTONE])
def test_a_block_on_its_way_out_reads_as_evicted(make, state) -> None:
    table = make()
    table.set(key(1), fields(1))
    table.set(key(2), fields(2, state=state))
    assert table.match_prefix(key(1) + key(2), 16, 0, TTL_S) == (1, Stop.EVICTED)
    table.set(key(2), fields(2, state=State.DEGRADED))
    assert table.match_prefix(key(1) + key(2), 16, 0, TTL_S) == (2, Stop.ALL)


@tables
def test_t_gc_3_lives_of_the_classes(make) -> None:
    assert not is_expired(0, TtlClass.AGENT, 259_800)
    assert is_expired(0, TtlClass.AGENT, 259_801)
    table = make()
    table.set(key(1), fields(1, epoch=0, ttl=TtlClass.AGENT))
    assert table.match_prefix(key(1), 16, 259_800, TTL_S) == (1, Stop.ALL)
    assert table.match_prefix(key(1), 16, 259_801, TTL_S) == (0, Stop.EVICTED)
    assert 255_600 // 600 == 426
    log = table.touch(key(1), 16, 426, TtlClass.CHAT, 1)
    assert len(log) == LOG_ENTRY_BYTES
    assert table.match_prefix(key(1), 16, 861_000, TTL_S) == (1, Stop.ALL)
    assert table.match_prefix(key(1), 16, 861_001, TTL_S) == (0, Stop.EVICTED)


@tables
def test_a_touch_in_the_same_epoch_and_class_changes_nothing(make) -> None:
    table = make()
    table.set(key(1), fields(1, epoch=5, ttl=TtlClass.CHAT))
    assert table.touch(key(1) + key(2), 16, 5, TtlClass.AGENT, 1) == b""
    log = table.touch(key(1) + key(2), 16, 6, TtlClass.AGENT, 9)
    seq, op, touched, record = decode_entry(log)
    assert (seq, op, touched) == (9, OP_SET, key(1))
    assert (record.access_epoch, record.ttl_class) == (6, TtlClass.CHAT)


@tables
def test_a_touch_with_a_class_that_a_record_has_no_room_for_changes_nothing(make) -> None:
    table = make()
    table.set(key(1), fields(1, epoch=5, ttl=TtlClass.CHAT))
    with pytest.raises(ValueError, match="class: at most 15"):
        table.touch(key(1), 16, 9, 16, 1)
    assert table.match_prefix(key(1), 16, 0, TTL_S) == (1, Stop.ALL)


def test_t_gc_1_expired_first_then_down_to_low() -> None:
    assert num_to_evict(1000, 860, 100, Waterlines()) == 110
    assert 860 - 110 == 750 == 0.75 * 1000
    assert num_to_evict(1000, 850, 0, Waterlines()) == 0
    assert num_to_evict(1000, 400, 3, Waterlines()) == 3
    assert num_to_evict(1000, 1000, 900, Waterlines()) == 900


@tables
def test_t_gc_1_order_puts_the_expired_in_front(make) -> None:
    table = make()
    for number in range(860):
        expired = number < 100
        table.set(key(number), fields(1, epoch=0 if expired else 500 + number % 3))
    now_s = 259_801
    order = table.eviction_order(now_s, TTL_S, 110)
    assert len(order) == 110
    assert {k for k, is_gone in order if is_gone} == {key(n) for n in range(100)}
    assert all(is_gone for _, is_gone in order[:100])
    assert {table.get(k)[3] for k, _ in order[100:]} == {500}
    assert len(table.eviction_order(now_s, TTL_S, 999, True)) == 100


@tables
def test_t_gc_2_leaves_go_before_parents(make) -> None:
    table = make()
    for number in range(1, 5):
        table.set(key(number), fields(number, epoch=5))
    table.touch(key(1) + key(2), 16, 6, TtlClass.AGENT, 1)
    order = [k for k, _ in table.eviction_order(0, TTL_S, 2)]
    assert order == [key(4), key(3)]
    for gone in order:
        table.remove(gone)
    assert [k for k, _ in table.eviction_order(0, TTL_S, 9)] == [key(2), key(1)]


def test_waterlines_refuse_agents_first_then_everybody() -> None:
    lines = Waterlines()
    used = (919, 920, 959, 960)
    assert [admits_put(1000, n, TtlClass.AGENT, lines) for n in used] == [True, False, False, False]
    assert [admits_put(1000, n, TtlClass.CHAT, lines) for n in used] == [True, True, True, False]
    with pytest.raises(ValueError, match="waterlines"):
        Waterlines(low=0.9)


def test_pins_hold_blocks_up_but_not_in_an_emergency() -> None:
    order = [(key(n), False) for n in range(5)]
    pinned = {key(0), key(2)}
    assert choose(order, 2, pinned, False) == [key(1), key(3)]
    assert choose(order, 2, pinned, True) == [key(0), key(1)]
    assert choose(order, 9, pinned, False) == [key(1), key(3), key(4)]


def test_relief_is_asked_in_proportion() -> None:
    assert relief_shares([(1, 300), (2, 100), (3, 0)], 40) == {1: 30, 2: 10}
    assert sum(relief_shares([(1, 1), (2, 1), (3, 1)], 10).values()) >= 10
    assert relief_shares([], 10) == {}


def test_native_and_plain_agree_under_random_edits() -> None:
    rng = random.Random(6)
    native_table, plain = native.IndexTable(), PlainIndexTable()
    for step in range(6_000):
        k = key(rng.randrange(300))
        action = rng.random()
        if action < 0.5:
            record = fields(rng.randrange(1, 50), rng.randrange(900), rng.randrange(1, 5),
                            rng.randrange(1, 3), step)  # fmt: skip
            native_table.set(k, record)
            plain.set(k, record)
        elif action < 0.7:
            assert native_table.remove(k) == plain.remove(k)
        elif action < 0.85:
            keys = b"".join(key(rng.randrange(300)) for _ in range(4))
            epoch, ttl = rng.randrange(900), rng.randrange(1, 3)
            assert native_table.touch(keys, 16, epoch, ttl, step) == plain.touch(
                keys, 16, epoch, ttl, step
            )
        else:
            now_s = rng.randrange(900_000)
            limit = rng.randrange(1, 40)
            assert native_table.eviction_order(now_s, TTL_S, limit) == plain.eviction_order(
                now_s, TTL_S, limit
            )
    assert len(native_table) == len(plain)
    assert sorted(native_table.census()) == plain.census()
    assert sorted(native_table.stale(4, 500)) == sorted(plain.stale(4, 500))
    copies = []
    for table in (native_table, plain):
        copy, cursor = PlainIndexTable(), 0
        while cursor is not None:
            log, cursor = table.snapshot(cursor, 20, 3)
            assert copy.apply_log(log)[0] == len(log)
        copies.append(copy._records)
    assert copies[0] == copies[1] == plain._records


@tables
def test_a_damaged_log_entry_stops_the_log_there(make) -> None:
    log = b"".join(encode_entry(n, OP_SET, key(n), fields(n)) for n in range(1, 6))
    for at in (0, 8, 12, 30, 60, 75, 79):
        bad = bytearray(log)
        bad[2 * LOG_ENTRY_BYTES + at] ^= 4
        table = make()
        assert table.apply_log(bytes(bad)) == (2 * LOG_ENTRY_BYTES, 2)
        assert len(table) == 2
    assert make().apply_log(log[:-1]) == (4 * LOG_ENTRY_BYTES, 4)


@tables
def test_merging_another_log_renumbers_what_it_sets_and_names_what_it_removes(make) -> None:
    other = PlainIndexTable()
    log = b"".join(encode_entry(70 + n, OP_SET, key(n), fields(n)) for n in range(1, 4))
    log += encode_entry(74, OP_REMOVE, key(1), fields(1))
    table = make()
    entries, removed = table.merge(log, 5)
    assert removed == [key(1)]
    assert other.apply_log(entries) == (240, 7)
    assert {k: table.get(k) for k in other._records} == other._records


def test_both_encoders_write_the_same_entry() -> None:
    record = fields(9, 77, 2, 2, 12345)
    ours = encode_entry(3, OP_SET, key(1), record, key(2), 1024)
    assert ours == native.encode_log_entry(3, OP_SET, key(1), record, key(2), 1024)


def test_an_index_costs_at_most_64_bytes_per_block() -> None:
    table = native.IndexTable()
    log = b"".join(encode_entry(1, OP_SET, key(n), fields()) for n in range(20_000))
    table.apply_log(log)
    assert table.memory_bytes() <= 64 * len(table)
