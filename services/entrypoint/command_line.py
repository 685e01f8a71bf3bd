"""What `pelagos chat` and `pelagos explain` share: where the entrypoint is, and the key.

Given flags win; else the state file of the local stack, or of the one in `--folder`, says both.
Only the standard library: these commands start fast and run anywhere.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

_FOLDER: Final = Path(".local/stack")
_STATE_FILE: Final = "state.json"
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
        body = None if document is None else json.dumps(document).encode()
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        is_tls = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        try:
            connection = kind(parts.netloc, timeout=_TIMEOUT_S)
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            return connection.getresponse()
        except OSError as error:
            raise UsageError(f"{self.url} does not answer: {error}") from None
        except http.client.HTTPException as error:  # a port of something else, or no port at all
            text = str(error).strip() or type(error).__name__
            raise UsageError(f"{self.url} does not speak HTTP: {text!r}") from None


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


def find_target(flags: dict[str, str], folder: Path = _FOLDER) -> Target:
    """Returns where to go. Raises UsageError saying which flag is missing."""
    folder = Path(flags.get("folder", folder))
    state = _read_state(folder / _STATE_FILE)
    url = flags.get("url") or _first_http(state)
    if not url:
        raise UsageError(f"no stack runs in {folder}; give --folder DIR or --url http://host:port")
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
