"""Order inside one bucket."""

from hypothesis import given
from hypothesis import strategies as st

from services.lb.prefill.fair_queue import FairQueue


def drain(queue):
    order = []
    while (key := queue.head()) is not None:
        queue.take(key)
        order.append(key)
    return order


def push(queue, key, tenant, cost_ns, arrival, priority=0):
    queue.push(key, queue.place_for(tenant, cost_ns, priority, arrival), cost_ns)


@given(st.lists(st.integers(0, 10**9), max_size=30))
def test_one_tenant_sees_a_plain_fifo(costs):
    queue = FairQueue()
    for index, cost_ns in enumerate(costs):
        push(queue, f"r{index:03}", "acme", cost_ns, index)
    assert queue.waiting_ns == sum(costs)
    assert drain(queue) == [f"r{index:03}" for index in range(len(costs))]
    assert queue.waiting_ns == 0


def test_p_13_a_burst_of_one_tenant_does_not_stand_before_another():
    queue = FairQueue()
    for index in range(100):
        push(queue, f"burst{index:03}", "loud", 1_000, index)
    push(queue, "quiet0", "quiet", 1_000, 100)
    push(queue, "quiet1", "quiet", 1_000, 101)
    order = drain(queue)
    assert order.index("quiet0") <= 1
    assert order.index("quiet1") <= 3


def test_a_tenant_that_was_away_has_saved_nothing_up():
    queue = FairQueue()
    for index in range(10):
        push(queue, f"a{index}", "steady", 1_000, index)
    for _ in range(5):
        queue.take(queue.head())
    for index in range(5):
        push(queue, f"b{index}", "late", 1_000, 100 + index)
    order = drain(queue)
    assert {key[0] for key in order[:2]} == {"a", "b"}
    assert order[:4].count("b0") == 1
    assert sum(key.startswith("a") for key in order[:6]) >= 2


def test_without_fairness_arrival_decides():
    queue = FairQueue(fair=False)
    push(queue, "a0", "loud", 10**9, 0)
    push(queue, "a1", "loud", 10**9, 1)
    push(queue, "b0", "quiet", 1, 2)
    assert drain(queue) == ["a0", "a1", "b0"]


def test_higher_priority_goes_first_and_what_came_back_before_all():
    queue = FairQueue()
    push(queue, "normal", "acme", 10, 0)
    push(queue, "urgent", "acme", 10, 1, priority=5)
    place = queue.place_for("acme", 10, 0, 2)
    queue.push("back", place._replace(is_new=False), 10)
    assert drain(queue) == ["back", "urgent", "normal"]


def test_removed_keys_leave_no_trace():
    queue = FairQueue()
    for index in range(1_000):
        push(queue, f"r{index}", "acme", 7, index)
    for index in range(999):
        queue.remove(f"r{index}")
    queue.remove("unknown")
    assert (len(queue), queue.waiting_ns, queue.head()) == (1, 7, "r999")
    assert len(queue._heap) <= 70
    assert queue.position("r999") == 0
