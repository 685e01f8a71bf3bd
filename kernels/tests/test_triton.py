"""GPU kernels beside their references, on odd shapes; and every one of them compiled for GPUs.

Without a GPU they run in Triton's interpreter on CPU tensors (`conftest.py`), and are compiled in
a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import kernels
from kernels.reference import attention, engram, experts, formats, hyper, index, norm, stores

pytestmark = pytest.mark.engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fast(name: str):
    return kernels.get(name, "cuda")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_norm_and_rotation(rows, dtype):
    x, weight = random(rows, 24, dtype=dtype), random(24, seed=1)
    step = 0.0 if dtype == torch.float32 else 0.02
    for w in (weight, None):
        close(fast("rms_norm")(x, w, 1e-20), norm.rms_norm(x, w, 1e-20), step + 2e-6)
    heads = random(rows, 3, 24, dtype=dtype)
    turns = norm.rotations(
        torch.arange(rows, device=DEVICE), norm.rope_frequencies(100.0, 12).to(DEVICE)
    )
    for inverse in (False, True):
        expected = norm.rope_(heads.clone(), turns, inverse=inverse)
        found = fast("rope_")(heads.clone(), turns, inverse=inverse)
        close(found, expected, step + 2e-6)


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_mixes_and_the_fused_end_of_a_site(rows):
    h, fn = random(rows, 4, 20), random(24, 80, seed=1)
    base, scale = random(24, seed=2), random(3, seed=3)
    options = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    expected = hyper.hc_mixes(h, fn, base, scale, **options)
    for a, b in zip(fast("hc_mixes")(h, fn, base, scale, **options), expected, strict=True):
        close(a, b)
    y, weight = random(rows, 20, seed=4), random(20, seed=5)
    pre, post, comb = expected
    given = (y, h, post, comb, pre, weight, 1e-20)
    for a, b in zip(
        fast("hc_expand_collapse_norm")(*given), hyper.hc_expand_collapse_norm(*given), strict=True
    ):
        close(a, b)


def edges() -> torch.Tensor:
    """Values at and around every border of E4M3 and E2M1, ties, subnormals, zeros of both signs."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    around = torch.cat((codes, middle, middle * (1 + 2e-7), middle * (1 - 2e-7)))
    return torch.cat((around, -around, torch.tensor([0.0, -0.0, 500.0, 1e-7, -1e-7])))


