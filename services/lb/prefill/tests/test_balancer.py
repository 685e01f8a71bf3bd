"""The prefill balancer as a list of events and the actions they must give."""

import itertools
import random

import pytest

from services.common.cost_model import CostModel
from services.common.errors import Reason
from services.lb.prefill import events as ev
from services.lb.prefill.balancer import PrefillBalancer
from services.lb.prefill.policy import Steal
from services.lb.prefill.state import BalancerConfig

NO_WAIT = {"rebuild_s": 0.0}
PLENTY_NS = 10**12
# One ns of cost per token, so that the examples can name costs directly.
FLAT = CostModel(k0_ns=0, k1_ns=1, k2_ns=0, k3_ns=0)


class Bench:
    """A balancer with short forms for its events; time moves only when told."""

    def __init__(self, cost_model=FLAT, **config):
        self.now_s = 100.0
        settings = BalancerConfig(**{**NO_WAIT, **config})
        self.balancer = PrefillBalancer(settings, self.now_s, cost_model)
        self.cost_model = cost_model

    def on(self, event):
        return self.balancer.on_event(event, self.now_s)

    def join(self, engine_id, quota_ns=PLENTY_NS, **more):
        fields = {"boot_id": f"{engine_id}-boot", "address": f"{engine_id}:1", **more}
        return self.on(
            ev.EngineJoined(
                engine_id=engine_id, quota_ns=quota_ns, cost_model=self.cost_model, **fields
            )
        )

    def submit(self, key, num_tokens=1_000, deadline_s=None, **more):
        fields = {"request_id": key, "tenant": "acme", "num_present": 0, **more}
        deadline_s = self.now_s + 600 if deadline_s is None else deadline_s
        return self.on(
            ev.Submitted(ev.Work(key=key, num_tokens=num_tokens, deadline_s=deadline_s, **fields))
        )

    def accept(self, key, engine_id):
        return self.on(ev.EngineAccepted(engine_id, f"{engine_id}-boot", key))

    def reject(self, key, engine_id, reason):
        return self.on(ev.EngineRejected(engine_id, f"{engine_id}-boot", key, reason))

    def finish(self, key, engine_id, **more):
        return self.on(ev.EngineFinished(engine_id, f"{engine_id}-boot", key, **more))

    def capacity(self, engine_id, remaining_ns=PLENTY_NS, holding=0, accepting=True):
        boot_id = f"{engine_id}-boot"
        return self.on(ev.EngineCapacity(engine_id, boot_id, remaining_ns, holding, accepting))

    def lose(self, engine_id):
        return self.on(ev.EngineLost(engine_id, f"{engine_id}-boot"))

    def tick(self, seconds=0.0):
        self.now_s += seconds
        return self.on(ev.Tick())


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def offers(actions):
    return [(action.key, action.engine_id) for action in of(actions, ev.Offer)]


def test_a_request_is_offered_accepted_and_assigned_with_its_wait():
    bench = Bench()
    waits = of(bench.submit("r1"), ev.Wait)
    assert waits == [ev.Wait("r1", 0, 0, False)]
    bench.now_s += 0.25
    assert offers(bench.join("e1")) == [("r1", "e1")]
    assert bench.accept("r1", "e1") == [ev.Assign("r1", "e1", "e1-boot", "e1:1", 250)]
    bench.finish("r1", "e1")
    bench.capacity("e1")
    held = {name: count for name, count in bench.balancer.census().items() if count}
    assert held == {"engines": 1}


