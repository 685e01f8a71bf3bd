"""What tells one vocabulary from another: codec and engines name theirs in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

V4_SHA256: Final = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
V41_SHA256: Final = "81f64d1248a68ce3663e07ab3ee48b851e5df0e32d27cb98e4c9a268151e8d99"
# As a checkpoint ships it: one spelling differs, the ids are those of V4.1 (recipe.md, 1.1).
V41_CHECKPOINT_SHA256: Final = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
V41: Final = "deepseek-v4.1"

# Files that have a name, which is how engines know the vocabularies they were trained with.
_KNOWN: Final[Mapping[str, str]] = {
    V4_SHA256: "deepseek-v4",
    V41_SHA256: V41,
    V41_CHECKPOINT_SHA256: V41,
}


def tokenizer_id(data: bytes) -> str:
    """Returns the name of a `tokenizer.json`, equal for equal ids; its digest where it has none."""
    digest = hashlib.sha256(data).hexdigest()
    return _KNOWN.get(digest, digest)
