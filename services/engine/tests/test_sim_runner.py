"""The simulated device under a minimal loop: hand-off, replay, windows, damage, asynchrony."""

import asyncio
import hashlib
import itertools
import random
from array import array

import pytest

from services.common.clock import VirtualClock
from services.engine.keys import MediaSpan, chain
from services.engine.layout import Geometry
from services.engine.requests import Sampling, Tokens
from services.engine.runner import (
    DecodeBatch,
    DecodeRow,
    PrefillBatch,
    PrefillRow,
    Start,
    StateFault,
)
from services.engine.sim.config import SimConfig, sim_layout
from services.engine.sim.runner import SimRunner

GEOMETRY = Geometry(block_tokens=16, window=16, keep_tokens=24)
LAYOUT = sim_layout("tiny", GEOMETRY)
CONFIG = SimConfig(mode="hash", stop_every=0, time_scale=0)
SAMPLING = Sampling(temperature=1.0, seed=3, max_tokens=200)


def make(ring=None, config=CONFIG, clock=None):
    kwargs = {"clock": clock} if clock else {}
    return SimRunner(LAYOUT, config, 64, ring_slots=ring, **kwargs)


def prompt(num, seed=0):
    rng = random.Random(seed)
    return Tokens(GEOMETRY, array("I", [rng.randrange(3, 128000) for _ in range(num)]))


def start(tokens, seq_id=1, num_prompt=None, sampling=SAMPLING):
    return Start(seq_id, "r", tokens, sampling, num_prompt or len(tokens), len(tokens), 1)


def row(tokens, low, high, table, *, valid=0, write_from=0, seq_id=1):
    return PrefillRow(seq_id, low, high - low, valid, write_from, high == len(tokens), tuple(table))


async def prefill(runner, tokens, table, cuts=(), seq_id=1, first=0, valid=0, write_from=0):
    """Runs a prompt in chunks; returns the first token."""
    edges = [first, *cuts, len(tokens)]
    for low, high in itertools.pairwise(edges):
        chunk = row(tokens, low, high, table, valid=valid, write_from=write_from, seq_id=seq_id)
        result = await runner.prefill(PrefillBatch((chunk,)))
        assert not result.faults, result.faults
    return result.first[seq_id]


async def decode(runner, num_cached, table, steps, budget=6, seq_id=1, start_remap=-1):
    """Runs steps one at a time, asynchronously launched; returns the tokens."""
    said, remap = [], start_remap
    for _ in range(steps):
        step = runner.launch(
            DecodeBatch((DecodeRow(seq_id, remap, num_cached, tuple(table), 6),), budget)
        )
        runner.sample(step, {})
        result = await runner.result(step)
        assert not result.faults, result.faults
        output = result.outputs[seq_id]
        said += [token.token_id for token in output.tokens]
        num_cached += len(output.tokens)
        remap = 0
    return said


async def handed_over(tokens, table=range(1, 30)):
    """A prefill runner and a decode runner that got its bytes; and the first token."""
    source, target = make(GEOMETRY.prefill_ring), make()
    source.open(start(tokens))
    first = await prefill(source, tokens, list(table))
    moved = Tokens(GEOMETRY, array("I", tokens.ids))
    moved.append([first.token_id])
    target.open(start(moved, num_prompt=len(tokens)))
    other = [b + 20 for b in table]
    for here, there in zip(table, other, strict=True):
        if here < 30:
            target.write_block(there, source.read_block(here))
    target.write_state(1, source.read_state(1), len(tokens))
    return source, target, other, first.token_id


async def test_t8_a_handed_over_sequence_goes_on_as_if_it_had_never_moved():
    tokens = prompt(100)
    source, target, table, first = await handed_over(tokens)
    target.verify(1, 100, table)
    there = await decode(target, 100, table, 12)
    here = await decode(source, 100, list(range(1, 30)), 40, budget=1)
    num = min(len(here), len(there))
    assert num >= 12
    assert here[:num] == there[:num]
    assert first not in (None,)


