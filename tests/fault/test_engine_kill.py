"""SIGKILL of prefill and decode processes under streams: every answer is whole (P-01, P-03, T18).

The client here does what an entrypoint does: submit to the prefill balancer, attach, follow moves,
and after a loss submit prompt plus delivered output again as the next attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from array import array
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pelagos.engine.v1 import records_pb2 as pb

from deploy.local.plan import StackConfig
from deploy.local.stack import Stack
from services.common.cli import SERVICES
from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import ClusterView
from services.common.rpc_client import Channels
from services.common.store_etcd import EtcdStore
from services.decode.client import DecodeClient
from services.engine.requests import RequestKey, Sampling
from services.engine.sim.config import SimConfig
from services.engine.sim.tokens import Cursor, Scripts, voice_for
from services.lb.prefill.client import PrefillLbClient, leader_of, place
from services.prefill.client import PrefillClient
from tests.contract.engine_parts import prompt_ids

pytestmark = pytest.mark.timeout(180)

KEPT = {"prefill-lb", "decode-lb", "prefill", "decode"}
NUM_STREAMS, NUM_TOKENS, SEED = 20, 300, 11
SIM = SimConfig(mode="hash", stop_every=0)
SIM_FLAGS = ["--model.sim.mode=hash", "--model.sim.stop_every=0", "--model.sim.time_scale=2.0"]


def expected(ids: array[int]) -> list[int]:
    """What the simulated model says to a prompt, whoever computes it."""
    sampling = Sampling(temperature=1.0, seed=SEED)
    voice = voice_for(SIM, Scripts(), "any", ids, sampling)
    cursor, said = Cursor(SIM.ids, ids, ()), []
    while len(said) < NUM_TOKENS:
        said.append(voice.say(cursor).token_id)
        cursor.advance(said[-1])
    return said


class Client:
    """One request at a time, followed through losses."""

    def __init__(self, channels: Channels, view: ClusterView) -> None:
        self._queue = PrefillLbClient(channels, leader_of(view))
        self._prefill = PrefillClient(channels)
        self._decode = DecodeClient(channels)
        self.num_lost = 0
        self.num_tokens = 0

    async def generate(self, request_id: str, ids: array[int]) -> list[int]:
        said: list[int] = []
        for attempt in itertools.count():
            try:
                await self._attempt(request_id, ids, said, attempt)
                return said
            except Failure as failure:
                if not failure.retryable:
                    raise
                self.num_lost += 1
                await asyncio.sleep(0.05)
        raise AssertionError("unreachable")

    async def _attempt(
        self, request_id: str, ids: array[int], said: list[int], attempt: int
    ) -> None:
        prompt = ids[:]
        prompt.extend(said)
        spec = pb.RequestSpec(
            key=pb.RequestKey(request_id=request_id, attempt=attempt),
            prompt_tokens=prompt.tobytes(),
            num_resumed_tokens=len(said),
            sampling=pb.Sampling(max_tokens=NUM_TOKENS, temperature=1.0, seed=SEED),
            namespace=pb.Namespace(tenant="acme"),
        )
        placed = await place(self._queue, spec, timeout_s=60)
        client, address, epoch = self._prefill, placed.address, 0
        while True:
            key = RequestKey(request_id, 0, epoch, attempt)
            end = await self._follow(client, address, key, said)
            if end.HasField("finished"):
                assert end.finished.reason == pb.FINISH_REASON_LENGTH, end
                return
            if end.HasField("failed"):
                raise Failure(Reason.BACKEND_LOST, "the engine gave the request back")
            client, address, epoch = self._decode, end.moved.address, end.moved.epoch

    async def _follow(
        self,
        client: PrefillClient | DecodeClient,
        address: str,
        key: RequestKey,
        said: list[int],
    ) -> pb.RequestEvent:
        async with (
            client.attach(address, "entrypoint-t") as channel,
            channel.subscribe(key, len(said)) as events,
        ):
            async for event in events:
                if event.HasField("tokens"):
                    assert event.tokens.first_index == len(said), "a gap or a repeat"
                    new = array("I")
                    new.frombytes(event.tokens.token_ids)
                    said.extend(new)
                    self.num_tokens += len(new)
        return event


async def reach(client: Client, num_tokens: int) -> None:
    """Waits until so many tokens have been delivered in all."""
    while client.num_tokens < num_tokens:  # noqa: ASYNC110 - tokens come from other processes
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_p_03_t18_killing_an_engine_under_streams_changes_no_answer(
    tmp_path: Path, victim: str
) -> None:
    config = StackConfig(
        folder=tmp_path / "stack",
        without=tuple(name for name in SERVICES if name not in KEPT),
        flags={"prefill": SIM_FLAGS, "decode": SIM_FLAGS},
        drain_grace_s=2.0,
    )
    prompts = {f"r{i}": prompt_ids(200 + 13 * i, seed=i) for i in range(NUM_STREAMS)}
    async with Stack(config).running() as stack, AsyncExitStack() as cleanup:
        store = EtcdStore(stack.etcd_endpoint)
        cleanup.push_async_callback(store.close)
        view, channels = ClusterView(store, Keys(config.cluster)), Channels()
        cleanup.push_async_callback(channels.close)
        follow = asyncio.create_task(view.run())
        cleanup.callback(follow.cancel)
        await view.wait_for(lambda v: len(v.members("decode")) == len(v.members("prefill")) == 2)
        await view.wait_for(lambda v: v.leader("prefill-lb") is not None)
        client = Client(channels, view)
        tasks = {
            name: asyncio.create_task(client.generate(name, ids)) for name, ids in prompts.items()
        }
        if victim == "prefill":
            # While prompts are still being computed and handed over.
            await reach(client, 1)
        else:
            await reach(client, NUM_STREAMS * NUM_TOKENS // 4)
        stack[f"{victim}-1"].signal(signal.SIGKILL)
        answers = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        for name, said in answers.items():
            assert said == expected(prompts[name]), name
        if victim == "decode":
            assert client.num_lost > 0, "nothing ran on the killed engine"
