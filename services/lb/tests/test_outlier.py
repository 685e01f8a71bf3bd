"""Ejection and return of failing instances."""

from services.lb.outlier import OutlierConfig, OutlierTable, State


def table_of(num_instances=3, **changes):
    table = OutlierTable(OutlierConfig(**changes))
    for index in range(num_instances):
        table.add(f"i{index}")
    return table


def fail(table, instance_id, times, now_s=0.0):
    for _ in range(times):
        table.on_pick(instance_id)
        table.on_failure(instance_id, now_s)


def test_ur_47_client_errors_never_open_a_breaker():
    table = table_of()
    for _ in range(500):
        table.on_pick("i0")
        table.on_release("i0")
        assert table.state("i0") is State.CLOSED
        assert table.allows("i0", 0.0)


def test_ur_48_five_failures_in_a_row_leave_only_probes():
    table = table_of(base_ejection_s=5)
    fail(table, "i0", 4)
    assert table.allows("i0", 0.0)
    fail(table, "i0", 1)
    assert table.state("i0") is State.OPEN
    assert not table.allows("i0", 4.9)
    assert table.allows("i0", 5.0)
    table.on_pick("i0")
    assert not table.allows("i0", 5.0)  # one probe, not two


def test_each_round_of_ejection_lasts_twice_as_long():
    table = table_of(base_ejection_s=5, max_ejection_s=15)
    fail(table, "i0", 5)
    lengths, now_s = [], 0.0
    for length_s in (5, 10, 15, 15):
        assert not table.allows("i0", now_s + length_s - 0.1)
        now_s += length_s
        assert table.allows("i0", now_s)
        fail(table, "i0", 1, now_s)
        lengths.append(length_s)
    assert table.state("i0") is State.OPEN


def test_one_good_probe_brings_an_instance_back_with_a_slow_ramp():
    table = table_of(base_ejection_s=5, ramp_limit=8)
    fail(table, "i0", 5)
    assert table.allows("i0", 5.0)
    table.on_pick("i0")
    table.on_success("i0")
    assert table.state("i0") is State.RAMPING
    admitted = []
    for _ in range(2):
        count = 0
        while table.allows("i0", 5.0):
            table.on_pick("i0")
            count += 1
        admitted.append(count)
        table.on_success("i0")
        for _ in range(count - 1):
            table.on_release("i0")
    assert admitted == [2, 4]
    assert table.state("i0") is State.CLOSED


def test_statistics_eject_at_most_a_third_but_one_of_two():
    table = table_of(6)
    for index in range(6):
        fail(table, f"i{index}", 5)
    assert [table.state(f"i{i}") for i in range(6)].count(State.OPEN) == 2
    pair = table_of(2)
    fail(pair, "i0", 5)
    fail(pair, "i1", 5)
    assert (pair.state("i0"), pair.state("i1")) == (State.OPEN, State.CLOSED)
    alone = table_of(1)
    fail(alone, "i0", 50)
    assert alone.state("i0") is State.CLOSED


def test_an_error_rate_far_above_the_peers_ejects():
    table = table_of()
    for _ in range(20):
        for peer in ("i1", "i2"):
            table.on_pick(peer)
            table.on_success(peer)
    for index in range(12):
        table.on_pick("i0")
        if index % 3 == 2:
            table.on_success("i0")
        else:
            table.on_failure("i0", 0.0)
    assert table.state("i0") is State.OPEN


def test_a_rate_shared_by_all_ejects_nobody():
    table = table_of()
    for index in range(30):
        for instance in ("i0", "i1", "i2"):
            table.on_pick(instance)
            if index % 3 == 2:
                table.on_success(instance)
            else:
                table.on_failure(instance, 0.0)
    assert all(table.state(f"i{i}") is State.CLOSED for i in range(3))


def test_members_that_leave_are_forgotten():
    table = table_of()
    fail(table, "i0", 5)
    table.keep_only(["i1", "i2"])
    assert table.allows("i0", 0.0)
