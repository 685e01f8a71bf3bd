"""One decision maker, also when it is paused: fenced writes, frozen counts, continued plans."""

import asyncio
import json
import random

from services.common.clock import VirtualClock
from services.common.election import Election
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import Member, MemberState
from services.common.store_memory import MemoryStore
from services.lb.autoscaler.config import AutoscalerConfig
from services.lb.autoscaler.controller import Controller
from services.lb.autoscaler.orchestrator import RecordingOrchestrator
from services.lb.autoscaler.policy import PoolConfig

POOL = PoolConfig(
    capacity=100,
    min_instances=1,
    max_instances=20,
    up_every_s=0,
    down_every_s=0,
    down_stable_s=0,
    smoothing_s=0,
)
KEYS = Keys()


class View:
    """A membership that shows as many decode instances as it is told."""

    def __init__(self):
        self.is_stale = False
        self.num_online = 2

    def members(self, role, states=(MemberState.READY,)):
        count = self.num_online if role == "decode" else 0
        return tuple(Member(role, f"d{i}", f"d{i}:1", MemberState.READY) for i in range(count))


class Candidate:
    """One autoscaler process with a clock of its own: a clock that stands is a frozen process."""

    def __init__(self, name, store, view, orchestrator, enact=False):
        self.clock = VirtualClock()
        rng = random.Random(name)
        self.election = Election(
            store, KEYS, "autoscaler", name, f"{name}:1", clock=self.clock, rng=rng
        )
        config = AutoscalerConfig(decode=POOL, enact=enact)
        self.controller = Controller(
            config, self.election, view, store, KEYS, orchestrator, self.clock
        )
        self.task = asyncio.create_task(self.election.run())

    def demand(self, value):
        self.controller.scaler.demand("decode", "lb", value, self.clock.now_s())

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Bench:
    def __init__(self, enact=False):
        self.clock = VirtualClock()
        self.store = MemoryStore(self.clock)
        self.view = View()
        self.orchestrator = RecordingOrchestrator()
        self.enact = enact
        self.candidates = []

    def start(self, name):
        candidate = Candidate(name, self.store, self.view, self.orchestrator, self.enact)
        self.candidates.append(candidate)
        return candidate

    async def pass_time(self, seconds, *candidates):
        """Lets the store and these candidates live on; the others are frozen."""
        for _ in range(round(seconds * 10)):
            await self.clock.advance(0.1)
            for candidate in candidates:
                await candidate.clock.advance(0.1)

    async def desired(self):
        item = await self.store.get(KEYS.named("as", "decode", "desired"))
        return json.loads(item.value) if item else None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for candidate in self.candidates:
            await candidate.stop()
        await self.store.close()


async def test_a_change_is_written_with_plan_number_and_term_and_told_the_orchestrator():
    async with Bench() as bench:
        one = bench.start("one")
        await bench.pass_time(1, one)
        one.demand(300)
        await one.controller.look()
        desired = await bench.desired()
        assert (desired["count"], desired["plan"]) == (4, 1)
        assert desired["term"] == one.election.term
        (note,) = bench.orchestrator.notes
        assert (note.pool, note.what, note.plan_number) == ("decode", "scale to 4", 1)
        await one.controller.look()
        assert len(bench.orchestrator.notes) == 2  # 4 -> 6, the step is two


async def test_ur_52_a_paused_leader_writes_nothing_once_another_has_begun():
    async with Bench() as bench:
        one, two = bench.start("one"), bench.start("two")
        await bench.pass_time(1, one, two)
        leader, other = (one, two) if one.election.is_leader else (two, one)
        leader.demand(150)
        await leader.controller.look()
        first = await bench.desired()
        # The leader is frozen past its lease; its clock stands, so it still believes.
        await bench.pass_time(30, other)
        assert other.election.is_leader
        assert leader.election.is_leader
        other.demand(100)
        await other.controller.look()
        second = await bench.desired()
        assert second["term"] > first["term"]
        assert second["plan"] == first["plan"] + 1
        leader.demand(1_900)
        await leader.controller.look()
        assert await bench.desired() == second
        assert {note.term for note in bench.orchestrator.notes} == {first["term"], second["term"]}
        assert not leader.election.is_leader


async def test_p_22_the_orchestrator_refuses_an_old_term():
    orchestrator = RecordingOrchestrator()
    await orchestrator.scale("decode", 3, 1, term=7)
    try:
        await orchestrator.scale("decode", 9, 2, term=6)
    except Failure as failure:
        refused = failure
    assert refused.reason is Reason.STALE_EPOCH
    assert len(orchestrator.notes) == 1


async def test_a_new_leader_continues_count_plan_and_bounds():
    async with Bench() as bench:
        one = bench.start("one")
        await bench.pass_time(1, one)
        one.demand(500)
        await one.controller.look()
        await one.controller.set_bounds("decode", 3, 9)
        await one.stop()
        two = bench.start("two")
        await bench.pass_time(15, two)
        two.demand(300)
        await two.controller.look()
        (view,) = [v for v in two.controller.pools() if v.pool == "decode"]
        assert (view.config.min_instances, view.config.max_instances) == (3, 9)
        assert (await bench.desired())["plan"] == 2


async def test_counts_freeze_while_the_view_is_stale_or_the_store_away():
    async with Bench() as bench:
        one = bench.start("one")
        await bench.pass_time(1, one)
        bench.view.is_stale = True
        one.demand(900)
        await one.controller.look()
        assert await bench.desired() is None
        bench.view.is_stale = False
        await one.controller.look()
        before = await bench.desired()
        bench.store.set_down(True)
        await one.controller.look()
        bench.store.set_down(False)
        assert await bench.desired() == before
        await one.controller.look()
        assert (await bench.desired())["plan"] == before["plan"] + 1


async def test_without_reports_nothing_is_decided():
    async with Bench() as bench:
        one = bench.start("one")
        await bench.pass_time(1, one)
        await one.controller.look()
        one.demand(300)
        await one.controller.look()
        count = (await bench.desired())["count"]
        await bench.pass_time(6, one)
        await one.controller.look()
        (view,) = [v for v in one.controller.pools() if v.pool == "decode"]
        assert view.decision.held_by == "no_demand"
        assert (await bench.desired())["count"] == count


async def test_enacting_writes_the_instances_before_it_acts_on_them():
    async with Bench(enact=True) as bench:
        one = bench.start("one")
        await bench.pass_time(1, one)
        one.demand(300)
        await one.controller.look()
        prefix = KEYS.named("as", "decode", "inst", "")
        written = {
            item.key.removeprefix(prefix): json.loads(item.value)["state"]
            for item in (await bench.store.list(prefix)).items
        }
        assert sorted(written.values()) == ["online", "online", "starting", "starting"]
        notes = [note for note in bench.orchestrator.notes if note.pool == "decode"]
        launches = [note for note in notes if note.what.startswith("launch")]
        assert len(launches) == 2
