"""The decode balancer as a list of events and the actions they must give."""

import random

import pytest

from services.common.errors import Reason
from services.lb.decode import balancer as dec
from services.lb.decode.balancer import BalancerConfig, DecodeBalancer, Placed, RankReport, Refused


class Bench:
    """A balancer with short forms for its events; time moves only when told."""

    def __init__(self, **config):
        self.now_s = 100.0
        self.balancer = DecodeBalancer(BalancerConfig(**config), self.now_s)
        self.versions = {}

    def on(self, event):
        return self.balancer.on_event(event, self.now_s)

    def report(
        self,
        instance_id,
        loads=((0, 0, 100_000),),
        seen=(),
        accepting=True,
        layout="",
        max_requests=64,
        boot_id=None,
    ):
        self.versions[instance_id] = self.versions.get(instance_id, 0) + 1
        ranks = tuple(
            RankReport(index, tokens, requests, free, max_requests)
            for index, (tokens, requests, free) in enumerate(loads)
        )
        boot_id = boot_id or f"{instance_id}-boot"
        return self.on(
            dec.Report(
                instance_id,
                boot_id,
                f"{instance_id}:1",
                accepting,
                ranks,
                self.versions[instance_id],
                layout,
                tuple(seen),
            )
        )

    def pick(self, key, num_tokens=1_000, wait_s=1.0, **more):
        return self.on(
            dec.Pick(key, more.pop("request_id", key), num_tokens, self.now_s + wait_s, **more)
        )

    def tick(self, seconds=0.0):
        self.now_s += seconds
        return self.on(dec.Tick())


def places(actions):
    return [(a.key, a.instance_id, a.rank) for a in actions if isinstance(a, Placed)]


def refusals(actions):
    return [(a.key, a.reason) for a in actions if isinstance(a, Refused)]


def test_a_pick_names_instance_boot_address_and_rank():
    bench = Bench()
    bench.report("d1", [(500, 1, 100_000), (0, 0, 100_000)])
    assert bench.pick("r1") == [Placed("r1", "d1", "d1-boot", "d1:1", 1)]


def test_t_dec_1_over_four_instances():
    bench = Bench()
    bench.report("d0", [(90_000, 10, 110_000)])
    bench.report("d1", [(60_000, 14, 140_000)])
    bench.report("d2", [(80_000, 6, 120_000)])
    bench.report("d3", [(50_000, 9, 150_000)])
    # Something that fits nowhere now makes the five wait, so that one tick decides them together.
    bench.pick("blocker", 160_000)
    for index, num_tokens in enumerate((2_000, 40_000, 3_000, 60_000, 1_000)):
        assert bench.pick(f"r{index + 1}", num_tokens) == []
    bench.on(dec.Cancelled("blocker"))
    placed = places(bench.tick(0.005))
    assert [instance for _, instance, _ in placed] == ["d2", "d3", "d2", "d1", "d2"]
    loads = {load.rank_id[:2]: load for load in bench.balancer.rank_loads(bench.now_s)}
    assert {k: (v.num_kv_tokens, v.num_requests) for k, v in loads.items()} == {
        "d0": (90_000, 10),
        "d1": (120_000, 15),
        "d2": (86_000, 9),
        "d3": (90_000, 10),
    }


def test_p_26_eighty_picks_in_a_burst_spread_evenly_without_any_new_report():
    bench = Bench()
    for name in ("d0", "d1", "d2", "d3"):
        bench.report(name, [(0, 0, 1_000_000)] * 2)
    counts = {}
    for index in range(80):
        bench.now_s += 0.00025
        ((_, instance_id, rank),) = places(bench.pick(f"r{index}"))
        counts[instance_id, rank] = counts.get((instance_id, rank), 0) + 1
    assert len(counts) == 8
    assert max(counts.values()) - min(counts.values()) <= 2


def test_own_placements_count_until_a_report_has_seen_them():
    bench = Bench()
    bench.report("d1", [(0, 0, 1_500)])
    assert places(bench.pick("r1")) == [("r1", "d1", 0)]
    # This report was made before r1 arrived there: r1 still takes its room.
    bench.report("d1", [(0, 0, 1_500)])
    assert bench.pick("r2") == []
    # Now it is in the figures, and not counted twice.
    assert places(bench.report("d1", [(1_000, 1, 1_500)], seen=["r1"])) == [("r2", "d1", 0)]


def test_a_pick_that_no_report_shows_is_forgotten_after_the_reservations_lease():
    bench = Bench(unseen_s=10.0)
    bench.report("d1", [(0, 0, 1_500)])
    bench.pick("r1")
    bench.pick("r2", wait_s=60)
    bench.now_s += 9.0
    assert places(bench.report("d1", [(0, 0, 1_500)])) == []
    assert places(bench.tick(1.0)) == [("r2", "d1", 0)]


