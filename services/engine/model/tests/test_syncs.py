"""A decode step waits for its device once, for its result; nothing else in it would wait.

Source: engine.md, section 2.2. Runs on a CPU: the counter sees what would make a GPU's host wait,
and fake tensors of a GPU refuse whatever needs a value on the host or mixes the two memories.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.reference import formats
from services.engine.model.cache import geometry, pool_slots
from services.engine.model.checkpoint import RandomSource
from services.engine.model.device import CpuDevice, Graphs, SyncCounter, size_for, step_sizes
from services.engine.model.names import stored
from services.engine.model.network import load_network
from services.engine.model.numerics import Numerics
from services.engine.model.presets import NANO, TINY
from services.engine.model.tests.kit import INVARIANT, Driver, network, prompt
from services.engine.model.worker import Worker
from services.engine.runner import DecodeBatch, DecodeRow

pytestmark = pytest.mark.engine

SAMPLED = {"temperature": 0.9, "seed": 5, "top_p": 0.9}


def test_the_counter_sees_reads_copies_and_shapes_that_depend_on_values():
    x, at = torch.ones(4), torch.tensor(1)
    waits = {
        "item": lambda: x[0].item(),
        "tolist": x.tolist,
        "cpu": x.cpu,
        "numpy": x.numpy,
        "__bool__": lambda: bool(x[0] > 0),
        "__float__": lambda: float(x[0]),
        "__index__": lambda: [1, 2, 3][at],
        "to": lambda: x.to("cpu"),
        "tensor": lambda: torch.tensor([1, 2]),
        "from_numpy": lambda: torch.from_numpy(np.zeros(2)),
        "aten.nonzero": lambda: x.nonzero(),
        "aten.index by mask": lambda: x[x > 0],
        "aten._unique2": lambda: x.unique(),
        "aten.bincount": lambda: torch.bincount(at[None]),
        "aten.repeat_interleave": lambda: x.repeat_interleave(torch.ones(4).long()),
    }
    for kind, wait in waits.items():
        with SyncCounter() as found:
            wait()
        assert found.kinds[kind] == 1, (kind, found.kinds)
        assert "test_syncs.py" in found.places[0]
    with SyncCounter() as found:
        y = torch.where(x > 0, x, 0.0)[at[None]].sort().values.cumsum(0)
        y.index_copy_(0, at[None] * 0, x[:1])
    assert not found.kinds, found.places


def watched(net, counters):
    @contextmanager
    def watch():
        with SyncCounter() as found:
            yield
        counters.append(found)

    net.device.watch = watch


@pytest.mark.parametrize(
    ("mode", "sampling"), [("coupled", {}), ("rejection", SAMPLED)], ids=["greedy", "sampled"]
)
def test_a_decode_step_waits_once(mode, sampling):
    device = CpuDevice(is_resident=True, kind="reference")  # ops of the CPU's own are no GPU's
    net = load_network(NANO, RandomSource(NANO, 1), Numerics(), device=device)
    driver = Driver(net, verify_mode=mode)
    for seq in (1, 2, 3):
        driver.start(seq, prompt(10 * seq, seq), **sampling, logprobs=seq == 2)
    driver.step([1, 2, 3])  # joining sends what the host knows
    counters: list[SyncCounter] = []
    watched(net, counters)
    for _ in range(2):
        before = device.num_waits
        driver.step([1, 2, 3])
        assert device.num_waits - before == 3, "the report, and two tensors of log-probabilities"
        driver.step([1, 3])
        driver.step([1, 2, 3])
    alone = device.num_waits
    driver.step([1, 3])
    assert device.num_waits - alone == 1
    assert len(counters) == 2 * 7, "each step is a forward pass and a sampling"
    # What the host sends is staged in pinned memory behind the seam; on a CPU that is from_numpy.
    hidden = [place for c in counters for place in c.places if "from_numpy: cpu.py" not in place]
    assert not hidden


def test_steps_packed_by_the_host_do_wait():
    """The counter is no rubber stamp: the CPU's own path reads values all the time."""
    net = load_network(NANO, RandomSource(NANO, 1), INVARIANT, device=CpuDevice())
    driver = Driver(net)
    driver.start(1, prompt(20))
    counters: list[SyncCounter] = []
    watched(net, counters)
    driver.step([1])
    assert sum(sum(counter.kinds.values()) for counter in counters) > 20


class FakeCuda(CpuDevice):
    """A GPU that is not there: its tensors have shapes and a device, and no values."""

    def __init__(self) -> None:
        super().__init__(is_resident=True)
        self.torch, self.kind = torch.device("cuda"), "reference"

    def place(self, value):
        return torch.empty(value.shape, dtype=value.dtype, device=self.torch)

    def upload(self, values):
        return self.place(torch.as_tensor(values))

    def inbox(self, num_elements, dtype):
        fake = super().inbox(1, dtype)
        data = torch.zeros(num_elements, dtype=dtype, device=self.torch)
        return type(fake)(data)


