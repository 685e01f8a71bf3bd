"""The conformance suite of engines: invariants that can be driven from outside, over gRPC.

    report = await run_conformance(channels, "127.0.0.1:7201")
    for outcome in report: print(outcome.name, outcome.result)

It asks the engine what it is and runs the checks of its role. A check that needs what this engine
does not claim is reported as not driven, never as passed. The ids T… are those of engine.md, 10.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import random
import secrets
from array import array
from dataclasses import dataclass

from pelagos.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from pelagos.engine.v1 import engine_control_pb2 as control
from pelagos.engine.v1 import engine_control_pb2_grpc as control_rpc
from pelagos.engine.v1 import records_pb2 as pb
from pelagos.prefill.v1 import prefill_pb2, prefill_pb2_grpc

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels, call, stream_call
from services.engine.conformance_decode import decode_checks
from services.engine.conformance_kit import Check, CheckFailed, NotDriven, Target, require

_SETTLE_S = 15.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """How one check ended: `passed`, `failed` or `not driven`, with the reason."""

    name: str
    result: str
    detail: str = ""


async def run_conformance(
    channels: Channels, address: str, settle_s: float = _SETTLE_S
) -> list[Outcome]:
    """Runs every check of the engine's role, one after the other. Raises: Failure when the engine
    does not answer at all."""
    stub = control_rpc.EngineControlServiceStub(channels.get(address))
    described = await call(stub.Describe, control.DescribeRequest(), timeout_s=5.0)
    target = Target(channels, address, described, stub, settle_s)
    checks = [*_COMMON, *_OF_ROLE.get(described.role, []), ("T9 nothing is left", _nothing_left)]
    outcomes = []
    for name, check in checks:
        outcomes.append(await _run(name, check, target))
    return outcomes


async def _run(name: str, check: Check, target: Target) -> Outcome:
    try:
        async with asyncio.timeout(120):
            await check(target)
    except NotDriven as reason:
        return Outcome(name, "not driven", str(reason))
    except CheckFailed as reason:
        return Outcome(name, "failed", str(reason))
    except Failure as failure:
        return Outcome(name, "failed", f"unexpected {failure}")
    except TimeoutError:
        return Outcome(name, "failed", "took longer than 120 s")
    return Outcome(name, "passed")


# --- every engine ---------------------------------------------------------------------------------


async def _describes_itself(target: Target) -> None:
    about = target.about
    require(bool(about.instance_id and about.boot_id), "instance and boot id are empty")
    require(about.role != control.ENGINE_ROLE_UNSPECIFIED, "the role is unspecified")
    if about.role == control.ENGINE_ROLE_VISION:
        return
    layout = about.kv_layout
    require(bool(about.layout_signature), "the layout signature is empty")
    require(len(about.ranks) == about.dp_size, "one capacity per rank")
    at = 0
    for part in layout.parts:
        require(part.offset_bytes == at, f"part {part.name} of layer {part.layer} leaves a gap")
        at += part.length_bytes
    require(at <= layout.block_bytes, "the parts are larger than the block")
    require(layout.ring_tokens > layout.window_tokens, "the ring leaves no room to roll back")
    again = await call(target.service.Describe, control.DescribeRequest(), timeout_s=5.0)
    require(again.boot_id == about.boot_id, "the boot id changes while the process lives")


async def _reports_load(target: Target) -> None:
    versions: list[int] = []
    request = control.WatchLoadRequest(interval_ms=50)
    async with stream_call(target.service.WatchLoad, request, timeout_s=10) as stream:
        async for report in stream:
            require(report.boot_id == target.about.boot_id, "a report of another boot")
            versions.append(report.version)
            if len(versions) == 3:
                break
    require(
        versions == [versions[0] + i for i in range(3)], f"versions {versions} do not rise by 1"
    )


async def _refuses_old_configuration(target: Target) -> None:
    version = int.from_bytes(secrets.token_bytes(4), "little") + 2
    request = control.ConfigureRequest(version=version)
    await call(target.service.Configure, request, timeout_s=5.0)
    try:
        old = control.ConfigureRequest(version=version - 1)
        await call(target.service.Configure, old, timeout_s=5.0)
    except Failure as failure:
        require(failure.reason is Reason.CONFLICT, f"an old version gives {failure.reason.value}")
    else:
        raise CheckFailed("an old version was taken")


async def _nothing_left(target: Target) -> None:
    """At idle every pool is full and no work is outstanding (T3, T9)."""
    deadline_s = asyncio.get_running_loop().time() + target.settle_s
    while True:
        ranks = await target.loads()
        left = [
            (r.rank, r.running, r.waiting, r.waiting_deps, r.outstanding_ns, r.blocks_reserved)
            for r in ranks
            if r.running or r.waiting or r.waiting_deps or r.outstanding_ns or r.blocks_reserved
        ]
        used = [r.rank for r in ranks if (r.blocks_free, r.state_free) != _all_of(r)]
        if not left and not used:
            return
        if asyncio.get_running_loop().time() > deadline_s:
            raise CheckFailed(f"still held: {left}; pools not full on ranks {used}")
        await asyncio.sleep(_POLL_S)


def _all_of(load: control.RankLoad) -> tuple[int, int]:
    return load.blocks_total, load.state_total


# --- prefill --------------------------------------------------------------------------------------


class _Prefill:
    """Runs prompts on the engine; every id is used once."""

    def __init__(self, target: Target) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(target.channels.get(target.address))
        self._vocab = min(target.about.vocab_size, 100_000)
        self._ids = itertools.count()
        self._prefix = f"conformance-{secrets.token_hex(4)}"
        self.stub = self._stub

    def prompt(self, num: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return array("I", [rng.randrange(3, self._vocab) for _ in range(num)]).tobytes()

    def spec(self, prompt: bytes, **fields: object) -> pb.RequestSpec:
        key = pb.RequestKey(request_id=f"{self._prefix}-{next(self._ids)}")
        sampling = pb.Sampling(max_tokens=1, temperature=1.0, seed=4, logprobs=True)
        spec = pb.RequestSpec(key=key, prompt_tokens=prompt, sampling=sampling)
        for name, value in fields.items():
            getattr(spec, name).extend(value)  # only repeated fields are set this way
        return spec

    async def run(self, spec: pb.RequestSpec) -> list[pb.RequestEvent]:
        request = prefill_pb2.RunRequest(spec=spec)
        async with stream_call(self._stub.Run, request, timeout_s=60) as stream:
            return [response.event async for response in stream]

    async def first_token(self, spec: pb.RequestSpec) -> pb.Tokens:
        events = await self.run(spec)
        ends = [e for e in events if e.WhichOneof("event") in ("finished", "failed", "moved")]
        require(len(ends) == 1 and events[-1] is ends[0], "a stream ends once, with its end")
        require(events[-1].HasField("finished"), f"ended by {events[-1].WhichOneof('event')}")
        tokens = [event.tokens for event in events if event.HasField("tokens")]
        require(len(tokens) == 1, f"{len(tokens)} token events for one token")
        return tokens[0]


async def _prefill_is_a_function_of_its_request(target: Target) -> None:
    engine = _Prefill(target)
    prompt = engine.prompt(3 * target.about.kv_layout.block_tokens + 5, seed=1)
    first = await engine.first_token(engine.spec(prompt))
    again, *others = await asyncio.gather(
        engine.first_token(engine.spec(prompt)),
        *(engine.first_token(engine.spec(engine.prompt(50 + i, seed=i))) for i in range(8)),
    )
    require(again.token_ids == first.token_ids, "a batch changes a seeded token (UR-72)")
    require(len({t.token_ids for t in others}) > 1, "different prompts give one answer")


async def _prefill_chunks_change_nothing(target: Target) -> None:
    engine = _Prefill(target)
    num = 4 * target.about.kv_layout.block_tokens + 7
    prompt = engine.prompt(num, seed=2)
    whole = await engine.first_token(engine.spec(prompt))
    for cuts in ([1], [num // 2], list(range(5, num, num // 6))):
        cut = await engine.first_token(engine.spec(prompt, cut_points=cuts))
        require(cut.token_ids == whole.token_ids, f"cut at {cuts} gives another token")


async def _prefill_refuses_bad_requests(target: Target) -> None:
    engine = _Prefill(target)
    good = engine.prompt(20, seed=3)
    too_long = engine.prompt(target.about.max_model_len + 1, seed=3)
    vocab = target.about.vocab_size.to_bytes(4, "little")
    cases: list[tuple[str, pb.RequestSpec, tuple[Reason, ...]]] = [
        ("empty prompt", engine.spec(b""), (Reason.INVALID_REQUEST,)),
        ("half an id", engine.spec(good + b"x"), (Reason.INVALID_REQUEST,)),
        ("id past the vocabulary", engine.spec(good + vocab), (Reason.INVALID_REQUEST,)),
        ("too long", engine.spec(too_long), (Reason.CONTEXT_LENGTH, Reason.NOT_FITTING)),
    ]
    for name, value in (("max_tokens", 0), ("top_p", 2.0), ("temperature", -1.0)):
        spec = engine.spec(good)
        setattr(spec.sampling, name, value)
        cases.append((f"{name} = {value}", spec, (Reason.INVALID_REQUEST,)))
    late = engine.spec(good)
    late.deadline_unix_ms = 1
    cases.append(("passed deadline", late, (Reason.DEADLINE,)))
    for name, spec, reasons in cases:
        try:
            await engine.run(spec)
        except Failure as failure:
            require(failure.reason in reasons, f"{name} gives {failure.reason.value}")
        else:
            raise CheckFailed(f"{name} was taken")


async def _prefill_keeps_fifo(target: Target) -> None:
    """Equal requests end in the order in which they came, on one rank (T4)."""
    if target.about.dp_size != 1:
        raise NotDriven("order is kept per rank, and this engine has several")
    engine = _Prefill(target)
    order: list[int] = []

    async def one(number: int) -> None:
        await engine.first_token(engine.spec(engine.prompt(200, seed=number)))
        order.append(number)

    tasks = []
    for number in range(6):
        tasks.append(asyncio.create_task(one(number)))
        await asyncio.sleep(0.02)  # the order of arrival is what is tested
    await asyncio.gather(*tasks)
    # Two that end in one step may reach us in either order.
    late = [number for place, number in enumerate(order) if abs(place - number) > 1]
    require(not late, f"ended in the order {order}")


async def _prefill_aborts_are_safe(target: Target) -> None:
    engine = _Prefill(target)
    unknown = prefill_pb2.AbortRequest(key=pb.RequestKey(request_id="conformance-nobody"))
    answer = await call(engine.stub.Abort, unknown, timeout_s=5.0)
    require(not answer.found, "an unknown request was found")
    spec = engine.spec(engine.prompt(2000, seed=6))
    request = prefill_pb2.RunRequest(spec=spec)
    async with stream_call(engine.stub.Run, request, timeout_s=30) as stream:
        await stream.read()
    known = prefill_pb2.AbortRequest(key=spec.key)
    for _ in range(2):
        await call(engine.stub.Abort, known, timeout_s=5.0)


# --- encoder --------------------------------------------------------------------------------------


async def _encoder_plans(target: Target) -> None:
    stub = encoder_pb2_grpc.EncoderServiceStub(target.channels.get(target.address))
    request = encoder_pb2.PlanRequest(widths=[1920, 64, 7], heights=[1080, 64, 3000])
    answer = await call(stub.Plan, request, timeout_s=5.0)
    for image in answer.images:
        require(
            image.num_tokens == image.llm_height * (image.llm_width + 1) + 2,
            f"{image.num_tokens} tokens for {image.llm_width} x {image.llm_height} cells",
        )
        require(image.num_patches == image.vit_width * image.vit_height, "patches are the grid")
    again = encoder_pb2.PlanRequest(
        widths=[i.width for i in answer.images], heights=[i.height for i in answer.images]
    )
    settled = await call(stub.Plan, again, timeout_s=5.0)
    require(list(settled.images) == list(answer.images), "a planned size plans to another")


async def _encoder_fails_one_image_alone(target: Target) -> None:
    from PIL import Image

    stub = encoder_pb2_grpc.EncoderServiceStub(target.channels.get(target.address))
    data = io.BytesIO()
    Image.new("RGB", (90, 60), (1, 2, 3)).save(data, "PNG")
    good = data.getvalue()

    def image(name: str, content: bytes) -> encoder_pb2.EncodeRequest:
        digest = hashlib.sha256(content + secrets.token_bytes(8)).digest()
        return encoder_pb2.EncodeRequest(
            item_id=name, width=90, height=60, data=content, digest=digest
        )

    sizes: dict[str, tuple[int, int]] = {}
    failed: list[str] = []
    async with stream_call(stub.Encode, timeout_s=30) as stream:
        for name, content in (("a", good), ("broken", b"no image"), ("b", good)):
            await stream.write(image(name, content))
        await stream.done_writing()
        async for part in stream:
            if part.HasField("error"):
                failed.append(part.item_id)
                continue
            have, _ = sizes.get(part.item_id, (0, 0))
            require(part.offset_bytes == have, "a piece of an embedding is missing")
            sizes[part.item_id] = (have + len(part.embeddings), part.total_bytes)
            rows = part.total_bytes // (2 * part.hidden)
            require(rows == part.geometry.num_tokens, f"{rows} rows for the span")
    require(failed == ["broken"], f"failed: {failed}")
    require(sorted(sizes) == ["a", "b"], f"encoded: {sorted(sizes)}")
    require(all(have == total for have, total in sizes.values()), "an embedding is not whole")


_COMMON: list[tuple[str, Check]] = [
    ("describes itself", _describes_itself),
    ("reports load", _reports_load),
    ("refuses an old configuration", _refuses_old_configuration),
]
_OF_ROLE: dict[int, list[tuple[str, Check]]] = {
    control.ENGINE_ROLE_PREFILL: [
        ("UR-72 a token is a function of its request", _prefill_is_a_function_of_its_request),
        ("T5 chunked = unchunked", _prefill_chunks_change_nothing),
        ("P-07 bad requests are refused", _prefill_refuses_bad_requests),
        ("T4 FIFO", _prefill_keeps_fifo),
        ("aborts are safe", _prefill_aborts_are_safe),
    ],
    control.ENGINE_ROLE_DECODE: decode_checks(),
    control.ENGINE_ROLE_VISION: [
        ("plans are a pure function", _encoder_plans),
        ("P-07 one image fails alone", _encoder_fails_one_image_alone),
    ],
}