def test_a_pick_is_idempotent_for_a_minute():
    bench = Bench(remember_s=60.0)
    bench.report("d1")
    (placed,) = bench.pick("r1")
    assert bench.pick("r1") == [placed]
    assert bench.balancer.counters.placed == 1
    bench.tick(60.0)
    assert bench.balancer.census()["remembered"] == 0


def test_reports_older_than_three_seconds_make_ranks_ineligible():
    bench = Bench()
    bench.report("d1")
    bench.now_s += 3.1
    assert bench.pick("r1", wait_s=0.5) == []
    assert refusals(bench.tick(0.5)) == [("r1", Reason.NO_INSTANCE)]
    bench.report("d1")
    assert places(bench.pick("r2")) == [("r2", "d1", 0)]


def test_a_draining_instance_gets_nothing_new():
    bench = Bench()
    bench.report("d1", accepting=False)
    bench.report("d2", [(90_000, 60, 1_000)])
    assert places(bench.pick("r1")) == [("r1", "d2", 0)]


def test_handoffs_go_before_the_queue():
    bench = Bench()
    bench.report("d1", [(0, 0, 100)], max_requests=64)
    bench.pick("r1", 50_000 - 49_950)
    bench.pick("r2", 100, wait_s=10)
    bench.pick("h1", 100, wait_s=10, is_handoff=True)
    bench.pick("h2", 100, wait_s=10, is_handoff=True)
    actions = bench.report("d1", [(0, 0, 200)], seen=["r1"])
    assert [key for key, _, _ in places(actions)] == ["h1", "h2"]
    actions = bench.report("d1", [(0, 0, 100)], seen=["h1", "h2"])
    assert [key for key, _, _ in places(actions)] == ["r2"]


def test_a_waiting_handoff_is_not_overtaken_by_the_queue():
    bench = Bench()
    bench.report("d1", [(900, 1, 100)])
    bench.pick("h1", 500, wait_s=10, is_handoff=True)
    assert bench.pick("r1", 50, wait_s=10) == []
    assert bench.tick(0.005) == []
    actions = bench.report("d1", [(0, 0, 1_000)])
    assert [key for key, _, _ in places(actions)] == ["h1", "r1"]


def test_the_queue_is_fifo_and_small_requests_do_not_overtake():
    bench = Bench()
    bench.report("d1", [(900, 1, 100)])
    assert bench.pick("big", 500, wait_s=10) == []
    assert bench.pick("small", 50, wait_s=10) == []
    assert bench.tick(0.005) == []
    actions = bench.report("d1", [(0, 0, 1_000)])
    assert [key for key, _, _ in places(actions)] == ["big", "small"]


def test_a_head_that_no_instance_could_take_blocks_nobody():
    bench = Bench()
    bench.report("d1", layout="x")
    assert bench.pick("other", layout_signature="y", wait_s=5) == []
    bench.pick("r1", layout_signature="x")
    assert places(bench.tick(0.005)) == [("r1", "d1", 0)]
    assert refusals(bench.tick(5.0)) == [("other", Reason.NO_INSTANCE)]


def test_when_the_head_gives_up_the_next_is_placed_at_once():
    bench = Bench()
    bench.report("d1", [(900, 1, 100)])
    bench.pick("big", 500, wait_s=1.0)
    bench.pick("small", 50, wait_s=10)
    actions = bench.tick(1.0)
    assert refusals(actions) == [("big", Reason.ENGINE_FULL)]
    assert places(actions) == [("small", "d1", 0)]


def test_a_request_that_can_never_fit_is_refused_at_once():
    bench = Bench()
    bench.report("d1", [(900, 1, 100)])
    assert refusals(bench.pick("r1", 1_001)) == [("r1", Reason.NOT_FITTING)]


def test_the_queue_is_bounded():
    bench = Bench(max_waiting_requests=3)
    keys = [f"r{i}" for i in range(4)]
    results = [refusals(bench.pick(key)) for key in keys]
    assert results == [[], [], [], [("r3", Reason.OVERLOADED)]]


def test_a_caller_that_went_away_leaves_the_queue():
    bench = Bench()
    bench.pick("r1")
    bench.on(dec.Cancelled("r1"))
    bench.on(dec.Cancelled("r1"))
    assert bench.balancer.num_waiting == 0
    assert places(bench.report("d1")) == []


def test_a_returned_pick_gives_its_room_back_and_excludes_its_instance():
    bench = Bench()
    bench.report("d1", [(0, 0, 1_000)])
    bench.report("d2", [(10, 5, 1_000)])
    assert places(bench.pick("r1", 1_000)) == [("r1", "d1", 0)]
    bench.on(dec.Returned("r1", "d1", False))
    again = bench.pick("r1/1", 1_000, request_id="r1", exclude=frozenset({"d1"}))
    assert places(again) == [("r1/1", "d2", 0)]
    assert places(bench.pick("r2", 1_000)) == [("r2", "d1", 0)]