def test_t_pre_2_a_dear_head_waits_for_an_empty_engine_and_blocks_the_next():
    bench = Bench(bucket_bounds=(), max_waiting_tokens=10**10)
    quota_ns, big = 600_000_000, {"max_tokens": 1 << 40}
    bench.join("A", quota_ns, outstanding_ns=500_000_000, holding=("a",), **big)
    bench.join("B", quota_ns, outstanding_ns=100_000_000, holding=("b",), **big)
    bench.join("C", quota_ns, **big)
    assert offers(bench.submit("X", num_tokens=200_000_000)) == [("X", "C")]
    assert offers(bench.submit("Y", num_tokens=700_000_000)) == []
    assert offers(bench.submit("Z", num_tokens=64_700_000)) == []
    assert offers(bench.tick(1.0)) == []
    bench.finish("a", "A")
    # A holds nothing now: it takes Y, dear as it is, and Z goes where most quota is left.
    assert offers(bench.capacity("A", quota_ns, 0)) == [("Y", "A"), ("Z", "B")]
    assert bench.balancer.counters.head_blocked_s[0] == pytest.approx(1.0)


def test_engines_pull_only_while_they_have_quota_left():
    bench = Bench()
    bench.join("e1", quota_ns=2_500)
    assert offers(bench.submit("r1")) == [("r1", "e1")]
    assert offers(bench.submit("r2")) == [("r2", "e1")]
    # 500 left: r3 is dearer, and the engine is not idle.
    assert offers(bench.submit("r3")) == []
    bench.accept("r1", "e1")
    bench.accept("r2", "e1")
    assert offers(bench.capacity("e1", remaining_ns=500, holding=2)) == []
    bench.finish("r1", "e1")
    assert offers(bench.capacity("e1", remaining_ns=1_500, holding=1)) == [("r3", "e1")]


def test_p_26_offers_in_flight_count_before_any_report_shows_them():
    bench = Bench(rebuild_s=1.0)
    for engine_id in ("e1", "e2", "e3", "e4"):
        bench.join(engine_id, quota_ns=100_000)
    for index in range(80):
        bench.submit(f"r{index}")
    counts = dict.fromkeys(("e1", "e2", "e3", "e4"), 0)
    for _, engine_id in offers(bench.tick(1.0)):
        counts[engine_id] += 1
    assert sum(counts.values()) == 80
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_capacity_report_clears_only_what_it_can_know():
    bench = Bench()
    bench.join("e1", quota_ns=3_000)
    bench.submit("r1")
    bench.submit("r2")
    bench.accept("r1", "e1")
    # r2 was not accepted when this report was made: it still weighs 1,000 here.
    bench.capacity("e1", remaining_ns=2_000, holding=1)
    assert offers(bench.submit("r3", num_tokens=1_001)) == []
    bench.accept("r2", "e1")
    assert offers(bench.capacity("e1", remaining_ns=1_001, holding=2)) == [("r3", "e1")]


def test_ur_61_a_deadline_that_passed_in_the_queue_never_reaches_an_engine():
    bench = Bench()
    bench.submit("r1", deadline_s=bench.now_s + 1.0)
    bench.now_s += 2.0
    actions = bench.join("e1")
    assert offers(actions) == []
    assert [(a.key, a.reason) for a in of(actions, ev.Refuse)] == [("r1", Reason.DEADLINE)]
    assert bench.balancer.counters.refused == {"DEADLINE": 1}
    assert [a.reason for a in of(bench.submit("r2", deadline_s=bench.now_s), ev.Refuse)] == [
        Reason.DEADLINE
    ]


def test_p_05_a_tick_answers_expired_requests_while_nobody_pulls():
    bench = Bench(no_engine_wait_s=1e9)
    bench.submit("r1", deadline_s=bench.now_s + 1.0)
    bench.submit("r2", deadline_s=bench.now_s + 300.0)
    assert [a.key for a in of(bench.tick(1.05), ev.Refuse)] == ["r1"]
    refusals = of(bench.tick(60.0), ev.Refuse)
    assert [(a.key, a.reason) for a in refusals] == [("r2", Reason.QUEUE_TIMEOUT)]


def test_an_offer_that_expires_is_revoked():
    bench = Bench()
    bench.join("e1")
    bench.submit("r1", deadline_s=bench.now_s + 1.0)
    bench.now_s += 0.9
    bench.capacity("e1")
    actions = bench.tick(0.2)
    assert of(actions, ev.Revoke) == [ev.Revoke("r1", "e1", "e1-boot")]
    assert [a.reason for a in of(actions, ev.Refuse)] == [Reason.DEADLINE]
    assert bench.accept("r1", "e1") == []


