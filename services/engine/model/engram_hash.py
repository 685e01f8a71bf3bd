"""N-gram hashing of Engram: primes, multipliers and row ids. Integers only, CPU, ahead of a step.

Source: model.md, sections 13.1 and 13.2.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


class EngramConfig(Protocol):
    """The fields of TextConfig that hashing needs."""

    @property
    def engram_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def engram_max_ngram_size(self) -> int: ...
    @property
    def engram_n_heads(self) -> int: ...
    @property
    def engram_vocab_size(self) -> int: ...
    @property
    def engram_compressed_vocab_size(self) -> int: ...
    @property
    def engram_pad_token_id(self) -> int: ...


def _is_prime(n: int) -> bool:
    if n < 2:
        return False
    if n % 2 == 0:
        return n == 2
    divisor = 3
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 2
    return True


@lru_cache(maxsize=64)
def _primes(first: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    candidate = first
    while len(found) < count:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return tuple(found)


def layer_primes(config: EngramConfig) -> tuple[tuple[int, ...], ...]:
    """Returns per engram layer its primes, in (n-gram size, head) order.

    One upward walk from `engram_vocab_size` serves all layers; no prime is used twice.
    """
    per_layer = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    primes = _primes(config.engram_vocab_size, per_layer * len(config.engram_layer_ids))
    return tuple(
        primes[at * per_layer : (at + 1) * per_layer] for at in range(len(config.engram_layer_ids))
    )


def table_rows(config: EngramConfig) -> tuple[int, ...]:
    """Returns the number of rows of each layer's table: the sum of its primes."""
    return tuple(sum(primes) for primes in layer_primes(config))


def multipliers(config: EngramConfig, layer: int) -> Int64:
    """Returns the odd multipliers of one layer, newest token first. [max_ngram_size] int64."""
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    generator = np.random.default_rng(10007 * layer)
    drawn = generator.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
    return 2 * drawn + 1


@dataclass(frozen=True)
class HashTables:
    """Constants of the hash: (multipliers [order], primes [order - 1, heads], offsets) by layer."""

    pad: int
    token_map: Int64 | None
    layers: tuple[tuple[Int64, Int64, Int64], ...]


class EngramHash:
    """Row ids of every token of a sequence, for every engram layer.

    `token_map`: raw id -> compressed id, [vocab_size] int64; None is the identity.
    """

    def __init__(self, config: EngramConfig, token_map: Int64 | None = None) -> None:
        self._order = config.engram_max_ngram_size
        self._token_map = token_map
        pad = config.engram_pad_token_id
        self._pad = int(pad if token_map is None else token_map[pad])
        self._layers = []
        for layer, primes in zip(config.engram_layer_ids, layer_primes(config), strict=True):
            grid = np.array(primes, dtype=np.int64).reshape(self._order - 1, config.engram_n_heads)
            starts = np.concatenate([[0], np.cumsum(grid.reshape(-1))[:-1]]).reshape(grid.shape)
            self._layers.append((multipliers(config, layer), grid, starts.astype(np.int64)))

    def tables(self) -> HashTables:
        """Returns the constants, for whoever hashes elsewhere."""
        return HashTables(self._pad, self._token_map, tuple(self._layers))

    @property
    def history(self) -> int:
        """Tokens before the first one asked for that the hash looks at."""
        return self._order - 1

    def rows(self, ids: Int64, is_image: npt.NDArray[np.bool_], first: int) -> list[Int64]:
        """Returns per layer the row ids of tokens `first`…, [n - first, (order-1)*heads] int64.

        `ids` [n] int64 and `is_image` [n] hold the tokens and at least `history` tokens before
        `first`, unless the sequence starts later than that: what is not given counts as the
        time before the sequence.
        """
        count = len(ids) - first
        mapped = ids if self._token_map is None else self._token_map[ids]
        # One image position, or the start of the sequence, hides itself and everything older.
        shifted = np.full((self._order, count), self._pad, dtype=np.int64)
        visible = np.ones(count, dtype=np.bool_)
        for back in range(self._order):
            at = np.arange(first, len(ids)) - back
            inside = at >= 0
            safe = np.where(inside, at, 0)
            visible = visible & inside & ~is_image[safe]
            shifted[back] = np.where(visible, mapped[safe], self._pad)
        return self._hash(shifted)

    def rows_of_shifted(self, shifted: Int64) -> list[Int64]:
        """Returns per layer the row ids of packed rows, [n, (order-1)*heads] int64.

        `shifted` [order, n] int64: each row's id, the id before it, and so on; negative where
        there is none or an image, which hides everything older too.
        """
        visible = np.logical_and.accumulate(shifted >= 0, axis=0)
        ids = np.where(visible, shifted, 0)
        mapped = ids if self._token_map is None else self._token_map[ids]
        return self._hash(np.where(visible, mapped, self._pad))

    def _hash(self, shifted: Int64) -> list[Int64]:
        result = []
        for mult, primes, starts in self._layers:
            with np.errstate(over="ignore"):
                mixed = shifted[0] * mult[0]
                columns = []
                for back in range(1, self._order):
                    mixed = mixed ^ (shifted[back] * mult[back])
                    columns.append(mixed[:, None] % primes[back - 1] + starts[back - 1])
            result.append(np.concatenate(columns, axis=1))
        return result


def normalise(text: str) -> str:
    """Returns the spelling under which tokens share an n-gram id (model.md, section 13.1)."""
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(ch for ch in decomposed if unicodedata.category(ch)[0] != "M").lower()
    collapsed: list[str] = []
    for ch in plain:
        if ch in " \t\r\n":
            if collapsed and collapsed[-1] == " ":
                continue
            collapsed.append(" ")
        else:
            collapsed.append(ch)
    joined = "".join(collapsed)
    if joined == " ":
        return " "
    return joined.strip()


def build_token_map(texts: Sequence[str], raw_spellings: Sequence[str]) -> Int64:
    """Returns raw id -> compressed id in first-seen order. [len(texts)] int64.

    texts: decoded text of each single id, special tokens kept; raw_spellings: the vocabulary
    string of each id, the key of those whose bytes are no whole characters.
    """
    seen: dict[str, int] = {}
    ids = np.empty(len(texts), dtype=np.int64)
    for at, text in enumerate(texts):
        key = raw_spellings[at] if "�" in text else (normalise(text) or text)
        ids[at] = seen.setdefault(key, len(seen))
    return ids
