"""The index that asks primaries: the search, pure; and over nodes, in three round trips."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.service import running
from services.kvstore.check import main as check_main
from services.kvstore.check.gallop import search
from services.kvstore.check.sharded import ShardedIndex
from services.kvstore.client import CheckClient
from services.kvstore.config import CheckConfig
from services.kvstore.formats import TtlClass
from services.kvstore.hit_policy import EndedBy
from services.kvstore.tests.cluster_kit import cluster, leader_of
from services.kvstore.tests.kit import blocks_of, match_request, token_ids


def run(stored: set[int], num_keys: int, hint: int = 0, has_time=lambda: True):
    """Returns (count, positions asked per round trip)."""
    steps = search(num_keys, hint, has_time)
    rounds = []
    try:
        wanted = next(steps)
        while True:
            rounds.append(wanted)
            wanted = steps.send([at in stored for at in wanted])
    except StopIteration as done:
        return done.value, rounds


def test_t_match_a_hole_ends_the_prefix_in_sharded_mode_too() -> None:
    stored = {0, 1, 2, 3, 4, 6}  # blocks 1 to 5 and 7
    for num_keys in (6, 7, 8, 100):
        for hint in (0, 3, 5, 7, 50):
            assert run(stored, num_keys, hint)[0] == 5, (num_keys, hint)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_a_closed_prefix_is_found_in_three_round_trips_whatever_the_hint(
    num_keys: int, num_stored: int, hint: int
) -> None:
    count, rounds = run(set(range(num_stored)), num_keys, hint)
    assert count == min(num_stored, num_keys)
    assert len(rounds) <= 3
    asked = [at for wanted in rounds for at in wanted]
    assert len(asked) == len(set(asked)), "nothing is asked twice"


@settings(deadline=None)
@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(0, 60))
def test_with_holes_no_answer_is_longer_than_what_is_stored(stored, num_keys, hint) -> None:
    right = next(at for at in range(num_keys + 1) if at == num_keys or at not in stored)
    assert run(stored, num_keys, hint)[0] <= right


def test_without_time_the_middle_is_taken_on_trust() -> None:
    count, rounds = run(set(range(6000)), 8190, hint=6000, has_time=lambda: False)
    assert (count, len(rounds)) == (6000, 1)
    assert len(rounds[0]) < 20


def test_t_match_1m_is_found_by_its_hint_in_one_small_round() -> None:
    count, rounds = run(set(range(8190)), 8190, hint=8190, has_time=lambda: False)
    assert count * 128 == 1_048_320
    assert [len(wanted) for wanted in rounds] == [14]


async def test_over_nodes_a_match_asks_each_primary_at_most_three_times(tmp_path) -> None:
    async with cluster(tmp_path, num_nodes=3, profile="2+1") as c:
        blocks = await c.put(1, 128 * 20)
        keys = b"".join(block.key for block in blocks)
        index = ShardedIndex(c.view, c.blocks._links, timeout_s=30, budget_s=30)
        unknown = random.Random(1).randbytes(32 * 20)
        for hint in (0, 5, 20, 40):
            index.num_round_trips = 0
            assert await index.find(keys + unknown, hint) == (20, EndedBy.ABSENT)
            assert index.num_round_trips <= 3
        # One is evicted in the middle: the prefix ends there, in this mode as in the other.
        await leader_of_key(c, blocks[7].key).evict([blocks[7].key[:16]], "test")
        assert await index.find(keys, 20) == (7, EndedBy.ABSENT)
        # A primary that is away makes its blocks look absent, and the answer says so.
        gone = sorted(c.view.pgmap.nodes)[0]
        index._links = Missing(c.blocks._links, gone)
        count, why = await index.find(keys[: 7 * 32], 7)
        assert count < 7
        assert why is EndedBy.LAGGING


def leader_of_key(c, key: bytes):
    """The leader of a key's group."""
    return next(leader for leader in map(leader_of, c.runtimes.values()) if leader.leads(key))


class Missing:
    """Links without one node."""

    def __init__(self, links, gone: str) -> None:
        self._links = links
        self._gone = gone

    def get(self, node: str):
        return None if node == self._gone else self._links.get(node)


def test_a_hit_is_told_once_an_epoch_and_for_a_higher_class() -> None:
    index = ShardedIndex(None, None)  # type: ignore[arg-type]
    keys = bytes(64)
    assert index.needs_touch(keys, TtlClass.AGENT, 600)
    assert not index.needs_touch(keys, TtlClass.AGENT, 700)
    assert index.needs_touch(keys, TtlClass.CHAT, 700)
    assert not index.needs_touch(keys, TtlClass.AGENT, 1100)
    assert index.needs_touch(keys, TtlClass.AGENT, 1200)
    assert not index.needs_touch(b"", TtlClass.AGENT, 1200)


@pytest.mark.parametrize("num_keys", [0, 1, 2])
def test_short_prompts(num_keys: int) -> None:
    assert run(set(range(num_keys)), num_keys)[0] == num_keys
    assert run(set(), num_keys)[0] == 0


async def test_check_in_sharded_mode_hits_what_nodes_have_and_renews_it(tmp_path) -> None:
    async with cluster(tmp_path, num_nodes=3, profile="2+1") as c:
        config = CheckConfig(
            store=c.store_runtime.address, index="sharded", lookup_timeout_ms=30_000
        )
        async with running("check", config, check_main.build, store=c.members) as runtime:
            check = CheckClient(runtime.channels, runtime.address)
            tokens = token_ids(3, 128 * 6 + 200)
            cold = await check.match(match_request(tokens), timeout_s=60)
            assert (cold.hit.stored_tokens, cold.hit.ended_by) == (0, "absent")
            blocks = blocks_of(cold.namespace.root, tokens)
            for block in blocks:
                assert (await c.store.put(block)).is_stored
            # A commit is answered by its primary, and a match asks the same one.
            warm = await check.match(match_request(tokens), timeout_s=60)
            assert warm.hit.stored_tokens == (128 * 6 + 200 - 134) // 128 * 128
            assert warm.lag_ms == 0
