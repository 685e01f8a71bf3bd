"""The table of reasons, and its way over gRPC and inside streams."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pelagos.common.v1 import errors_pb2 as pb

from services.common.errors import Api, Blame, Failure, Reason, Retry, Scope, reason_of_status
from services.common.rpc_errors import from_proto, from_rpc_error, to_proto, to_status

# reliability-and-security.md, section 4, row by row: reasons, gRPC status, Chat status and type,
# Messages status and type, SDK should retry, counts against the instance.
TABLE = """
INVALID_REQUEST | INVALID_ARGUMENT | 400 invalid_request_error | 400 invalid_request_error | n | n
CONTEXT_LENGTH NOT_FITTING | OUT_OF_RANGE | 400 invalid_request_error | 400 invalid_request_error | n | n
UNSUPPORTED_FEATURE SCHEMA_UNSUPPORTED GRAMMAR_BUDGET | INVALID_ARGUMENT | 400 invalid_request_error | 400 invalid_request_error | n | n
IMAGE_INVALID IMAGE_FETCH IMAGE_BLOCKED | INVALID_ARGUMENT | 400 invalid_request_error | 400 invalid_request_error | n | n
BODY_TOO_LARGE | - | 413 invalid_request_error | 413 request_too_large | n | n
UNAUTHENTICATED | UNAUTHENTICATED | 401 authentication_error | 401 authentication_error | n | n
NO_BALANCE | - | 402 insufficient_balance | 402 billing_error | n | n
FORBIDDEN | PERMISSION_DENIED | 403 permission_error | 403 permission_error | n | n
NOT_FOUND | NOT_FOUND | 404 invalid_request_error | 404 not_found_error | n | n
CONFLICT | ABORTED | 409 invalid_request_error | 409 invalid_request_error | y | n
QUOTA | RESOURCE_EXHAUSTED | 429 rate_limit_error | 429 rate_limit_error | y | n
OVERLOADED QUEUE_TIMEOUT | UNAVAILABLE | 503 server_error | 529 overloaded_error | y | n
DRAINING NO_INSTANCE | UNAVAILABLE | 503 server_error | 529 overloaded_error | y | n
BACKEND_LOST | UNAVAILABLE | 503 server_error | 529 overloaded_error | y | INSTANCE
DEADLINE | DEADLINE_EXCEEDED | 504 server_error | 504 timeout_error | n | HOLDER
LAYOUT_MISMATCH WRONG_ROLE | FAILED_PRECONDITION | 500 internal_error | 500 api_error | y | INSTANCE
INTERNAL | INTERNAL | 500 internal_error | 500 api_error | y | INSTANCE
"""  # noqa: E501


def test_every_reason_has_the_row_of_the_document() -> None:
    seen = set()
    for line in TABLE.strip().splitlines():
        names, status, chat, messages, sdk, blame = (part.strip() for part in line.split("|"))
        for name in names.split():
            reason = Reason[name]
            seen.add(reason)
            if status != "-":
                assert reason.grpc_status == status
            for api, expected in (
                (Api.CHAT, chat),
                (Api.RESPONSES, chat),
                (Api.MESSAGES, messages),
            ):
                assert f"{reason.http_status(api)} {reason.http_type(api)}" == expected, reason
            assert reason.facts.sdk_should_retry == (sdk == "y"), reason
            assert reason.facts.blame is (Blame.NOBODY if blame == "n" else Blame[blame]), reason
    never_shown = {Reason.ENGINE_FULL, Reason.CLIENT_CANCELLED, Reason.BLOCK_CORRUPT}
    never_shown |= {Reason.STALE_EPOCH, Reason.HANDOFF_MISMATCH}
    assert seen | never_shown == set(Reason)


def test_what_is_never_shown_is_shown_as_something_else() -> None:
    assert Reason.ENGINE_FULL.shown_as is Reason.OVERLOADED
    assert Reason.ENGINE_FULL.grpc_status == "RESOURCE_EXHAUSTED"
    for reason in (Reason.BLOCK_CORRUPT, Reason.STALE_EPOCH, Reason.HANDOFF_MISMATCH):
        assert reason.shown_as is Reason.INTERNAL
        assert reason.facts.blame is Blame.HOLDER
    assert Reason.STALE_EPOCH.grpc_status == "ABORTED"
    assert Reason.BLOCK_CORRUPT.grpc_status == "DATA_LOSS"
    assert Reason.CLIENT_CANCELLED.grpc_status == "CANCELLED"
    assert Reason.QUOTA.shown_as is Reason.QUOTA


def test_every_reason_names_a_grpc_status_and_a_proto_value() -> None:
    names = {name.removeprefix("REASON_") for name, _ in pb.Reason.items()}
    assert {reason.value for reason in Reason} == names - {"UNSPECIFIED"}
    for reason in Reason:
        assert hasattr(grpc.StatusCode, reason.grpc_status)
        assert reason.value == reason.name


def test_caller_errors_are_retried_by_nobody() -> None:
    for reason in Reason:
        if reason.http_status(Api.CHAT) in (400, 401, 402, 403, 404, 413):
            assert reason.facts.retry is Retry.NOBODY
            assert not reason.retryable
            assert reason.facts.blame is Blame.NOBODY


class FakeRpcError(grpc.RpcError):
    """What a call raises: a status and trailers."""

    def __init__(self, status: grpc.Status) -> None:
        super().__init__()
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self):
        return self._status.trailing_metadata


failures = st.builds(
    Failure,
    st.sampled_from([reason for reason in Reason if reason is not Reason.INTERNAL]),
    st.text(max_size=200).filter(lambda text: "\x00" not in text),
    st.dictionaries(st.sampled_from(["a", "num_tokens"]), st.text(max_size=20)),
    st.one_of(st.none(), st.integers(1, 10**6).map(lambda ms: ms / 1000)),
    scope=st.sampled_from(Scope),
)


def same(left: Failure, right: Failure) -> bool:
    facts = [(f.reason, f.message, f.metadata, f.scope) for f in (left, right)]
    return facts[0] == facts[1] and left.retry_after_s == pytest.approx(right.retry_after_s)


@given(failures)
def test_a_failure_survives_the_status_and_the_message(failure: Failure) -> None:
    assert same(failure, from_rpc_error(FakeRpcError(to_status(failure))))
    assert same(failure, from_proto(to_proto(failure)))
    assert to_proto(failure).retryable == failure.reason.retryable


def test_the_text_of_internal_does_not_travel() -> None:
    failure = Failure(Reason.INTERNAL, "row 7 of users.db", {"trace_id": "ab" * 16})
    for text in (to_proto(failure).message, to_status(failure).details):
        assert "users" not in text
        assert "ab" * 16 in text


def test_a_status_without_our_details_is_mapped_by_its_code() -> None:
    assert reason_of_status("UNAVAILABLE") is Reason.BACKEND_LOST
    assert reason_of_status("UNKNOWN") is Reason.INTERNAL
    assert reason_of_status("A_CODE_OF_TOMORROW") is Reason.INTERNAL
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="Received message larger than max (5 vs. 4)",
    )
    assert from_rpc_error(error).reason is Reason.INVALID_REQUEST


def test_values_of_a_newer_build_read_as_internal() -> None:
    assert from_proto(pb.Error(reason=9999)).reason is Reason.INTERNAL  # type: ignore[arg-type]
    assert from_proto(pb.Error()).reason is Reason.INTERNAL
    assert from_proto(pb.Error(scope=77)).scope is Scope.REQUEST  # type: ignore[arg-type]


def test_a_broken_details_trailer_falls_back_to_the_code() -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers)
    assert from_rpc_error(error).reason is Reason.BACKEND_LOST
