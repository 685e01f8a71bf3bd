"""The network through real prefill and decode servers: tokens are those of the runner alone.

Source: engine.md, sections 1.8, 1.9 and 10 (T6 to T8, T12); model.md, section 21.4.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from services.engine.config import ModelConfig
from services.engine.keys import chain
from services.engine.model.serve import network_of
from services.engine.model.settings import TorchConfig
from services.engine.model.tests.kit import Driver
from tests.integration.engine_kit import (
    ROOT,
    Cluster,
    ask,
    cluster,
    eventually,
    nothing_held,
    spec,
)
from tests.integration.test_engines_cache import stored_prompt, with_hit

pytestmark = pytest.mark.engine

OFF = TorchConfig(truncation="off")
# Blocks of 4 KiB, as the store of the cluster takes them.
PACKED = TorchConfig(numerics="quantised-kv")
GREEDY = {"temperature": 0.0, "stop_token_ids": []}


def both(torch: TorchConfig) -> dict:
    """Settings of prefill and decode that run this network."""
    model = ModelConfig(engine="torch", torch=torch, max_model_len=2048)
    return {"prefill": {"model": model, "num_blocks": 2000}, "decode": {"model": model}}


def ids_of(num: int, seed: int = 0) -> array[int]:
    return array("I", np.random.default_rng([5, seed]).integers(3, 2000, num).tolist())


def alone(
    torch: TorchConfig, prompts: Sequence[Sequence[int]], count: int, **sampling
) -> list[list[int]]:
    """Runs prompts on a runner without any service, in one batch; returns their answers."""
    driver = Driver(
        network_of(torch), num_blocks=4000, truncation=torch.truncation, verify_mode=torch.verify
    )
    seqs = list(range(1, len(prompts) + 1))
    for seq, ids in zip(seqs, prompts, strict=True):
        driver.open(seq, ids, **sampling)
    rows = [driver.row(seq, 0, len(ids)) for seq, ids in zip(seqs, prompts, strict=True)]
    driver.prefill(*rows)
    left = seqs
    while left:
        driver.step(left, drafts=0)
        left = [s for s in left if len(driver.tokens[s]) - len(prompts[s - 1]) < count]
    return [list(driver.tokens[s].ids[len(prompts[s - 1]) :])[:count] for s in seqs]


async def ask_all(
    found: Cluster, prompts: Sequence[Sequence[int]], count: int, group: int
) -> list[list[int]]:
    requests = [
        spec(f"r{group}-{i}", array("I", ids), max_tokens=count, **GREEDY)
        for i, ids in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(ask(found, request) for request in requests))
    assert {answer.end for answer in answers} == {"finished"}
    return [answer.token_ids for answer in answers]


@pytest.mark.timeout(400)
async def test_200_prompts_through_prefill_and_decode_give_the_tokens_of_the_runner_alone(tmp_path):
    lengths = np.random.default_rng(1).integers(1, 90, 200).tolist()
    prompts = [ids_of(num, seed) for seed, num in enumerate(lengths)]
    async with cluster(tmp_path, **both(OFF)) as found:
        said = []
        for first in range(0, 200, 50):
            said += await ask_all(found, prompts[first : first + 50], 6, first)
        await nothing_held(found)
    expected = []
    for first in range(0, 200, 50):
        expected += await asyncio.to_thread(alone, OFF, prompts[first : first + 50], 6)
    assert said == expected
    assert len({tuple(answer) for answer in said}) > 150


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "count"), [(1, 200), (2, 50)], ids=["ep1-200", "ep2-50"])
async def test_prompts_from_a_warm_cache_give_the_tokens_of_the_runner_that_stored_nothing(
    tmp_path, ranks, count
):
    """Blocks from the store, windows from the pool, experts on one rank and on two.

    What is sent through the decoder half begins at the same place in both runs: a hit that ends
    less than `keep_tokens` before the end cuts it elsewhere (engine.md, 1.9).
    """
    torch, geometry = TorchConfig(expert_ranks=ranks), TorchConfig().geometry
    block, ring = geometry.block_tokens, geometry.ring
    fitting = [n for n in range(40, 100) if (n - ring) % block >= geometry.keep_tokens - ring]
    lengths = np.random.default_rng(ranks).choice(fitting, count).tolist()
    prompts = [ids_of(num, 1000 + seed) for seed, num in enumerate(lengths)]
    hits = [(num - ring) // block * block for num in lengths]
    groups = [range(first, min(first + 50, count)) for first in range(0, count, 50)]
    options = both(torch)
    options["prefill"] |= {"load_base_s": 100.0, "load_cap_s": 100.0}
    async with cluster(tmp_path, with_store=True, payload_bytes=1 << 14, **options) as found:
        core = found.prefills[0].core
        for group in groups:
            # A prefix is run whose last block boundary is where the hit is to end.
            primes = [
                spec(f"p{i}", prompts[i][: hits[i] + 1], max_tokens=1, **GREEDY) for i in group
            ]
            await asyncio.gather(*(ask(found, prime) for prime in primes))
        stored = sum(hits) // block
        await eventually(lambda: core.persister.counts.persisted >= stored, "blocks in the store")
        places = {key.key16: at for key, at in core._keep_window.__self__.pool.locations()}
        said: dict[int, list[int]] = {}
        for tries in range(5):
            # Where leases lapse, as on a starved machine, a hit comes to nothing: asked again.
            for group in groups:
                left = [i for i in group if i not in said]
                requests = []
                for i in left:
                    request = spec(f"w{tries}-{i}", prompts[i], max_tokens=6, **GREEDY)
                    keys = chain(ROOT, request.prompt_tokens, block)
                    place = places[keys[hits[i] // block - 1][:16]]
                    requests.append(with_hit(request, hits[i], found, _location(place)))
                answers = await asyncio.gather(*(ask(found, request) for request in requests))
                for i, answer in zip(left, answers, strict=True):
                    usage = answer.event.finished.usage
                    if (usage.cached_tokens, usage.replayed_tokens) == (hits[i], 0):
                        said[i] = answer.token_ids
        await nothing_held(found)
    expected = []
    for group in groups:
        chunk = [prompts[i] for i in group]
        expected += await asyncio.to_thread(alone, TorchConfig(), chunk, 6)
    assert [said.get(i) for i in range(count)] == expected


@pytest.mark.timeout(400)
async def test_a_warm_cache_gives_the_tokens_of_the_runner_on_the_same_start(tmp_path):
    torch = PACKED
    ids = ids_of(100, 3)
    async with cluster(tmp_path, with_store=True, **both(torch)) as found:
        first = await stored_prompt(found, ids, max_tokens=30, **GREEDY)
        turn = ids[:]
        turn.extend(first.token_ids)
        turn.extend(ids_of(40, 4))
        stored = (100 + 29) // 16 * 16
        request = with_hit(spec("again", turn, max_tokens=12, **GREEDY), stored, found)
        again = await ask(found, request)
        usage = again.event.finished.usage
        # No window is known: the last block is replayed over bounded windows.
        assert (usage.cached_tokens, usage.replayed_tokens) == (stored - 16, 16)
    by_hand = await asyncio.to_thread(replayed_by_hand, torch, ids, turn, stored)
    assert (first.token_ids, again.token_ids) == by_hand


def replayed_by_hand(
    torch: TorchConfig, ids: array[int], turn: array[int], stored: int
) -> tuple[list[int], list[int]]:
    """A cold run gives the blocks; the second starts one block below the hit."""
    net = network_of(torch)
    cold = Driver(net, num_blocks=200)
    first = cold.generate(ids, 30)
    warm = Driver(net, num_blocks=200)
    warm.open(1, turn)
    for block, data in zip(warm.tables[1], cold.blocks(1, stored), strict=False):
        warm.runner.write_block(block, data)
    row = warm.row(1, stored - 16, len(turn), valid_start=stored - 16, write_from=stored)
    return first, [warm.prefill(row)[1], *warm.decode(1, 11)]


@pytest.mark.timeout(400)
async def test_a_stored_window_makes_a_warm_run_equal_to_a_cold_one(tmp_path):
    torch = PACKED
    ids = ids_of(75, 5)
    async with cluster(tmp_path, with_store=True, **both(torch)) as found:
        await stored_prompt(found, ids, max_tokens=8, **GREEDY)
        pool = found.prefills[0].core._keep_window.__self__.pool
        (location,) = [place for _, place in pool.locations() if place.position == 64]
        longer = ids[:]
        longer.extend(ids_of(30, 6))
        swa = _location(location)
        request = with_hit(spec("longer", longer, max_tokens=12, **GREEDY), 64, found, swa)
        again = await ask(found, request)
        usage = again.event.finished.usage
        assert (usage.cached_tokens, usage.replayed_tokens) == (64, 0)
        cold = await ask(found, spec("cold", longer, max_tokens=12, **GREEDY))
        assert cold.event.finished.usage.cached_tokens == 0
    assert again.token_ids == cold.token_ids
    assert await asyncio.to_thread(alone, torch, [longer], 12) == [cold.token_ids]


def _location(place):
    from pelagos.engine.v1 import records_pb2 as pb

    return pb.SwaLocation(
        position=place.position,
        host_instance_id=place.host,
        address=place.address,
        slot=place.slot,
        length_bytes=place.num_bytes,
        digest=place.digest,
        host_epoch=place.host_epoch,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "changes",
    [{"async_steps": False}, {"dspark": "none"}, {"dspark": "fixed"}],
    ids=["sync", "plain", "fixed"],
)
async def test_t12_seeded_output_is_the_same_however_decode_steps(tmp_path, changes):
    torch = TorchConfig(expert_ranks=2, extra_experts=2)
    ids = ids_of(50, 7)
    options = both(torch)
    options["decode"] |= changes
    sampling = {"temperature": 0.8, "seed": 3, "stop_token_ids": []}
    async with cluster(tmp_path, **options) as found:
        answer = await ask(found, spec("r", ids, max_tokens=14, **sampling))
        await nothing_held(found)
    expected = await asyncio.to_thread(alone, torch, [ids], 14, temperature=0.8, seed=3)
    assert [answer.token_ids] == expected
