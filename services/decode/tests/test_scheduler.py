import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.scheduler import (
    Running,
    blocks_needed,
    blocks_reserved,
    copy_confirmed,
    copy_decision,
    key_length,
    max_positions,
    next_batch,
    num_state_slots,
    on_result,
    persist_range,
    pick_victim,
)
from services.engine.layout import Geometry
from services.engine.stop import Stop, StopRules

FLASH = Geometry()
NANO = Geometry(block_tokens=8, window=8, keep_tokens=16)
RULES = StopRules(frozenset({1}), max_tokens=100, max_model_len=1000)


def test_blocks_cover_the_step_in_flight_and_the_drafts():
    assert blocks_needed(123, False, FLASH) == 1
    assert blocks_needed(124, False, FLASH) == 2
    assert blocks_needed(117, True, FLASH) == 1
    assert blocks_needed(118, True, FLASH) == 2
    assert blocks_reserved(117, FLASH) == 1
    assert blocks_reserved(118, FLASH) == 2


def test_capacities_of_2_1_and_2_2():
    assert num_state_slots(10) == 13
    assert max_positions(1000, FLASH) == 1016


def test_a_remapped_key_length_counts_golden_accepted_drafts_and_this_steps_rows():
    for accepted in range(6):
        for rows in range(1, 7):
            assert key_length(50, True, rows, accepted, FLASH) == 50 + 1 + accepted + rows
            assert key_length(50, False, rows, accepted, FLASH) == 50 + rows


def test_a_step_grows_a_sequence_by_at_most_one_block_and_two_of_nanos():
    for geometry, most in ((FLASH, 1), (NANO, 2)):
        for num_tokens in range(1, 600):
            before = blocks_needed(num_tokens, True, geometry)
            grown = blocks_needed(num_tokens + geometry.back, True, geometry) - before
            assert grown <= most


# --- who runs (2.5) ----------------------------------------------------------------------------


def test_the_shortest_output_is_served_first():
    running = [Running(1, 300, 50, 3), Running(2, 300, 5, 3), Running(3, 300, 5, 3)]
    assert next_batch(running, 10, 8, FLASH).seq_ids == [2, 3, 1]
    assert next_batch(running, 10, 2, FLASH).seq_ids == [2, 3]


def test_the_victim_has_the_longest_output_ties_to_the_highest_id():
    running = [Running(1, 300, 9, 3), Running(4, 300, 50, 3), Running(3, 300, 50, 3)]
    assert pick_victim(running).seq_id == 4


def test_a_full_pool_preempts_the_longest_output_for_the_shortest():
    running = [Running(1, 384, 2, 3), Running(2, 384, 200, 4), Running(3, 100, 100, 1)]
    batch = next_batch(running, free_blocks=0, max_seqs=8, geometry=FLASH)
    assert batch.victims == [2]
    assert batch.grow == {1: 1, 3: 0}
    assert batch.sat_out == []


def test_blocks_of_a_victim_in_flight_come_back_only_after_its_step():
    running = [Running(1, 384, 2, 3), Running(2, 384, 200, 4, in_flight=True)]
    batch = next_batch(running, free_blocks=0, max_seqs=8, geometry=FLASH)
    assert batch.victims == [2]
    assert batch.sat_out == [1]
    assert batch.seq_ids == []


def test_a_lone_sequence_without_room_is_its_own_victim():
    batch = next_batch([Running(1, 384, 2, 3)], 0, 8, FLASH)
    assert batch.victims == [1]
    assert batch.seq_ids == []


