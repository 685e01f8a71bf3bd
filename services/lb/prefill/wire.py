"""Between the messages of the prefill balancer and its events. Checks what callers send."""

from __future__ import annotations

import math

from pelagos.engine.v1 import records_pb2 as records
from pelagos.lb.v1 import prefill_lb_pb2 as pb

from services.common.call import current_call
from services.common.clock import Clock
from services.common.cost_model import CostModel
from services.common.errors import Failure, Reason
from services.lb.prefill import events as ev
from services.lb.prefill.events import Event, Work

MAX_TOKENS = 1 << 20
_KEY_BYTES = 32
# A request without any deadline still leaves the queue some day.
_MAX_LIFE_S = 2 * 3_600.0


def key_of(key: records.RequestKey) -> str:
    """Returns the text that names one attempt of one request."""
    return f"{key.request_id}/{key.branch}/{key.epoch}/{key.attempt}"


def work_of(spec: records.RequestSpec, clock: Clock, min_follow_tokens: int) -> Work:
    """Returns what the balancer needs of a request. Raises Failure(INVALID_REQUEST)."""
    if not spec.key.request_id:
        raise Failure(Reason.INVALID_REQUEST, "a request needs a request_id")
    num_bytes = len(spec.prompt_tokens)
    num_tokens = num_bytes // 4
    if num_bytes % 4 or not 1 <= num_tokens <= MAX_TOKENS:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"a prompt of {num_bytes} bytes is not 1 to {MAX_TOKENS} token ids",
            {"num_bytes": str(num_bytes), "max_tokens": str(MAX_TOKENS)},
        )
    hit = spec.hit
    num_present = hit.replay_from if hit.replay else hit.hit_tokens
    if num_present >= num_tokens:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"a hit of {num_present} tokens leaves nothing of {num_tokens}",
            {"num_present": str(num_present), "num_tokens": str(num_tokens)},
        )
    now_s = clock.now_s()
    deadline_s = min(current_call().deadline_s, now_s + _MAX_LIFE_S)
    if spec.deadline_unix_ms:
        deadline_s = min(deadline_s, now_s + spec.deadline_unix_ms / 1_000 - clock.wall_s())
    # What the request is for the queue: its branch may be queued beside it, its epoch replaces it.
    return Work(
        key=key_of(spec.key),
        request_id=f"{spec.key.request_id}/{spec.key.branch}",
        tenant=spec.namespace.tenant or current_call().tenant,
        num_tokens=num_tokens,
        num_present=num_present,
        deadline_s=deadline_s,
        attempt=spec.key.attempt,
        priority=spec.priority,
        model=spec.model,
        prefix_key=prefix_key(hit.block_keys, num_tokens, num_present, min_follow_tokens),
    )


def prefix_key(
    block_keys: bytes, num_tokens: int, num_present: int, min_follow_tokens: int
) -> bytes:
    """Returns the key of a block that ends `min_follow_tokens` or more into the cold part; or b"".

    Equal keys mean equal tokens up to there, since keys are chained: only prompts that share that
    much follow each other. Of two equal prompts that hit a little more and a little less of what
    is being written, both should get the same key: so it is the next block at a multiple of half
    as many tokens, or the last one. The block size is the power of two that fits length and count.
    """
    num_blocks = len(block_keys) // _KEY_BYTES
    if not num_blocks or num_tokens - num_present < min_follow_tokens:
        return b""
    block = 1 << ((num_tokens // num_blocks).bit_length() - 1)
    if num_tokens // block != num_blocks:
        return b""
    least = num_present + min_follow_tokens
    step = max(block, min_follow_tokens // 2)
    index = min(-(-least // step) * step // block, num_blocks) - 1
    if (index + 1) * block < least:
        return b""
    return block_keys[index * _KEY_BYTES : (index + 1) * _KEY_BYTES]


def joined_of(hello: pb.PullHello, cost_model: CostModel) -> ev.EngineJoined:
    """Returns the event of an engine's first message. Raises Failure(INVALID_REQUEST)."""
    if not hello.instance_id or not hello.boot_id or not hello.address:
        raise Failure(Reason.INVALID_REQUEST, "an engine needs instance_id, boot_id and address")
    return ev.EngineJoined(
        engine_id=hello.instance_id,
        boot_id=hello.boot_id,
        address=hello.address,
        quota_ns=hello.quota_ns,
        outstanding_ns=hello.outstanding_ns,
        holding=tuple(key_of(key) for key in hello.holding),
        accept_buckets=hello.accept_buckets,
        max_tokens=hello.max_tokens or MAX_TOKENS,
        model=hello.model,
        cost_model=cost_model,
    )


def report_of(request: pb.PullRequest, engine_id: str, boot_id: str) -> Event:
    """Returns the event of an engine's report. Raises Failure(INVALID_REQUEST)."""
    match request.WhichOneof("report"):
        case "capacity":
            capacity = request.capacity
            return ev.EngineCapacity(
                engine_id, boot_id, capacity.remaining_ns, capacity.holding, capacity.accepting
            )
        case "accepted":
            return ev.EngineAccepted(engine_id, boot_id, key_of(request.accepted.key))
        case "rejected":
            name = request.rejected.reason
            reason = Reason[name] if name in Reason.__members__ else Reason.INTERNAL
            return ev.EngineRejected(engine_id, boot_id, key_of(request.rejected.key), reason)
        case "finished":
            finished = request.finished
            return ev.EngineFinished(
                engine_id,
                boot_id,
                key_of(finished.key),
                finished.committed,
                finished.engine_fault,
            )
    raise Failure(Reason.INVALID_REQUEST, "a second hello, or an empty report")


def news_to_proto(news: ev.Wait | ev.Assign | ev.Rematch) -> pb.SubmitResponse:
    """Returns the message for a submitter."""
    match news:
        case ev.Wait():
            return pb.SubmitResponse(
                queued=pb.Queued(
                    bucket=news.bucket, position=news.position, following=news.following
                )
            )
        case ev.Assign():
            return pb.SubmitResponse(
                assigned=pb.Assigned(
                    instance_id=news.engine_id,
                    address=news.address,
                    boot_id=news.boot_id,
                    queue_wait_ms=min(news.queue_wait_ms, 2**32 - 1),
                )
            )
        case ev.Rematch():
            return pb.SubmitResponse(rematch=pb.Rematch())


def to_ms(seconds: float) -> int:
    """Returns whole milliseconds, at least 0, for a field of 32 bits."""
    return min(2**32 - 1, max(0, math.floor(seconds * 1_000)))
