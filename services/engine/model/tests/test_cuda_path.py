"""The path of a GPU with its own kernels, run by Triton's interpreter through the same calls.

`CpuDevice(kind="cuda")` looks kernels up as a GPU does and keeps decode steps resident, so that a
step calls whatever it would call there, on tensors that a CPU can read.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels
from kernels.reference import formats
from services.engine.model.checkpoint import CheckpointReader, RandomSource, make_random_checkpoint
from services.engine.model.config import ModelConfig
from services.engine.model.device import CpuDevice
from services.engine.model.engram_store import (
    MemoryEngram,
    PackedEngram,
    engram_in_memory,
    table_name,
)
from services.engine.model.network import load_network
from services.engine.model.numerics import Numerics
from services.engine.model.parallel import InProcessGroup, Placement
from services.engine.model.presets import NANO, TINY
from services.engine.model.tests.kit import Driver, PredictableSource, network, prompt
from services.engine.model.vision import VisionTower
from services.engine.model.weights import load_model

pytestmark = pytest.mark.engine

NATIVE = Numerics(native=True, quantised_kv=True)
STORED = Numerics(quantised_kv=True)
FUSED = {
    "store_window",
    "store_block_kv",
    "hc_expand_collapse_norm",
    "engram_gather",
    "grouped_mlp_static",
    "paged_attention",
}


def gpu(kind: str = "cuda") -> CpuDevice:
    return CpuDevice(is_resident=True, kind=kind)


@pytest.fixture
def called(monkeypatch) -> set[str]:
    """Names of the kernels that were called since."""
    seen: set[str] = set()
    find = kernels.get

    def get(name: str, device: str = "cpu", impl: str | None = None):
        op = find(name, device, impl)

        def noted(*args, **options):
            if "cuda" in (device, impl) and op.__module__.startswith("kernels.triton"):
                seen.add(name)
            return op(*args, **options)

        return noted

    monkeypatch.setattr(kernels, "get", get)
    return seen


NEWEST = 19  # position of the step; both ratios complete an entry there


def stepped(config: ModelConfig, numerics: Numerics, kind: str):
    """One decode step behind a prompt of the references; returns its token and what it stored."""
    source = PredictableSource(config, 1)
    donor = Driver(load_network(config, source, numerics, device=gpu("reference")), num_blocks=20)
    ids = prompt(NEWEST)
    first = donor.start(1, ids)
    net = load_network(config, source, numerics, device=gpu(kind))
    taker = Driver(net, max_seqs=1, num_blocks=20)
    taker.open(1, [*ids, first])
    for block, held in zip(taker.tables[1], donor.tables[1], strict=False):
        taker.runner.write_block(block, donor.runner.read_block(held))
    taker.runner.write_state(1, donor.runner.read_state(1), len(ids))
    taker.cached[1] = len(ids)
    said = taker.decode(1, 1, drafts=0)
    return said, stored(taker), net


def stored(driver: Driver) -> torch.Tensor:
    """Values of the newest position in every ring and in the entries of every source."""
    states, pool, rows = driver.runner.states, driver.runner.pool, []
    for ring in states.rings:
        rows.append(ring.gather(torch.tensor([states.ring_slots + NEWEST % states.ring_slots])))
    size = driver.geometry.block_tokens
    block = driver.tables[1][NEWEST // size]
    for layer, source in pool.sources.items():
        slot = torch.tensor([block * source.entries + NEWEST % size // source.ratio])
        rows += [pool.main[layer].gather(slot), pool.index[layer].gather(slot)]
    assert all(row.abs().max() > 0 for row in rows)
    return torch.cat(rows, 1)


@pytest.mark.parametrize(
    ("config", "numerics", "most"),
    [(TINY, NATIVE, 0.1), (NANO, STORED, 0.03)],
    ids=["native", "f32"],
)
def test_a_step_calls_every_kernel_and_stores_what_the_references_store(
    called, config, numerics, most
):
    expected, values, _ = stepped(config, numerics, "reference")
    assert not called
    said, own, net = stepped(config, numerics, "cuda")
    assert called >= (FUSED if numerics.native else FUSED - {"engram_gather"})
    assert said == expected
    # Sums in another order round elsewhere now and then: a code may be the next one.
    assert float((own - values).norm() / values.norm()) < most
    assert isinstance(net.engram, PackedEngram if numerics.native else MemoryEngram)
    parts = {len(part) for part in net.experts.shards[0].weights.values()}
    assert parts == ({4} if numerics.native else {2})


def test_experts_stay_packed_and_their_products_are_those_of_expanded_ones():
    source = RandomSource(TINY, 1)
    expanded = load_model(TINY, source, CpuDevice(), NATIVE).experts["layers.2"][1]([3, 0])
    packed = load_model(TINY, source, gpu(), NATIVE).experts["layers.2"][1]([3, 0])
    assert [part.dtype for part in packed] == [torch.uint8] * 4
    for at, whole in enumerate(expanded):
        assert torch.equal(formats.dequant_fp4_index(*packed[2 * at : 2 * at + 2]), whole)
    held = sum(part.numel() * part.element_size() for part in packed)
    assert held == sum(whole.numel() for whole in expanded) * 17 / 32
    x = torch.randn(5, TINY.text.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 3], [1, 4], [2, 3], [0, 1], [5, 7]])
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    answers = [
        InProcessGroup(load_model(TINY, source, device, NATIVE), NATIVE, ranks).routed(
            "layers.2", x, ids, weights
        )
        for device in (CpuDevice(is_resident=True), gpu("reference"), gpu("cuda"))
        for ranks in (1, 2)
    ]
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], atol=2e-5, rtol=2e-5)


def test_packed_experts_move_whole():
    """Values and scales go together, over ranks and into replicas."""
    net = load_model(TINY, RandomSource(TINY, 1), gpu("reference"), NATIVE)
    group = InProcessGroup(net, NATIVE, 2, extra=2)
    old = group.placements["layers.3"]
    new = Placement(tuple(reversed(old.logical)), old.num_experts, old.num_ranks)
    group.move("layers.3", new)
    for rank, shard in enumerate(group.shards):
        expected = net.experts["layers.3"][1](list(new.of_rank(rank)))
        for part, whole in zip(shard.weights["layers.3"], expected, strict=True):
            assert torch.equal(part, whole)


def test_a_checkpoint_gives_experts_and_tables_as_they_are_stored(tmp_path):
    config = make_random_checkpoint(TINY, 4, tmp_path, quantised=True)
    with CheckpointReader(tmp_path, config) as source:
        layer = config.text.engram_layer_ids[0]
        stored = engram_in_memory(source, [layer], gpu())
        expanded = engram_in_memory(source, [layer], CpuDevice())
        assert isinstance(stored, PackedEngram)
        assert isinstance(expanded, MemoryEngram)
        rows = torch.tensor([[0, 7], [3, 3]])
        assert torch.equal(stored.lookup(layer, rows), expanded.lookup(layer, rows))
        before = source.bytes_read
        packed = source.packed(table_name(layer))
        assert packed is not None
        assert source.bytes_read - before == sum(part.numel() for part in packed)
        assert source.packed("layers.0.attn_norm.weight") is None
    plain = make_random_checkpoint(TINY, 4, tmp_path / "bf16", quantised=False)
    with CheckpointReader(tmp_path / "bf16", plain) as source:
        assert isinstance(engram_in_memory(source, [layer], gpu()), MemoryEngram)


class Placed(CpuDevice):
    """A device that knows what was brought to it and fetched."""

    def __init__(self) -> None:
        super().__init__(is_resident=True, kind="cuda")
        self.placed: list[torch.Size] = []

    def place(self, value: torch.Tensor) -> torch.Tensor:
        self.placed.append(value.shape)
        return super().place(value)


def test_the_vision_tower_is_placed_and_computes_there(called):
    config: ModelConfig = TINY
    image = np.random.default_rng(1).integers(0, 256, (42, 84, 3), np.uint8)
    source = RandomSource(config, 1)
    expected = VisionTower(config, source).encode([image])[0]
    device = Placed()
    tower = VisionTower(config, source, device=device)
    names = [name for name in source._specs if name.startswith(("vision.", "aligner.", "image_"))]
    assert len(device.placed) == len(names)
    found = tower.encode([image])[0]
    assert device.num_waits == 1
    assert "rms_norm" in called
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_the_cpu_keeps_its_own_form():
    net = network(TINY, Numerics(native=True, quantised_kv=True, invariant=True))
    assert {len(part) for part in net.experts.shards[0].weights.values()} == {2}
