"""A running stack as the evaluation speaks to it: its HTTP API, and what its state file tells."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from services.engine.evaluation.questions import Said

_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True)
class StackAddress:
    """Where a stack is. Without its processes' addresses only the HTTP API can be used.

    processes: of each service, the RPC addresses.
    """

    url: str
    key: str
    model: str
    processes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> StackAddress:
        """Returns the address of a local stack, as its state file gives it. Raises: OSError."""
        processes: dict[str, tuple[str, ...]] = {}
        url = ""
        for process in state["processes"].values():
            service = process["service"]
            processes[service] = (*processes.get(service, ()), process["address"])
            if service == "entrypoint" and not url:
                url = f"http://{process['labels']['http']}"
        key = Path(state["api_key_file"]).read_text(encoding="utf-8").strip()
        return StackAddress(url, key, state.get("model", ""), processes)


class HttpStack:
    """The Chat API, one connection a call: calls come from several threads at once."""

    def __init__(self, address: StackAddress) -> None:
        self.address = address
        self._netloc = urlsplit(address.url).netloc

    def ask(self, body: Mapping[str, Any], *, salt: str, request_id: str) -> Said:
        """Asks one question greedily; an answer that is none says so in `error`."""
        status, document = self._call(
            "POST",
            "/v1/chat/completions",
            {**body, "model": self.address.model},
            {"x-pelagos-cache-salt": salt, "x-request-id": request_id},
        )
        if status != 200:
            return Said(error=f"{status}: {_error_text(document)}")
        said = _said_of(document)
        status, explained = self._call("GET", f"/v1/requests/{request_id}")
        if status != 200:
            return said
        return Said(
            said.content,
            said.reasoning,
            said.calls,
            said.finish,
            said.prompt_tokens,
            said.cached_tokens,
            int(explained["replayed_tokens"]),
            tuple(explained.get("instances", ())),
        )

    def _call(
        self,
        method: str,
        path: str,
        document: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._netloc, timeout=_TIMEOUT_S)
        try:
            connection.request(
                method,
                path,
                None if document is None else json.dumps(document).encode(),
                {
                    "authorization": f"Bearer {self.address.key}",
                    "content-type": "application/json",
                    **(headers or {}),
                },
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"{}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            return 0, {"error": {"message": f"{type(error).__name__}: {error}"}}
        finally:
            connection.close()


def _said_of(document: Mapping[str, Any]) -> Said:
    choice = document["choices"][0]
    message, usage = choice["message"], document["usage"]
    calls = tuple(
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Said(
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=calls,
        finish=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def _error_text(document: Any) -> str:
    try:
        return str(document["error"]["message"])
    except (KeyError, TypeError):
        return str(document)[:200]
