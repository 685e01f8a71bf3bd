"""Moving expert weights: the worked example, and that every plan reaches the new table."""

import random

import pytest

from services.lb.expert.moves import Kind, sender_index, shuffle_plan


@pytest.mark.parametrize(
    ("senders", "receivers", "expected"),
    [(2, 5, [0, 0, 1, 1, 0]), (3, 7, [0, 0, 1, 1, 2, 2, 0]), (3, 2, [0, 1])],
)
def test_receivers_are_spread_over_senders(senders, receivers, expected):
    assert [sender_index(j, receivers, senders) for j in range(receivers)] == expected


def test_the_example_with_four_ranks():
    old = [[0, 1], [2, 3], [4, 5], [0, 1]]
    new = [[0, 5], [1, 3], [2, 0], [4, 0]]
    plan = [(m.rank, m.slot, m.kind, m.source_rank, m.source_slot) for m in shuffle_plan(old, new)]
    assert plan == [
        (0, 0, Kind.KEEP, 0, 0),
        (0, 1, Kind.REMOTE, 2, 1),
        (1, 0, Kind.REMOTE, 0, 1),
        (1, 1, Kind.KEEP, 1, 1),
        (2, 0, Kind.REMOTE, 1, 0),
        (2, 1, Kind.REMOTE, 0, 0),
        (3, 0, Kind.REMOTE, 2, 0),
        (3, 1, Kind.LOCAL, 3, 0),
    ]


def apply(old, plan):
    """Executes a plan on the old contents, as the executor must: reads see old, staged waits."""
    new = [list(experts) for experts in old]
    for staged in (False, True):
        for move in plan:
            if move.from_staged is staged:
                source = new if staged else old
                new[move.rank][move.slot] = source[move.source_rank][move.source_slot]
    return new


@pytest.mark.parametrize("seed", range(40))
def test_t14_a_plan_reaches_the_new_table_and_fetches_each_expert_once(seed):
    rng = random.Random(seed)
    ranks, slots = rng.randint(1, 6), rng.randint(1, 6)
    experts = list(range(rng.randint(1, ranks * slots)))

    def table():
        flat = experts + [rng.choice(experts) for _ in range(ranks * slots - len(experts))]
        rng.shuffle(flat)
        return [flat[r * slots : (r + 1) * slots] for r in range(ranks)]

    old, new = table(), table()
    plan = shuffle_plan(old, new)
    assert apply(old, plan) == new
    remote = [(m.rank, m.expert) for m in plan if m.kind is Kind.REMOTE]
    assert len(remote) == len(set(remote))
    assert all(expert not in old[rank] for rank, expert in remote)


def test_an_expert_that_sits_nowhere_is_an_error():
    with pytest.raises(ValueError, match="expert 7"):
        shuffle_plan([[0, 1]], [[0, 7]])