def test_the_same_key_again_joins_the_first():
    bench = Bench()
    bench.submit("r1")
    assert of(bench.submit("r1"), ev.Wait) == [ev.Wait("r1", 0, 0, False)]
    assert bench.balancer.num_waiting == 1
    bench.join("e1")
    (assigned,) = bench.accept("r1", "e1")
    assert bench.submit("r1") == [assigned]
    bench.finish("r1", "e1")
    assert bench.submit("r1") == [assigned]  # its events are replayed by the engine


def test_offered_requests_of_a_lost_engine_go_to_the_head_in_their_order():
    bench = Bench()
    bench.join("e1", quota_ns=2_000)
    for key in ("r1", "r2", "r3", "r4"):
        bench.submit(key)
    bench.lose("e1")
    assert offers(bench.join("e2")) == [("r1", "e2"), ("r2", "e2"), ("r3", "e2"), ("r4", "e2")]
    assert bench.balancer.counters.requeued == 2


def test_a_new_attempt_after_a_lost_engine_goes_to_the_head():
    bench = Bench()
    bench.join("e1", quota_ns=1_000)
    bench.submit("r1")
    bench.accept("r1", "e1")
    bench.submit("r2")
    bench.lose("e1")
    bench.submit("r1/1", request_id="r1", attempt=1)
    assert offers(bench.join("e2")) == [("r1/1", "e2"), ("r2", "e2")]


def test_a_new_attempt_replaces_an_older_one_that_still_waits():
    bench = Bench()
    bench.submit("r1")
    bench.submit("r1/1", request_id="r1", attempt=1)
    assert bench.balancer.num_waiting == 1
    assert offers(bench.join("e1")) == [("r1/1", "e1")]


def test_ur_49_a_silent_engine_is_lost_after_three_seconds_and_its_offers_move():
    bench = Bench()
    bench.join("e1", quota_ns=1_500)
    bench.submit("r1")
    bench.now_s += 2.0
    bench.join("e2")
    actions = bench.tick(1.1)
    assert [(a.engine_id, a.reason) for a in of(actions, ev.Evict)] == [("e1", Reason.BACKEND_LOST)]
    assert offers(actions) == [("r1", "e2")]
    # What the frozen life says afterwards changes nothing.
    assert bench.accept("r1", "e1") == []


def test_messages_of_a_former_life_are_ignored():
    bench = Bench()
    bench.join("e1")
    bench.submit("r1")
    bench.join("e1", boot_id="second")
    assert bench.accept("r1", "e1") == []
    assert bench.on(ev.EngineLost("e1", "e1-boot")) == []
    (assigned,) = bench.on(ev.EngineAccepted("e1", "second", "r1"))
    assert assigned.boot_id == "second"


def test_an_engine_that_rejoins_with_work_keeps_it():
    bench = Bench(rebuild_s=1.0)
    bench.submit("held")
    bench.submit("new")
    actions = bench.join("e1", holding=("held", "unknown"), outstanding_ns=2_000)
    assert [a.key for a in of(actions, ev.Assign)] == ["held"]
    assert offers(actions) == []
    assert offers(bench.tick(1.0)) == [("new", "e1")]
    # Its submitter comes to the new leader after the engine did.
    assert [a.engine_id for a in of(bench.submit("unknown"), ev.Assign)] == ["e1"]


def test_a_new_leader_hands_nothing_out_before_it_has_heard_the_engines():
    bench = Bench(rebuild_s=1.0)
    bench.join("e1")
    assert offers(bench.submit("r1")) == []
    bench.capacity("e1")
    assert offers(bench.tick(0.9)) == []
    assert offers(bench.tick(0.1)) == [("r1", "e1")]