def test_ur_48_a_worker_that_fails_every_request_gets_only_probes():
    bench = Bench()
    served = {}
    for index in range(200):
        bench.now_s += 0.05
        for name in ("d0", "d1", "d2"):
            bench.report(name, [(0, 0, 10**6)], seen=[f"r{index - 1}", f"r{index - 1}/1"])
        bench.tick()
        ((key, instance_id, _),) = places(bench.pick(f"r{index}"))
        served[instance_id] = served.get(instance_id, 0) + 1
        if instance_id == "d0":
            bench.on(dec.Returned(key, "d0", True))
            exclude = frozenset({"d0"})
            retry = bench.pick(f"{key}/1", request_id=key, exclude=exclude)
            assert places(retry)[0][1] != "d0"
    # 10 s of requests: five failures, then at most one probe after 5 s.
    assert served["d0"] <= 6
    assert sum(served.values()) - served["d0"] >= 194


def test_ur_47_returns_without_fault_never_eject():
    bench = Bench()
    for name in ("d0", "d1"):
        bench.report(name, [(0, 0, 10**6)])
    for index in range(500):
        ((key, instance_id, _),) = places(bench.pick(f"r{index}"))
        bench.on(dec.Returned(key, instance_id, False))
    assert {load.rank_id for load in bench.balancer.rank_loads(bench.now_s)} == {
        "d0/0000",
        "d1/0000",
    }
    assert len(places(bench.pick("good"))) == 1


def test_another_boot_id_means_everything_on_the_old_life_is_lost():
    bench = Bench()
    bench.report("d1", [(0, 0, 1_000)])
    bench.pick("r1", 900)
    bench.report("d1", [(0, 0, 1_000)], boot_id="second")
    assert places(bench.pick("r2", 900)) == [("r2", "d1", 0)]
    bench.on(dec.Lost("d1", "d1-boot"))
    assert bench.balancer.census()["instances"] == 1


def test_a_lost_instance_is_gone_and_its_picks_can_be_made_again():
    bench = Bench()
    bench.report("d1")
    bench.pick("r1")
    bench.on(dec.Lost("d1", "d1-boot"))
    bench.report("d2")
    assert places(bench.pick("r1")) == [("r1", "d2", 0)]


def test_a_report_that_was_overtaken_changes_nothing():
    bench = Bench()
    bench.report("d1", [(0, 0, 1_000)])
    bench.report("d1", [(900, 9, 100)])
    bench.versions["d1"] = 0
    bench.report("d1", [(0, 0, 1_000)])
    assert bench.balancer.rank_loads(bench.now_s)[0].num_free_tokens == 100


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_never_exceeded_and_every_pick_ends_once_in_a_random_life(seed):
    rng = random.Random(seed)
    bench = Bench(max_waiting_requests=50)
    names = ["d0", "d1", "d2"]
    size = 10_000
    held = {name: {} for name in names}
    unseen = {name: [] for name in names}
    ended, asked = {}, set()

    def digest(actions):
        for action in actions:
            assert action.key not in ended
            if isinstance(action, Placed):
                ended[action.key] = action.instance_id
                held[action.instance_id][action.key] = lengths[action.key]
                unseen[action.instance_id].append(action.key)
                assert sum(held[action.instance_id].values()) <= size
            else:
                ended[action.key] = "refused"

    lengths = {}
    for step in range(500):
        bench.now_s += rng.uniform(0, 0.02)
        choice = rng.random()
        if choice < 0.5:
            key = f"r{step}"
            lengths[key] = rng.choice((10, 500, 4_000))
            asked.add(key)
            digest(bench.pick(key, lengths[key], wait_s=0.3, is_handoff=rng.random() < 0.2))
        elif choice < 0.75:
            name = rng.choice(names)
            for key in [k for k in held[name] if rng.random() < 0.5 and k not in unseen[name]]:
                del held[name][key]
            tokens = sum(held[name].values())
            load = (tokens, len(held[name]), size - tokens)
            seen, unseen[name] = unseen[name], []
            digest(bench.report(name, [load], seen=seen))
        elif choice < 0.85 and any(unseen.values()):
            name = next(n for n in names if unseen[n])
            key = unseen[name].pop()
            del held[name][key]
            digest(bench.on(dec.Returned(key, name, False)))
        else:
            digest(bench.tick())
    digest(bench.tick(1.0))
    assert asked == set(ended)
    bench.tick(120.0)
    census = bench.balancer.census()
    del census["instances"]
    assert set(census.values()) == {0}
