"""The test hook: each fault changes what it says, and nothing is changed without one."""

from __future__ import annotations

import json
from array import array

import numpy as np
import pytest

from services.engine.config import ModelConfig
from services.engine.model.faults import FAULTS, FaultyRunner
from services.engine.model.serve import layout_of
from services.engine.model.settings import TorchConfig
from services.engine.model.tests.kit import Driver, network, prompt
from services.engine.requests import Sampling, Tokens
from services.engine.runner import Start

pytestmark = pytest.mark.engine


class Recorder:
    """An inner runner that keeps what it is given."""

    def __init__(self, pool):
        self.pool = pool
        self.layout = layout_of(TorchConfig(preset="nano"), "m")
        self.blocks, self.states, self.windows, self.starts = {}, [], [], []

    def write_block(self, block, data):
        self.blocks[block] = data

    def write_state(self, seq_id, data, num_cached):
        self.states.append(data)

    def write_window(self, seq_id, boundary, data):
        self.windows.append(data)

    def open(self, start):
        self.starts.append(start)


@pytest.fixture
def faulty(tmp_path):
    inner = Recorder(Driver(network()).runner.pool)
    file = tmp_path / "fault"

    def name(fault, *blocks):
        file.write_text(json.dumps({"fault": fault, "blocks": {"r1": blocks}}))

    def runner(for_prefill):
        return FaultyRunner(inner, file, for_prefill=for_prefill)

    return inner, name, runner


def carried(num, seed):
    return np.random.default_rng(seed).integers(1, 256, num, np.uint8).tobytes()


def start(num):
    tokens = Tokens(layout_of(TorchConfig(preset="nano"), "m").geometry, array("I", prompt(num)))
    return Start(1, "r1", tokens, Sampling(), num, num, 1)


def test_without_a_fault_bytes_pass_as_they_are_and_unknown_names_are_no_fault(faulty):
    inner, name, make = faulty
    runner = make(True)
    data = carried(inner.layout.block_bytes, 1)
    runner.open(start(20))
    runner.write_block(7, data)
    name("no such thing", 0)
    runner.write_block(8, data)
    assert inner.blocks == {7: data, 8: data}
    assert runner.pool is inner.pool  # everything else is the inner runner's
    assert ModelConfig().fault_file == ""


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if fault.state])
def test_a_fault_of_the_state_changes_its_own_regions_alone(faulty, fault):
    inner, name, make = faulty
    runner = make(False)
    foreign, own = (carried(inner.layout.state_bytes, seed) for seed in (1, 2))
    runner.write_state(1, foreign, 30)
    name(fault)
    runner.write_state(2, own, 31)
    changed, at = set(), 0
    for region in inner.layout.regions:
        if inner.states[1][at : at + region.length_bytes] != own[at : at + region.length_bytes]:
            changed.add(region.name)
        at += region.length_bytes
    rings = {region.name for region in inner.layout.regions if region.name.startswith("window")}
    drafts = {region.name for region in inner.layout.regions if region.name.startswith("draft")}
    assert (
        changed
        == {
            "rings-lost": rings | drafts,
            "rings-foreign": rings | drafts,
            "encoder-rings-lost": {f"window.{n}" for n in range(4)},
            "decoder-rings-lost": {f"window.{n}" for n in range(4, 8)},
            "layer-0-ring-lost": {"window.0"},
            "one-ring-lost": {"window.6"},
            "draft-rings-lost": drafts,
            "rings-shifted": rings,
            "last-row-wrong": rings,
            "pooling-lost": {"pool.1"},
            "position-off": {"cursor"},
        }[fault]
    )


def test_a_fault_of_blocks_hits_those_named_by_their_place_in_the_prompt(faulty):
    inner, name, make = faulty
    runner = make(True)
    blocks = [carried(inner.layout.block_bytes, seed) for seed in range(3)]
    runner.open(start(20))
    runner.write_block(3, blocks[0])
    for fault in ("block-zeroed", "block-foreign", "index-zeroed", "main-decoder-zeroed"):
        name(fault, 1)
        runner.open(start(20))
        for place, data in zip((9, 5, 4), blocks, strict=True):
            runner.write_block(place, data)
        assert inner.blocks[9] == blocks[0]
        assert inner.blocks[4] == blocks[2]
        assert inner.blocks[5] != blocks[1]
        if fault == "block-foreign":
            assert inner.blocks[5] == blocks[0]
    name("blocks-reversed")
    runner.open(start(20))
    for place, data in zip((9, 5, 4), blocks, strict=True):
        runner.write_block(place, data)
    assert [inner.blocks[place] for place in (9, 5, 4)] == blocks[::-1]


def test_windows_and_the_words_before_a_hand_over_can_be_lost(faulty):
    inner, name, make = faulty
    runner = make(False)
    name("window-lost")
    runner.write_window(1, 16, carried(inner.layout.window_bytes, 1))
    assert not any(inner.windows[0])
    name("ngrams-lost")
    given = start(20)
    runner.open(given)
    seen = inner.starts[0].tokens.ids.tolist()
    assert seen == [*given.tokens.ids[:17], 2, 2, 2]
    assert given.tokens.ids.tolist() == prompt(20)  # the loop's own are as they were
