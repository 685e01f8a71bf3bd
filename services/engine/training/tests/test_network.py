"""The training forward computes what the engine computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.model.checkpoint import RandomSource
from services.engine.model.presets import NANO, TINY
from services.engine.model.tests.naive import Naive
from services.engine.training.native import ops_for
from services.engine.training.network import Selection, TrainingNetwork, _index_loss
from services.engine.training.parameters import from_source

pytestmark = pytest.mark.engine


def ids_of(num: int, vocab: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, num).tolist()


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "native"])
def test_logits_are_those_of_the_slow_network(fast):
    torch.set_num_threads(1)
    source = RandomSource(NANO, 1)
    ids = ids_of(48, 240)
    slow = Naive(NANO, source).run(ids)
    ops = ops_for(NANO.text) if fast else None
    network = TrainingNetwork(NANO, from_source(NANO, source), ops)
    with torch.no_grad():
        hidden = network.forward(torch.tensor([ids, ids[::-1]]))
        logits = network.logits(hidden.x)
    wanted = torch.stack([slow.logits[t] for t in range(48)])
    np.testing.assert_allclose(logits[:48].numpy(), wanted.numpy(), atol=5e-4)


ULP = 1.2e-7


def gradients(config, ops, rows, length, free=True, moved=None):
    """The loss and its gradients; `moved` seeds a change of every parameter by an ulp at most."""
    params = from_source(config, RandomSource(config, 1))
    if moved is not None:
        dice = torch.Generator().manual_seed(moved)
        for value in params.values():
            value *= 1 + ULP * torch.randint(-1, 2, value.shape, generator=dice)
    for value in params.values():
        value.requires_grad_()
    network = TrainingNetwork(config, params, ops)
    ids = torch.tensor(ids_of(rows * length, 240)).view(rows, length)
    hidden = network.forward(ids, free=free)
    loss = torch.nn.functional.cross_entropy(network.logits(hidden.x), ids.flatten())
    (loss + hidden.index_loss).backward()
    return float(loss.detach()), {name: p.grad for name, p in params.items() if p.grad is not None}


@pytest.mark.parametrize("config", [NANO, TINY], ids=["nano", "tiny"])
def test_the_fast_operations_have_the_gradients_of_the_plain_ones(config):
    torch.set_num_threads(1)
    plain_loss, plain = gradients(config, None, 2, 96)
    loss, found = gradients(config, ops_for(config.text), 2, 96)
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    assert found.keys() == plain.keys()
    # Some gradients move by thousandths when the parameters move by an ulp, most by millionths:
    # each is held to what its own condition allows.
    others = [gradients(config, None, 2, 96, moved=seed)[1] for seed in range(3)]
    for name, wanted in plain.items():
        size = max(float(wanted.abs().max()), 1e-5)
        spread = max(float((other[name] - wanted).abs().max()) / size for other in others)
        np.testing.assert_allclose(
            found[name] / size, wanted / size, atol=3e-4 + 10 * spread, err_msg=name
        )


def test_the_candidate_source_learns_from_later_sources_where_they_look():
    """Entries that only the later source chose pull the candidate source's scores up."""
    near = torch.tensor([[0, 1]])
    raised = torch.tensor([[0.0, 0.0]], requires_grad=True)
    later = Selection(torch.tensor([[1, 7]]), torch.zeros(1, 2), lambda at: at)
    later.mass.append(torch.tensor([[0.1, 0.5]]))
    seen = []

    def score(at: torch.Tensor) -> torch.Tensor:
        seen.append(at)
        return raised

    first = Selection(near, torch.zeros(1, 2), score, [torch.tensor([[0.3, 0.1]])], [later])
    loss = _index_loss(first)
    loss.backward()
    assert seen[0].tolist() == [[-1, 7]]  # entry 1 is the source's own choice already
    # The target is .3, .2 and .5 of a mass of 1; three equal scores say a third each.
    np.testing.assert_allclose(raised.grad, [[0.0, 1 / 3 - 0.5]], atol=1e-6)


def test_a_picture_takes_other_experts_no_memory_and_its_own_embeddings():
    torch.set_num_threads(1)
    source = RandomSource(NANO, 1)
    ids, flags = ids_of(24, 240), [5 <= t < 14 for t in range(24)]
    ids[5:14] = [NANO.image_token_id] * 9
    drawn = np.random.default_rng(4).standard_normal((9, 64), np.float32)
    pictures = torch.from_numpy(drawn).requires_grad_()
    rows = {5 + i: pictures[i].detach() for i in range(9)}
    slow = Naive(NANO, source).run(ids, image=flags, embeddings=rows)
    network = TrainingNetwork(NANO, from_source(NANO, source), ops_for(NANO.text))
    hidden = network.forward(torch.tensor([ids]), torch.tensor([flags]), pictures)
    logits = network.logits(hidden.x)
    wanted = torch.stack([slow.logits[t] for t in range(24)])
    np.testing.assert_allclose(logits.detach(), wanted, atol=5e-4)
    logits[-1].square().sum().backward()
    assert (pictures.grad.abs().sum(1) > 0).all()


def test_the_fast_operations_leave_small_numbers_to_everybody_else():
    ops_for(NANO.text)
    smallest = torch.tensor([2.0**-127])
    assert float(smallest * 1.0) == 2.0**-127