def test_a_full_engine_that_refuses_is_not_asked_again_before_it_reports():
    bench = Bench()
    bench.join("e1")
    assert offers(bench.submit("r1")) == [("r1", "e1")]
    assert offers(bench.reject("r1", "e1", Reason.ENGINE_FULL)) == []
    assert offers(bench.submit("r2")) == []
    # r1 stays at the head; e1 refused it, so another engine must take it.
    assert offers(bench.join("e2")) == [("r1", "e2"), ("r2", "e2")]


def test_p_11_a_request_is_offered_to_at_most_three_engines():
    bench = Bench()
    for index in range(5):
        bench.join(f"e{index}")
    (first,) = offers(bench.submit("r1"))
    asked = [first[1]]
    for _ in range(2):
        ((_, engine_id),) = offers(bench.reject("r1", asked[-1], Reason.ENGINE_FULL))
        asked.append(engine_id)
    assert len(set(asked)) == 3
    refusals = of(bench.reject("r1", asked[-1], Reason.ENGINE_FULL), ev.Refuse)
    assert [a.reason for a in refusals] == [Reason.OVERLOADED]


def test_a_lone_engine_that_was_full_gets_the_request_again_once_it_has_room():
    bench = Bench()
    bench.join("e1")
    assert offers(bench.submit("r1")) == [("r1", "e1")]
    for _ in range(2):
        assert bench.reject("r1", "e1", Reason.ENGINE_FULL) == []
        assert offers(bench.capacity("e1")) == [("r1", "e1")]
    refusals = of(bench.reject("r1", "e1", Reason.ENGINE_FULL), ev.Refuse)
    assert [a.reason for a in refusals] == [Reason.OVERLOADED]


def test_a_head_that_its_own_lane_may_not_take_goes_to_any_engine():
    bench = Bench(steal=Steal.OFF, bucket_bounds=(5_000,))
    bench.join("e1", accept_buckets=0b01)
    bench.join("e2", accept_buckets=0b10)
    bench.submit("short", num_tokens=100)
    bench.submit("long", num_tokens=6_000)
    for _ in range(5):
        bench.now_s += 2.0
        bench.capacity("e1")
        bench.capacity("e2")
    bench.tick()  # one lane each now, whichever way round
    placed = offers(bench.submit("s2", num_tokens=100)) + offers(
        bench.submit("l2", num_tokens=6_000)
    )
    assert placed == [("s2", "e1"), ("l2", "e2")]


def test_ur_47_requests_refused_for_their_own_fault_leave_the_engine_in_rotation():
    bench = Bench()
    bench.join("e1")
    bench.join("e2")
    for index in range(500):
        ((key, engine_id),) = offers(bench.submit(f"bad{index}"))
        refusals = of(bench.reject(key, engine_id, Reason.CONTEXT_LENGTH), ev.Refuse)
        assert [a.reason for a in refusals] == [Reason.CONTEXT_LENGTH]
        bench.capacity("e1")
        bench.capacity("e2")
    assert len(offers(bench.submit("good"))) == 1


def test_ur_48_an_engine_that_fails_everything_gets_only_probes():
    bench = Bench()
    for engine_id in ("e1", "e2", "e3"):
        bench.join(engine_id, quota_ns=1_000)
    failed = 0
    for index in range(60):
        ((key, engine_id),) = offers(bench.submit(f"r{index}"))
        bench.accept(key, engine_id)
        bench.finish(key, engine_id, engine_fault=engine_id == "e1")
        failed += engine_id == "e1"
        for name in ("e1", "e2", "e3"):
            bench.capacity(name, remaining_ns=1_000)
    assert failed == 5


def test_the_queue_is_bounded_in_requests_and_in_tokens():
    bench = Bench(max_waiting_requests=10, max_waiting_tokens=50_000, max_tenant_share=1.0)
    for index in range(10):
        assert of(bench.submit(f"r{index}"), ev.Refuse) == []
    refusals = of(bench.submit("r10"), ev.Refuse)
    assert [a.reason for a in refusals] == [Reason.OVERLOADED]
    assert refusals[0].retry_after_s is not None
    bench = Bench(max_waiting_requests=10, max_waiting_tokens=50_000, max_tenant_share=1.0)
    assert of(bench.submit("big", num_tokens=50_001), ev.Refuse) != []