def test_stored_bytes_are_those_of_the_reference():
    """Bit for bit, at every border between two codes."""
    special = edges()
    special = special[: len(special) // 96 * 96].view(-1, 96).to(DEVICE)
    rows = torch.cat((special, special / 64, random(7, 96, seed=1), torch.zeros_like(special[:1])))
    slots = torch.arange(len(rows), device=DEVICE).flip(0)
    slots[3] = -1
    for name, width in (("store_window", 99), ("store_block_kv", 54)):
        pools = [torch.zeros(len(rows), width, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        getattr(stores, name)(rows, pools[0], slots)
        fast(name)(rows, pools[1], slots)
        assert torch.equal(pools[0], pools[1])
        assert pools[1].any()


@pytest.mark.parametrize(
    "kinds", [("raw", "raw"), ("fp8", "fp4kv"), ("fp8", "fp8")], ids=["raw", "fp4", "fp8"]
)
@pytest.mark.parametrize(("rows", "heads", "seen"), [(0, 4, 5), (3, 5, 37), (2, 16, 0)])
def test_attention_reads_records_as_they_are_stored(kinds, rows, heads, seen):
    dim = 64
    encode = {
        "raw": lambda x: x,
        "fp8": stores.window_bytes,
        "fp4kv": stores.entry_bytes,
    }
    pools = [encode[kind](random(50, dim, seed=at)) for at, kind in enumerate(kinds)]
    q, sink = random(rows, heads, dim, seed=3), random(heads, seed=4)
    pick = torch.Generator().manual_seed(5)
    places = [torch.randint(0, 50, (rows, count), generator=pick).to(DEVICE) for count in (9, seen)]
    present = [(torch.rand(p.shape, generator=pick) < 0.7).to(DEVICE) for p in places]
    if rows:
        for p in present:
            p[0] = False  # a row without any key
    for entries in (pools[1], None):
        given = (q, pools[0], places[0], present[0], entries, places[1], present[1])
        given = (*given, sink, dim**-0.5, kinds)
        found = fast("paged_attention")(*given)
        close(found, attention.paged_attention(*given))
        if rows:
            assert found[0].abs().max() == 0


@pytest.mark.parametrize("kind", ["raw", "fp4ix"])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(0, 2, 32), (4, 3, 32), (2, 8, 96)])
def test_scores_read_pages_and_stop_where_a_row_sees_nothing(kind, rows, heads, dim):
    keys = random(12 * 4, dim, seed=1)
    pool = keys if kind == "raw" else torch.cat(formats.quant_fp4_index(keys), -1)
    queries, weights = random(rows, heads, dim), random(rows, heads, seed=2)
    req = torch.tensor([0, 1, 1, 2], device=DEVICE)[:rows]
    tables = torch.randint(0, 12, (3, 20), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    visible = torch.tensor([0, 1, 80, 33], device=DEVICE)[:rows]
    given = (queries, weights, pool, req, tables, visible, 4, kind)
    close(fast("paged_scores")(*given), index.paged_scores(*given), 2e-4)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same values, apart in memory: a slice of something larger."""
    return torch.stack((x, torch.full_like(x, 77)), -1)[..., 0]


def test_inputs_may_lie_anyhow_in_memory():
    """Slices and expanded views come out of torch's own ops; a kernel reads addresses."""
    x, weight = random(3, 24), random(24, seed=1)
    close(fast("rms_norm")(spread(x), weight, 1e-20), norm.rms_norm(x, weight, 1e-20))
    y, h, post = random(3, 24, seed=2), random(3, 4, 24, seed=3), random(3, 4, seed=4)
    comb, pre = random(3, 4, 4, seed=5), random(3, 4, seed=6)
    found = fast("hc_expand_collapse_norm")(*map(spread, (y, h, post, comb, pre)), weight, 1e-20)
    for a, b in zip(
        found, hyper.hc_expand_collapse_norm(y, h, post, comb, pre, weight, 1e-20), strict=True
    ):
        close(a, b)
    rows, slots = random(3, 96, seed=7), torch.tensor([2, 0, 1], device=DEVICE)
    for name, width in (("store_window", 99), ("store_block_kv", 54)):
        pools = [torch.zeros(3, width, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        getattr(stores, name)(rows, pools[0], slots)
        fast(name)(spread(rows), pools[1], spread(slots))
        assert torch.equal(*pools)
    table = stores.window_bytes(random(9, 96))
    one = torch.tensor([[4]], device=DEVICE).expand(2, 3)
    assert torch.equal(fast("engram_gather")(table, one), engram.engram_gather(table, one))
    w13, w2 = random(2, 16, 24, seed=8), random(2, 24, 8, seed=9)
    pairs, experts_of = torch.zeros(1, device=DEVICE).long().expand(2), torch.tensor([0, 1])
    given = (pairs, experts_of.to(DEVICE), random(2, seed=10).abs(), w13, w2, 9.0)
    close(
        fast("grouped_mlp_static")(spread(x[:1]), *given),
        experts.grouped_mlp_static(x[:1], *given),
    )
    keys, tables = random(8, 32, seed=11), torch.tensor([[0, 1]], device=DEVICE)
    queries, weights = random(2, 2, 32, seed=12), random(2, 2, seed=13)
    req, visible = torch.zeros(1, device=DEVICE).long().expand(2), torch.tensor([5, 8])
    tail = (tables, spread(visible.to(DEVICE)), 4, "raw")
    close(
        fast("paged_scores")(spread(queries), spread(weights), keys, req, *tail),
        index.paged_scores(queries, weights, keys, req, *tail),
        2e-4,
    )


@pytest.mark.parametrize("form", ["float32", "packed"])
@pytest.mark.parametrize("pairs", [0, 1, 43])
def test_experts_over_pairs(form, pairs):
    width, inner, count = 64, 32, 5
    x = random(9, width)
    pick = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 9, (pairs,), generator=pick).to(DEVICE)
    chosen = torch.randint(0, count, (pairs,), generator=pick)
    chosen = torch.where(chosen == 3, 1, chosen).to(DEVICE)  # one expert has no pairs
    weights = random(pairs, seed=2).abs()
    w13, w2 = random(count, 2 * inner, width, seed=3), random(count, width, inner, seed=4)
    if form == "float32":
        found = fast("grouped_mlp_static")(x, rows, chosen, weights, w13, w2, 1.5)
        expected = experts.grouped_mlp_static(x, rows, chosen, weights, w13, w2, 1.5)
        close(found, expected, 2e-4)
        return
    packed = formats.quant_fp4_index(w13), formats.quant_fp4_index(w2)
    wide = [formats.dequant_fp4_index(*w) for w in packed]
    x = experts.fake_quant(x)
    given = (x, rows, chosen, weights)
    quantised = {"before_down": experts.fake_quant}
    found = fast("grouped_mlp_static")(*given, *packed, 10.0, **quantised)
    close(found, experts.grouped_mlp_static(*given, *wide, 10.0, **quantised), 2e-3)


def test_tiles_hold_each_pair_once_and_one_expert_each():
    from kernels.triton.experts import sorted_tiles

    for pairs in (1, 16, 17, 200):
        chosen = torch.randint(0, 6, (pairs,), generator=torch.Generator().manual_seed(pairs))
        places, expert = sorted_tiles(chosen, 6)
        tiles = places.view(-1, 16)
        assert sorted(places[places >= 0].tolist()) == list(range(pairs))
        for tile, owner in zip(tiles, expert.tolist(), strict=True):
            held = tile[tile >= 0]
            assert (owner >= 0) == bool(len(held))
            assert (chosen[held] == owner).all()


def test_rows_of_a_table_are_expanded_as_they_come():
    table = stores.window_bytes(random(40, 96, seed=1))
    rows = torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(fast("engram_gather")(table, rows), engram.engram_gather(table, rows))


@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_gpus_that_are_not_here(tmp_path):
    """sm_80 has no FP8 conversions, sm_90 has; both get a binary of every kernel."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "kernels.testing.compile", "80", "90"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = json.loads(done.stdout)
    from kernels.registry import device_ops

    assert {name.split()[0] for name in built} == set(device_ops("cuda"))
    assert len(built) == 2 * len(device_ops("cuda"))
    for name, sizes in built.items():
        assert sizes["cubin"] > 1000, name
        assert sizes["shared"] <= 160 << 10, f"{name} needs more shared memory than sm_80 has"
