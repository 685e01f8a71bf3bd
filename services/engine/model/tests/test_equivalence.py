"""Two ways to the same numbers. Source: model.md, section 21.4; engine.md, T5 to T7 and T12.

In batch-invariant mode the comparison is of bits.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.engine.model.network import load_network
from services.engine.model.parallel import Placement
from services.engine.model.presets import NANO, TINY
from services.engine.model.tests.kit import (
    EXACT,
    INVARIANT,
    NATIVE,
    Driver,
    PredictableSource,
    network,
    prompt,
    with_text,
)

pytestmark = pytest.mark.engine

OFF = {"truncation": "off"}


def state(driver: Driver, seq: int = 1) -> bytes:
    return driver.runner.read_state(seq)


@pytest.mark.parametrize("length", [21, 40])
def test_equivalence_01_one_shot_is_prefill_and_decode_is_chunks_with_odd_borders(length):
    net = network(NANO, INVARIANT)
    slow = Driver(net, **OFF)
    ids = prompt(length - 6)
    said = slow.generate(ids, 7, drafts=0)
    whole = [*ids, *said[:-1]]
    assert len(whole) == length
    one_shot = Driver(net, **OFF)
    assert one_shot.start(1, whole) == said[-1]
    chunks = Driver(net, **OFF)
    assert chunks.start(1, whole, cuts=(1, 4, 13, 18)) == said[-1]
    for other in (one_shot, chunks):
        assert other.blocks(1, length) == slow.blocks(1, length)
        assert state(other) == state(slow)


def test_equivalence_01_holds_within_rounding_without_the_fixed_tiles():
    net, ids = network(NANO, EXACT), prompt(45, 3)
    values = []
    for cuts in ((), (7, 20, 33)):
        driver = Driver(net, **OFF)
        driver.start(1, ids, cuts)
        driver.decode(1, 4, drafts=0)
        values.append(np.frombuffer(b"".join(driver.blocks(1, 48)), np.float32))
    assert np.abs(values[0]).max() > 0.5
    np.testing.assert_allclose(values[0], values[1], atol=2e-4)


def test_equivalence_02_rejected_drafts_leave_nothing_behind():
    net, ids = network(NANO, INVARIANT), prompt(30, 1)
    drafted, plain = Driver(net), Driver(net)
    said = drafted.start(1, ids)
    assert plain.start(1, ids) == said
    rejected = 0
    for _ in range(9):
        out = drafted.step([1])[1]
        rejected += out.num_rows - len(out.tokens)
        plain.decode(1, len(out.tokens), drafts=0)
        assert list(drafted.tokens[1].ids) == list(plain.tokens[1].ids)
        assert state(drafted) == state(plain)
    assert rejected > 20
    assert drafted.blocks(1) == plain.blocks(1)


@pytest.mark.parametrize("cuts", [(), (11, 30, 38)])
def test_equivalence_03_mask_and_compact_truncation_give_the_same(cuts):
    net, ids = network(NANO, INVARIANT), prompt(45, 2)
    drivers = [Driver(net, truncation=kind) for kind in ("mask", "compact")]
    first = [driver.start(1, ids, cuts, logprobs=True, top_logprobs=5) for driver in drivers]
    assert first[0] == first[1]
    assert state(drivers[0]) == state(drivers[1])
    assert drivers[0].blocks(1) == drivers[1].blocks(1)


def test_equivalence_03_keeping_the_whole_prompt_is_exact_and_keeping_less_is_not():
    ids = prompt(30, 2)
    config = replace(NANO, system=replace(NANO.system, keep_tokens=30))
    kept, exact = Driver(network(config, INVARIANT)), Driver(network(config, INVARIANT), **OFF)
    cut = Driver(network(NANO, INVARIANT))
    for driver in (kept, exact, cut):
        driver.start(1, ids)
    assert state(kept) == state(exact)
    assert state(cut) != state(exact)
    assert cut.blocks(1) == exact.blocks(1)


def test_equivalence_04_replay_from_the_start_is_exact_and_writes_no_block_below_the_hit():
    net, ids = network(NANO, INVARIANT), prompt(40, 4)
    cold = Driver(net)
    first = cold.start(1, ids)
    stored = cold.blocks(1, 40)
    # Block 8, window 8: a hit of one block is replayed from position 0.
    warm = Driver(net)
    warm.open(1, ids)
    warm.runner.write_block(warm.tables[1][0], stored[0])
    assert warm.prefill(warm.row(1, 0, 40, write_from=8))[1] == first
    assert warm.blocks(1, 40) == stored
    assert state(warm) == state(cold)


def test_equivalence_04_replay_keeps_the_stored_bytes_and_only_bounds_the_windows():
    net, ids = network(NANO, INVARIANT), prompt(40, 4)
    cold = Driver(net)
    cold.start(1, ids)
    stored = cold.blocks(1, 40)
    for cuts in ((), (19, 27)):
        warm = Driver(net)
        warm.open(1, ids)
        for block, data in zip(warm.tables[1], stored[:2], strict=False):
            warm.runner.write_block(block, data)
        borders = [8, *cuts, 40]
        for low, high in itertools.pairwise(borders):
            warm.prefill(warm.row(1, low, high, valid_start=8, write_from=16))
        again = warm.blocks(1, 40)
        assert again[:2] == stored[:2]
        assert again[2:] != stored[2:]  # the price of the bound, and proof that it is there


def test_equivalence_04_a_loaded_window_makes_a_hit_exact():
    config = replace(NANO, system=replace(NANO.system, keep_tokens=NANO.text.ring_slots))
    net, ids = network(config, INVARIANT), prompt(47, 5)
    cold = Driver(net)
    first = cold.start(1, ids)
    warm = Driver(net)
    warm.open(1, ids)
    for block, data in zip(warm.tables[1], cold.blocks(1, 47)[:4], strict=False):
        warm.runner.write_block(block, data)
    donor = Driver(net)
    donor.start(1, ids[:33])
    warm.runner.write_window(1, 32, donor.runner.read_window(1, 32, None))
    assert warm.prefill(warm.row(1, 32, 47, write_from=32))[1] == first
    assert warm.blocks(1, 47) == cold.blocks(1, 47)
    assert _rings_of(state(warm), warm) == _rings_of(state(cold), cold)


def _rings_of(data: bytes, driver: Driver) -> bytes:
    """A state without its cursor, which tells where the computed part began."""
    return data[: -driver.runner.layout.regions[-1].length_bytes]


@pytest.mark.parametrize("numerics", [INVARIANT, NATIVE], ids=["float32", "native"])
def test_equivalence_05_a_sequence_that_moves_goes_on_as_if_it_had_not(numerics):
    config = NANO if numerics is INVARIANT else TINY
    net, ids = network(config, numerics), prompt(37, 6)
    here = Driver(net)
    first = here.start(1, ids)
    stays = Driver(net)
    assert stays.start(1, ids) == first
    expected = stays.decode(1, 8, drafts=0)
    said: list[int] = []
    for count in (3, 5):  # prefill to decode, then decode to decode
        there = Driver(net, prefill=False)
        there.open(1, here.tokens[1].ids)
        there.cached[1] = here.cached[1]
        num = there.geometry.num_blocks(here.cached[1])
        for source, target in zip(here.tables[1][:num], there.tables[1], strict=False):
            there.runner.write_block(target, here.runner.read_block(source))
        there.runner.write_state(1, state(here), here.cached[1])
        there.runner.verify(1, here.cached[1], there.tables[1])
        assert state(there) == state(here)
        said += there.decode(1, count, drafts=0)
        here = there
    assert said == expected
    assert state(here) == state(stays)


def test_equivalence_06_blocks_from_decode_are_the_bytes_that_prefill_writes():
    net, ids = network(TINY, NATIVE), prompt(29, 7)
    decoded = Driver(net)
    said = decoded.generate(ids, 8)
    whole = [*ids, *said[: decoded.cached[1] - len(ids)]]
    fresh = Driver(net)
    fresh.start(1, whole)
    assert decoded.cached[1] // 16 > len(ids) // 16
    assert decoded.blocks(1) == fresh.blocks(1)


def test_equivalence_07_a_row_does_not_depend_on_its_batch():
    net = network(NANO, INVARIANT)
    prompts = {seq: prompt(num, 10 + seq) for seq, num in ((1, 9), (2, 33), (3, 20), (4, 47))}
    together = Driver(net)
    for seq, ids in prompts.items():
        together.open(seq, ids)
    firsts = together.prefill(*(together.row(s, 0, len(ids)) for s, ids in prompts.items()))
    for order in ((1, 2, 3, 4), (4, 2, 1), (3, 4, 1, 2), (2, 1, 3, 4)):
        together.step(order)
    for seq, ids in prompts.items():
        alone = Driver(net)
        assert alone.start(1, ids) == firsts[seq]
        num = together.cached[seq] - len(ids)
        alone.decode(1, num, drafts=0)
        assert list(alone.tokens[1].ids) == list(together.tokens[seq].ids)
        assert state(alone) == state(together, seq)
        assert alone.blocks(1) == together.blocks(seq)


def test_equivalence_08_room_for_all_candidates_is_plain_top_k_and_room_for_all_is_dense():
    ids = prompt(60, 8)

    def states(**changes) -> bytes:
        driver = Driver(network(with_text(NANO, **changes), INVARIANT), **OFF)
        driver.start(1, ids)
        driver.decode(1, 3, drafts=0)
        return state(driver)

    plain = states(candidate_source_layer_id=None)
    assert states(candidate_topk_blocks=16) == plain
    assert states(candidate_topk_blocks=4) != plain
    # All 63 entries fit into the selection: the index changes nothing any more.
    wide = {"index_topk": 64, "candidate_topk_blocks": 16}
    dense = states(**wide)
    assert dense != plain
    blind = with_text(NANO, **wide)
    net = load_network(blind, _WithoutIndex(blind, 1), INVARIANT)
    driver = Driver(net, **OFF)
    driver.start(1, ids)
    driver.decode(1, 3, drafts=0)
    assert state(driver) == dense


class _WithoutIndex(PredictableSource):
    """The same weights with queries of the index that are all zero."""

    def matrix(self, name: str) -> torch.Tensor:
        value = super(PredictableSource, self).matrix(name)
        return torch.zeros_like(value) if name.endswith("indexer.wq_b.weight") else value


def test_equivalence_09_the_number_of_expert_ranks_and_their_placement_change_no_bit():
    ids = prompt(25, 9)
    expected = None
    for ranks, extra in ((1, 0), (2, 2), (3, 1)):
        net = load_network(
            NANO,
            PredictableSource(NANO, 1),
            INVARIANT,
            num_expert_ranks=ranks,
            extra_experts=extra,
        )
        for shuffled in (False, True):
            if shuffled:
                for layer, old in net.experts.placements.items():
                    order = np.random.default_rng(ranks).permutation(len(old.logical))
                    slots = tuple(old.logical[i] for i in order)
                    net.experts.move(layer, Placement(slots, old.num_experts, ranks))
            driver = Driver(net)
            driver.generate(ids, 5)
            found = (list(driver.tokens[1].ids), state(driver), driver.blocks(1))
            expected = expected or found
            assert found == expected


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_equivalence_10_greedy_output_is_the_same_for_every_verify_length(mode):
    net, ids = network(NANO, INVARIANT, predictable=True), prompt(30, 11)
    expected = Driver(net, verify_mode=mode).generate(ids, 14, drafts=0)
    accepted = 0
    for drafts in (1, 2, 3, 4, 5):
        driver = Driver(net, verify_mode=mode)
        said = [driver.start(1, ids)]
        while len(said) < 14:
            out = driver.step([1], drafts=drafts)[1]
            assert len(out.tokens) <= out.num_rows <= drafts + 1
            accepted += len(out.tokens) - 1
            said += [token.token_id for token in out.tokens]
        assert said[:14] == expected
    assert accepted > 10


def test_coupled_output_is_a_function_of_the_seed_whatever_is_verified():
    net, ids = network(NANO, INVARIANT, predictable=True), prompt(30, 12)
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 77}
    said = [Driver(net).generate(ids, 12, drafts=n, **options) for n in (0, 2, 5)]
    assert said[0] == said[1] == said[2]
    assert Driver(net).generate(ids, 12, **options | {"seed": 78}) != said[0]
