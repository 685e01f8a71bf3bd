"""The vocabulary beside a checkpoint: its `tokenizer.json`, met with the network's configuration.

Ids mean the same to codec and network only when both read the same file, so an engine that finds
one names it by its digest, and one whose special ids differ from the configuration is not started.
Free of torch. Source: recipe.md, sections 1.1 and 1.2; model.md, section 13.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from services.common.tokenizer_id import tokenizer_id
from services.engine.model.config import ConfigError, ModelConfig
from services.engine.model.engram_hash import Int64, build_token_map

TOKENIZER: Final = "tokenizer.json"
TOKEN_MAP: Final = "engram_token_map.npy"  # raw id -> compressed id, where they differ
# Two spellings of one id: the codec's file, and a checkpoint's (recipe.md, 1.1).
_IMAGE_SPELLINGS: Final = ("<｜image｜>", "<｜deepseek_image｜>")
_END_SPELLING: Final = "<｜end▁of▁sentence｜>"
_START_SPELLING: Final = "<｜begin▁of▁sentence｜>"


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer file says of its ids. `spellings`: by id, as the file writes them."""

    path: Path
    tokenizer_id: str
    spellings: Mapping[int, str]
    added: Mapping[str, int]

    @property
    def num_ids(self) -> int:
        """Returns one more than the largest id."""
        return max(self.spellings) + 1

    def demand_fits(self, config: ModelConfig) -> None:
        """Raises ConfigError where network and tokenizer do not mean the same ids."""
        rows = config.text.vocab_size
        if self.num_ids > rows:
            raise ConfigError(
                f"{self.path} has ids up to {self.num_ids - 1}, the network knows {rows} of them"
            )
        for name, wanted, spellings in (
            ("bos_token_id", config.bos_token_id, (_START_SPELLING,)),
            ("eos_token_id", config.eos_token_id, (_END_SPELLING,)),
            ("image_token_id", config.image_token_id, _IMAGE_SPELLINGS),
        ):
            found = next((self.added[text] for text in spellings if text in self.added), None)
            if found is None and name == "image_token_id" and config.vision is None:
                continue
            if found != wanted:
                raise ConfigError(
                    f"{name} is {wanted}, {self.path} spells {spellings[0]} as "
                    f"{'no id' if found is None else found}"
                )

    def token_map(self, vocab_size: int) -> Int64:
        """Returns raw id -> compressed id of the n-gram memory, [vocab_size] int64."""
        raw = [self.spellings.get(at, f"[{at}]") for at in range(vocab_size)]
        added = set(self.added.values())
        byte_of = _byte_alphabet()
        texts = [
            text
            if at in added or at not in self.spellings
            else bytes(byte_of[char] for char in text).decode("utf-8", "replace")
            for at, text in enumerate(raw)
        ]
        return build_token_map(texts, raw)


def vocabulary_of(folder: Path) -> Vocabulary | None:
    """Returns the vocabulary beside a checkpoint, None where there is none. Raises: ConfigError."""
    path = folder / TOKENIZER
    return read_vocabulary(path) if path.is_file() else None


@lru_cache(maxsize=4)
def read_vocabulary(path: Path) -> Vocabulary:
    """Reads a `tokenizer.json`. Raises: ConfigError for what is none."""
    try:
        data = path.read_bytes()
        document: dict[str, Any] = json.loads(data)
        spellings = {int(at): text for text, at in document["model"]["vocab"].items()}
        added = {token["content"]: int(token["id"]) for token in document["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no tokenizer file: {error}") from None
    spellings |= {at: text for text, at in added.items()}
    if not spellings:
        raise ConfigError(f"{path} has no ids")
    return Vocabulary(path, tokenizer_id(data), spellings, added)


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte behind each character of a byte-level vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    pairs = {chr(byte): byte for byte in shown}
    return pairs | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