@settings(max_examples=120)
@given(
    seqs=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 300), st.booleans()), max_size=12),
    free=st.integers(0, 6),
    max_seqs=st.integers(1, 12),
)
def test_a_batch_never_takes_more_blocks_than_there_are(seqs, free, max_seqs):
    running = [
        Running(i, num, min(out, num), max(1, -(-num // 128)), flying)
        for i, (num, out, flying) in enumerate(seqs)
    ]
    by_id = {seq.seq_id: seq for seq in running}
    batch = next_batch(running, free, max_seqs, FLASH)
    returned = sum(by_id[v].num_blocks for v in batch.victims if not by_id[v].in_flight)
    assert sum(batch.grow.values()) <= free + returned
    assert len(batch.seq_ids) == len(set(batch.seq_ids)) <= max_seqs
    assert not set(batch.seq_ids) & set(batch.victims)
    for seq_id in batch.seq_ids:
        seq = by_id[seq_id]
        need = blocks_needed(seq.num_tokens, seq.in_flight, FLASH)
        assert seq.num_blocks + batch.grow[seq_id] >= need
    if running and not any(seq.in_flight for seq in running):
        assert batch.seq_ids or len(batch.victims) == len(running)


# --- results (2.3) ------------------------------------------------------------------------------


def test_tokens_after_a_stop_are_dropped_and_cached_counts_what_is_kept():
    result = on_result([5, 6, 1, 7, 8], num_cached=40, num_tokens=41, num_output=3, rules=RULES)
    assert (result.kept, result.num_cached, result.stop) == (3, 43, Stop.STOP)


def test_stops_are_checked_in_order_for_each_token():
    short = StopRules(frozenset({1}), max_tokens=4, max_model_len=1000)
    assert on_result([5, 1], 40, 41, 2, short).stop is Stop.STOP
    assert on_result([5, 6], 40, 41, 2, short).stop is Stop.LENGTH
    assert on_result([5, 6, 7], 40, 41, 2, short).kept == 2
    model = StopRules(frozenset({1}), max_tokens=100, max_model_len=42)
    assert on_result([5, 6, 7], 40, 41, 2, model).kept == 2


def test_stop_tokens_can_be_ignored_or_come_too_early():
    ignoring = StopRules(frozenset({1}), 100, 1000, ignore_stop=True)
    assert on_result([1, 1], 40, 41, 2, ignoring).stop is None
    late = StopRules(frozenset({1}), 100, 1000, min_tokens=4)
    assert on_result([1, 1], 40, 41, 2, late).kept == 2


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(2, 500))
def test_one_token_is_always_committed_without_its_kv(tokens, num_tokens):
    result = on_result(tokens, num_tokens - 1, num_tokens, 0, RULES)
    assert result.num_cached == num_tokens + result.kept - 1


# --- window copies (2.6, T10) -------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [FLASH, NANO])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_t10_every_copy_holds_the_whole_window_before_its_boundary(geometry, asynchronous, seed):
    """Drives a ring with random acceptance; each confirmed copy is checked slot by slot.

    Every step writes `rows` positions, of which `kept` are committed; a rejected draft's slot keeps
    a wrong value until a later step writes it again, as on a device.
    """
    rng = random.Random(seed)
    ring = [None] * geometry.ring
    committed = known = rng.randrange(1, 300)
    for position in range(max(0, committed - geometry.ring), committed):
        ring[position % geometry.ring] = position
    attached = committed // geometry.block_tokens * geometry.block_tokens
    confirmed = 0
    in_flight = False
    for step in range(600):
        # schedule(N): `known` is through N-2, the ring already holds N-1's writes.
        boundary = copy_decision(known, in_flight, attached, geometry)
        copy = list(ring) if boundary else None
        if boundary and copy_confirmed(boundary, committed):  # post-process(N-1)
            for position in range(boundary - geometry.window, boundary):
                if position >= 0:
                    assert copy[position % geometry.ring] == position
            assert boundary > attached
            attached = boundary
            confirmed += 1
        known = committed
        if rng.random() < 0.15:
            in_flight = False  # sits this step out
            continue
        rows = rng.randint(1, geometry.back)
        kept = rng.randint(1, rows)
        for index in range(rows):
            right = index < kept
            ring[(committed + index) % geometry.ring] = (
                committed + index if right else ("draft", step, index)
            )
        committed += kept
        in_flight = asynchronous
        if not asynchronous:
            known = committed
    crossed = committed // geometry.block_tokens - (attached // geometry.block_tokens)
    assert crossed <= 1, "no boundary may be missed but the one just crossed"
    assert confirmed > 0


def test_copying_from_stale_counts_would_lose_the_oldest_positions():
    """The hazard of 2.6: why strategy A exists. With known n = a + 5 the window is damaged."""
    a, n = 1280, 1285
    newest = n + FLASH.back - 1
    oldest_held = newest - FLASH.ring + 1
    assert oldest_held > a - FLASH.window


def test_t19_only_full_committed_blocks_are_persisted_once():
    assert list(persist_range(0, 300, FLASH)) == [0, 1]
    assert list(persist_range(2, 383, FLASH)) == []
    assert list(persist_range(2, 384, FLASH)) == [2]