async def test_t12_the_budget_changes_the_pace_and_never_the_tokens():
    outputs = []
    for budget in (1, 3, 6):
        _, target, table, _ = await handed_over(prompt(50))
        outputs.append(await decode(target, 50, table, 20, budget=budget))
    assert len(outputs[0]) == 20
    assert len(outputs[2]) > len(outputs[1]) > 20
    assert outputs[0] == outputs[1][:20] == outputs[2][:20]


async def test_t5_any_chunking_gives_the_same_token_and_the_same_bytes():
    tokens = prompt(150)
    results = []
    for cuts in ((), (1,), (16, 32, 48), (7, 99, 149), tuple(range(10, 150, 10))):
        runner = make(GEOMETRY.prefill_ring)
        runner.open(start(tokens))
        token = await prefill(runner, tokens, list(range(1, 12)), cuts)
        blocks = b"".join(runner.read_block(b) for b in range(1, 11))
        results.append((token, blocks, runner.read_state(1), runner.read_window(1, 144, None)))
    assert all(result == results[0] for result in results)


async def test_t7_a_replay_rebuilds_the_window_and_writes_no_block():
    tokens = prompt(150)
    cold = make(GEOMETRY.prefill_ring)
    cold.open(start(tokens))
    first = await prefill(cold, tokens, list(range(1, 12)))
    warm = make(GEOMETRY.prefill_ring)
    warm.open(start(tokens))
    stored = 112  # hit 96: the block before 112 is replayed
    for block in range(1, 8):
        warm.write_block(block, cold.read_block(block))
    before = [warm.read_block(b) for b in range(1, 8)]
    token = await prefill(
        warm, tokens, list(range(1, 12)), (130,), first=96, valid=96, write_from=stored
    )
    assert token == first
    assert [warm.read_block(b) for b in range(1, 8)] == before
    assert warm.read_block(9) == cold.read_block(9)


async def test_a_stored_window_resumes_a_prompt_exactly():
    tokens = prompt(150)
    cold = make(GEOMETRY.prefill_ring)
    cold.open(start(tokens))
    first = await prefill(cold, tokens, list(range(1, 12)), (112,))
    shorter = Tokens(GEOMETRY, tokens.ids[:113])
    cold.open(start(shorter, seq_id=2))
    await prefill(cold, shorter, list(range(20, 30)), seq_id=2)
    window = cold.read_window(2, 112, None)
    warm = make(GEOMETRY.prefill_ring)
    warm.open(start(tokens))
    for block in range(1, 8):
        warm.write_block(block, cold.read_block(block))
    warm.write_window(1, 112, window)
    token = await prefill(warm, tokens, list(range(1, 12)), first=112, write_from=112)
    assert token == first
    warm.open(start(prompt(150, seed=9), seq_id=3))
    with pytest.raises(StateFault):
        warm.write_window(3, 112, window)


@pytest.mark.parametrize("damaged", ["block", "other prompt", "state", "position"])
async def test_t18_damaged_or_foreign_bytes_are_noticed_before_a_token_is_said(damaged):
    tokens = prompt(100)
    source, target, table, _ = await handed_over(tokens)
    if damaged == "block":
        data = bytearray(source.read_block(3))
        data[300] ^= 1
        target.write_block(table[2], bytes(data))
    elif damaged == "other prompt":
        other = prompt(100, seed=5)
        source.open(start(other, seq_id=2))
        await prefill(source, other, list(range(40, 60)), seq_id=2)
        target.write_block(table[0], source.read_block(40))
    elif damaged == "state":
        data = bytearray(source.read_state(1))
        data[8] ^= 1
        target.write_state(1, bytes(data), 100)
    else:
        with pytest.raises(StateFault):
            target.write_state(1, source.read_state(1), 99)
        return
    with pytest.raises(StateFault):
        target.verify(1, 100, table)


