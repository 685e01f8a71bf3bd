"""Requests from prefill to decode, on real servers: what survives, and what is given back."""

from __future__ import annotations

import asyncio

import pytest
from pelagos.common.v1 import errors_pb2
from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.rpc_client import call
from services.common.service import RuntimeConfig, running
from services.decode.client import DecodeClient
from services.engine.requests import RequestKey
from services.engine.sim.tokens import Script
from services.engine.streams import StreamLimits
from services.lb.prefill.client import PrefillLbClient, leader_of, place
from services.lb.prefill.config import PrefillLbConfig
from services.lb.prefill.main import build as build_prefill_lb
from services.prefill.client import PrefillClient
from tests.integration.engine_kit import (
    Answer,
    Cluster,
    Gate,
    ask,
    cluster,
    eventually,
    move_while_running,
    nothing_held,
    prompt_ids,
    spec,
)


async def test_one_request_flows_from_prefill_to_decode(tmp_path):
    async with cluster(tmp_path) as found:
        answer = await ask(found, spec("r1", prompt_ids(100), max_tokens=40))
        assert answer.end == "finished"
        assert answer.event.finished.reason == pb.FINISH_REASON_LENGTH
        assert len(answer.token_ids) == 40
        assert len(answer.moves) == 1
        usage = answer.event.finished.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (100, 40)
        assert usage.accepted_tokens > 0
        await nothing_held(found)


async def test_a_request_that_ends_with_its_first_token_never_reaches_decode(tmp_path):
    async with cluster(tmp_path) as found:
        answer = await ask(found, spec("r1", prompt_ids(30), max_tokens=1))
        assert (answer.end, len(answer.token_ids), answer.moves) == ("finished", 1, [])
        assert found.decodes[0].core.ranks[0].counts.steps == 0
        await nothing_held(found)


@pytest.mark.parametrize(
    "changes", [{"async_steps": False}, {"dspark": "none"}, {"dspark": "fixed"}, {"num_ranks": 2}]
)
async def test_t12_the_same_tokens_however_decode_steps(tmp_path, changes):
    request = spec("r", prompt_ids(60), max_tokens=50)
    async with cluster(tmp_path) as found:
        reference = (await ask(found, request)).token_ids
    async with cluster(tmp_path, decode=changes) as found:
        assert (await ask(found, request)).token_ids == reference


async def test_ur_72_a_seeded_request_is_the_same_alone_and_in_a_batch_of_32(tmp_path):
    request = spec("r", prompt_ids(60), max_tokens=30, seed=77)
    async with cluster(tmp_path) as found:
        alone = (await ask(found, request)).token_ids
    async with cluster(tmp_path, prefills=2, decodes=2) as found:
        others = [
            ask(found, spec(f"o{i}", prompt_ids(40 + i, seed=i), max_tokens=25, seed=i))
            for i in range(31)
        ]
        answers = await asyncio.gather(ask(found, request, found.prefills[1]), *others)
        assert answers[0].token_ids == alone
        assert all(answer.end == "finished" for answer in answers)
        await nothing_held(found)


async def test_scripted_answers_come_with_their_log_probabilities(tmp_path):
    async with cluster(tmp_path, sim={"mode": "scripted"}) as found:
        found.scripts.registered["r"] = Script(
            (11, 12, 13), logprobs=(-0.5, -0.25, -0.125), top=(((11, -0.5), (7, -3.0)),)
        )
        request = spec("r", prompt_ids(20), logprobs=True, top_logprobs=2)
        events = []
        async with PrefillClient(found.channels).run(found.prefills[0].address, request) as stream:
            events = [event async for event in stream]
        first = next(event.tokens for event in events if event.HasField("tokens"))
        assert first.top[0].token_ids == b"\x0b\0\0\0\x07\0\0\0"
        moved = events[-1].moved
        key = RequestKey("r", 0, moved.epoch, 0)
        # The whole answer can be replayed by decode, prefill's token with what was said about it.
        client = DecodeClient(found.channels)
        async with (
            client.attach(moved.address, "e") as channel,
            channel.subscribe(key, 0) as stream,
        ):
            tokens = [event.tokens async for event in stream if event.HasField("tokens")]
        packed = b"".join(t.logprobs for t in tokens)
        assert memoryview(packed).cast("f").tolist() == [-0.5, -0.25, -0.125]