def test_p_13_one_tenant_cannot_fill_the_queue():
    bench = Bench(max_waiting_requests=10, max_tenant_share=0.5)
    results = [bool(of(bench.submit(f"l{i}", tenant="loud"), ev.Refuse)) for i in range(8)]
    assert results == [False] * 5 + [True] * 3
    assert of(bench.submit("q0", tenant="quiet"), ev.Refuse) == []
    order = [key for key, _ in offers(bench.join("e1"))]
    assert order.index("q0") <= 1


def test_a_prompt_that_fits_no_engine_is_refused_at_once():
    bench = Bench()
    bench.join("e1", max_tokens=4_096)
    refusals = of(bench.submit("r1", num_tokens=5_000), ev.Refuse)
    assert [a.reason for a in refusals] == [Reason.NOT_FITTING]


def test_another_model_is_refused_and_its_engine_is_turned_away():
    bench = Bench()
    bench.join("e1", model="flash")
    assert [a.reason for a in of(bench.submit("r1", model="tiny"), ev.Refuse)] == [
        Reason.NO_INSTANCE
    ]
    assert [a.reason for a in of(bench.join("e2", model="tiny"), ev.Evict)] == [Reason.WRONG_ROLE]
    assert len(offers(bench.submit("r2", model="flash"))) == 1


def test_without_any_engine_requests_wait_a_little_then_fail():
    bench = Bench(no_engine_wait_s=5.0)
    bench.submit("r1")
    assert of(bench.tick(4.9), ev.Refuse) == []
    assert [(a.key, a.reason) for a in of(bench.tick(0.2), ev.Refuse)] == [
        ("r1", Reason.NO_INSTANCE)
    ]
    assert [a.reason for a in of(bench.submit("r2"), ev.Refuse)] == [Reason.NO_INSTANCE]


def test_a_draining_engine_gets_nothing_new():
    bench = Bench()
    bench.join("e1")
    bench.capacity("e1", accepting=False)
    assert offers(bench.submit("r1")) == []


def test_engines_follow_demand_and_the_division_is_published():
    bench = Bench(steal=Steal.OFF, bucket_bounds=(100, 1_000, 10_000))
    for index in range(4):
        bench.join(f"e{index}", quota_ns=1)
        bench.capacity(f"e{index}", remaining_ns=0, accepting=False)
    for index, num_tokens in enumerate((10, 500, 5_000, 50_000)):
        bench.submit(f"r{index}", num_tokens=num_tokens)
    for _ in range(5):
        bench.now_s += 2.0
        for index in range(4):
            bench.capacity(f"e{index}", remaining_ns=0)
    (published,) = of(bench.tick(), ev.PublishBuckets)
    assert published.round_number == 1
    assert sorted(published.buckets_of.values()) == [(0,), (1,), (2,), (3,)]
    again = Bench(bucket_bounds=(100, 1_000, 10_000))
    again.balancer.restore_buckets(7, published.buckets_of)
    (taken_over,) = of(again.join("e9"), ev.PublishBuckets)
    assert taken_over.round_number == 7


def test_ur_60_a_long_prompt_does_not_hold_the_short_ones_up():
    bench = Bench(cost_model=CostModel(k0_ns=0, k1_ns=20_000, k2_ns=0, k3_ns=0))
    for engine_id in ("e1", "e2"):
        bench.join(engine_id, quota_ns=400_000_000)
    ((_, long_engine),) = offers(bench.submit("long", num_tokens=65_536))
    bench.accept("long", long_engine)
    bench.capacity(long_engine, remaining_ns=400_000_000 - 1_310_720_000, holding=1)
    placed = [offers(bench.submit(f"s{i}", num_tokens=200)) for i in range(20)]
    assert all(len(p) == 1 and p[0][1] != long_engine for p in placed)


