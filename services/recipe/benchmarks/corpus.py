"""Fresh text for the recipe benchmark: varied, seeded, and found on any machine that runs Pelagos.

English is the prose of docstrings and package descriptions, code is Python source, both as they
ship with Python and the installed packages. Chinese has no such source, so its words are drawn
from the tokenizer's own vocabulary with the weights of natural text (1 / rank).
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

KINDS = ("english", "code", "chinese", "mixed")

_PUNCTUATION = ("，", "，", "，", "。", "。", "、", "；", "：", "？", "！", "\n")


def _sources(seed: int) -> list[Path]:
    roots = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    random.Random(seed).shuffle(files)
    return files


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError, RecursionError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and len(text) > 80:
            yield text


def _english(seed: int) -> Iterator[str]:
    seen: set[str] = set()
    for path in _sources(seed):
        for text in _docstrings(path):
            if text not in seen and text.isascii():
                seen.add(text)
                yield text + "\n\n"


def _code(seed: int) -> Iterator[str]:
    for path in _sources(seed + 1):
        try:
            yield path.read_text("utf-8") + "\n"
        except ValueError:
            continue


def _chinese(seed: int, tokenizer_json: Path) -> Iterator[str]:
    vocab = json.loads(tokenizer_json.read_text("utf-8"))["model"]["vocab"]
    alphabet = _byte_alphabet()
    words = []
    for token, token_id in vocab.items():
        try:
            text = bytes(alphabet[symbol] for symbol in token).decode("utf-8")
        except (KeyError, UnicodeDecodeError):
            continue
        if all("一" <= char <= "龥" for char in text):
            words.append((token_id, text))
    words.sort()
    texts = [text for _, text in words]
    weights = list(itertools.accumulate(1 / (rank + 50) for rank in range(len(texts))))
    rng = random.Random(seed + 2)
    while True:
        clause = rng.choices(texts, cum_weights=weights, k=rng.randint(2, 12))
        yield "".join(clause) + rng.choice(_PUNCTUATION)


def _byte_alphabet() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    pairs = [(chr(byte), byte) for byte in plain]
    return dict(pairs + [(chr(0x100 + index), byte) for index, byte in enumerate(moved)])


def _fill(parts: Iterator[str], num_bytes: int) -> tuple[str, int]:
    """Joins parts up to `num_bytes`; fewer if the source runs dry (the caller is told)."""
    texts, total = [], 0
    for part in parts:
        texts.append(part)
        total += len(part.encode("utf-8"))
        if total >= num_bytes:
            break
    text = "".join(texts).encode("utf-8")[:num_bytes].decode("utf-8", "ignore")
    return text, len(text.encode("utf-8"))


def make(kind: str, num_bytes: int, seed: int, tokenizer_json: Path) -> str:
    """Returns text of one kind, `num_bytes` long in UTF-8 (at most 3 bytes fewer).

    Raises: RuntimeError when this machine has too little source text of the kind.
    """
    if kind == "mixed":
        third = num_bytes // 3 + 1
        texts = [make(one, third, seed, tokenizer_json) for one in KINDS[:3]]
        lines = [block for text in texts for block in _blocks(text)]
        random.Random(seed + 3).shuffle(lines)
        return "".join(lines).encode("utf-8")[:num_bytes].decode("utf-8", "ignore")
    parts = {
        "english": lambda: _english(seed),
        "code": lambda: _code(seed),
        "chinese": lambda: _chinese(seed, tokenizer_json),
    }[kind]()
    text, found = _fill(parts, num_bytes)
    if found < num_bytes - 3:
        raise RuntimeError(f"only {found} bytes of {kind} text on this machine")
    return text


def _blocks(text: str, size: int = 400) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def pathological(num_bytes: int, seed: int) -> dict[str, str]:
    """Returns inputs without the structure that tokenizers count on, by name."""
    rng = random.Random(seed + 4)
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=num_bytes))
    words = "".join(rng.choices(["the", "quick", "brown", "value", "Return", "node"], k=num_bytes))
    base64 = "".join(
        rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", k=num_bytes)
    )
    return {
        "one letter": "a" * num_bytes,
        "spaces": " " * num_bytes,
        "newlines": "\n" * num_bytes,
        "random letters": letters,
        "words without spaces": words[:num_bytes],
        "base64": base64,
        "one CJK character": "的" * (num_bytes // 3),
        "combining marks": "e\u0301" * (num_bytes // 3),
    }


if __name__ == "__main__":
    sys.stdout.write(make(sys.argv[1], int(sys.argv[2]), 1, Path(sys.argv[3])))