# --- what survives --------------------------------------------------------------------------------


async def read_until_killed(found: Cluster, moved, answer: Answer) -> Failure:
    """Follows a moved request and kills its engine after some tokens; returns what it saw."""
    owner = next(e for e in found.decodes if e.runtime.instance_id == moved.instance_id)
    key = RequestKey("r", 0, moved.epoch, 0)
    try:
        async with (
            DecodeClient(found.channels).attach(moved.address, "e") as channel,
            channel.subscribe(key, moved.next_index) as stream,
        ):
            async for event in stream:
                answer.take(event)
                if len(answer.token_ids) > 2 and owner in found.decodes:
                    found.decodes.remove(owner)
                    await owner.kill()
    except Failure as failure:
        return failure
    raise AssertionError("the killed engine's stream ended well")


async def test_p_03_a_killed_decode_is_survived_by_prompt_plus_delivered_tokens(tmp_path):
    ids = prompt_ids(90)
    async with cluster(tmp_path, decodes=2) as found:
        reference = (await ask(found, spec("ref", ids, max_tokens=200))).token_ids
        await nothing_held(found)
        gate, answer = Gate(*found.decodes, after=3), Answer()
        async with PrefillClient(found.channels).run(
            found.prefills[0].address, spec("r", ids, max_tokens=200)
        ) as events:
            async for event in events:
                answer.take(event)
        failure = await read_until_killed(found, answer.moves[0], answer)
        assert failure.reason is Reason.BACKEND_LOST
        gate.open()
        delivered = answer.token_ids
        assert delivered == reference[: len(delivered)]
        again = ids[:]
        again.extend(delivered)
        rest = await ask(found, spec("r", again, max_tokens=200, attempt=1, resumed=len(delivered)))
        assert rest.first_index == len(delivered)
        assert delivered + rest.token_ids == reference
        assert rest.event.finished.usage.output_tokens == 200
        assert rest.event.finished.usage.prompt_tokens == 90
        await nothing_held(found)


async def test_p_02_a_decode_that_dies_before_the_hand_off_is_replaced_unseen(tmp_path):
    async with cluster(tmp_path, decodes=2) as found:
        dead = found.decodes[0]
        reference = (await ask(found, spec("ref", prompt_ids(50)))).token_ids
        found.decodes.remove(dead)
        await dead.kill()
        for number in range(4):
            answer = await ask(found, spec(f"r{number}", prompt_ids(50)))
            assert (answer.end, answer.token_ids) == ("finished", reference)
        await nothing_held(found)


async def test_t8_a_moved_request_goes_on_with_the_same_tokens(tmp_path):
    ids = prompt_ids(70)
    async with cluster(tmp_path, decodes=2) as found:
        reference = (await ask(found, spec("ref", ids, max_tokens=400))).token_ids
        await nothing_held(found)
        answer = await move_while_running(found, spec("r", ids, max_tokens=400))
        assert answer.token_ids == reference
        await nothing_held(found)


async def test_an_export_that_nobody_takes_leaves_the_request_where_it_was(tmp_path):
    ids = prompt_ids(70)
    async with cluster(tmp_path) as found:
        reference = (await ask(found, spec("ref", ids, max_tokens=300))).token_ids
        await nothing_held(found)
        gate = Gate(*found.decodes)
        task = asyncio.create_task(ask(found, spec("r", ids, max_tokens=300)))
        core = found.decodes[0].core
        await eventually(lambda: core.num_running, "a start")
        (_, sequence) = core.find(RequestKey("r"))
        export = asyncio.create_task(
            DecodeClient(found.channels).export(
                found.decodes[0].address, RequestKey("r"), "127.0.0.1:1"
            )
        )
        await eventually(lambda: sequence.paused, "a pause")
        gate.open()
        with pytest.raises(Failure):
            await export
        assert (await task).token_ids == reference


