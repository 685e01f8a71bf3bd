"""Rank choice: the worked example and what must hold for any load."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.lb.decode import policy
from services.lb.decode.policy import RankLoad


def test_t_dec_1_five_requests_over_four_ranks():
    ranks = [
        RankLoad("d0", 90_000, 10, 110_000, 100),
        RankLoad("d1", 60_000, 14, 140_000, 100),
        RankLoad("d2", 80_000, 6, 120_000, 100),
        RankLoad("d3", 50_000, 9, 150_000, 100),
    ]
    lengths = [2_000, 40_000, 3_000, 60_000, 1_000]
    assert policy.level_of(lengths, ranks) == 101_325
    placements = policy.place(lengths, ranks)
    assert [p.rank_id for p in placements] == ["d2", "d3", "d2", "d1", "d2"]
    table = {rank.rank_id: rank for rank in ranks}
    for placement in placements:
        rank = table[placement.rank_id]
        table[placement.rank_id] = policy.with_request(rank, lengths[placement.index])
    assert [(r.num_kv_tokens, r.num_requests) for r in table.values()] == [
        (90_000, 10),
        (120_000, 15),
        (86_000, 9),
        (90_000, 10),
    ]


def test_full_ranks_are_never_picked():
    ranks = [RankLoad("d0", 0, 0, 99, 4), RankLoad("d1", 0, 4, 10_000, 4)]
    assert policy.pick_rank(ranks, 100, 1e9) is None


def test_a_draining_rank_is_never_picked():
    ranks = [RankLoad("d0", 0, 0, 1_000, 4, accepting=False)]
    assert policy.pick_rank(ranks, 100, 1e9) is None


def test_the_queue_stops_at_the_first_request_that_fits_nowhere():
    ranks = [RankLoad("d0", 0, 0, 1_000, 9)]
    assert policy.place([600, 500, 100], ranks) == [policy.Placement(0, "d0")]


def test_no_ranks_place_nothing():
    assert policy.place([10], []) == []


def slow_pick_rank(ranks, num_tokens, level):
    """Section 13, word by word."""
    fit = [
        rank
        for rank in ranks
        if rank.accepting
        and rank.num_free_tokens >= num_tokens
        and rank.num_requests < rank.max_requests
    ]
    low = [rank for rank in fit if rank.num_kv_tokens + num_tokens <= level]
    if low:
        return min(low, key=lambda r: (r.num_requests, -r.num_kv_tokens, r.rank_id))
    return min(fit, key=lambda r: (r.num_kv_tokens, r.num_requests, r.rank_id), default=None)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 6), st.booleans()),
        max_size=10,
    ),
    st.integers(1, 4),
    st.integers(0, 8),
)
def test_the_fast_choice_equals_the_slow_one(loads, num_tokens, level):
    ranks = [
        RankLoad(f"d{i}", tokens, requests, free, 3, accepting)
        for i, (tokens, requests, free, accepting) in enumerate(loads)
    ]
    picked = policy.pick_rank(ranks, num_tokens, level)
    assert picked == slow_pick_rank(ranks, num_tokens, level)


RANKS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 10**6)),
    min_size=1,
    max_size=12,
).map(
    lambda loads: [
        RankLoad(f"d{i:02}", tokens, requests, free, 64)
        for i, (tokens, requests, free) in enumerate(loads)
    ]
)
LENGTHS = st.lists(st.integers(1, 200_000), max_size=30)


@settings(max_examples=300, deadline=None)
@given(RANKS, LENGTHS)
def test_placements_never_exceed_memory_nor_the_request_limit(ranks, lengths):
    table = {rank.rank_id: rank for rank in ranks}
    placements = policy.place(lengths, ranks)
    assert [p.index for p in placements] == list(range(len(placements)))
    for placement in placements:
        rank = policy.with_request(table[placement.rank_id], lengths[placement.index])
        assert rank.num_free_tokens >= 0
        assert rank.num_requests <= rank.max_requests
        table[placement.rank_id] = rank


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 50)), min_size=1, max_size=12), LENGTHS
)
def test_the_longest_rank_stays_bounded_when_memory_is_plenty(loads, lengths):
    ranks = [RankLoad(f"d{i:02}", t, n, 10**9, 10**9) for i, (t, n) in enumerate(loads)]
    level = policy.level_of(lengths, ranks)
    before = max(rank.num_kv_tokens for rank in ranks)
    table = {rank.rank_id: rank for rank in ranks}
    bound = max(level, before)
    for placement in policy.place(lengths, ranks):
        length = lengths[placement.index]
        least = min(rank.num_kv_tokens for rank in table.values())
        rank = policy.with_request(table[placement.rank_id], length)
        table[placement.rank_id] = rank
        bound = max(bound, max(lengths) + least)
        assert rank.num_kv_tokens <= bound


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), st.integers(1, 100), st.integers(1, 10_000))
def test_requests_of_equal_length_spread_evenly(num_ranks, num_requests, length):
    ranks = [RankLoad(f"d{i:02}", 0, 0, 10**9, 10**9) for i in range(num_ranks)]
    counts = dict.fromkeys((rank.rank_id for rank in ranks), 0)
    for placement in policy.place([length] * num_requests, ranks):
        counts[placement.rank_id] += 1
    assert sum(counts.values()) == num_requests
    assert max(counts.values()) - min(counts.values()) <= 1
