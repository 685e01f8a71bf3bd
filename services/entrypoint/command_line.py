"""What `pelagos chat` and `pelagos explain` share: where the entrypoint is, and the key.

Given flags win; else the local stack's state file says both. Only the standard library: these
commands start fast and run anywhere.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

_STATE_FILE: Final = Path(".local/stack/state.json")
_TIMEOUT_S: Final = 600.0


class UsageError(Exception):
    """A command line that cannot be carried out; its text is for the person at it."""


@dataclass(frozen=True)
class Target:
    """An entrypoint and a key for it."""

    url: str
    key: str

    def request(self, method: str, path: str, document: Any = None) -> http.client.HTTPResponse:
        """Sends one request; the answer may be read piece by piece."""
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.netloc, timeout=_TIMEOUT_S
            )
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
        body = None if document is None else json.dumps(document).encode()
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            return connection.getresponse()
        except OSError as error:
            raise UsageError(f"{self.url} does not answer: {error}") from None


def parse_flags(args: Sequence[str], known: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns `--name value` flags and the other arguments. Raises UsageError."""
    flags: dict[str, str] = {}
    others: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            others.append(arg)
            continue
        name, has_value, value = arg[2:].partition("=")
        if name not in known:
            raise UsageError(f"unknown flag --{name}; known: {', '.join('--' + k for k in known)}")
        if not has_value:
            if not rest:
                raise UsageError(f"--{name} needs a value")
            value = rest.pop(0)
        flags[name] = value
    return flags, others


def find_target(flags: dict[str, str], state_file: Path = _STATE_FILE) -> Target:
    """Returns where to go. Raises UsageError saying which flag is missing."""
    state = _read_state(state_file)
    url = flags.get("url") or _first_http(state)
    if not url:
        raise UsageError("no local stack runs here; give --url http://host:port")
    key_file = flags.get("key-file") or state.get("api_key_file", "")
    if not key_file:
        raise UsageError("give --key-file FILE with the API key")
    try:
        key = Path(key_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"cannot read the key: {error.strerror}") from None
    return Target(url, key)


def error_text(response: http.client.HTTPResponse) -> str:
    """Returns what an answer that is no success says."""
    try:
        message = json.loads(response.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.reason
    return f"{response.status}: {message}"


def _first_http(state: dict[str, Any]) -> str:
    for process in state.get("processes", {}).values():
        if process.get("service") == "entrypoint" and process.get("labels", {}).get("http"):
            return f"http://{process['labels']['http']}"
    return ""


def _read_state(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