@pytest.mark.parametrize(
    ("config", "numerics", "kind"),
    [
        (TINY, Numerics(native=True, quantised_kv=True), "greedy"),
        (TINY, Numerics(), "full"),
    ],
    ids=["native", "float32"],
)
def test_a_step_on_a_gpu_needs_no_value_and_mixes_no_memories(config, numerics, kind):
    """Every operator of the three bodies runs on fake tensors of a GPU."""
    from services.engine.model.cache import BlockPool, StatePool
    from services.engine.model.resident import ResidentDecode

    formats.signed_values.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=False), torch.inference_mode():
            source = _Shapes(config)
            device = FakeCuda()
            net = load_network(config, source, numerics, device=device)
            pool = BlockPool(config, numerics, 64, device.torch)
            states = StatePool(config, numerics, geometry(config).ring, device.torch)
            backbone = net.backbone(pool, states, "compact")
            head = net.draft_head(backbone, states)
            worker = Worker(device)
            steps = ResidentDecode(
                device, backbone, head, worker, {}, geometry(config), states, coupled=False
            )
            if kind != "greedy":
                shape = (steps.board.capacity, 5, config.text.vocab_size)
                steps._proposals = torch.zeros(shape, device=device.torch)
            steps.board._tables[64] = device.inbox(65 * 64, torch.int32)
            steps._forward_body(32, 64)
            steps._verify_body(32, kind, True)
            steps._draft_body(16, kind)
            assert steps.board.report.device.type == "cuda"
            assert pool_slots(config.text)
            worker.shut_down()
    finally:
        formats.signed_values.cache_clear()


class _Shapes(RandomSource):
    def matrix(self, name):
        return torch.empty(self._specs[name].shape)

    def packed(self, name):
        spec, quantised = self._specs[name], self.config.quantization is not None
        parts = [held.shape for held in stored(name, spec, quantised=quantised).values()]
        return (
            tuple(torch.empty(shape, dtype=torch.uint8) for shape in parts) if parts[1:] else None
        )


def test_sizes_are_powers_then_multiples_then_the_most_rows():
    assert step_sizes(6, 5) == (1, 2, 4, 8, 16, 24, 32, 36)
    assert step_sizes(1, 5) == (1, 2, 4, 6)
    assert step_sizes(6, 5, multiple=16) == (16, 32, 48)
    assert step_sizes(64, 5)[-3:] == (368, 376, 384)
    assert [size_for((1, 2, 4), n) for n in (1, 3, 4, 5)] == [1, 4, 4, None]


def test_a_body_is_captured_once_per_key_and_never_above_the_largest():
    device, ran = CpuDevice(), []
    graphs: Graphs[None] = Graphs(device, max_graphs=2)
    for key in ("a", "b", "a", None, "c", "b"):
        graphs.run(key, lambda key=key: ran.append(key))
    assert (device.num_captures, graphs.num_replays, graphs.num_eager) == (4, 5, 1)
    assert len(graphs) == 2, "the one used longest ago was let go, and captured again"
    graphs.forget()
    assert len(graphs) == 0


def test_a_step_is_captured_per_size_and_eager_above_the_largest():
    net = network(NANO, Numerics(), resident=True)
    driver = Driver(net, max_seqs=8, graph_rows=16)
    for seq in range(1, 7):
        driver.start(seq, prompt(8, seq))
    steps = driver.runner._decode
    for _ in range(3):
        driver.step([1, 2])
    assert set(steps.graphs._held) == {
        ("forward", 16, 16),
        ("verify", 16, "greedy", False),
        ("draft", 2, "greedy"),
    }
    assert steps.graphs.num_eager == 0
    driver.step([1, 2, 3, 4, 5, 6])
    assert steps.graphs.num_eager == 3
    with pytest.raises(ValueError, match="lanes"):
        driver.runner.launch(
            DecodeBatch(tuple(DecodeRow(s, 0, 0, (1,), 1) for s in [1, 2, 3, 4, 5, 6] * 2), 12)
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("numerics", [INVARIANT, Numerics(native=True, quantised_kv=True)])
def test_a_gpu_decodes_in_captured_steps_without_a_hidden_wait(numerics):
    """On a real GPU its own check of synchronisations is set to fail while steps run."""
    expected = Driver(network(TINY, numerics, resident=True)).generate(prompt(60), 20)
    net = load_network(TINY, RandomSource(TINY, 1), numerics, device="cuda")
    driver = Driver(net)

    @contextmanager
    def strict():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    said = driver.generate(prompt(60), 4)
    net.device.watch = strict
    said += driver.decode(1, 16)
    assert driver.runner._decode.graphs.num_replays
    agree = sum(a == b for a, b in zip(said, expected, strict=True))
    assert agree >= 18, "another order of sums may change a token, not most"
