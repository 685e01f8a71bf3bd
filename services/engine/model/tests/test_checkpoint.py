"""Checkpoints: written, read back, read in part, and refused. Source: model.md, section 18."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from services.engine.model.checkpoint import (
    INDEX,
    CheckpointError,
    CheckpointReader,
    RandomSource,
    make_random_checkpoint,
)
from services.engine.model.device import CpuDevice
from services.engine.model.engram_store import FileEngram, MemoryEngram, ShardedEngram, table_shard
from services.engine.model.names import stored, tensors
from services.engine.model.network import load_network
from services.engine.model.numerics import Numerics
from services.engine.model.parallel import Placement, make_shard
from services.engine.model.presets import FLASH, NANO, PRESETS, TINY
from services.engine.model.tests.kit import EXACT, INVARIANT, NATIVE, Driver, network, prompt
from services.engine.model.tests.test_naive import logits_of
from services.engine.model.weights import load_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("nano")
    make_random_checkpoint(NANO, 1, path, max_shard_bytes=1 << 20)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_random_checkpoint(TINY, 1, path, max_shard_bytes=2 << 20)
    return path


def count(config, part: str = "") -> int:
    return sum(
        math.prod(spec.shape) for name, spec in tensors(config).items() if name.startswith(part)
    )


def test_parameter_counts_of_the_flash_model():
    assert count(FLASH, "vision.") + count(FLASH, "aligner.") == pytest.approx(0.49e9, rel=0.02)
    names = tensors(FLASH)
    experts = sum(
        math.prod(stored(n, s, quantised=True)[part].shape)
        for n, s in names.items()
        if n.startswith("layers.") and ".ffn.experts." in n
        for part in stored(n, s, quantised=True)
    )
    assert experts == pytest.approx(289e9, rel=0.01)
    tables = sum(
        math.prod(wanted.shape)
        for n, s in names.items()
        if s.kind == "table"
        for wanted in stored(n, s, quantised=True).values()
    )
    assert tables == (384006168 + 384016682) * 264
    # One layer's active experts and everything dense, without tables: about 16 G per token.
    dense = sum(
        math.prod(s.shape)
        for n, s in names.items()
        if n.startswith("layers.") and ".ffn.experts." not in n and s.kind != "table"
    )
    active = dense + 40 * 6 * 3 * 5120 * 2304 + 2 * 129280 * 5120
    assert active == pytest.approx(16.1e9, rel=0.05)


def test_parameter_counts_of_the_small_models():
    sizes = {name: count(PRESETS[name], "layers.") / 1e6 for name in ("tiny", "nano")}
    assert 1 < sizes["tiny"] < 6
    assert 0.3 < sizes["nano"] < 1.5


def test_bf16_form_gives_the_same_logits_after_writing_and_loading(nano):
    ids = tuple(prompt(20))
    with CheckpointReader(nano, NANO) as reader:
        loaded = logits_of(Driver(load_network(NANO, reader, EXACT)), ids)
    assert torch.equal(loaded, logits_of(Driver(network(NANO, EXACT)), ids))


@pytest.mark.parametrize("numerics", [INVARIANT, NATIVE], ids=["float32", "native"])
def test_quantised_form_gives_the_same_logits_after_writing_and_loading(tiny, numerics):
    ids = tuple(prompt(24))
    with CheckpointReader(tiny, TINY) as reader:
        loaded = logits_of(Driver(load_network(TINY, reader, numerics)), ids)
    assert torch.equal(loaded, logits_of(Driver(network(TINY, numerics)), ids))


def test_native_numerics_stay_near_float32_ones(tiny):
    ids = tuple(prompt(24))
    found = [logits_of(Driver(network(TINY, numerics)), ids) for numerics in (EXACT, NATIVE)]
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert 0 < error < 0.6
    assert torch.nn.functional.cosine_similarity(found[0], found[1], dim=0) > 0.8


def test_another_reader_of_the_format_reads_our_files(tiny):
    source = RandomSource(TINY, 1)
    index = json.loads((tiny / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    for name in ("layers.1.hc_attn_fn", "embed.weight", "norm.weight"):
        with safe_open(tiny / index[name], "pt") as file:
            assert torch.equal(file.get_tensor(name).float(), source.matrix(name))
    with safe_open(tiny / index["layers.0.attn.wq_a.weight"], "pt") as file:
        raw = file.get_tensor("layers.0.attn.wq_a.weight")
        assert raw.dtype == torch.float8_e4m3fn


def test_a_rank_of_an_expert_group_reads_only_its_own_experts(tiny):
    with CheckpointReader(tiny, TINY) as reader:
        model = load_model(TINY, reader, CpuDevice(), EXACT)
        before = reader.bytes_read
        placements = {layer: Placement.initial(n, 4) for layer, (n, _) in model.experts.items()}
        shard = make_shard(model, placements, 1, Numerics())
        read = reader.bytes_read - before
    text = TINY.text
    values = text.moe_intermediate_size * text.hidden_size
    expert = 3 * (values // 2 + values // 32)
    layers = text.num_hidden_layers + text.num_nextn_predict_layers
    assert read == layers * 2 * expert
    source = RandomSource(TINY, 1)
    assert torch.equal(
        shard.weights["layers.5"][1][0], source.matrix("layers.5.ffn.experts.2.w2.weight")
    )


def test_memory_rows_come_out_the_same_from_files_and_over_shards(tiny):
    rows = torch.tensor([[0, 17], [2999, 17]])
    with CheckpointReader(tiny, TINY) as reader:
        table = reader.matrix("layers.1.engram.embed.weight")
        whole = MemoryEngram({1: table})
        before = reader.bytes_read
        expected = whole.lookup(1, rows)
        assert torch.equal(FileEngram(reader).lookup(1, rows), expected)
        assert reader.bytes_read - before == 3 * (32 + 1)
    for ranks in (2, 3):
        shards = [MemoryEngram({1: table_shard(table, r, ranks)}) for r in range(ranks)]
        assert torch.equal(ShardedEngram(shards, {1: len(table)}).lookup(1, rows), expected)


# --- refusals -----------------------------------------------------------------------------------


def rewrite(path: Path, change) -> None:
    """Applies `change` to the header of the shard that holds it; data stays as it is."""
    for file in sorted(path.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if change(header):
            text = json.dumps(header).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
            names = json.loads((path / INDEX).read_text())
            names["weight_map"] = {
                n: f for n, f in names["weight_map"].items() if f != file.name
            } | dict.fromkeys(header, file.name)
            (path / INDEX).write_text(json.dumps(names))
            return
    raise AssertionError("nothing was changed")


@pytest.fixture
def copy(tmp_path) -> Path:
    make_random_checkpoint(NANO, 1, tmp_path, max_shard_bytes=1 << 20)
    return tmp_path


def test_missing_tensors_are_refused_all_by_name(copy):
    gone = ("layers.3.attn.wkv.weight", "layers.3.attn.wo_b.weight")

    def change(header):
        return [header.pop(name) for name in gone if name in header]

    rewrite(copy, change)
    with pytest.raises(CheckpointError) as refused:
        CheckpointReader(copy, NANO)
    assert "missing: layers.3.attn.wkv.weight" in str(refused.value)


def test_a_misnamed_tensor_is_refused_with_the_name_it_should_have(copy):
    def change(header):
        if "layers.2.attn.kv_norm.weight" not in header:
            return False
        header["layers.2.attn.kvnorm.weight"] = header.pop("layers.2.attn.kv_norm.weight")
        return True

    rewrite(copy, change)
    with pytest.raises(CheckpointError, match=r"is it layers\.2\.attn\.kv_norm\.weight"):
        CheckpointReader(copy, NANO)


def test_an_extra_tensor_is_refused_or_only_logged(copy):
    def change(header):
        first = next(iter(header))
        header["surplus.weight"] = header[first]
        return True

    rewrite(copy, change)
    with pytest.raises(CheckpointError, match=r"unknown: surplus\.weight"):
        CheckpointReader(copy, NANO)
    CheckpointReader(copy, NANO, strict=False).close()


def test_a_misshapen_tensor_is_refused_with_both_shapes(copy):
    def change(header):
        if "embed.weight" not in header:
            return False
        header["embed.weight"]["shape"] = [128, 128]
        return True

    rewrite(copy, change)
    with pytest.raises(CheckpointError, match=r"embed\.weight is \[128, 128\].*\[256, 64\] BF16"):
        CheckpointReader(copy, NANO)


def test_a_scale_of_the_wrong_shape_is_refused(tmp_path):
    make_random_checkpoint(TINY, 1, tmp_path, max_shard_bytes=2 << 20)
    name = "layers.0.attn.wq_b.scale"

    def change(header):
        if name not in header:
            return False
        rows, columns = header[name]["shape"]
        header[name]["shape"] = [columns, rows]
        return True

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"wq_b\.scale is \[3, 16\].*expected \[16, 3\]"):
        CheckpointReader(tmp_path, TINY)


@pytest.mark.parametrize("kept", [4, 40, -1])
def test_a_cut_file_is_refused_by_name(copy, kept):
    file = sorted(copy.glob("*.safetensors"))[0]
    data = file.read_bytes()
    file.write_bytes(data[:kept])
    with pytest.raises(CheckpointError, match=f"{file.name} is cut"):
        CheckpointReader(copy, NANO)


def test_a_missing_shard_and_a_missing_index_are_refused(copy):
    file = sorted(copy.glob("*.safetensors"))[0]
    file.rename(copy / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        CheckpointReader(copy, NANO)
    (copy / INDEX).unlink()
    with pytest.raises(CheckpointError, match="neither"):
        CheckpointReader(copy, NANO)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"norm.weight": 3}}', "[" * 99999]
)
def test_an_index_that_is_none_is_refused(copy, text):
    (copy / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="no weight_map of names to files"):
        CheckpointReader(copy, NANO)


def test_files_that_cannot_be_read_are_refused_by_name(copy):
    first, second = sorted(copy.glob("*.safetensors"))[:2]
    data = first.read_bytes()
    first.unlink()
    first.symlink_to(first.name)  # a loop
    with pytest.raises(CheckpointError, match=f"{first.name} cannot be read"):
        CheckpointReader(copy, NANO)
    first.unlink()
    first.mkdir()
    with pytest.raises(CheckpointError, match=f"{first.name} cannot be read"):
        CheckpointReader(copy, NANO)
    first.rmdir()
    first.write_bytes(data)
    outside = json.loads((copy / INDEX).read_text())
    outside["weight_map"]["norm.weight"] = f"../{second.name}"
    (copy / INDEX).write_text(json.dumps(outside))
    with pytest.raises(CheckpointError, match="no plain file name"):
        CheckpointReader(copy, NANO)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (3, "no data_offsets, shape and dtype"),
        ({"dtype": "BF16", "shape": [1]}, "no data_offsets, shape and dtype"),
        ({"dtype": "BF16", "shape": [-1, -2], "data_offsets": [0, 4]}, "whole numbers from 0"),
        ({"dtype": "BF16", "shape": [1.0], "data_offsets": [0, 2]}, "whole numbers from 0"),
        ({"dtype": "BF16", "shape": [1], "data_offsets": [-2, 0]}, "whole numbers from 0"),
        ({"dtype": ["BF16"], "shape": [1], "data_offsets": [0, 2]}, "whole numbers from 0"),
        ({"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}, "is F64"),
        ({"dtype": "BF16", "shape": [9], "data_offsets": [0, 2]}, "needs 18"),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused_by_name(copy, facts, expected):
    def change(header):
        header["norm.weight"] = facts
        return True

    rewrite(copy, change)
    with pytest.raises(CheckpointError, match=expected) as refused:
        CheckpointReader(copy, NANO)
    assert "norm.weight" in str(refused.value)


@pytest.mark.parametrize("header", [b"[]", b"7", b"\xff", b"[" * 99999])
def test_a_header_that_is_no_table_is_refused(copy, header):
    file = sorted(copy.glob("*.safetensors"))[0]
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=f"{file.name} has no readable header"):
        CheckpointReader(copy, NANO)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.attn.wq_b.scale", "powers of two"),
        ("layers.0.attn.wq_b.weight", "no numbers"),
        ("norm.weight", "no numbers"),
    ],
)
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path, name, expected):
    config = make_random_checkpoint(TINY, 1, tmp_path, max_shard_bytes=2 << 20)
    with CheckpointReader(tmp_path, config) as reader:
        entry = reader._entries[name]
    with entry.path.open("r+b") as file:
        file.seek(entry.begin)
        file.write(b"\xff" * 4)
    with (
        CheckpointReader(tmp_path, config) as reader,
        pytest.raises(CheckpointError, match=f"{name} .*{expected}"),
    ):
        load_network(config, reader, EXACT)


def test_reads_that_come_in_parts_are_joined(tiny, monkeypatch):
    """As of tensors above 2 GiB, of which one call never gives all."""
    whole, parts = os.pread, []

    def some(descriptor, count, at):
        parts.append(count)
        return whole(descriptor, min(count, 1000), at)

    with CheckpointReader(tiny, TINY) as reader:
        expected = reader.matrix("layers.0.attn.wq_b.weight")
        monkeypatch.setattr(os, "pread", some)
        assert torch.equal(reader.matrix("layers.0.attn.wq_b.weight"), expected)
    assert len(parts) > 2


def test_the_quantised_form_is_no_bf16_form(tiny):
    plain = replace(TINY, quantization=None)
    with pytest.raises(CheckpointError, match="F8_E4M3, expected"):
        CheckpointReader(tiny, plain)


def test_a_prefix_and_copies_of_the_embedding_are_accepted(copy):
    def change(header):
        if "embed.weight" not in header:
            return False
        header["mtp.0.embed.weight"] = dict(header["embed.weight"])
        header["model.embed.weight"] = header.pop("embed.weight")
        return True

    rewrite(copy, change)
    with CheckpointReader(copy, NANO) as reader:
        assert torch.equal(
            reader.matrix("embed.weight"), RandomSource(NANO, 1).matrix("embed.weight")
        )