@pytest.mark.parametrize("where", ["another engine", "nobody", "nowhere"])
async def test_an_export_whose_caller_leaves_pauses_no_request_for_good(tmp_path, where):
    ids = prompt_ids(70)
    async with cluster(tmp_path, decodes=2) as found:
        reference = (await ask(found, spec("ref", ids, max_tokens=300))).token_ids
        await nothing_held(found)
        gate = Gate(*found.decodes)
        task = asyncio.create_task(ask(found, spec("r", ids, max_tokens=300)))
        first, second = found.decodes
        await eventually(lambda: first.core.num_running + second.core.num_running, "a start")
        source, target = (first, second) if first.core.num_running else (second, first)
        (_, sequence) = source.core.find(RequestKey("r"))
        address = {"another engine": target.address, "nobody": "127.0.0.1:1", "nowhere": ""}[where]
        export = asyncio.create_task(
            DecodeClient(found.channels).export(source.address, RequestKey("r"), address)
        )
        await eventually(lambda: sequence.paused, "a pause")
        export.cancel()
        await asyncio.wait([export])
        await asyncio.sleep(0.05)  # the server hears of it
        gate.open()
        answer = await task
        if where == "nowhere":  # it ends here, to be continued by whoever asked
            assert answer.event.finished.reason == pb.FINISH_REASON_PREEMPTED_RESUMABLE
        else:
            assert answer.token_ids == reference
            assert source.core.num_moved == (where == "another engine")
        await nothing_held(found)


async def test_p_04_t20_a_drained_decode_hands_everything_over_with_its_kv(tmp_path):
    async with cluster(tmp_path, decodes=2) as found:
        prompts = {f"r{i}": prompt_ids(40 + 3 * i, seed=i) for i in range(8)}
        references = {
            name: (await ask(found, spec(f"ref-{name}", ids, max_tokens=200))).token_ids
            for name, ids in prompts.items()
        }
        await nothing_held(found)
        gate = Gate(*found.decodes)
        tasks = {
            name: asyncio.create_task(ask(found, spec(name, ids, max_tokens=200)))
            for name, ids in prompts.items()
        }
        leaving, other = found.decodes
        await eventually(
            lambda: leaving.core.num_running + other.core.num_running == 8, "eight requests"
        )
        await leaving.runtime.set_ready(False)
        leaving.core.start_drain(0.0, 60.0, migrate=True)
        gate.open()
        await leaving.core.stopped.wait()
        for name, task in tasks.items():
            answer = await task
            assert answer.end == "finished", answer.event
            assert answer.token_ids == references[name]
        assert leaving.core.num_moved >= 2
        assert (leaving.core.num_resumed, leaving.core.num_lost) == (0, 0)
        await nothing_held(found)


async def test_without_another_engine_a_drain_gives_requests_back_as_resumable(tmp_path):
    async with cluster(tmp_path) as found:
        gate = Gate(*found.decodes)
        task = asyncio.create_task(ask(found, spec("r", prompt_ids(40), max_tokens=900)))
        engine = found.decodes[0].core
        await eventually(lambda: engine.num_running, "a start")
        engine.start_drain(0.0, 60.0, migrate=False)
        gate.open()
        await engine.stopped.wait()
        answer = await task
        assert answer.event.finished.reason == pb.FINISH_REASON_PREEMPTED_RESUMABLE
        with pytest.raises(Failure) as failure:
            engine.reserve(RequestKey("x"), 10, 10, engine.layout.signature, 0, 0)
        assert failure.value.reason is Reason.DRAINING


async def test_2_5_a_full_pool_moves_the_longest_output_to_another_engine(tmp_path):
    """25 blocks of 16 positions: three sequences of 60 + 120 come to need 36."""
    ids = [prompt_ids(60, seed=i) for i in range(3)]
    async with cluster(tmp_path, decodes=2, decode={"num_blocks": 26, "admit_below": 1.0}) as found:
        full, other = (engine.core for engine in found.decodes)
        gate = Gate(found.decodes[0])
        other.refusing = True  # until all three run on the first one
        tasks = []
        for index in range(3):
            request = spec(f"r{index}", ids[index], max_tokens=120)
            tasks.append(asyncio.create_task(ask(found, request)))
            await eventually(lambda n=index: full.num_running > n, "a start")
        other.refusing = False
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert full.ranks[0].counts.preempted > 0
        assert full.num_moved > 0
        for index, answer in enumerate(answers):
            assert answer.event.finished.reason == pb.FINISH_REASON_LENGTH, answer.event
            reference = await ask(found, spec(f"ref{index}", ids[index], max_tokens=120))
            assert answer.token_ids == reference.token_ids
        await nothing_held(found)


