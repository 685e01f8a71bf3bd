"""Checkpoints: sharded safetensors files, read by byte range and checked against the names.

Nothing loads a whole shard: headers are parsed, and only the ranges of wanted tensors are read, so
that a rank of an expert group reads its own experts' bytes and no others.
Source: model.md, section 18.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.reference import formats
from services.engine.model.config import ModelConfig
from services.engine.model.names import TensorSpec, is_ignored, scale_name, stored, tensors
from services.engine.model.vocabulary import TOKEN_MAP, TOKENIZER, read_vocabulary

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20
_NO_SCALE = 0xFF  # E8M0's NaN
_SHOWN = 20  # names of one kind of fault that a refusal lists; missing ones are listed in full

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,  # packed nibbles
    "U8": torch.uint8,
}


class CheckpointError(ValueError):
    """A checkpoint that is not this model's; the text names tensors and what was expected."""


class TensorSource(Protocol):
    """Where weights come from: a checkpoint's files, or random numbers."""

    def matrix(self, name: str) -> Tensor:
        """Returns a logical tensor, expanded to float32."""
        ...

    def packed(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns a quantised tensor as it is stored, values and scales as uint8; None if none."""
        ...

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        """Returns rows of an n-gram table, [n, width] float32; rows: [n] int64."""
        ...


# --- storage of one tensor ----------------------------------------------------------------------


def encode(name: str, spec: TensorSpec, value: Tensor, *, quantised: bool) -> dict[str, Tensor]:
    """Returns what files hold for a tensor of float32 values."""
    if spec.kind == "fp32":
        return {name: value.float()}
    if spec.kind in ("bf16", "norm") or not quantised:
        return {name: value.to(torch.bfloat16)}
    if spec.kind == "fp8":
        data, scale = formats.quant_fp8_tiles(value)
    elif spec.kind == "fp4":
        data, scale = formats.quant_fp4_index(value)
    else:
        data, scale = formats.quant_fp8_rows(value)
    return {name: data, scale_name(name): scale}


def decode(name: str, spec: TensorSpec, held: dict[str, Tensor]) -> Tensor:
    """Returns the float32 values of what `encode` gave."""
    data = held[name]
    scale = held.get(scale_name(name)) if scale_name(name) != name else None
    if scale is None:
        return data.float()
    if spec.kind == "fp8":
        return formats.dequant_fp8_tiles(data, scale)
    if spec.kind == "fp4":
        return formats.dequant_fp4_index(data, scale)
    return formats.dequant_fp8_rows(data, scale)


def _parts(name: str, held: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    if len(held) == 1:
        return None
    return held[name].view(torch.uint8), held[scale_name(name)].view(torch.uint8)


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # absolute, in the file
    end: int


class CheckpointReader:
    """Reads tensors of a model directory. `bytes_read` counts tensor bytes, headers not included.

    Raises: CheckpointError when a file is cut, an index points nowhere, or tensors do not match.
    """

    def __init__(self, directory: Path, config: ModelConfig, *, strict: bool = True) -> None:
        self.directory = directory
        self.config = config
        self.bytes_read = 0
        self._specs = tensors(config)
        self._entries = read_entries(directory)
        self._files: dict[Path, int] = {}
        self._check(strict)

    @property
    def quantised(self) -> bool:
        return self.config.quantization is not None

    @property
    def total_bytes(self) -> int:
        return sum(entry.end - entry.begin for entry in self._entries.values())

    def matrix(self, name: str) -> Tensor:
        held = {part: self._read(part) for part in self._stored(name)}
        return decode(name, self._specs[name], held)

    def packed(self, name: str) -> tuple[Tensor, Tensor] | None:
        return _parts(name, {part: self._read(part) for part in self._stored(name)})

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        """Returns rows of a table; each is read on its own."""
        parts = {}
        for part in self._stored(name):
            entry = self._entries[part]
            width = (entry.end - entry.begin) // entry.shape[0]
            data = b"".join(
                self._pread(entry, entry.begin + row * width, width) for row in rows.tolist()
            )
            parts[part] = _tensor(data, entry.dtype, (len(rows), *entry.shape[1:]))
        return decode(name, self._specs[name], parts)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, name: str) -> list[str]:
        return list(stored(name, self._specs[name], quantised=self.quantised))

    def _read(self, name: str) -> Tensor:
        entry = self._entries[name]
        found = _tensor(
            self._pread(entry, entry.begin, entry.end - entry.begin), entry.dtype, entry.shape
        )
        if entry.dtype == "F8_E8M0" and bool((found == _NO_SCALE).any()):
            raise CheckpointError(f"{name} holds a scale that is no number, expected powers of two")
        # E4M3 has no infinities and a NaN of each sign.
        is_nan = entry.dtype == "F8_E4M3" and bool(((found.view(torch.uint8) & 0x7F) == 0x7F).any())
        if is_nan or (entry.dtype in ("F32", "BF16") and not bool(found.isfinite().all())):
            raise CheckpointError(f"{name} holds values that are no numbers")
        return found

    def _pread(self, entry: _Entry, at: int, count: int) -> bytes:
        descriptor = self._files.get(entry.path)
        if descriptor is None:
            descriptor = self._files[entry.path] = os.open(entry.path, os.O_RDONLY)
        data = os.pread(descriptor, count, at)
        # One call gives 2 GiB at most.
        while len(data) < count and (
            more := os.pread(descriptor, count - len(data), at + len(data))
        ):
            data += more
        if len(data) != count:
            raise CheckpointError(f"{entry.path.name} ends early: {count} bytes wanted at {at}")
        self.bytes_read += count
        return data

    def _check(self, strict: bool) -> None:
        expected = {
            part: wanted
            for name, spec in self._specs.items()
            for part, wanted in stored(name, spec, quantised=self.quantised).items()
        }
        missing = [name for name in expected if name not in self._entries]
        extra = [n for n in self._entries if n not in expected and not is_ignored(n)]
        faults = []
        if missing:
            faults.append("missing: " + ", ".join(missing))
        if extra and (strict or missing):
            faults.append("unknown: " + ", ".join(_hint(n, missing) for n in extra[:_SHOWN]))
        elif extra:
            log.warning("tensors that are not used", extra={"names": extra[:_SHOWN]})
        wrong = []
        for name, wanted in expected.items():
            entry = self._entries.get(name)
            if entry is None:
                continue
            if entry.shape != wanted.shape or entry.dtype not in wanted.dtypes:
                wrong.append(
                    f"{name} is {list(entry.shape)} {entry.dtype}, expected {wanted.described}"
                )
        faults += wrong[:_SHOWN]
        if faults:
            raise CheckpointError(f"{self.directory.name}: " + "; ".join(faults))


def _hint(name: str, missing: list[str]) -> str:
    close = difflib.get_close_matches(name, missing, n=1)
    return f"{name} (is it {close[0]}?)" if close else name


def read_entries(directory: Path) -> dict[str, _Entry]:
    """Returns where every tensor of a model directory lies. Raises: CheckpointError."""
    mapping: dict[str, str] = {}
    index = directory / INDEX
    if index.exists():
        mapping = _read_index(index)
        files = sorted(set(mapping.values()))
    elif (directory / SINGLE).exists():
        files = [SINGLE]
    else:
        raise CheckpointError(f"{directory.name} has neither {INDEX} nor {SINGLE}")
    entries: dict[str, _Entry] = {}
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{INDEX} names {file!r}, which is no plain file name")
        held = _read_header(directory / file)
        for name, owner in mapping.items():
            if owner == file and name not in held:
                raise CheckpointError(f"{INDEX} places {name} in {file}, which does not hold it")
        for name, entry in held.items():
            plain = name.removeprefix("model.")
            if plain in entries:
                raise CheckpointError(f"{name} is in {entries[plain].path.name} and in {file}")
            entries[plain] = entry
    return entries


def _read_index(path: Path) -> dict[str, str]:
    try:
        mapping = json.loads(path.read_text())["weight_map"]
        sound = all(isinstance(file, str) for file in mapping.values())
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path.name} has no weight_map of names to files")
    return dict(mapping)


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path.name} is cut: {size} bytes, the header alone needs {length + 8}"
                )
            document: dict[str, Any] = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing") from error
    except OSError as error:  # a loop of links, a folder, a file of somebody else
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has no readable header: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path.name} has no readable header: it is no table of tensors")
    start, entries = 8 + length, {}
    for name, facts in document.items():
        if name == "__metadata__":
            continue
        begin, end, shape, dtype = _facts_of(path, name, facts)
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path.name}: {name} is {dtype}; known: {', '.join(_DTYPES)}")
        wanted = math.prod(shape) * _DTYPES[dtype].itemsize
        if end - begin != wanted:
            raise CheckpointError(
                f"{path.name}: {name} has {end - begin} bytes, {list(shape)} {dtype} needs {wanted}"
            )
        if not 0 <= begin <= end or start + end > size:
            raise CheckpointError(
                f"{path.name} is cut: {name} ends at byte {start + end}, the file at {size}"
            )
        entries[name] = _Entry(path, dtype, shape, start + begin, start + end)
    return entries


def _facts_of(path: Path, name: str, facts: Any) -> tuple[int, int, tuple[int, ...], str]:
    """Returns begin, end, shape and type of a header's entry. Raises: CheckpointError."""
    try:
        (begin, end), shape, dtype = facts["data_offsets"], tuple(facts["shape"]), facts["dtype"]
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name}: {name} has no data_offsets, shape and dtype"
        ) from error
    numbers = (begin, end, *shape)
    if not isinstance(dtype, str) or any(type(at) is not int or at < 0 for at in numbers):
        raise CheckpointError(
            f"{path.name}: {name} lies at {[begin, end]} with shape {list(shape)}, "
            "expected whole numbers from 0"
        )
    return begin, end, shape, dtype


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).view(shape)