def prefix_burst(bench, count, prefix=b"cold"):
    for index in range(count):
        bench.submit(f"r{index}", num_tokens=5_000, prefix_key=prefix)


def test_p_35_ur_46_one_request_computes_a_cold_prefix_and_the_rest_follow():
    bench = Bench()
    bench.join("e1")
    prefix_burst(bench, 64)
    assert bench.balancer.census()["following"] == 63
    assert bench.balancer.counters.offers == 1
    bench.accept("r0", "e1")
    assert of(bench.finish("r0", "e1", committed=True), ev.Rematch) == []
    # The blocks are on their way: one asks for all.
    assert [a.key for a in of(bench.tick(0.05), ev.Rematch)] == ["r1"]
    bench.lose("e1")
    hit = {"num_tokens": 5_000, "num_present": 4_800, "prefix_key": b""}
    released = of(bench.submit("r1", **hit), ev.Rematch)
    assert [a.key for a in released] == [f"r{i}" for i in range(2, 64)]
    # They hit now: other blocks are missing, nobody follows, arrival order holds.
    for index in reversed(range(2, 64)):
        bench.submit(f"r{index}", **hit)
    assert [key for key, _ in offers(bench.join("e2"))] == [f"r{i}" for i in range(1, 64)]
    assert bench.balancer.census()["leaders"] == 0


def test_p_35_promised_blocks_are_asked_for_again_before_anyone_computes_them():
    bench = Bench()
    bench.join("e1")
    prefix_burst(bench, 24)
    bench.accept("r0", "e1")
    bench.finish("r0", "e1", committed=True)
    for delay_s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):
        assert bench.balancer.counters.offers == 1
        assert of(bench.tick(delay_s / 2), ev.Rematch) == []
        assert [a.key for a in of(bench.tick(delay_s / 2 + 0.001), ev.Rematch)] == ["r1"]
        bench.capacity("e1")
        missed = bench.submit("r1", num_tokens=5_000, prefix_key=b"cold")
    # The promise was broken: the one that asked computes them, and the others go on waiting.
    assert offers(missed) == [("r1", "e1")]
    assert bench.balancer.census()["following"] == 22
    assert bench.balancer.counters.offers == 2


def test_p_35_a_hit_shorter_than_what_was_promised_is_waited_for_until_it_stops_growing():
    bench = Bench()
    bench.join("e1")
    prefix_burst(bench, 4)  # each misses 5,000 tokens
    bench.accept("r0", "e1")
    bench.finish("r0", "e1", committed=True)
    # Equal keys promise 2,048 tokens: below that it is waited for even where nothing has come;
    # beyond, until two answers in a row are the same.
    for delay_s, num_present in ((0.05, 256), (0.1, 256), (0.2, 256), (0.4, 2_304), (0.8, 2_304)):
        assert [a.key for a in of(bench.tick(delay_s + 0.001), ev.Rematch)] == ["r1"]
        bench.capacity("e1")
        submitted = bench.submit("r1", num_tokens=5_000, num_present=num_present, prefix_key=b"b")
        assert offers(submitted) == []
    assert [a.key for a in of(bench.tick(1.601), ev.Rematch)] == ["r1"]
    bench.capacity("e1")
    done = bench.submit("r1", num_tokens=5_000, num_present=2_304, prefix_key=b"b")
    assert offers(done) == [("r1", "e1")]
    assert [a.key for a in of(done, ev.Rematch)] == ["r2", "r3"]


def test_p_35_when_blocks_are_not_yet_visible_one_follower_asks_for_all():
    bench = Bench(probe_delay_s=0.25)
    bench.join("e1")
    prefix_burst(bench, 4)
    bench.accept("r0", "e1")
    assert of(bench.finish("r0", "e1"), ev.Rematch) == []
    assert [a.key for a in of(bench.tick(0.25), ev.Rematch)] == ["r1"]
    actions = bench.submit("r1", num_tokens=5_000, num_present=4_000, prefix_key=b"next")
    assert [a.key for a in of(actions, ev.Rematch)] == ["r2", "r3"]
    assert offers(actions) == [("r1", "e1")]


