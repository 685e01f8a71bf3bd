import random

import pytest

from services.engine.blocks import BlockFault, BlockManager, Fit, SlotPool


def test_block_zero_is_never_given_out_and_an_idle_pool_is_full():
    pool = BlockManager(5)
    assert pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.fit(1) is Fit.LATER
    assert pool.fit(5) is Fit.NEVER
    assert pool.fit(0) is Fit.OK


def test_blocks_come_from_the_front_and_return_to_the_back_last_first():
    pool = BlockManager(7)
    table = pool.allocate(3)
    pool.free(table)
    # 4, 5, 6 were never used; then 3, 2, 1: the start of the freed prefix survives longest.
    assert pool.allocate(6) == [4, 5, 6, 3, 2, 1]


def test_a_pinned_block_outlives_its_first_holder():
    pool = BlockManager(4)
    (block,) = pool.allocate(1)
    pool.pin([block])
    pool.free([block])
    assert pool.num_free == 2
    assert pool.count(block) == 1
    pool.free([block])
    assert pool.num_free == 3


def test_our_own_mistakes_are_loud():
    pool = BlockManager(4)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(BlockFault, match="double free"):
        pool.free([block])
    with pytest.raises(BlockFault, match="pin of free"):
        pool.pin([block])
    with pytest.raises(BlockFault, match="allocate"):
        pool.allocate(4)
    slots = SlotPool(3)
    slot = slots.allocate()
    slots.free(slot)
    with pytest.raises(BlockFault, match="double free"):
        slots.free(slot)


def test_a_quarantined_block_is_not_free_until_its_writer_is_fenced():
    pool = BlockManager(4)
    table = pool.allocate(2)
    pool.quarantine(table)
    assert (pool.num_free, pool.num_quarantined) == (1, 2)
    pool.release(table)
    assert (pool.num_free, pool.num_quarantined) == (3, 0)


@pytest.mark.parametrize("seed", range(10))
def test_t9_random_sharing_and_freeing_leaks_nothing(seed):
    rng = random.Random(seed)
    pool, slots = BlockManager(64), SlotPool(9)
    held, held_slots = [], []
    for _ in range(2000):
        choice = rng.random()
        if choice < 0.4:
            num = rng.randint(0, 6)
            if pool.fit(num) is Fit.OK:
                held.append(pool.allocate(num))
        elif choice < 0.55 and held:
            table = rng.choice(held)[: rng.randint(0, 4)]
            pool.pin(table)
            held.append(table)
        elif choice < 0.8 and held:
            pool.free(held.pop(rng.randrange(len(held))))
        elif choice < 0.9:
            slot = slots.allocate()
            if slot is not None:
                held_slots.append(slot)
        elif held_slots:
            slots.free(held_slots.pop())
        live = {block for table in held for block in table}
        assert pool.num_used == len(live)
        assert 0 not in live
    for table in held:
        pool.free(table)
    for slot in held_slots:
        slots.free(slot)
    assert pool.num_free == 63
    assert slots.num_free == 8
