"""One way to fail: `Failure`, which carries a `Reason` that knows its status on every surface.

Cores and shells raise `Failure`; `rpc_errors` turns it into a gRPC status and back, and the
entrypoint turns it into each API's body. This module imports no gRPC, so cores may use it.
Source: reliability-and-security.md, section 4; engine.md, section 7.7.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DOMAIN: Final = "pelagos"


class Api(enum.Enum):
    """The HTTP dialects; Chat and Responses share one error table."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


class Retry(enum.Enum):
    """Who tries again. One layer retries per call path, never two."""

    NOBODY = "nobody"
    CALLER = "caller"  # reloads its view (epoch, revision) and starts again
    PLACER = "placer"  # whoever chose the instance takes another, then backs off
    CLIENT = "client"  # the API's client, after Retry-After


class Blame(enum.Enum):
    """Whether a failure counts towards ejecting somebody from rotation."""

    NOBODY = "nobody"
    INSTANCE = "instance"  # the instance that was called
    HOLDER = "holder"  # the stage or node that held the request or served the bytes


class Scope(enum.Enum):
    """How far a failure reaches; INSTANCE also turns the instance's health off."""

    REQUEST = 1
    RANK = 2
    INSTANCE = 3


@dataclass(frozen=True)
class ReasonFacts:
    """One row of the table. `grpc_status` is the name of a grpc.StatusCode."""

    grpc_status: str
    http_status: int
    http_type: str
    messages_status: int
    messages_type: str
    retry: Retry = Retry.NOBODY
    sdk_should_retry: bool = False
    blame: Blame = Blame.NOBODY
    alert: bool = False


def _refused(grpc_status: str) -> ReasonFacts:
    return ReasonFacts(grpc_status, 400, "invalid_request_error", 400, "invalid_request_error")


def _unavailable(
    retry: Retry, blame: Blame = Blame.NOBODY, grpc_status: str = "UNAVAILABLE"
) -> ReasonFacts:
    return ReasonFacts(
        grpc_status, 503, "server_error", 529, "overloaded_error", retry, True, blame
    )


def _broken(
    grpc_status: str, retry: Retry, blame: Blame = Blame.INSTANCE, alert: bool = False
) -> ReasonFacts:
    return ReasonFacts(
        grpc_status, 500, "internal_error", 500, "api_error", retry, True, blame, alert
    )


class Reason(enum.Enum):
    """Why a call failed. `Reason.X.facts` is its row; names equal those of the proto enum."""

    INVALID_REQUEST = "INVALID_REQUEST"
    CONTEXT_LENGTH = "CONTEXT_LENGTH"
    NOT_FITTING = "NOT_FITTING"
    UNSUPPORTED_FEATURE = "UNSUPPORTED_FEATURE"
    SCHEMA_UNSUPPORTED = "SCHEMA_UNSUPPORTED"
    GRAMMAR_BUDGET = "GRAMMAR_BUDGET"
    IMAGE_INVALID = "IMAGE_INVALID"
    IMAGE_FETCH = "IMAGE_FETCH"
    IMAGE_BLOCKED = "IMAGE_BLOCKED"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    NO_BALANCE = "NO_BALANCE"
    FORBIDDEN = "FORBIDDEN"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    QUOTA = "QUOTA"
    ENGINE_FULL = "ENGINE_FULL"
    OVERLOADED = "OVERLOADED"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    DRAINING = "DRAINING"
    NO_INSTANCE = "NO_INSTANCE"
    BACKEND_LOST = "BACKEND_LOST"
    DEADLINE = "DEADLINE"
    CLIENT_CANCELLED = "CLIENT_CANCELLED"
    BLOCK_CORRUPT = "BLOCK_CORRUPT"
    STALE_EPOCH = "STALE_EPOCH"
    HANDOFF_MISMATCH = "HANDOFF_MISMATCH"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    WRONG_ROLE = "WRONG_ROLE"
    INTERNAL = "INTERNAL"

    @property
    def facts(self) -> ReasonFacts:
        """Returns the row of the table: statuses, who retries, who is to blame."""
        return _FACTS[self]

    @property
    def grpc_status(self) -> str:
        """Returns the name of the gRPC status code."""
        return _FACTS[self].grpc_status

    @property
    def retryable(self) -> bool:
        """Returns whether the same request may succeed elsewhere, later, or after a reload."""
        return _FACTS[self].retry is not Retry.NOBODY

    def http_status(self, api: Api) -> int:
        """Returns the HTTP status in that API's dialect."""
        facts = _FACTS[self]
        return facts.messages_status if api is Api.MESSAGES else facts.http_status

    def http_type(self, api: Api) -> str:
        """Returns the `type` of the error object in that API's dialect."""
        facts = _FACTS[self]
        return facts.messages_type if api is Api.MESSAGES else facts.http_type

    @property
    def shown_as(self) -> Reason:
        """Returns the reason a client sees: some are only between services."""
        return _SHOWN_AS.get(self, self)


