"""Cuts objects into shards and puts them together again; any k of k + m shards are enough.

Cauchy Reed-Solomon over GF(2^8), polynomial 0x11d, the matrix of ISA-L. `ErasureCode` is native;
`PlainErasureCode` is its twin and gives the same bytes.
Source: kvcache-and-balancing.md, section 4; case T-EC-VEC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Protocol, cast

from services.kvstore.checksums import HAS_NATIVE, Buffer, crc32c, native
from services.kvstore.formats import ShardHeader
from services.kvstore.placement import Profile, shard_bytes

_POLYNOMIAL: Final = 0x11D


class Code(Protocol):
    """What native code and twin offer."""

    def encode(self, data: Buffer) -> bytes:
        """Returns the m parity shards, concatenated; `data` is the k data shards."""

    def decode(self, present: Sequence[tuple[int, Buffer]], wanted: Sequence[int]) -> bytes:
        """Returns the shards `wanted`, concatenated. Raises ValueError below k shards."""


def _exp_log() -> tuple[list[int], list[int]]:
    exp, log, value = [0] * 512, [0] * 256, 1
    for power in range(255):
        exp[power] = exp[power + 255] = value
        log[value] = power
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    return exp, log


_EXP, _LOG = _exp_log()


def multiply(a: int, b: int) -> int:
    """Returns the product in the field."""
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def inverse(a: int) -> int:
    """Returns the multiplicative inverse. Raises ZeroDivisionError for 0."""
    if a == 0:
        raise ZeroDivisionError("zero has no inverse in the field")
    return _EXP[255 - _LOG[a]]


def generator_rows(k: int, m: int) -> list[list[int]]:
    """Returns the (k+m) x k generator: identity over Cauchy rows, entry (r, j) = 1 / (r XOR j)."""
    unit = [[int(row == column) for column in range(k)] for row in range(k)]
    return unit + [[inverse(row ^ column) for column in range(k)] for row in range(k, k + m)]


def invert(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the inverse of a square matrix. Raises ValueError when it is singular."""
    n = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for pivot in range(n):
        at = next((row for row in range(pivot, n) if rows[row][pivot]), None)
        if at is None:
            raise ValueError("singular: a shard was given twice")
        rows[pivot], rows[at] = rows[at], rows[pivot]
        scale = inverse(rows[pivot][pivot])
        rows[pivot] = [multiply(scale, value) for value in rows[pivot]]
        for row in range(n):
            factor = rows[row][pivot]
            if row != pivot and factor:
                rows[row] = [
                    value ^ multiply(factor, other)
                    for value, other in zip(rows[row], rows[pivot], strict=True)
                ]
    return [row[n:] for row in rows]


@lru_cache(maxsize=256)
def _product_table(coefficient: int) -> bytes:
    return bytes(multiply(coefficient, value) for value in range(256))


class PlainErasureCode:
    """The code in plain Python: one table translation per product, sums as big integers."""

    def __init__(self, k: int, m: int) -> None:
        if k < 1 or k + m > 255:
            raise ValueError("profile: k at least 1, k + m at most 255")
        self._k, self._m = k, m
        self._rows = generator_rows(k, m)

    def encode(self, data: Buffer) -> bytes:
        """Returns the m parity shards, concatenated."""
        raw = bytes(data)
        if len(raw) % self._k:
            raise ValueError("data: whole shards")
        size = len(raw) // self._k
        shards = [raw[at : at + size] for at in range(0, len(raw), size)] if size else []
        return b"".join(_combine(row, shards) for row in self._rows[self._k :]) if size else b""

    def decode(self, present: Sequence[tuple[int, Buffer]], wanted: Sequence[int]) -> bytes:
        """Returns the shards `wanted`, concatenated."""
        if len(present) < self._k:
            raise ValueError("fewer shards than k")
        used = [(index, bytes(shard)) for index, shard in present[: self._k]]
        if len({len(shard) for _, shard in used}) != 1:
            raise ValueError("shards: equal lengths")
        back = invert([self._rows[index] for index, _ in used])
        shards = [shard for _, shard in used]
        out = []
        for index in wanted:
            row = [
                _sum(multiply(self._rows[index][j], back[j][column]) for j in range(self._k))
                for column in range(self._k)
            ]
            out.append(_combine(row, shards))
        return b"".join(out)