# --- writing ------------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path,
    config: ModelConfig,
    values: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Writes configuration, shards and index. `values`: every logical tensor as float32."""
    config.save(directory)
    specs = tensors(config)
    shards: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    size = 0
    for name, value in values:
        held = encode(name, specs[name], value, quantised=config.quantization is not None)
        grown = sum(t.numel() * t.element_size() for t in held.values())
        if shard and size + grown > max_shard_bytes:
            shards.append(_write_shard(directory, len(shards), shard))
            shard, size = {}, 0
        shard |= held
        size += grown
    shards.append(_write_shard(directory, len(shards), shard))
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, 1):
        final = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    total = sum((directory / file).stat().st_size for file in set(weight_map.values()))
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(document, indent=1) + "\n")


def _write_shard(directory: Path, number: int, held: dict[str, Tensor]) -> tuple[Path, list[str]]:
    at, header = 0, {}
    for name, value in held.items():
        count = value.numel() * value.element_size()
        header[name] = {
            "dtype": _stored_dtype(name, value),
            "shape": list(value.shape),
            "data_offsets": [at, at + count],
        }
        at += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path = directory / f"shard-{number}.part"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for value in held.values():
            file.write(value.contiguous().view(torch.uint8).numpy().tobytes())
    return path, list(held)


def _stored_dtype(name: str, value: Tensor) -> str:
    if value.dtype == torch.uint8:
        return "F8_E8M0" if name.endswith(".scale") else "I8"
    return next(key for key, dtype in _DTYPES.items() if dtype == value.dtype)


# --- random weights -----------------------------------------------------------------------------


class RandomSource:
    """Random weights of a configuration, as its storage would give them back.

    A tensor depends on (seed, name) only, so that any subset is the same.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self._seed = seed
        self._specs = tensors(config)
        self._tables: dict[str, Tensor] = {}

    def matrix(self, name: str) -> Tensor:
        spec = self._specs[name]
        quantised = self.config.quantization is not None
        return decode(name, spec, encode(name, spec, self.raw(name), quantised=quantised))

    def packed(self, name: str) -> tuple[Tensor, Tensor] | None:
        quantised = self.config.quantization is not None
        return _parts(name, encode(name, self._specs[name], self.matrix(name), quantised=quantised))

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        if name not in self._tables:
            self._tables[name] = self.matrix(name)
        return self._tables[name][rows]

    def raw(self, name: str) -> Tensor:
        """Returns the values before they are stored."""
        spec = self._specs[name]
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(spec.shape, dtype=np.float32)
        if spec.fan_in:
            values *= spec.fan_in**-0.5
        elif spec.kind == "norm":
            values = 1 + 0.1 * values
        elif name.endswith("_scale"):
            values = 1 + 0.2 * values
        elif name.endswith((".bias", ".bias_vl")):
            values *= 0.1
        return torch.from_numpy(values)

    def all(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor's values before they are stored."""
        for name in self._specs:
            yield name, self.raw(name)


def make_random_checkpoint(
    config: ModelConfig,
    seed: int,
    directory: Path,
    *,
    quantised: bool | None = None,
    max_shard_bytes: int = 64 << 20,
    tokenizer: Path | None = None,
) -> ModelConfig:
    """Writes a valid checkpoint of random weights; returns its configuration.

    quantised: None as the configuration says, else the form to write. tokenizer: a
    `tokenizer.json` to lay beside it, and the n-gram memory's token map where it needs one.
    Raises: CheckpointError; ConfigError where the tokenizer is not the configuration's.
    """
    if quantised is False:
        config = replace(config, quantization=None)
    elif quantised and config.quantization is None:
        raise CheckpointError("this configuration has no quantised form")
    config.validate()
    if tokenizer is not None:
        read_vocabulary(tokenizer).demand_fits(config)
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(
        directory, config, RandomSource(config, seed).all(), max_shard_bytes=max_shard_bytes
    )
    if tokenizer is not None:
        lay_tokenizer(directory, config, tokenizer)
    return config


def lay_tokenizer(directory: Path, config: ModelConfig, tokenizer: Path) -> None:
    """Lays a tokenizer beside a checkpoint, and the token map that follows from it."""
    (directory / TOKENIZER).write_bytes(tokenizer.read_bytes())
    if config.text.engram_compressed_vocab_size != config.text.vocab_size:
        token_map = read_vocabulary(tokenizer).token_map(config.text.vocab_size)
        np.save(directory / TOKEN_MAP, token_map.astype(np.int32), allow_pickle=False)