async def test_2_5_a_move_that_breaks_in_any_way_gives_the_request_back(tmp_path):
    class Broken:
        async def move(self, *_):
            raise ValueError("nobody thought of this")

    async with cluster(tmp_path, decode={"num_blocks": 26, "admit_below": 1.0}) as found:
        full = found.decodes[0].core
        full.mover = Broken()
        gate = Gate(found.decodes[0])
        tasks = []
        for index in range(3):
            request = spec(f"r{index}", prompt_ids(60, seed=index), max_tokens=120)
            tasks.append(asyncio.create_task(ask(found, request)))
            await eventually(lambda n=index: full.num_running > n, "a start")
        gate.open()
        reasons = [answer.event.finished.reason for answer in await asyncio.gather(*tasks)]
        assert full.ranks[0].counts.preempted > 0
        assert pb.FINISH_REASON_PREEMPTED_RESUMABLE in reasons
        assert pb.FINISH_REASON_LENGTH in reasons  # the others had room then
        await nothing_held(found)


async def test_2_5_a_preempted_request_resumes_with_the_same_tokens(tmp_path):
    ids = [prompt_ids(60, seed=i) for i in range(3)]
    async with cluster(tmp_path) as found:
        references = [
            (await ask(found, spec(f"ref{i}", p, max_tokens=120))).token_ids
            for i, p in enumerate(ids)
        ]
    small = {"num_blocks": 26, "preempt": "requeue", "admit_below": 1.0}
    async with cluster(tmp_path, decode=small) as found:
        gate = Gate(*found.decodes)

        async def persistent(index):
            """What the entrypoint does: prompt plus output again, until it ends for good."""
            said, prompt, attempts = [], ids[index], 0
            while True:
                again = prompt[:]
                again.extend(said)
                answer = await ask(
                    found,
                    spec(f"r{index}", again, max_tokens=120, attempt=attempts, resumed=len(said)),
                )
                said += answer.token_ids
                attempts += 1
                reason = answer.event.finished.reason
                if reason != pb.FINISH_REASON_PREEMPTED_RESUMABLE:
                    assert reason == pb.FINISH_REASON_LENGTH, answer.event
                    return said, attempts

        # One after the other: the balancer counts what runs by its present length.
        core, tasks = found.decodes[0].core, []
        for index in range(3):
            tasks.append(asyncio.create_task(persistent(index)))
            await eventually(lambda n=index: core.num_running > n, "a start")
        gate.open()
        results = await asyncio.gather(*tasks)
        assert [said for said, _ in results] == references
        assert sum(attempts for _, attempts in results) > 3, "nobody was preempted"
        await nothing_held(found)


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_p_06_t9_ur_29_ur_30_random_cancels_give_everything_back(tmp_path, seed):
    """Clients leave before, during and after the hand-off; nothing stays."""
    import random

    rng = random.Random(seed)
    async with cluster(tmp_path, prefills=2, decodes=2, sim={"time_scale": 0.05}) as found:
        watched = asyncio.create_task(ask(found, spec("watched", prompt_ids(64), max_tokens=120)))
        tasks = []
        for number in range(40):
            request = spec(f"r{number}", prompt_ids(rng.randrange(20, 400), seed=number))
            tasks.append(asyncio.create_task(ask(found, request, rng.choice(found.prefills))))
        for task in tasks:
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answer = await watched
        assert (answer.end, len(answer.token_ids)) == ("finished", 120)
        await nothing_held(found)
        probe = await ask(found, spec("probe", prompt_ids(64), max_tokens=120))
        assert probe.token_ids == answer.token_ids


async def test_ur_28_an_abort_in_the_middle_of_a_long_prompt_stops_it(tmp_path):
    async with cluster(tmp_path, prefill={"max_batched_tokens": 512}) as found:
        core, gate = found.prefills[0].core, Gate(found.prefills[0])
        task = asyncio.create_task(ask(found, spec("long", prompt_ids(3000))))
        await eventually(lambda: core.num_blocks_used, "a running prompt")
        task.cancel()
        await eventually(lambda: core.counts.aborted == 1, "the abort, while the step runs")
        gate.open()
        await nothing_held(found)
        assert core.ranks[0].counts.computed_tokens == 0


