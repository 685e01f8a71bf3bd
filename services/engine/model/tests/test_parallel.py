"""Experts over ranks: placements, and ranks that talk over gloo. Source: model.md, 12 and 19."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from services.engine.model.exchange import DistributedGroup, ProcessGroupExchange
from services.engine.model.parallel import InProcessGroup, Placement
from services.engine.model.presets import NANO
from services.engine.model.tests.kit import EXACT, INVARIANT, network

pytestmark = pytest.mark.engine

LAYER = "layers.3"


def routing(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=rng)
    ids = torch.rand(rows, 8, generator=rng).argsort(1)[:, :2].sort(1).values
    return x, ids, torch.rand(rows, 2, generator=rng)


def test_a_placement_holds_every_expert_in_equal_ranges():
    placement = Placement.initial(8, 3, extra=2)
    assert placement.logical == (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3)
    assert [placement.of_rank(r) for r in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)]
    table, counts = placement.replicas()
    assert counts.tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
    assert table[1].tolist() == [1, 9, 1, 1, 1]
    assert table[5].tolist() == [5] * 5
    with pytest.raises(ValueError, match="without a slot"):
        Placement((0, 1, 1, 2), 4, 2)
    with pytest.raises(ValueError, match="do not split"):
        Placement((0, 1, 2), 3, 2)


@pytest.mark.parametrize("numerics", [EXACT, INVARIANT], ids=["rank order", "expert order"])
def test_ranks_in_process_sum_what_one_rank_sums(numerics):
    model = network(NANO, EXACT).model
    x, ids, weights = routing(33)
    expected = InProcessGroup(model, numerics).routed(LAYER, x, ids, weights)
    for ranks, extra in ((2, 0), (3, 1), (5, 2)):
        found = InProcessGroup(model, numerics, ranks, extra).routed(LAYER, x, ids, weights)
        if numerics.invariant:
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_over_gloo_give_the_same_and_change_their_placement_in_place(ranks):
    """Each rank has rows of its own, one has none; replicas move between two passes."""
    model = network(NANO, EXACT).model
    given = [routing(n, seed) for seed, n in enumerate((17, 0, 5)[:ranks])]
    alone = InProcessGroup(model, INVARIANT)
    expected = [alone.routed(LAYER, *own) if len(own[0]) else own[0] for own in given]
    store = dist.HashStore()
    results: dict[int, list[torch.Tensor]] = {}
    placements: dict[int, list[tuple[int, ...]]] = {}

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
        own = DistributedGroup(model, INVARIANT, ProcessGroupExchange(group, rank, ranks), extra=1)
        first = own.routed(LAYER, *given[rank])
        old = own.placements[LAYER]
        turned = old.logical[3:] + old.logical[:3]
        own.move(LAYER, Placement(turned, old.num_experts, ranks))
        placements[rank] = [old.logical, own.placements[LAYER].logical]
        results[rank] = [first, own.routed(LAYER, *given[rank])]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(ranks):
        assert placements[rank][0] != placements[rank][1]
        for found in results[rank]:
            assert torch.equal(found, expected[rank])
