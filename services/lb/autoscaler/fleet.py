"""Brings one pool's instances to the count that is wanted: whom to start, drain, give up.

Level-triggered: it compares what is wanted with what the membership shows, every time anew.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.lb.autoscaler import lifecycle, policy
from services.lb.autoscaler.lifecycle import Action, Event, Instance, LifecycleConfig, State
from services.lb.autoscaler.policy import Candidate

_NEW = "new-"  # an instance that was asked for and has not registered yet


@dataclass(frozen=True)
class FleetMember:
    """An instance as the membership shows it."""

    instance_id: str
    state: str  # starting, ready or draining
    failure_domain: str = ""
    num_running: int = 0


@dataclass(frozen=True)
class Step:
    """Something to do to an instance, under the plan that asked for it."""

    instance_id: str
    action: Action
    plan_number: int


class Fleet:
    """The instances of one pool."""

    def __init__(self, pool: str, config: LifecycleConfig) -> None:
        self._pool = pool
        self._config = config
        self._num_new = 0
        self.instances: dict[str, Instance] = {}

    def reconcile(
        self, members: Iterable[FleetMember], desired: int, plan_number: int, now_s: float
    ) -> list[Step]:
        """Returns what must be done now; the table is changed as if it had been."""
        found = {member.instance_id: member for member in members}
        steps: list[Step] = []
        self._adopt(found, plan_number, now_s)
        for instance_id in sorted(self.instances):
            member = found.get(instance_id)
            if not instance_id.startswith(_NEW):
                steps += self._observe(instance_id, member, now_s)
            if instance_id in self.instances:
                steps += self._apply(instance_id, Event.TICK, None, now_s)
        self._forget(found)
        counted = [i for i in self.instances.values() if i.counts]
        for _ in range(desired - len(counted)):
            self._num_new += 1
            new_id = f"{_NEW}{plan_number}-{self._num_new}"
            self.instances[new_id] = Instance(new_id, self._pool, State.READY, now_s)
            steps += self._apply(new_id, Event.START, plan_number, now_s)
        for _ in range(len(counted) - desired):
            victim = self._victim(found)
            if victim is None:
                break
            steps += self._apply(victim, Event.DRAIN, plan_number, now_s)
        self._forget(found)
        return steps

    def failed(self, instance_id: str, can_restart: bool, now_s: float) -> list[Step]:
        """Takes the platform's answer to COUNT_CARDS: start with what is left, or give up."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.state is not State.FAILED:
            return []
        event = Event.RESTART if can_restart else Event.GIVE_UP
        return self._apply(instance_id, event, None, now_s)

    def to_documents(self) -> dict[str, bytes]:
        """Returns the values of `as/<pool>/inst/<id>`: state and plan number."""
        return {
            instance_id: json.dumps(
                {"state": instance.state.value, "plan": instance.plan_number}
            ).encode()
            for instance_id, instance in self.instances.items()
        }

    def restore(self, documents: Mapping[str, bytes], now_s: float) -> None:
        """Starts from what a former leader wrote; time limits count from now."""
        self.instances = {}
        for instance_id, value in documents.items():
            try:
                document = json.loads(value)
                state, plan_number = State(document["state"]), int(document["plan"])
            except (ValueError, KeyError, TypeError):
                continue  # what is really there shows in the membership
            self.instances[instance_id] = Instance(
                instance_id, self._pool, state, now_s, plan_number
            )

    def _adopt(self, found: Mapping[str, FleetMember], plan_number: int, now_s: float) -> None:
        """Takes members that are new to us; those we asked for take their request's place."""
        asked = sorted(
            (i for i in self.instances.values() if i.instance_id.startswith(_NEW)),
            key=lambda i: (i.since_s, i.instance_id),
        )
        states = {"starting": State.WARMING, "ready": State.ONLINE, "draining": State.DRAINING}
        for instance_id in sorted(found.keys() - self.instances.keys()):
            state = states.get(found[instance_id].state, State.WARMING)
            number = plan_number
            if asked and state is not State.DRAINING:
                number = asked[0].plan_number
                del self.instances[asked.pop(0).instance_id]
            self.instances[instance_id] = Instance(instance_id, self._pool, state, now_s, number)

    def _observe(self, instance_id: str, member: FleetMember | None, now_s: float) -> list[Step]:
        state = self.instances[instance_id].state
        if member is None and state is State.RESIZING:
            # The old process has ended; the next one registers under an id of its own.
            self._num_new += 1
            old = self.instances.pop(instance_id)
            new_id = f"{_NEW}{old.plan_number}-{self._num_new}"
            self.instances[new_id] = dataclasses.replace(old, instance_id=new_id)
            return self._apply(new_id, Event.LOST, None, now_s)
        if member is None:
            return self._apply(instance_id, Event.LOST, None, now_s)
        if member.state == "ready":
            return self._apply(instance_id, Event.SERVING, None, now_s)
        if member.state == "starting":
            return self._apply(instance_id, Event.REGISTERED, None, now_s)
        # Somebody drained it by hand: it is on its way out all the same.
        if state in (State.ONLINE, State.WARMING, State.STARTING):
            instance = self.instances[instance_id]
            self.instances[instance_id] = dataclasses.replace(
                instance, state=State.DRAINING, since_s=now_s
            )
        return []

    def _apply(
        self, instance_id: str, event: Event, plan_number: int | None, now_s: float
    ) -> list[Step]:
        instance = self.instances[instance_id]
        number = instance.plan_number if plan_number is None else plan_number
        moved, actions = lifecycle.on_event(instance, event, now_s, number, self._config)
        self.instances[instance_id] = moved
        return [Step(instance_id, action, moved.plan_number) for action in actions]

    def _forget(self, found: Mapping[str, FleetMember]) -> None:
        """Drops what has gone back to the reserve, and what was stopped before it registered."""
        gone = (State.READY, State.STOPPED)
        self.instances = {
            k: i for k, i in self.instances.items() if i.state not in gone or k in found
        }

    def _victim(self, found: Mapping[str, FleetMember]) -> str | None:
        # What does not serve yet goes first: nobody is hurt.
        early = [i for i in self.instances.values() if i.state in (State.STARTING, State.WARMING)]
        if early:
            return max(early, key=lambda i: (i.since_s, i.instance_id)).instance_id
        online = [i for i in self.instances.values() if i.state is State.ONLINE]
        return policy.pick_victim(
            [
                Candidate(
                    i.instance_id,
                    found[i.instance_id].failure_domain,
                    found[i.instance_id].num_running,
                    i.since_s,
                )
                for i in online
                if i.instance_id in found
            ]
        )