async def test_ur_61_an_expired_request_computes_nothing_and_fails_by_its_deadline(tmp_path):
    async with cluster(tmp_path) as found:
        core, gate = found.prefills[0].core, Gate(found.prefills[0])
        blocker = asyncio.create_task(ask(found, spec("blocker", prompt_ids(3000), max_tokens=1)))
        await eventually(lambda: core.num_blocks_used, "a busy engine")
        late = spec("late", prompt_ids(200))
        late.deadline_unix_ms = int(1e3 * found.prefills[0].runtime.clock.wall_s()) + 300
        stream = core.submit(late).stream
        await eventually(lambda: stream.has_ended, "its end, while the step of another runs")
        gate.open()
        assert stream.end_event.failed.reason == errors_pb2.REASON_DEADLINE
        assert stream.next_index == 0
        await blocker
        await nothing_held(found)
        assert core.ranks[0].counts.computed_tokens == 3000


async def test_ur_59_a_request_that_cannot_fit_decode_at_its_end_is_refused_with_a_reason(tmp_path):
    async with cluster(tmp_path, decode={"num_blocks": 21}) as found:
        answer = await ask(found, spec("big", prompt_ids(100), max_tokens=400))
        assert answer.end == "failed"
        assert answer.event.failed.reason == errors_pb2.REASON_NOT_FITTING
        fine = await ask(found, spec("fine", prompt_ids(100), max_tokens=50))
        assert fine.end == "finished"
        await nothing_held(found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_tokens": b""}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": b"abc"}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": (1 << 20).to_bytes(4, "little")}, Reason.INVALID_REQUEST),
        ({"prompt_tokens": prompt_ids(5000).tobytes()}, Reason.CONTEXT_LENGTH),
        ({"sampling": pb.Sampling(max_tokens=0)}, Reason.INVALID_REQUEST),
        ({"sampling": pb.Sampling(max_tokens=1, temperature=-1)}, Reason.INVALID_REQUEST),
        ({"sampling": pb.Sampling(max_tokens=1, top_p=1.5)}, Reason.INVALID_REQUEST),
        ({"sampling": pb.Sampling(max_tokens=1, top_logprobs=3)}, Reason.INVALID_REQUEST),
        ({"deadline_unix_ms": 1}, Reason.DEADLINE),
        ({"key": pb.RequestKey()}, Reason.INVALID_REQUEST),
    ],
)
async def test_p_07_bad_requests_are_refused_at_intake_and_hurt_nobody(tmp_path, change, reason):
    async with cluster(tmp_path) as found:
        request = spec("bad", prompt_ids(20))
        for name, value in change.items():
            if isinstance(value, bytes | int):
                setattr(request, name, value)
            else:
                getattr(request, name).CopyFrom(value)
        with pytest.raises(Failure) as failure:
            await ask(found, request)
        assert failure.value.reason is reason
        assert (await ask(found, spec("good", prompt_ids(20)))).end == "finished"


async def test_a_second_run_of_the_same_attempt_conflicts_and_a_newer_one_takes_over(tmp_path):
    async with cluster(tmp_path) as found:
        core, gate = found.prefills[0].core, Gate(found.prefills[0])
        first = asyncio.create_task(ask(found, spec("r", prompt_ids(2000))))
        await eventually(lambda: core.num_requests, "the first attempt")
        with pytest.raises(Failure) as failure:
            await ask(found, spec("r", prompt_ids(2000)))
        assert failure.value.reason is Reason.CONFLICT
        second = asyncio.create_task(ask(found, spec("r", prompt_ids(30), attempt=1)))
        await eventually(lambda: core.counts.received == 2, "the second attempt")
        gate.open()
        answer = await first
        assert answer.event.finished.reason == pb.FINISH_REASON_ABORT
        answer = await second
        assert answer.end == "finished", answer.event


# --- pulled work, channels ------------------------------------------------------------------------


