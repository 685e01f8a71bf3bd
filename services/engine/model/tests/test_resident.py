"""Decode steps that stay on the device give what steps packed by the host give, bit for bit.

The CPU stands in for the GPU: same bodies, same tables, same order; a capture runs the body again.
Source: engine.md, sections 2.2 and 3.3; model.md, section 21.4.
"""

from __future__ import annotations

import numpy as np
import pytest

from services.engine.model.presets import NANO, TINY
from services.engine.model.tests.kit import INVARIANT, NATIVE, Driver, network, prompt, with_text
from services.engine.requests import Sampling

pytestmark = pytest.mark.engine

SAMPLED = {"temperature": 0.9, "seed": 2**63 + 5}
LIMITED = SAMPLED | {"top_p": 0.8, "top_k": 20}


def both(config, numerics=INVARIANT, predictable=True, **options) -> list[Driver]:
    nets = [
        network(config, numerics, predictable=predictable, resident=resident)
        for resident in (False, True)
    ]
    return [Driver(net, **options) for net in nets]


def blocks_of(driver: Driver, seq: int) -> list[bytes]:
    return driver.blocks(seq)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, LIMITED], ids=["greedy", "plain", "full"])
def test_tokens_blocks_and_states_are_those_of_packed_steps(mode, sampling):
    said, bytes_ = [], []
    for driver in both(NANO, verify_mode=mode):
        out = driver.generate(prompt(37), 40, **sampling)
        said.append(out)
        bytes_.append((driver.blocks(1), driver.runner.read_state(1)))
    assert said[0] == said[1]
    assert bytes_[0] == bytes_[1]


@pytest.mark.parametrize(("config", "numerics"), [(TINY, NATIVE), (TINY, INVARIANT)])
def test_the_larger_network_and_native_numbers_agree_too(config, numerics):
    said = [d.generate(prompt(70, vocab=2000), 30) for d in both(config, numerics)]
    assert said[0] == said[1]


def test_a_batch_that_changes_from_step_to_step():
    """Requests join, sit out, come back and leave; greedy and sampled ones share steps."""
    kinds = ({}, SAMPLED, LIMITED, {"temperature": 0.5, "seed": 9})
    plans = ([1], [1, 2], [2, 1, 3], [3, 4], [1, 4, 2, 3], [4], [4, 3, 2], [2, 3, 4], [1, 2, 3, 4])
    traces = []
    for driver in both(NANO):
        trace = []
        for seq in range(1, 5):
            trace.append(driver.start(seq, prompt(9 * seq + 2, seq), **kinds[seq - 1]))
        for batch in (*plans, *plans):
            outputs = driver.step(batch)
            trace.append([(s, [t.token_id for t in outputs[s].tokens]) for s in batch])
            trace.append([(outputs[s].num_rows, outputs[s].drafts) for s in batch])
        trace.append([driver.runner.read_state(s) for s in range(1, 5)])
        traces.append(trace)
    assert traces[0] == traces[1]


def test_the_split_of_a_small_budget_is_the_same():
    rows = []
    for driver in both(NANO):
        for seq in range(1, 7):
            driver.start(seq, prompt(11 * seq, seq))
        seqs = [1, 2, 3, 4, 5, 6]
        for drafts in (5, 1, 2, 0, 3, 1, 5):
            outputs = driver.step(seqs, drafts=drafts)
            rows.append([outputs[s].num_rows for s in seqs])
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]
    assert any(len(set(row)) > 1 for row in rows)


def test_logprobs_and_masks_reach_the_caller():
    config = NANO
    rng = np.random.default_rng(3)
    allowed = rng.random((6, 256)) < 0.3
    masks = [np.packbits(row, bitorder="little").tobytes() for row in allowed]
    traces = []
    for driver in both(config):
        driver.start(1, prompt(20), logprobs=True, top_logprobs=4)
        driver.start(2, prompt(21, 2), **SAMPLED, logprobs=True, top_logprobs=20)
        driver.start(3, prompt(22, 3))
        trace = []
        for turn in range(4):
            given = {1: masks, 3: [None, *masks[1:]]} if turn % 2 else {}
            outputs = driver.step([1, 2, 3], masks=given)
            trace.append([outputs[s].tokens for s in (1, 2, 3)])
            if turn % 2:
                assert allowed[0][outputs[1].tokens[0].token_id]
        traces.append(trace)
    for one, two in zip(*traces, strict=True):
        for a, b in zip(one, two, strict=True):
            assert [t.token_id for t in a] == [t.token_id for t in b]
            for x, y in zip(a, b, strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-5)
                assert [i for i, _ in x.top] == [i for i, _ in y.top]


def test_drafts_after_a_stop_token_are_worth_nothing():
    driver = both(NANO)[1]
    first = driver.generate(prompt(30), 8)
    stops = frozenset(first[3:5])
    again = both(NANO)[1]
    again.start(1, prompt(30), stop_token_ids=stops)
    while True:
        out = again.step([1])[1]
        hit = any(token.token_id in stops for token in out.tokens)
        assert (set(out.confidences) == {0.0}) == hit
        if hit:
            break


def test_a_state_that_is_handed_over_goes_on():
    donor, taker = both(NANO)
    ids = prompt(45)
    first = donor.start(1, ids)
    expected = [first, *donor.decode(1, 20)]
    donor2 = both(NANO)[0]
    donor2.start(1, ids)
    state = donor2.runner.read_state(1)
    taker.open(1, [*ids, first])
    for block, source in zip(taker.tables[1], donor2.tables[1], strict=False):
        taker.runner.write_block(block, donor2.runner.read_block(source))
    taker.runner.write_state(1, state, len(ids))
    taker.cached[1] = len(ids)
    assert [first, *taker.decode(1, 20)] == expected


def test_wrong_counts_are_faults_of_their_own_request():
    driver = both(NANO)[1]
    driver.start(1, prompt(20))
    driver.cached[1] += 1
    with pytest.raises(AssertionError, match="CPU counts 21 cached, device 20"):
        driver.step([1])


def test_more_state_slots_than_there_was_room_for():
    """The pools grow: captured steps are let go, and tokens stay the same."""
    said = []
    for driver in both(NANO, max_seqs=4):
        for seq in range(1, 20):
            driver.start(seq, prompt(5 + seq, seq))
            said.append(driver.decode(seq, 3))
    assert said[: len(said) // 2] == said[len(said) // 2 :]


def test_without_a_draft_head():
    config = with_text(
        NANO, num_nextn_predict_layers=0, compress_ratios=NANO.text.compress_ratios[:8]
    )
    said = [d.generate(prompt(33), 12) for d in both(config, predictable=False)]
    assert said[0] == said[1]
    assert Sampling().greedy
