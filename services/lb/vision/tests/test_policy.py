"""Cards, tickets and machines of the vision balancer."""

import random
from collections import Counter

import pytest

from services.common.errors import Reason
from services.lb.vision import policy
from services.lb.vision.policy import BalancerConfig, CardReport, MachineDraw, VisionBalancer


def balancer_with(loads, max_patches=0, **config):
    balancer = VisionBalancer(BalancerConfig(**config), "boot")
    for index, load in enumerate(loads):
        balancer.report(CardReport(f"c{index}", f"c{index}:1", load, max_patches, True), 0.0)
    return balancer


def test_t_vis_1_an_image_goes_to_the_card_with_the_fewest_patches():
    patches = policy.num_patches(1024, 768, 14)
    assert patches == 74 * 55 == 4_070
    loads = [5_000, 3_900, 4_100, 3_900]
    card = policy.pick_card(loads)
    assert card == 1
    loads[card] += patches
    assert loads[card] == 7_970
    assert policy.num_patches(448, 448, 14) == 1_024
    assert policy.pick_card(loads) == 3


def test_t_vis_1_through_the_balancer():
    balancer = balancer_with([5_000, 3_900, 4_100, 3_900])
    assert balancer.pick(4_070, set(), 0.0).instance_id == "c1"
    assert balancer.loads()["c1"] == 7_970
    assert balancer.pick(1_024, set(), 0.0).instance_id == "c3"


def test_a_charge_is_given_back_once():
    balancer = balancer_with([0])
    picked = balancer.pick(100, set(), 0.0)
    assert balancer.release(picked.ticket, False, 0.0)
    assert not balancer.release(picked.ticket, False, 0.0)
    assert not balancer.release("former-life-7", False, 0.0)
    assert balancer.loads() == {"c0": 0}
    assert balancer.census()["tickets"] == 0


def test_tickets_lapse_and_leave_nothing():
    balancer = balancer_with([0], ticket_s=60)
    balancer.pick(100, set(), 0.0)
    balancer.report(CardReport("c0", "c0:1", 0, 0, True), 60.0)
    assert balancer.loads() == {"c0": 0}  # no image has come since
    assert balancer.census()["tickets"] == 0
    balancer.pick(7, set(), 60.0)
    assert balancer.loads() == {"c0": 7}


def test_reports_do_not_count_our_own_tickets_twice():
    balancer = balancer_with([0])
    balancer.pick(100, set(), 0.0)
    balancer.report(CardReport("c0", "c0:1", 100, 0, True), 0.1)
    assert balancer.loads() == {"c0": 100}
    balancer.report(CardReport("c0", "c0:1", 350, 0, True), 0.2)  # 250 from before our restart
    assert balancer.loads() == {"c0": 350}


def test_full_silent_draining_and_excluded_cards_are_passed_over():
    balancer = balancer_with([0, 0], max_patches=1_000)
    assert balancer.pick(600, set(), 0.0).instance_id == "c0"
    assert balancer.pick(600, set(), 0.0).instance_id == "c1"
    assert balancer.pick(600, set(), 0.0).reason is Reason.ENGINE_FULL
    assert balancer.pick(400, {"c0"}, 0.0).instance_id == "c1"
    assert balancer.pick(1, set(), 3.1).reason is Reason.NO_INSTANCE
    balancer.report(CardReport("c0", "c0:1", 0, 1_000, False), 3.1)
    assert balancer.pick(1, set(), 3.1).reason is Reason.NO_INSTANCE


def test_an_image_above_the_bound_goes_to_an_empty_card():
    balancer = balancer_with([0], max_patches=1_000)
    assert balancer.pick(5_000, set(), 0.0).instance_id == "c0"
    assert balancer.pick(1, set(), 0.0).reason is Reason.ENGINE_FULL


def test_a_card_that_fails_every_image_is_ejected_and_a_lost_one_forgotten():
    balancer = balancer_with([0, 0, 0])
    hits = 0
    for _ in range(50):
        picked = balancer.pick(10, set(), 1.0)
        hits += picked.instance_id == "c0"
        balancer.release(picked.ticket, picked.instance_id == "c0", 1.0)
    assert hits == 5
    picked = balancer.pick(10, set(), 1.0)
    balancer.lost(picked.instance_id)
    assert not balancer.release(picked.ticket, False, 1.0)


def test_machines_are_drawn_uniformly():
    draw, rng = MachineDraw(), random.Random(7)
    counts = Counter(draw.draw(["m0", "m1", "m2", "m3"], set(), 0.0, rng) for _ in range(4_000))
    assert len(counts) == 4
    assert min(counts.values()) > 800


def test_a_machine_that_did_not_answer_is_skipped_for_five_seconds():
    draw, rng = MachineDraw(skip_s=5.0), random.Random(7)
    draw.failed("m0", 10.0)
    assert {draw.draw(["m0", "m1"], set(), 14.9, rng) for _ in range(50)} == {"m1"}
    assert {draw.draw(["m0", "m1"], set(), 15.1, rng) for _ in range(50)} == {"m0", "m1"}


@pytest.mark.parametrize(("machines", "tried"), [([], set()), (["m0"], {"m0"})])
def test_without_a_machine_left_there_is_none(machines, tried):
    assert MachineDraw().draw(machines, tried, 0.0, random.Random(1)) is None


def test_when_all_are_skipped_one_is_tried_anyway():
    draw = MachineDraw()
    draw.failed("m0", 0.0)
    assert draw.draw(["m0"], set(), 0.0, random.Random(1)) == "m0"
