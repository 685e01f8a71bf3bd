"""The seam: faults, masks, log-probabilities, copies, and a loop that does not stand still."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.engine.keys import MediaSpan
from services.engine.model.cache import geometry
from services.engine.model.presets import NANO
from services.engine.model.tests.kit import EXACT, INVARIANT, Driver, network, prompt
from services.engine.runner import DecodeBatch, DecodeRow, PrefillBatch, StateFault

pytestmark = pytest.mark.engine


def mask(*ids: int) -> bytes:
    bits = np.zeros(256, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_a_mask_restricts_every_row_and_a_draft_it_forbids_is_never_accepted():
    driver = Driver(network(NANO, EXACT, predictable=True))
    driver.start(1, prompt(20))
    driver.step([1])
    for temperature_step in range(6):
        only = 7 + temperature_step
        out = driver.step([1], masks={1: [mask(only)] * 6})[1]
        # The first row says the one id; drafts are right only where they happen to be that id.
        assert {token.token_id for token in out.tokens} == {only}


def test_a_prefill_mask_decides_the_first_token():
    driver = Driver(network(NANO, EXACT))
    driver.open(1, prompt(12))
    row = driver.row(1, 0, 12)
    masked = replace(row, mask=mask(42))
    assert driver.prefill(masked)[1] == 42


def test_log_probabilities_add_up_and_start_with_the_most_likely():
    driver = Driver(network(NANO, EXACT))
    driver.open(1, prompt(12), logprobs=True, top_logprobs=20)
    result = asyncio.run(driver.runner.prefill(PrefillBatch((driver.row(1, 0, 12),))))
    token = result.first[1]
    values = [value for _, value in token.top]
    assert token.top[0] == (token.token_id, token.logprob)
    assert values == sorted(values, reverse=True)
    assert len(values) == 20
    assert 0.2 < sum(np.exp(values)) < 1


def test_counts_that_do_not_fit_are_faults_of_that_sequence_alone():
    driver = Driver(network(NANO, EXACT))
    driver.start(1, prompt(20))
    driver.start(2, prompt(20, 1))
    runner = driver.runner
    rows = (
        DecodeRow(1, -1, 17, tuple(driver.tables[1]), 1),
        DecodeRow(2, -1, 20, tuple(driver.tables[2]), 1),
    )

    async def run():
        step = runner.launch(DecodeBatch(rows, 2))
        runner.sample(step, {})
        return await runner.result(step)

    result = asyncio.run(run())
    assert "17 cached, device 20" in result.faults[1].what
    assert list(result.outputs) == [2]
    driver.open(3, prompt(30, 2))
    driver.prefill(driver.row(3, 0, 10))
    gap = PrefillBatch((driver.row(3, 12, 30),))
    assert "KV ends at 10" in asyncio.run(runner.prefill(gap)).faults[3].what


def test_an_image_without_its_embedding_is_a_fault_and_a_chunk_border_may_cut_it():
    ids = prompt(24)
    ids[5:14] = [NANO.image_token_id] * 9
    media = (MediaSpan(5, 9, bytes(32)),)
    driver = Driver(network(NANO, INVARIANT))
    driver.open(1, ids, media=media)
    row = driver.row(1, 0, 24)
    faults = asyncio.run(driver.runner.prefill(PrefillBatch((row,)))).faults
    assert "no embedding" in faults[1].what
    data = torch.randn(9, 64).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    states = []
    for seq, cuts in ((2, [24]), (3, [9, 24])):
        driver.open(seq, ids, media=media)
        low = 0
        for high in cuts:
            given = ((5, data),) if low == 0 else ()
            driver.prefill(driver.row(seq, low, high, embeddings=given))
            low = high
        states.append(driver.runner.read_state(seq))
    assert states[0] == states[1]
    driver.open(4, ids, media=media)
    short = driver.row(4, 0, 24, embeddings=((5, data[:-2]),))
    faults = asyncio.run(driver.runner.prefill(PrefillBatch((short,)))).faults
    assert "expected 1152" in faults[4].what


@pytest.mark.parametrize("seed", range(3))
def test_t10_a_copied_window_is_the_window_at_its_boundary(seed):
    """Copies are taken right after the step that crossed a boundary, under random acceptance."""
    net = network(NANO, INVARIANT, predictable=True)
    size = geometry(NANO).block_tokens
    driver = Driver(net, prefill=False)
    feeder = Driver(net)
    ids = prompt(21, seed)
    feeder.start(1, ids)
    driver.open(1, feeder.tokens[1].ids)
    for source, target in zip(feeder.tables[1][:3], driver.tables[1], strict=False):
        driver.runner.write_block(target, feeder.runner.read_block(source))
    driver.runner.write_state(1, feeder.runner.read_state(1), 21)
    driver.cached[1] = 21
    checked = 0
    while driver.cached[1] < 45:
        before = driver.cached[1]
        driver.step([1])
        boundary = driver.cached[1] // size * size
        if boundary <= before:
            continue
        driver.runner.copy_state(1, checked % 2)
        driver.step([1])  # the ring moves on; the copy must not
        found = driver.runner.read_window(1, boundary, checked % 2)
        fresh = Driver(net)
        fresh.start(1, list(driver.tokens[1].ids)[: boundary + 1])
        assert found == fresh.runner.read_window(1, boundary, None)
        checked += 1
    assert checked >= 2


def test_foreign_sizes_and_states_are_refused():
    driver = Driver(network(NANO, EXACT))
    driver.start(1, prompt(20))
    runner = driver.runner
    data = runner.read_state(1)
    assert len(data) == runner.layout.state_bytes
    with pytest.raises(StateFault, match="a state has"):
        runner.write_state(1, data[:-1], 20)
    with pytest.raises(StateFault, match="stands at 20"):
        runner.write_state(1, data, 19)
    with pytest.raises(StateFault, match="a window has"):
        runner.write_window(1, 16, b"")
    with pytest.raises(StateFault, match="copy area 1 is empty"):
        runner.read_window(1, 16, 1)
    runner.pool.main[4].data[driver.tables[1][1] * 8] = float("nan")
    with pytest.raises(StateFault, match="layer 4 are no numbers"):
        runner.verify(1, 20, driver.tables[1])


async def test_the_event_loop_goes_on_while_a_pass_runs():
    driver = Driver(network(NANO, EXACT))
    driver.open(1, prompt(200))
    turns = 0
    task = asyncio.create_task(driver.runner.prefill(PrefillBatch((driver.row(1, 0, 200),))))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert (await task).first
    assert turns > 10


def test_closing_is_idempotent_and_a_closed_sequence_gives_no_output():
    driver = Driver(network(NANO, EXACT))
    driver.start(1, prompt(10))
    runner = driver.runner
    assert runner.num_sequences == 1
    runner.close(1)
    runner.close(1)
    row = DecodeRow(1, -1, 10, tuple(driver.tables[1]), 1)

    async def run():
        step = runner.launch(DecodeBatch((row,), 1))
        runner.sample(step, {})
        return await runner.result(step)

    result = asyncio.run(run())
    assert (result.outputs, result.faults) == ({}, {})
    runner.shut_down()
