"""`Failure` to and from google.rpc.Status (with ErrorInfo, RetryInfo) and `common.v1.Error`.

Servers and clients get this from `rpc_server` and `rpc_client`; call it directly only for the
`Error` message inside a stream.
"""

from __future__ import annotations

from typing import Final

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from pelagos.common.v1 import errors_pb2 as pb

from services.common.errors import DOMAIN, Failure, Reason, Scope, reason_of_status

_HIDDEN_TEXT: Final = "internal error"
_MAX_MESSAGE_BYTES: Final = 4096  # a status travels in HTTP/2 trailers, which peers bound
_SCOPE_KEY: Final = "pelagos-scope"


def to_proto(failure: Failure) -> pb.Error:
    """Returns the message for a failure inside a stream. INTERNAL loses its text."""
    return pb.Error(
        reason=pb.Reason.Value(f"REASON_{failure.reason.value}"),
        message=_public_text(failure),
        retryable=failure.retryable,
        scope=failure.scope.value,  # type: ignore[arg-type]
        metadata=failure.metadata,
        retry_after_ms=_to_ms(failure.retry_after_s),
    )


def from_proto(error: pb.Error) -> Failure:
    """Returns the failure that a peer sent inside a stream. Unknown values read as INTERNAL."""
    name = pb.Reason.Name(error.reason) if error.reason in pb.Reason.values() else ""
    return Failure(
        _reason_named(name.removeprefix("REASON_")),
        error.message,
        dict(error.metadata),
        error.retry_after_ms / 1000 if error.retry_after_ms else None,
        scope=Scope(error.scope) if error.scope in (1, 2, 3) else Scope.REQUEST,
    )


def to_status(failure: Failure) -> grpc.Status:
    """Returns what `context.abort_with_status` takes: code, text, ErrorInfo, RetryInfo."""
    name = failure.reason.grpc_status
    status = status_pb2.Status(code=code_pb2.Code.Value(name), message=_public_text(failure))
    metadata = dict(failure.metadata)
    if failure.scope is not Scope.REQUEST:
        metadata[_SCOPE_KEY] = failure.scope.name
    info = error_details_pb2.ErrorInfo(
        reason=failure.reason.value, domain=DOMAIN, metadata=metadata
    )
    status.details.add().Pack(info)
    if failure.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(failure.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError) -> Failure:
    """Returns the failure behind a call's exception: ours if it has ErrorInfo, else by status."""
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    text = (error.details() if hasattr(error, "details") else "") or ""
    status = _rich_status(error)
    if status is None:
        return Failure(_reason_without_info(code, text), text)
    reason: Reason | None = None
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            if info.domain == DOMAIN:
                reason = _reason_named(info.reason)
                metadata = dict(info.metadata)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    scope = metadata.pop(_SCOPE_KEY, "REQUEST")
    return Failure(
        reason or _reason_without_info(code, text),
        status.message,
        metadata,
        retry_after_s,
        scope=Scope[scope] if scope in Scope.__members__ else Scope.REQUEST,
    )


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    """Returns the status in the trailers; None where there is none or it is not readable."""
    trailers = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailers or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except Exception:
                return None
            return status
    return None


def _reason_without_info(code: grpc.StatusCode, text: str) -> Reason:
    # gRPC reports an oversize message as RESOURCE_EXHAUSTED; it would be as large elsewhere.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return Reason.INVALID_REQUEST
    return reason_of_status(code.name)


def _reason_named(name: str) -> Reason:
    return Reason[name] if name in Reason.__members__ else Reason.INTERNAL


def _public_text(failure: Failure) -> str:
    """Returns the text that may travel. INTERNAL texts stay in the log, found by trace id."""
    if failure.reason is Reason.INTERNAL:
        trace_id = failure.metadata.get("trace_id")
        return f"{_HIDDEN_TEXT}, trace {trace_id}" if trace_id else _HIDDEN_TEXT
    return failure.message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore")


def _to_ms(seconds: float | None) -> int:
    # A positive wait never rounds down to "no opinion".
    return 0 if seconds is None else max(1, round(seconds * 1000))