# ENGINE_FULL keeps its placer's retry; if it reaches a client after all it reads as OVERLOADED.
_FACTS: Final[Mapping[Reason, ReasonFacts]] = {
    Reason.INVALID_REQUEST: _refused("INVALID_ARGUMENT"),
    Reason.CONTEXT_LENGTH: _refused("OUT_OF_RANGE"),
    Reason.NOT_FITTING: _refused("OUT_OF_RANGE"),
    Reason.UNSUPPORTED_FEATURE: _refused("INVALID_ARGUMENT"),
    Reason.SCHEMA_UNSUPPORTED: _refused("INVALID_ARGUMENT"),
    Reason.GRAMMAR_BUDGET: _refused("INVALID_ARGUMENT"),
    Reason.IMAGE_INVALID: _refused("INVALID_ARGUMENT"),
    Reason.IMAGE_FETCH: _refused("INVALID_ARGUMENT"),
    Reason.IMAGE_BLOCKED: _refused("INVALID_ARGUMENT"),
    Reason.BODY_TOO_LARGE: ReasonFacts(
        "INVALID_ARGUMENT", 413, "invalid_request_error", 413, "request_too_large"
    ),
    Reason.UNAUTHENTICATED: ReasonFacts(
        "UNAUTHENTICATED", 401, "authentication_error", 401, "authentication_error"
    ),
    Reason.NO_BALANCE: ReasonFacts(
        "PERMISSION_DENIED", 402, "insufficient_balance", 402, "billing_error"
    ),
    Reason.FORBIDDEN: ReasonFacts(
        "PERMISSION_DENIED", 403, "permission_error", 403, "permission_error"
    ),
    Reason.NOT_FOUND: ReasonFacts(
        "NOT_FOUND", 404, "invalid_request_error", 404, "not_found_error"
    ),
    Reason.CONFLICT: ReasonFacts(
        "ABORTED", 409, "invalid_request_error", 409, "invalid_request_error", Retry.CALLER, True
    ),
    Reason.QUOTA: ReasonFacts(
        "RESOURCE_EXHAUSTED", 429, "rate_limit_error", 429, "rate_limit_error", Retry.CLIENT, True
    ),
    Reason.ENGINE_FULL: _unavailable(Retry.PLACER, grpc_status="RESOURCE_EXHAUSTED"),
    Reason.OVERLOADED: _unavailable(Retry.CLIENT),
    Reason.QUEUE_TIMEOUT: _unavailable(Retry.CLIENT),
    Reason.DRAINING: _unavailable(Retry.PLACER),
    Reason.NO_INSTANCE: _unavailable(Retry.PLACER),
    Reason.BACKEND_LOST: _unavailable(Retry.PLACER, Blame.INSTANCE),
    Reason.DEADLINE: ReasonFacts(
        "DEADLINE_EXCEEDED", 504, "server_error", 504, "timeout_error", blame=Blame.HOLDER
    ),
    Reason.CLIENT_CANCELLED: ReasonFacts(
        "CANCELLED", 499, "client_cancelled", 499, "client_cancelled"
    ),
    Reason.BLOCK_CORRUPT: _broken("DATA_LOSS", Retry.PLACER, Blame.HOLDER),
    Reason.STALE_EPOCH: _broken("ABORTED", Retry.CALLER, Blame.HOLDER),
    Reason.HANDOFF_MISMATCH: _broken("DATA_LOSS", Retry.PLACER, Blame.HOLDER),
    Reason.LAYOUT_MISMATCH: _broken("FAILED_PRECONDITION", Retry.PLACER, alert=True),
    Reason.WRONG_ROLE: _broken("FAILED_PRECONDITION", Retry.PLACER, alert=True),
    Reason.INTERNAL: _broken("INTERNAL", Retry.PLACER),
}

_SHOWN_AS: Final[Mapping[Reason, Reason]] = {
    Reason.ENGINE_FULL: Reason.OVERLOADED,
    Reason.BLOCK_CORRUPT: Reason.INTERNAL,
    Reason.STALE_EPOCH: Reason.INTERNAL,
    Reason.HANDOFF_MISMATCH: Reason.INTERNAL,
    Reason.LAYOUT_MISMATCH: Reason.INTERNAL,
    Reason.WRONG_ROLE: Reason.INTERNAL,
}

# What a status means when the peer sent no ErrorInfo: it came from gRPC itself, or from an
# engine that is not ours.
_REASON_OF_STATUS: Final[Mapping[str, Reason]] = {
    "INVALID_ARGUMENT": Reason.INVALID_REQUEST,
    "OUT_OF_RANGE": Reason.INVALID_REQUEST,
    "UNAUTHENTICATED": Reason.UNAUTHENTICATED,
    "PERMISSION_DENIED": Reason.FORBIDDEN,
    "NOT_FOUND": Reason.NOT_FOUND,
    "ALREADY_EXISTS": Reason.CONFLICT,
    "ABORTED": Reason.CONFLICT,
    "RESOURCE_EXHAUSTED": Reason.ENGINE_FULL,
    "UNAVAILABLE": Reason.BACKEND_LOST,
    "DEADLINE_EXCEEDED": Reason.DEADLINE,
    "CANCELLED": Reason.CLIENT_CANCELLED,
    "DATA_LOSS": Reason.BLOCK_CORRUPT,
    "UNIMPLEMENTED": Reason.WRONG_ROLE,
}


def reason_of_status(status_name: str) -> Reason:
    """Returns the reason for a bare gRPC status name; INTERNAL for one that is not listed."""
    return _REASON_OF_STATUS.get(status_name, Reason.INTERNAL)


class Failure(Exception):
    """A call that failed for a known reason.

    Args:
        reason: why; decides status, retry and blame.
        message: for a person. Never prompt text, keys, addresses or file names. For INTERNAL it
            stays in the log and does not travel.
        metadata: every number of the message, as text, for programs.
        retry_after_s: earliest useful next try, seconds from now.
        scope: how far it reaches.
    """

    def __init__(
        self,
        reason: Reason,
        message: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        *,
        scope: Scope = Scope.REQUEST,
    ) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s
        self.scope = scope

    @property
    def retryable(self) -> bool:
        """Returns whether trying again, elsewhere or later, may help."""
        return self.reason.retryable

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.message}" if self.message else self.reason.value
