"""Between the messages of the decode balancer and its events. Checks what callers send."""

from __future__ import annotations

from pelagos.lb.v1 import decode_lb_pb2 as pb

from services.common.call import current_call
from services.common.clock import Clock
from services.common.errors import Failure, Reason
from services.lb.decode import balancer as dec

MAX_TOKENS = 1 << 20
_MAX_WAIT_S = 60.0


def key_of(request_id: str, attempt: int) -> str:
    """Returns the text that names one attempt of one request."""
    return f"{request_id}/{attempt}"


def pick_of(request: pb.PickRankRequest, clock: Clock, default_wait_s: float) -> dec.Pick:
    """Returns the event of a pick. Raises Failure(INVALID_REQUEST)."""
    if not request.request_id:
        raise Failure(Reason.INVALID_REQUEST, "a pick needs a request_id")
    if not 1 <= request.num_tokens <= MAX_TOKENS:
        raise Failure(
            Reason.INVALID_REQUEST,
            f"num_tokens is {request.num_tokens}, outside 1 to {MAX_TOKENS}",
            {"num_tokens": str(request.num_tokens), "max_tokens": str(MAX_TOKENS)},
        )
    wait_s = min(_MAX_WAIT_S, request.max_wait_ms / 1_000 or default_wait_s)
    return dec.Pick(
        key=key_of(request.request_id, request.attempt),
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        wait_until_s=min(clock.now_s() + wait_s, current_call().deadline_s),
        is_handoff=request.handoff,
        exclude=frozenset(request.exclude_instances),
        layout_signature=request.layout_signature,
    )


def report_of(request: pb.ReportRequest) -> dec.Report:
    """Returns the event of a report. Raises Failure(INVALID_REQUEST)."""
    if not request.instance_id or not request.boot_id or not request.address:
        raise Failure(Reason.INVALID_REQUEST, "a report needs instance_id, boot_id and address")
    ranks = tuple(
        dec.RankReport(
            rank.rank, rank.kv_tokens, rank.requests, rank.free_tokens, rank.max_requests
        )
        for rank in request.ranks
    )
    if len({rank.rank for rank in ranks}) != len(ranks):
        raise Failure(Reason.INVALID_REQUEST, "a report names a rank twice")
    return dec.Report(
        request.instance_id,
        request.boot_id,
        request.address,
        request.accepting,
        ranks,
        request.version,
        request.layout_signature,
        tuple(request.seen_request_ids),
    )
