"""Comparing with the network alone, and the drift guard on a network of random weights."""

from __future__ import annotations

import asyncio
import itertools
from array import array

import numpy as np
import pytest

from deploy.local.plan import MODELS
from services.engine.evaluation import probes
from services.engine.evaluation.drift import Difference, Finding, compare
from services.engine.evaluation.drift_report import faults_table, modes_table
from services.engine.evaluation.guard import Blocks, conversation, replayed_turns
from services.engine.evaluation.modes import hit_end
from services.engine.evaluation.tokens import Output

BLOCK, RING, KEEP = 16, 22, 24


def ids_of(num, seed=0):
    return np.random.default_rng([3, seed]).integers(3, 2000, num).tolist()


def test_log_probabilities_count_as_far_as_the_words_agree():
    plain = Output((5, 6, 7), (-0.1, -0.2, -0.3))
    assert compare(plain, plain) == Difference(changed=False, moved=0.0)
    moved = compare(plain, Output((5, 6, 7), (-0.1, -0.25, -0.3)))
    assert not moved.changed
    assert moved.moved == pytest.approx(0.05)
    other = compare(plain, Output((5, 9, 7), (-0.1, -3.0, -4.0)))
    assert (other.changed, other.moved) == (True, 0.0)


@pytest.mark.parametrize(
    ("differences", "caught_by"),
    [
        ([Difference(True, 0.0), Difference(False, 0.0), Difference(True, 0.0)], "words"),
        (
            [Difference(True, 0.0), Difference(False, 1e-3), Difference(False, 0.0)],
            "log-probabilities",
        ),
        ([Difference(False, 1e-4), Difference(False, 0.0)], "log-probabilities"),
        ([Difference(False, 1e-6)], "no trace"),
        ([Difference(True, 0.0, error="lost")], "the engine refuses it"),
    ],
)
def test_what_shows_a_fault_is_named(differences, caught_by):
    finding = Finding("rings-lost", tuple(differences))
    assert finding.caught_by == caught_by
    assert caught_by in faults_table([finding], {"rings-lost": "all rings lost"})
    assert "rings-lost" in modes_table([finding])


def test_probes_need_old_blocks_and_leave_room_behind_the_hit():
    words: dict[str, int] = {}

    async def to_ids(text):
        return array("I", (words.setdefault(word, 3 + len(words)) for word in text.split()))

    async def prompt_of(body):
        parts = [f"<{m['role']}> {m['content'].rstrip('.?')}" for m in body["messages"]]
        return await to_ids(" ".join(parts))

    made = asyncio.run(probes.build(2, BLOCK, RING, prompt_of, to_ids))
    assert len(made) >= 4
    for probe in made:
        assert probe.position == hit_end(len(probe.prompt), BLOCK, RING)
        assert len(probe.prompt) - probe.position >= KEEP
        assert max(probe.fact_blocks) < probe.position // BLOCK
    assert len({probe.fact_blocks for probe in made if probe.name.startswith("0/")}) > 1


def test_an_exact_block_takes_the_place_of_an_approximate_one_and_never_the_other_way_round():
    guarded, plain = Blocks(guarded=True), Blocks(guarded=False)
    for store in (guarded, plain):
        store.put(0, b"exact", approximate=False)
        store.put(0, b"off", approximate=True)
        store.put(1, b"off", approximate=True)
        store.put(1, b"exact", approximate=False)
        store.put(3, b"alone", approximate=False)
    assert guarded.leading(9) == [b"exact", b"exact"]
    assert plain.leading(9) == [b"exact", b"off"]
    assert (guarded.num_approximate, plain.num_approximate) == (0, 1)


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_ten_turns_of_replays_drift_less_with_the_guard():
    from services.engine.evaluation.plain import PlainRun
    from services.engine.model.settings import TorchConfig

    run = PlainRun(TorchConfig())
    whole = ids_of(200)
    prompts = [whole[: 44 + 17 * number] for number in range(10)]
    options = {"exact_turns": frozenset({4}), "block": BLOCK, "ring": RING, "max_tokens": 2}
    try:
        with_guard = replayed_turns(run, prompts, guarded=True, **options)
        without = replayed_turns(run, prompts, guarded=False, **options)
    finally:
        run.close()
    assert with_guard[0].moved == 0.0
    assert any(turn.moved > 2e-5 or turn.changed for turn in with_guard[1:5])  # replays drift
    assert with_guard[:5] == without[:5]  # nothing exact has come yet
    assert with_guard[5].num_approximate == 0
    assert all(turn.num_approximate > 0 for turn in without[5:])
    drifts = [sum(t.changed + t.moved for t in turns[5:]) for turns in (with_guard, without)]
    assert drifts[0] <= drifts[1]


def test_the_turns_of_a_guards_conversation_grow_out_of_each_other():
    prompts = conversation(MODELS / "pelagos-mini" / "tokenizer.json", num_turns=10)
    assert len(prompts) == 10
    assert all(longer[: len(prompt)] == prompt for prompt, longer in itertools.pairwise(prompts))
    assert len(prompts[-1]) > 10 * BLOCK