def test_p_35_a_request_with_an_answer_from_before_the_hit_asks_again_before_it_leads():
    bench = Bench(probe_delay_s=0.25)
    bench.join("e1")
    prefix_burst(bench, 2)
    bench.accept("r0", "e1")
    bench.finish("r0", "e1")
    bench.tick(0.25)
    bench.submit("r1", num_tokens=5_000, num_present=5_000)  # it hits: the group is gone
    bench.accept("r1", "e1")
    bench.finish("r1", "e1")
    # These asked the cache before the leader's blocks were there, and come only now.
    late = [bench.submit(f"late{i}", num_tokens=5_000, prefix_key=b"cold") for i in range(3)]
    assert [offers(actions) for actions in late] == [[], [], []]
    asked = [a.key for a in of([*late[0], *late[1], *late[2], *bench.tick(0.01)], ev.Rematch)]
    assert asked == ["late0"]
    # Evicted meanwhile: it leads, and is not asked a second time.
    assert offers(bench.submit("late0", num_tokens=5_000, prefix_key=b"cold")) == [("late0", "e1")]
    assert bench.balancer.census()["following"] == 2


def test_p_35_followers_survive_the_leaders_death():
    bench = Bench()
    bench.join("e1")
    bench.join("e2")
    prefix_burst(bench, 4)
    bench.accept("r0", "e1")
    assert [a.key for a in of(bench.lose("e1"), ev.Rematch)] == ["r1"]
    actions = bench.submit("r1", num_tokens=5_000, prefix_key=b"cold")
    assert offers(actions) == [("r1", "e2")]  # the next leader; r2 and r3 go on waiting
    assert bench.balancer.census()["following"] == 2


def test_p_35_followers_do_not_wait_longer_than_twice_the_predicted_cost():
    cost_model = CostModel(k0_ns=0, k1_ns=1_000_000, k2_ns=0, k3_ns=0)  # 5,000 tokens: 5 s
    bench = Bench(cost_model=cost_model)
    bench.join("e1")
    prefix_burst(bench, 2)
    bench.accept("r0", "e1")
    for _ in range(9):
        assert of(bench.tick(1.0), ev.Rematch) == []
        bench.capacity("e1")
    assert [a.key for a in of(bench.tick(1.0), ev.Rematch)] == ["r1"]


def test_p_35_a_probe_that_went_away_is_replaced():
    bench = Bench(probe_delay_s=0.25, probe_timeout_s=1.0)
    bench.join("e1")
    prefix_burst(bench, 3)
    assert [a.key for a in of(bench.on(ev.Cancelled("r0")), ev.Rematch)] == ["r1"]
    bench.capacity("e1")
    assert [a.key for a in of(bench.tick(1.0), ev.Rematch)] == ["r2"]


def test_a_follower_can_be_cancelled_and_can_expire():
    bench = Bench()
    bench.join("e1")
    prefix_burst(bench, 3)
    bench.on(ev.Cancelled("r1"))
    assert bench.balancer.census()["following"] == 1
    bench.capacity("e1")
    bench.now_s += 59.0
    bench.capacity("e1")
    assert "r2" in [a.key for a in of(bench.tick(1.5), ev.Refuse)]
    assert bench.balancer.census()["following"] == 0


def test_following_can_be_switched_off():
    bench = Bench(follow_prefixes=False)
    bench.join("e1")
    prefix_burst(bench, 5)
    assert bench.balancer.counters.offers == 5