async def test_work_is_pulled_from_the_balancer_and_followed_over_one_channel(tmp_path):
    runtime = RuntimeConfig(uvloop=False)
    async with (
        cluster(tmp_path, prefills=2, decodes=2) as found,
        running(
            "prefill-lb",
            PrefillLbConfig(runtime=runtime),
            build_prefill_lb,
            store=found.store,
        ) as lb,
    ):
        await lb.view.wait_for(lambda view: view.leader("prefill-lb") is not None)
        queue = PrefillLbClient(found.channels, leader_of(lb.view))
        client = PrefillClient(found.channels)

        async def one(number):
            request = spec(f"r{number}", prompt_ids(50 + number, seed=number))
            placed = await place(queue, request, timeout_s=30)
            answer = Answer()
            async with (
                client.attach(placed.address, f"e{number}") as channel,
                channel.subscribe(RequestKey(f"r{number}")) as stream,
            ):
                async for event in stream:
                    answer.take(event)
            return answer

        answers = await asyncio.gather(*(one(number) for number in range(12)))
        assert all(answer.end == "moved" for answer in answers)
        assert all(len(answer.token_ids) == 1 for answer in answers)
        taken = [engine.core.counts.received for engine in found.prefills]
        assert sum(taken) == 12


async def test_one_channel_carries_many_requests(tmp_path):
    kept = StreamLimits(keep_ended_s=120)
    async with cluster(tmp_path, decode={"streams": kept}) as found:
        client = PrefillClient(found.channels)
        moves = {}
        for number in range(10):
            request = spec(f"r{number}", prompt_ids(40, seed=number), max_tokens=60)
            async with client.run(found.prefills[0].address, request) as events:
                async for event in events:
                    if event.HasField("moved"):
                        moves[number] = event.moved
        core = found.decodes[0].core
        await eventually(lambda: core.num_running == 0, "all done")
        batches = []
        decode = DecodeClient(found.channels)
        async with decode.attach(found.decodes[0].address, "e") as channel:

            async def follow(number):
                key = RequestKey(f"r{number}", 0, moves[number].epoch, 0)
                async with channel.subscribe(key, 1) as stream:
                    async for event in stream:
                        batches.append(event)

            await asyncio.gather(*(follow(number) for number in range(10)))
        tokens = [event for event in batches if event.HasField("tokens")]
        # Whatever was emitted before the reader came is one event per request.
        assert len(tokens) == 10
        assert all(len(event.tokens.token_ids) == 59 * 4 for event in tokens)


async def test_a_request_nobody_reads_is_let_go(tmp_path):
    limits = StreamLimits(reader_timeout_s=0.3)
    async with cluster(tmp_path, decode={"streams": limits}) as found:
        core, gate = found.decodes[0].core, Gate(found.decodes[0])
        async with PrefillClient(found.channels).run(
            found.prefills[0].address, spec("r", prompt_ids(40), max_tokens=2000)
        ) as events:
            async for _ in events:
                pass
        assert core.num_running == 1
        stream = core.hub.find(RequestKey("r"))
        await eventually(lambda: stream.has_ended, "the abort")
        gate.open()
        assert stream.end_event.finished.reason == pb.FINISH_REASON_ABORT
        await nothing_held(found)


async def test_describe_and_load_say_what_the_engine_is_and_holds(tmp_path):
    from pelagos.engine.v1 import engine_control_pb2 as control
    from pelagos.engine.v1 import engine_control_pb2_grpc

    async with cluster(tmp_path) as found:
        signatures = set()
        for engine in (found.prefills[0], found.decodes[0]):
            stub = engine_control_pb2_grpc.EngineControlServiceStub(
                found.channels.get(engine.address)
            )
            described = await call(stub.Describe, control.DescribeRequest(), timeout_s=5)
            assert described.engine == "sim"
            assert described.kv_layout.block_tokens == 16
            signatures.add(described.layout_signature)
            with pytest.raises(Failure) as failure:
                await call(
                    stub.Configure,
                    control.ConfigureRequest(version=3, persist="sometimes"),
                    timeout_s=5,
                )
            assert failure.value.reason is Reason.INVALID_REQUEST
            request = control.ConfigureRequest(version=3, persist="none")
            await call(stub.Configure, request, timeout_s=5)
            assert engine.core.persist_mode == "none"
            with pytest.raises(Failure) as failure:
                await call(stub.Configure, control.ConfigureRequest(version=2), timeout_s=5)
            assert failure.value.reason is Reason.CONFLICT
        assert len(signatures) == 1