def _sum(values: Sequence[int] | object) -> int:
    total = 0
    for value in cast(Sequence[int], values):
        total ^= value
    return total


def _combine(row: Sequence[int], shards: Sequence[bytes]) -> bytes:
    total = 0
    for coefficient, shard in zip(row, shards, strict=True):
        if coefficient:
            total ^= int.from_bytes(shard.translate(_product_table(coefficient)), "little")
    return total.to_bytes(len(shards[0]), "little")


@lru_cache(maxsize=16)
def code_for(profile: Profile) -> Code:
    """Returns the code of a profile, native when the crate is built."""
    if HAS_NATIVE:
        return cast(Code, native.ErasureCode(profile.k, profile.m))
    return PlainErasureCode(profile.k, profile.m)


def split(data: Buffer, profile: Profile) -> list[memoryview]:
    """Returns the k + m shards of an object, data first, the last data shard padded with zeros.

    With k = 1 every shard is a plain copy.
    """
    if profile.k == 1:
        return [memoryview(bytes(data))] * profile.num_shards
    size = shard_bytes(len(data), profile)
    padded = bytearray(size * profile.k)
    padded[: len(data)] = data
    parity = memoryview(code_for(profile).encode(padded))
    whole = memoryview(padded)
    shards = [whole[at : at + size] for at in range(0, len(padded), size)]
    return shards + [parity[at : at + size] for at in range(0, len(parity), size)]


def cut(header: bytes, pieces: Sequence[Buffer], profile: Profile) -> list[bytes]:
    """Returns all k + m shards, header and data, of an object given in pieces.

    Args:
        header: the packed header of any shard; number and checksums are filled in.
    """
    if HAS_NATIVE and profile.k > 1:
        shards: list[bytes] = cast(Any, code_for(profile)).cut(header, pieces)
        return shards
    return cut_plain(header, pieces, profile)


def cut_plain(header: bytes, pieces: Sequence[Buffer], profile: Profile) -> list[bytes]:
    """`cut` in plain Python, for machines without the crate; also for k = 1 anywhere."""
    parts = split(b"".join(pieces), profile)
    template = ShardHeader.parse(header)
    assert template is not None, "a header that we packed"
    return [
        replace(template, shard=number, data_crc=crc32c(part)).pack() + bytes(part)
        for number, part in enumerate(parts)
    ]


def join(shards: Mapping[int, Buffer], object_bytes: int, profile: Profile) -> bytes | None:
    """Returns the object from at least k shards by index, or None when there are fewer."""
    if len(shards) < profile.k:
        return None
    if profile.k == 1:
        return bytes(next(iter(shards.values())))[:object_bytes]
    missing = [index for index in range(profile.k) if index not in shards]
    parts: dict[int, Buffer] = dict(shards)
    if missing:
        rebuilt = memoryview(code_for(profile).decode(sorted(shards.items()), missing))
        size = len(rebuilt) // len(missing)
        for number, index in enumerate(missing):
            parts[index] = rebuilt[number * size : (number + 1) * size]
    return b"".join(parts[index] for index in range(profile.k))[:object_bytes]


def rebuild(
    shards: Sequence[tuple[int, Buffer]], wanted: Sequence[int], profile: Profile
) -> list[bytes]:
    """Returns the shards `wanted` from at least k others. Raises ValueError below k."""
    if profile.k == 1:
        return [bytes(shards[0][1])] * len(wanted)
    data = code_for(profile).decode(shards, wanted)
    size = len(data) // len(wanted)
    return [data[at : at + size] for at in range(0, len(data), size)]