def test_head_blocking_is_measured():
    bench = Bench(steal=Steal.OFF)
    bench.join("e1", quota_ns=2_000)
    bench.submit("r1", num_tokens=1_500)
    bench.accept("r1", "e1")
    bench.submit("r2", num_tokens=1_900)
    bench.tick(0.5)
    bench.tick(0.25)
    assert bench.balancer.counters.head_blocked_s[0] == pytest.approx(0.75)
    assert bench.balancer.buckets(bench.now_s)[0][1] == 1


@pytest.mark.parametrize("seed", range(25))
def test_t9_nothing_leaks_and_every_request_ends_once_after_a_random_life(seed):
    rng = random.Random(seed)
    bench = Bench(no_engine_wait_s=1e9, max_waiting_requests=60)
    last: dict[str, str] = {}  # key -> its last word
    offered: dict[str, str] = {}
    held: dict[str, str] = {}
    alive: set[str] = set()
    live_keys: dict[str, dict] = {}
    ids = itertools.count()

    def digest(actions):
        for action in actions:
            match action:
                case ev.Offer(key, engine_id):
                    assert key not in last
                    assert engine_id in alive
                    offered[key] = engine_id
                case ev.Assign(key):
                    assert key not in last
                    last[key] = "assigned"
                    held[key] = offered.pop(key)
                case ev.Refuse(key):
                    assert key not in last
                    last[key] = "refused"
                    offered.pop(key, None)
                case ev.Rematch(key):
                    fields = live_keys[key]
                    prefix = rng.choice([b"", fields["prefix_key"]])
                    digest(bench.submit(key, **{**fields, "prefix_key": prefix}))
                case ev.Revoke(key):
                    offered.pop(key, None)

    for _ in range(400):
        choice = rng.random()
        if choice < 0.35:
            key = f"r{next(ids)}"
            fields = {
                "num_tokens": rng.choice((100, 3_000, 20_000, 300_000)),
                "tenant": rng.choice("abc"),
                "prefix_key": rng.choice((b"", b"p", b"q")),
                "deadline_s": bench.now_s + rng.uniform(0.1, 90),
            }
            live_keys[key] = fields
            digest(bench.submit(key, **fields))
        elif choice < 0.45 and offered:
            key = rng.choice(sorted(offered))
            digest(bench.accept(key, offered[key]))
        elif choice < 0.5 and offered:
            key = rng.choice(sorted(offered))
            reason = rng.choice((Reason.ENGINE_FULL, Reason.CONTEXT_LENGTH, Reason.BACKEND_LOST))
            engine_id = offered.pop(key)
            digest(bench.reject(key, engine_id, reason))
        elif choice < 0.6 and held:
            key = rng.choice(sorted(held))
            digest(bench.finish(key, held.pop(key), committed=rng.random() < 0.5))
        elif choice < 0.65:
            key = rng.choice(sorted(live_keys) or ["none"])
            if last.setdefault(key, "cancelled") == "cancelled":
                digest(bench.on(ev.Cancelled(key)))
        elif choice < 0.72:
            engine_id = f"e{rng.randrange(4)}"
            if engine_id in alive:
                alive.discard(engine_id)
                for table in (offered, held):
                    for key in [k for k, v in table.items() if v == engine_id]:
                        del table[key]
                digest(bench.lose(engine_id))
            else:
                alive.add(engine_id)
                digest(bench.join(engine_id, quota_ns=rng.choice((10_000, 400_000))))
        else:
            for engine_id in sorted(alive):
                holding = sum(v == engine_id for v in held.values())
                digest(bench.capacity(engine_id, 50_000 - 5_000 * holding, holding))
            digest(bench.tick(rng.uniform(0, 2)))
    for _ in range(3):
        for engine_id in sorted(alive):
            bench.capacity(engine_id, 0, 0)
        digest(bench.tick(61.0))
    for key, engine_id in sorted(held.items()):
        bench.finish(key, engine_id)
    bench.tick(200.0)
    census = bench.balancer.census()
    census.pop("engines")
    assert {name: count for name, count in census.items() if count} == {}
    submitted = {key for key in live_keys if key not in last}
    assert submitted == set()
