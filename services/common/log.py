"""Logs: one JSON object per line, a fixed message and fields, never content.

    log = logging.getLogger(__name__)
    log.info("request placed", extra={"request_id": rid, "rank": rank_id, "queue_wait_ms": wait})

The ids of the current call are added by themselves. Fields that could hold content or credentials
are dropped by name, strings that look like keys are masked, and a line is cut at 8 KiB (S-09).
`setup` is called once by `service.run_service`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from typing import IO, Any, Final

from services.common.call import current_call
from services.common.errors import Failure

MAX_LINE_BYTES: Final = 8192
_MASK: Final = "(redacted)"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# A field with one of these names is content or a credential whatever its value.
_FORBIDDEN_FIELDS: Final = frozenset(
    {"prompt", "prompts", "completion", "text", "content", "contents", "messages", "body"}
    | {"token_ids", "prompt_tokens", "output_tokens", "api_key", "key", "keys", "authorization"}
    | {"password", "secret", "credential", "url"}
)
_QUOTABLE: Final = (OSError, RuntimeError, ImportError, AttributeError, TypeError, Failure)
_SECRET_TEXT: Final = re.compile(
    r"(?i)(bearer\s+|x-api-key[:=]\s*|authorization[:=]\s*)\S+|\bsk-[A-Za-z0-9_-]{8,}"
)


class JsonFormatter(logging.Formatter):
    """Turns a record into one line of JSON; never raises on a field it cannot encode."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "instance_id": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without its end, at most MAX_LINE_BYTES long."""
        line: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _clean(record.getMessage()),
            **self._fixed,
        }
        call = current_call()
        if call.request_id:
            line["request_id"] = call.request_id
        if call.traceparent:
            line["trace_id"] = call.traceparent[3:35]
        for name, value in record.__dict__.items():
            if name not in _STANDARD:
                line[name] = _MASK if name.lower() in _FORBIDDEN_FIELDS else _clean(value)
        if record.exc_info and record.exc_info[0] is not None:
            line["error_type"] = record.exc_info[0].__name__
            line["error"] = _clean(_describe(record.exc_info[1]))
        return _cut(line)


def setup(
    service: str, instance_id: str, level: str = "info", stream: IO[str] | None = None
) -> None:
    """Sends all logging of this process to `stream` (default stderr) as JSON lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service, instance_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries log at info what we count in metrics; their warnings stay.
    for noisy in ("grpc", "uvicorn", "opentelemetry", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


def _describe(error: BaseException | None) -> str:
    """Returns where it happened, and the text only of errors that do not quote their input.

    A ValueError or KeyError is often about the caller's own bytes (S-09); the place is enough.
    """
    if error is None:
        return ""
    frames = "".join(traceback.format_tb(error.__traceback__)[-12:])
    text = str(error) if isinstance(error, _QUOTABLE) else "(text withheld)"
    cause = f"; caused by {type(error.__cause__).__name__}" if error.__cause__ else ""
    return f"{frames}{type(error).__name__}: {text}{cause}"


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _SECRET_TEXT.sub(_MASK, value)
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, dict):
        return {
            str(k): _MASK if str(k).lower() in _FORBIDDEN_FIELDS else _clean(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    return _SECRET_TEXT.sub(_MASK, str(value))


def _cut(line: dict[str, Any]) -> str:
    text = json.dumps(line, ensure_ascii=True, default=str)
    if len(text) <= MAX_LINE_BYTES:
        return text
    # The longest strings give way first, so that the short fields one searches by survive.
    for name in sorted(line, key=lambda n: -len(str(line[n]))):
        excess = len(text) - MAX_LINE_BYTES + 32
        value = line[name] if isinstance(line[name], str) else json.dumps(line[name], default=str)
        # JSON may spend up to 12 bytes on a character, so cut until the encoded form fits.
        keep = max(0, len(value) - excess)
        line[name] = value[:keep] + "...(cut)"
        text = json.dumps(line, ensure_ascii=True, default=str)
        if len(text) <= MAX_LINE_BYTES:
            return text
    return text[: MAX_LINE_BYTES - 2] + '"}'


def _iso(wall_s: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall_s))
    return f"{whole}.{int(wall_s % 1 * 1_000_000):06d}Z"