async def test_a_hit_on_foreign_blocks_is_a_fault_of_that_sequence_only():
    runner = make(GEOMETRY.prefill_ring)
    good, bad = prompt(60, seed=1), prompt(60, seed=2)
    runner.open(start(good, seq_id=1))
    runner.open(start(bad, seq_id=2))
    rows = (
        row(good, 0, 60, range(1, 6), seq_id=1),
        row(bad, 32, 60, range(10, 16), valid=32, write_from=32, seq_id=2),
    )
    result = await runner.prefill(PrefillBatch(rows))
    assert set(result.first) == {1}
    assert set(result.faults) == {2}


async def test_a_neighbour_writing_into_our_block_is_noticed_within_a_round_of_steps():
    _, target, table, _ = await handed_over(prompt(100))
    said = await decode(target, 100, table, 2)
    target.write_block(table[4], bytes(LAYOUT.block_bytes))
    with pytest.raises(AssertionError, match="foreign KV"):
        await decode(target, 100 + len(said), table, 20, start_remap=0)


async def test_a_stop_token_leaves_no_confidence_in_what_follows():
    runner = make(config=SimConfig(mode="echo", time_scale=0))
    tokens = prompt(3)
    runner.open(start(tokens, sampling=Sampling(stop_token_ids=frozenset({1}))))
    await prefill(runner, tokens, [1, 2, 3])
    confidences, num_cached, remap = [], 3, -1
    for _ in range(3):
        step = runner.launch(DecodeBatch((DecodeRow(1, remap, num_cached, (1, 2, 3), 1),), 1))
        runner.sample(step, {})
        output = (await runner.result(step)).outputs[1]
        confidences.append((output.tokens[0].token_id, max(output.confidences)))
        num_cached, remap = num_cached + 1, 0
    assert [token_id for token_id, _ in confidences] == [*tokens.ids[1:], 1]
    assert confidences[0][1] > 0
    assert confidences[2][1] == 0


async def test_steps_take_their_predicted_time_and_overlap_with_the_cpu():
    clock = VirtualClock()
    config = SimConfig(mode="hash", stop_every=0, time_scale=1.0)
    runner = make(config=config, clock=clock)
    tokens = prompt(20)
    runner.open(start(tokens))
    task = asyncio.create_task(prefill(runner, tokens, [1, 2, 3, 4]))
    await clock.advance(1.0)
    await task
    began = clock.now_s()
    first = runner.launch(DecodeBatch((DecodeRow(1, -1, 20, (1, 2, 3, 4), 6),), 1))
    runner.sample(first, {})
    second = runner.launch(DecodeBatch((DecodeRow(1, 0, 20, (1, 2, 3, 4), 6),), 6))
    runner.sample(second, {})
    waits = asyncio.gather(runner.result(first), runner.result(second))
    await clock.advance(0.016)
    assert not waits.done()
    await clock.advance(0.01)
    results = await waits
    assert clock.now_s() - began == pytest.approx(0.026)
    assert results[1].outputs[1].num_rows == 6


def test_t_key_our_chain_is_the_stores():
    root = bytes.fromhex("15bb88fc0cc49704b69da99488287940d361cdf80451de1f2d10aaa6c6c1670e")
    ids = array("I", range(256)).tobytes()
    assert [key.hex() for key in chain(root, ids, 128)] == [
        "08564040a131b04b610289ede3f439af85fd02227ac0a470c0529339a1e8c647",
        "a963b890fd6a0eb08182ef79092000cb6b69e3cb4df3649eeb373d39b92f489f",
    ]
    media = (MediaSpan(10, 16, hashlib.sha256(b"img").digest()),)
    assert chain(root, ids, 128, media)[0].hex() == (
        "03107dbd8cdc423a580f0514e21915cfd16cfd50938ecc40990a03bb8aafd07f"
    )
