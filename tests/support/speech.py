"""What a scripted engine says, written as text: turned into the ids that the codec knows."""

from __future__ import annotations

import json
import uuid
from array import array
from collections.abc import Mapping
from pathlib import Path

from services.recipe.codec import Tokenizer
from services.recipe.make_tokenizer import DEFAULT_FOLDER, V41_FILE
from tests.support.background_stack import write_script


class Speech:
    """Writes scripts. One tokenizer for all tests: it takes a moment to load."""

    def __init__(self, scripts: Path) -> None:
        self._scripts = scripts
        self._tokenizer = Tokenizer(DEFAULT_FOLDER / V41_FILE)

    def ids(self, text: str) -> list[int]:
        """Returns the ids of text; `｜DSML｜` and other special spellings become their tokens."""
        return array("I", self._tokenizer.encode_full(text)).tolist()

    def plain_ids(self, text: str) -> list[int]:
        """Returns ordinary ids only, whatever the text spells."""
        return array("I", self._tokenizer.encode_plain(text)).tolist()

    def script(
        self,
        answer: str = "",
        *,
        reasoning: str = "",
        calls: Mapping[str, Mapping[str, object]] | None = None,
        end: bool = True,
        logprobs: bool = False,
        request_id: str = "",
    ) -> str:
        """Registers a script and returns the request id to send."""
        request_id = request_id or f"test-{uuid.uuid4().hex}"
        said = self.ids(answer)
        document: dict[str, object] = {
            "token_ids": said,
            "reasoning_token_ids": self.ids(reasoning),
            "tool_call_token_ids": self.ids(dsml(calls)) if calls else [],
            "end": end,
        }
        if logprobs:
            document["logprobs"] = [-0.25 * (at + 1) for at in range(len(said))]
            document["top"] = [
                [[token, -0.25 * (at + 1)], [5, -9.0]] for at, token in enumerate(said)
            ]
        write_script(self._scripts, request_id, document)
        return request_id


def dsml(calls: Mapping[str, Mapping[str, object]]) -> str:
    """Returns a calls block as the model writes it; a name may carry `#n` to be called again."""
    lines = ["\n\n<｜DSML｜ calls>"]
    for name, arguments in calls.items():
        lines.append(f'<｜DSML｜ invoke name="{name.partition("#")[0]}">')
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value)
            lines.append(
                f'<｜DSML｜ parameter name="{key}" string="{str(is_text).lower()}">{text}'
                "</｜DSML｜ parameter>"
            )
        lines.append("</｜DSML｜ invoke>")
    lines.append("</｜DSML｜ calls>")
    return "\n".join(lines)
