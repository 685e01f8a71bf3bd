"""Ops beside slow, obvious versions of themselves, on odd shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import kernels
from kernels.reference import attention, experts, formats, hyper, index, norm, stores, vision

pytestmark = pytest.mark.engine

ROWS = (0, 1, 7, 129)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_registry_finds_every_op_and_names_what_it_lacks():
    for name in kernels.names():
        assert callable(kernels.get(name))
        for impl in kernels.implementations(name):
            assert callable(kernels.get(name, impl=impl))
        assert callable(kernels.get(name, "cuda"))
    assert kernels.get("hc_mixes") is not kernels.get("hc_mixes", impl="reference")
    assert kernels.get("hc_mixes", "cuda") is not kernels.get("hc_mixes", impl="reference")
    assert kernels.get("gate_topk", "cuda") is kernels.get("gate_topk", impl="reference")
    with pytest.raises(KeyError, match="no op 'hc_mix'"):
        kernels.get("hc_mix")
    with pytest.raises(KeyError, match="no implementation 'cuda'"):
        kernels.get("gate_topk", impl="cuda")


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 24, 301])
def test_rms_norm_on_odd_shapes(impl, rows, width):
    rms_norm = kernels.get("rms_norm", impl=impl)
    both, weight = random(rows, width + 8), random(width, seed=1)
    x = both[:, 4 : width + 4]  # rows that do not follow each other
    found, plain = rms_norm(x, weight, 1e-20), rms_norm(x, None, 1e-20)
    for row, out, bare in zip(x, found, plain, strict=True):
        expected = row / math.sqrt(float((row.double() ** 2).mean()))
        torch.testing.assert_close(out, expected * weight, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(bare, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(rms_norm(row[None], weight, 1e-20)[0], out)
    half = x.to(torch.bfloat16)
    assert torch.equal(rms_norm(half, weight, 1e-20), norm.rms_norm(half, weight, 1e-20))


@pytest.mark.parametrize("rows", ROWS)
def test_rope_on_odd_numbers_of_rows(rows):
    heads = random(rows, 3, 24)
    turns = norm.rotations(torch.arange(rows), norm.rope_frequencies(100.0, 16))
    turned = norm.rope_(heads.clone(), turns)
    assert torch.equal(turned[..., :8], heads[..., :8])
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1))
    torch.testing.assert_close(norm.rope_(turned.clone(), turns, inverse=True), heads)
    wide = norm.rope_(heads.to(torch.bfloat16), turns).float()
    torch.testing.assert_close(wide, turned, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("streams", [2, 4])
def test_mixes_are_doubly_stochastic_and_implementations_agree(impl, rows, streams):
    each = streams * (streams + 2)
    h, fn = random(rows, streams, 8), random(each, streams * 8, seed=1)
    base, scale = random(each, seed=2), random(3, seed=3)
    options = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    pre, post, comb = kernels.get("hc_mixes", impl=impl)(h, fn, base, scale, **options)
    expected = kernels.get("hc_mixes", impl="reference")(h, fn, base, scale, **options)
    for a, b in zip((pre, post, comb), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    ones = torch.ones(rows, streams)
    torch.testing.assert_close(comb.sum(1), ones, atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(2), ones, atol=0.05, rtol=0)
    assert bool((comb > 0).all())


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_expand_sums_over_the_first_index_and_the_fused_op_is_its_parts(impl):
    h, y = random(5, 4, 8), random(5, 8, seed=1)
    post, comb, pre = random(5, 4, seed=2), random(5, 4, 4, seed=3), random(5, 4, seed=4)
    found = kernels.get("hc_expand")(y, h, post, comb)
    for n in range(5):
        for j in range(4):
            wanted = post[n, j] * y[n] + sum(comb[n, i, j] * h[n, i] for i in range(4))
            torch.testing.assert_close(found[n, j], wanted)
    weight = random(8, seed=5)
    fused = kernels.get("hc_expand_collapse_norm", impl=impl)
    out, x = fused(y, h, post, comb, pre, weight, 1e-20)
    torch.testing.assert_close(out, found)
    collapsed = kernels.get("hc_collapse")(found, pre)
    torch.testing.assert_close(x, norm.rms_norm(collapsed, weight, 1e-20))
    alone = fused(*(given[2:3] for given in (y, h, post, comb, pre)), weight, 1e-20)
    assert torch.equal(alone[0][0], out[2])
    assert torch.equal(alone[1][0], x[2])
    half = [given.to(torch.bfloat16) for given in (y, h)]
    for a, b in zip(
        fused(*half, post, comb, pre, weight, 1e-20),
        hyper.hc_expand_collapse_norm(*half, post, comb, pre, weight, 1e-20),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_gradients_are_those_of_the_references():
    def leaf(*shape: int, seed: int) -> torch.Tensor:
        return random(*shape, seed=seed).requires_grad_()

    given = [leaf(3, 8, seed=0), leaf(3, 4, 8, seed=1), leaf(3, 4, seed=2), leaf(3, 4, 4, seed=3)]
    given += [leaf(3, 4, seed=4), leaf(8, seed=5)]
    site = [given[1], leaf(24, 32, seed=6), leaf(24, seed=7), leaf(3, seed=8)]
    options = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    found = []
    for impl in ("reference", "cpu"):
        close = kernels.get("hc_expand_collapse_norm", impl=impl)(*given, 1e-6)
        mixes = kernels.get("hc_mixes", impl=impl)(*site, **options)
        norms = kernels.get("rms_norm", impl=impl)(given[0], given[5], 1e-6)
        loss = sum(part.square().sum() for part in (*close, *mixes, norms))
        found.append(torch.autograd.grad(loss, [*given, *site[1:]]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_native_part_refuses_what_does_not_fit():
    from kernels.cpu import _native

    rows, weight, out = (np.zeros(n, np.float32) for n in (24, 8, 24))
    for wrong in (
        (rows, 7, weight, out),
        (rows, 0, weight, out),
        (rows, 8, weight[:4], out),
        (rows, 8, weight, out[:8]),
        (rows[::2], 4, None, out[:12]),
    ):
        given, width, scale, into = wrong
        with pytest.raises(ValueError):
            _native.rms_norm(given, width, scale, 1e-6, into)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        _native.rms_norm(rows, 8, weight, 1e-6, out)
    with pytest.raises(BufferError):
        _native.rms_norm(rows.astype(np.float64), 8, weight, 1e-6, np.zeros(24, np.float32))
    three = [np.zeros(n, np.float32) for n in (24, 3)]
    outs = [np.zeros(n, np.float32) for n in (4, 4, 16)]
    with pytest.raises(ValueError, match="streams: 1 to 8, not 9"):
        _native.hc_mixes(rows, rows, *three, 9, 20, 1e-6, 1e-6, *outs)
    with pytest.raises(ValueError, match="base: 24"):
        _native.hc_mixes(rows, rows, rows[:8], three[1], 4, 20, 1e-6, 1e-6, *outs)
    with pytest.raises(ValueError, match="comb: 16"):
        _native.hc_mixes(rows, rows, *three, 4, 20, 1e-6, 1e-6, *outs[:2], outs[2][:8])


@pytest.mark.parametrize("entries", [1, 5, 64, 65, 200])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_top_k_is_exact_ascending_and_takes_the_lower_of_equals(entries, count):
    scores = random(9, entries).mul(2).round().div(2)  # many ties, zeros of both signs
    visible = torch.tensor([0, 1, 2, 3, entries, entries // 2, entries, 5, entries]).clamp(
        max=entries
    )
    allowed = random(9, entries, seed=1) > -0.5
    found = index.topk_entries(scores, visible, count, allowed)
    assert found.shape == (9, count)
    for n in range(9):
        usable = [j for j in range(int(visible[n])) if allowed[n, j]]
        best = sorted(sorted(usable, key=lambda j: (-float(scores[n, j]), j))[:count])
        assert found[n].tolist() == best + [-1] * (count - len(best))


def test_candidate_blocks_keep_the_newest_and_the_best():
    scores = random(6, 37)
    visible = torch.tensor([0, 1, 4, 5, 36, 37])
    found = index.candidate_blocks(scores, visible, 4, 3)
    for n, seen in enumerate(visible.tolist()):
        best = {
            b: max(scores[n, b * 4 : min(seen, b * 4 + 4)].tolist()) for b in range(-(-seen // 4))
        }
        if seen:
            best[(seen - 1) // 4] = math.inf
        order = sorted(sorted(best, key=lambda b: (-best[b], b))[:3])
        assert found[n].tolist() == order + [-1] * (3 - len(order))
    mask = index.candidate_mask(found, 37, 4)
    for n in range(6):
        wanted = {b for b in found[n].tolist() if b >= 0}
        assert [j // 4 in wanted for j in range(37)] == mask[n].tolist()


@pytest.mark.parametrize("rows", ROWS)
def test_attention_with_a_sink_and_absent_keys(rows):
    q, keys, sink = random(rows, 2, 8), random(rows, 5, 8, seed=1), random(2, seed=2)
    present = random(rows, 5, seed=3) > 0
    if rows:
        present[0] = False
    found = attention.sparse_attention(q, keys, present, sink, 0.3)
    for n in range(rows):
        for h in range(2):
            weights = [
                math.exp(0.3 * float(q[n, h] @ keys[n, k])) if present[n, k] else 0.0
                for k in range(5)
            ]
            total = sum(weights) + math.exp(float(sink[h]))
            wanted = sum((w / total) * keys[n, k] for k, w in enumerate(weights))
            torch.testing.assert_close(found[n, h], wanted, atol=1e-5, rtol=1e-4)
    if rows:
        assert found[0].abs().max() == 0
        shared = attention.tile_attention(q, keys[0], present, sink, 0.3)
        per_row = attention.sparse_attention(q, keys[:1].expand(rows, -1, -1), present, sink, 0.3)
        torch.testing.assert_close(shared, per_row, atol=1e-5, rtol=1e-4)


def test_grouped_output_is_a_matrix_per_group():
    o, wo_a = random(3, 2, 6), random(2, 4, 6, seed=1)
    found = attention.grouped_out(o, wo_a)
    wanted = torch.cat([o[:, g] @ wo_a[g].T for g in range(2)], 1)
    torch.testing.assert_close(found, wanted)


def test_the_bias_chooses_experts_and_does_not_weigh_them():
    x, gate = random(40, 16), random(8, 16, seed=1)
    none, bias = torch.zeros(8), torch.zeros(8)
    bias[3] = 100.0
    ids, weights = experts.gate_topk(x, gate, none, None, None, 2, 1.5)
    biased, biased_weights = experts.gate_topk(x, gate, bias, None, None, 2, 1.5)
    assert not torch.equal(ids, biased)
    assert bool((biased == 3).any(1).all())
    torch.testing.assert_close(weights.sum(1), torch.full((40,), 1.5))
    scores = torch.log1p(torch.exp(x @ gate.T)).sqrt()
    own = scores.gather(1, biased)
    torch.testing.assert_close(biased_weights, own / own.sum(1, keepdim=True) * 1.5)
    image = torch.arange(40) % 2 == 0
    mixed, _ = experts.gate_topk(x, gate, none, bias, image, 2, 1.5)
    assert torch.equal(mixed[image], biased[image])
    assert torch.equal(mixed[~image], ids[~image])


def test_equal_scores_go_to_the_lower_expert():
    ids, _ = experts.gate_topk(
        torch.zeros(1, 4), torch.ones(6, 4), torch.zeros(6), None, None, 3, 1
    )
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_experts_clamp_the_gate_from_above_and_the_other_on_both_sides(limit):
    x, w13, w2 = random(6, 8), random(3, 10, 8, seed=1), random(3, 8, 5, seed=2)
    rows = torch.tensor([0, 0, 1, 3, 5, 4])
    chosen = torch.tensor([2, 0, 2, 1, 2, 0])
    weights = random(6, seed=3).abs()
    found = experts.grouped_mlp(x, rows, chosen, weights, w13, w2, limit)
    for p in range(6):
        e, row = int(chosen[p]), x[rows[p]]
        g, u = (w13[e] @ row).chunk(2)
        inner = weights[p] * torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
        torch.testing.assert_close(found[p], w2[e] @ inner, atol=1e-5, rtol=1e-4)


def test_quantised_linears_are_products_of_what_their_operands_stand_for():
    x, w = random(5, 64), random(96, 64, seed=1)
    values, scale = formats.quant_fp8_tiles(w)
    wanted = experts.fake_quant(x) @ formats.dequant_fp8_tiles(values, scale).T
    torch.testing.assert_close(experts.linear_fp8(x, values, scale), wanted)
    w13, w2 = random(2, 64, 64, seed=2), random(2, 64, 32, seed=3)
    packed13, packed2 = formats.quant_fp4_index(w13), formats.quant_fp4_index(w2)
    rows, chosen = torch.arange(5), torch.tensor([0, 1, 0, 1, 1])
    found = experts.grouped_mlp_fp4(x, rows, chosen, torch.ones(5), packed13, packed2, 10.0)
    exact = experts.grouped_mlp(x, rows, chosen, torch.ones(5), w13, w2, 10.0)
    assert 0 < (found - exact).norm() / exact.norm() < 0.4


def test_stores_drop_rows_without_a_slot():
    pool = torch.zeros(4, 33, dtype=torch.uint8)
    stores.store_window(random(3, 32), pool, torch.tensor([2, -1, 0]))
    assert pool[[1, 3]].abs().max() == 0
    back = stores.window_values(pool[[2]])
    assert (back - random(3, 32)[0]).abs().max() < 0.3
    entries = torch.zeros(4, 18, dtype=torch.uint8)
    stores.store_block_kv(random(2, 32), entries, torch.tensor([-1, 3]))
    assert entries[:3].abs().max() == 0
    assert (stores.entry_values(entries[[3]]) - random(2, 32)[1]).abs().max() < 0.7


def test_pooling_takes_its_partner_from_the_step_or_from_the_state():
    score, value = random(3, 4), random(3, 4, seed=1)
    state = random(5, 2, 4, seed=2)
    held = state.clone()
    found = stores.pool_c2(
        score,
        value,
        state,
        torch.tensor([1, 2]),
        torch.tensor([-1, 1]),
        torch.tensor([4, 0]),
        torch.tensor([0, 2]),
        torch.tensor([1, 2]),
    )
    first = torch.stack((held[4, 0], score[0])).softmax(0)
    torch.testing.assert_close(found[0], first[0] * held[4, 1] + first[1] * value[0])
    second = score[1:].softmax(0)
    torch.testing.assert_close(found[1], (second * value[1:]).sum(0))
    assert torch.equal(state[0], held[0])
    assert torch.equal(state[1], torch.stack((score[1], value[1])))


def test_patches_are_row_major_and_channel_major_inside():
    pixels = torch.arange(3 * 4 * 6).view(3, 4, 6)
    found = vision.patchify(pixels, 2)
    assert found.shape == (6, 12)
    assert found[4].tolist() == pixels[:, 2:4, 2:4].flatten().tolist()


def test_two_dimensional_rotation_depends_on_the_distance_alone():
    angles = vision.rotations_2d(5, 7, 16, 100.0)
    q, k = random(16, seed=1), random(16, seed=2)
    rows = torch.stack([q] * 35)[:, None], torch.stack([k] * 35)[:, None]
    turned_q, turned_k = (vision.rope_2d(x, angles)[:, 0] for x in rows)
    # Patches (1, 2) -> (3, 5) and (0, 1) -> (2, 4) are equally far apart.
    one = turned_q[1 * 7 + 2] @ turned_k[3 * 7 + 5]
    two = turned_q[0 * 7 + 1] @ turned_k[2 * 7 + 4]
    torch.testing.assert_close(one, two)
    assert abs(float(one - turned_q[0] @ turned_k[2 * 7 + 4])) > 1e-3
