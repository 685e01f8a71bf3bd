"""The vision balancer of one machine: the same cases on the fake and on the real server."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from services.common.clock import VirtualClock
from services.common.errors import Failure, Reason
from services.common.service import running
from services.lb.vision import main as vision_main
from services.lb.vision.client import EncoderCards, VisionLbClient, machines_of
from services.lb.vision.config import VisionLbConfig
from services.lb.vision.fake import FakeVisionLb
from services.lb.vision.policy import CardReport

PATIENT_S = 20.0  # a loaded machine may be slow to answer; only what it answers is tested


@asynccontextmanager
async def real_machine():
    config = VisionLbConfig(listen="127.0.0.1:0")
    async with running("vision-lb", config, vision_main.build) as runtime:
        yield VisionLbClient(runtime.channels, runtime.address, PATIENT_S)


@asynccontextmanager
async def fake_machine():
    yield FakeVisionLb()


@pytest.fixture(params=["fake", "real"])
async def machine(request):
    async with fake_machine() if request.param == "fake" else real_machine() as opened:
        async with asyncio.timeout(30):
            yield opened


def card_of(name, patches=0, max_patches=0, accepting=True):
    return CardReport(name, f"{name}:1", patches, max_patches, accepting)


async def test_t_vis_1_the_image_goes_to_the_card_with_the_fewest_patches(machine):
    loads = {"c0": 5_000, "c1": 3_900, "c2": 4_100, "c3": 3_900}
    sessions = [machine.register() for _ in loads]
    opened = [await session.__aenter__() for session in sessions]
    for session, (name, patches) in zip(opened, loads.items(), strict=True):
        await session.send(card_of(name, patches))
    assert (await machine.pick(4_070)).instance_id == "c1"
    second = await machine.pick(1_024)
    assert (second.instance_id, second.address) == ("c3", "c3:1")
    for session in sessions:
        await session.__aexit__(None, None, None)


async def test_a_charge_is_given_back_once(machine):
    async with machine.register() as session:
        assert await session.send(card_of("c0")) == 1
        card = await machine.pick(100)
        assert await machine.release(card.ticket)
        assert not await machine.release(card.ticket)
        assert not await machine.release("unknown")


async def test_without_a_card_there_is_no_instance_and_over_the_bound_it_is_full(machine):
    with pytest.raises(Failure) as refused:
        await machine.pick(100)
    assert refused.value.reason is Reason.NO_INSTANCE
    async with machine.register() as session:
        await session.send(card_of("c0", max_patches=1_000))
        await machine.pick(600)
        with pytest.raises(Failure) as refused:
            await machine.pick(600)
        assert refused.value.reason is Reason.ENGINE_FULL
        with pytest.raises(Failure) as refused:
            await machine.pick(10, exclude=frozenset({"c0"}))
        assert refused.value.reason is Reason.NO_INSTANCE
        await session.send(card_of("c0", accepting=False))
        with pytest.raises(Failure) as refused:
            await machine.pick(10)
        assert refused.value.reason is Reason.NO_INSTANCE


async def test_malformed_calls_are_refused(machine):
    with pytest.raises(Failure) as refused:
        await machine.pick(0)
    assert refused.value.reason is Reason.INVALID_REQUEST
    async with machine.register() as session:
        with pytest.raises(Failure) as refused:
            await session.send(CardReport("", "", 0, 0, True))
        assert refused.value.reason is Reason.INVALID_REQUEST


async def test_only_the_newest_call_of_a_card_speaks_for_it(machine):
    async with machine.register() as old:
        await old.send(card_of("c0"))
        async with machine.register() as new:
            await new.send(card_of("c0"))
            with pytest.raises(Failure) as ended:
                await old.send(card_of("c0"))
            assert ended.value.reason is Reason.STALE_EPOCH
            assert (await machine.pick(10)).instance_id == "c0"


class BrokenMachine:
    """A machine that does not answer."""

    def __init__(self):
        self.num_asked = 0

    async def pick(self, num_patches, request_id="", exclude=frozenset()):
        self.num_asked += 1
        raise Failure(Reason.DEADLINE, "no answer within 200 ms")


async def test_a_silent_machine_is_skipped_and_another_is_drawn(machine):
    clock, broken = VirtualClock(), BrokenMachine()
    machines = {"m0": broken, "m1": machine}
    cards = EncoderCards(lambda: machines, clock, random.Random(3))
    async with machine.register() as session:
        await session.send(card_of("c0"))
        for _ in range(20):
            async with cards.card(10) as card:
                assert card.instance_id == "c0"
        assert broken.num_asked == 1
        await clock.advance(5.1)
        for _ in range(20):
            async with cards.card(10):
                pass
        assert broken.num_asked == 2


async def test_at_most_three_machines_are_tried():
    machines = {f"m{i}": BrokenMachine() for i in range(5)}
    cards = EncoderCards(lambda: machines, VirtualClock(), random.Random(3))
    with pytest.raises(Failure) as refused:
        async with cards.card(10):
            raise AssertionError("no card can be had")
    assert refused.value.reason is Reason.NO_INSTANCE
    assert sum(machine.num_asked for machine in machines.values()) == 3


async def test_a_card_that_fails_is_charged_for_it_and_the_charge_comes_back():
    machine = FakeVisionLb()
    cards = EncoderCards(lambda: {"m0": machine})
    async with machine.register() as session:
        await session.send(card_of("c0"))
        with pytest.raises(Failure):
            async with cards.card(10):
                raise Failure(Reason.BACKEND_LOST, "the card went away")
        assert machine.balancer.census() == {"cards": 1, "tickets": 0}


async def test_machines_are_found_in_the_membership():
    config = VisionLbConfig(listen="127.0.0.1:0")
    async with asyncio.timeout(30), running("vision-lb", config, vision_main.build) as runtime:
        await runtime.view.wait_for(lambda view: bool(view.members("vision-lb")))
        cards = EncoderCards(machines_of(runtime.view, runtime.channels, PATIENT_S))
        machine = VisionLbClient(runtime.channels, runtime.address, PATIENT_S)
        async with machine.register() as session:
            await session.send(card_of("c0"))
            async with cards.card(10, "r1") as card:
                assert card.instance_id == "c0"
                assert runtime.census.snapshot()["vision_lb"] == {"entries": 1, "leases": 1}
            assert runtime.census.snapshot()["vision_lb"]["leases"] == 0
