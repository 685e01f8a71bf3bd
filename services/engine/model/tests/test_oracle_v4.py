"""The parts that V4.1 shares with V4, beside the public implementation of V4 in `transformers`.

First each module, then a whole backbone made of V4 modules: with a selection that holds every
entry, without memory and candidates, V4.1 is V4 with sharing and shifted mixes.
Source: model.md, section 21.2.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

import kernels
from kernels.reference.norm import rope_frequencies, rotations, yarn_range
from services.engine.model.checkpoint import RandomSource
from services.engine.model.presets import NANO
from services.engine.model.tests.kit import EXACT, Driver, network, prompt, with_text
from services.engine.model.tests.test_naive import logits_of

pytestmark = pytest.mark.engine


PLAIN = with_text(
    NANO,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    index_topk=64,
    candidate_source_layer_id=None,
)
TEXT = PLAIN.text


@lru_cache(maxsize=2)
def config_of(ratio: int):
    """The V4 configuration of one layer; `ratio` is the rate of its compressor."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    scaling = TEXT.rope_scaling
    return DeepseekV4Config(
        vocab_size=TEXT.vocab_size,
        hidden_size=TEXT.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=TEXT.num_attention_heads,
        head_dim=TEXT.head_dim,
        partial_rotary_factor=TEXT.qk_rope_head_dim / TEXT.head_dim,
        q_lora_rank=TEXT.q_lora_rank,
        o_groups=TEXT.o_groups,
        o_lora_rank=TEXT.o_lora_rank,
        sliding_window=TEXT.sliding_window,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
        compress_rates={
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": ratio,
        },
        index_n_heads=TEXT.index_n_heads,
        index_head_dim=TEXT.index_head_dim,
        rope_theta=TEXT.rope_theta,
        compress_rope_theta=TEXT.compress_rope_theta,
        rope_parameters={
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        max_position_embeddings=TEXT.max_position_embeddings,
        rms_norm_eps=TEXT.rms_norm_eps,
        moe_intermediate_size=TEXT.moe_intermediate_size,
        n_routed_experts=TEXT.n_routed_experts,
        num_experts_per_tok=TEXT.num_experts_per_tok,
        scoring_func=TEXT.scoring_func,
        routed_scaling_factor=TEXT.routed_scaling_factor,
        swiglu_limit=TEXT.swiglu_limit,
        hc_mult=TEXT.hc_mult,
        hc_sinkhorn_iters=TEXT.hc_sinkhorn_iters,
        hc_eps=TEXT.hc_eps,
        attn_implementation="eager",
    )


def put(module: nn.Module, **values: Tensor) -> nn.Module:
    """Sets parameters and buffers by name; dots as double underscores."""
    state = module.state_dict()
    for name, value in values.items():
        key = name.replace("__", ".")
        assert state[key].shape == value.shape, (key, state[key].shape, value.shape)
        state[key] = value
    module.load_state_dict(state)
    return module.eval()


class Weights:
    def __init__(self) -> None:
        self._source = RandomSource(PLAIN, 1)

    def __call__(self, name: str) -> Tensor:
        return self._source.matrix(name)


W = Weights()


def hyper(at: str) -> nn.Module:
    module = v4.DeepseekV4HyperConnection(config_of(2))
    return put(module, fn=W(f"{at}_fn"), base=W(f"{at}_base"), scale=W(f"{at}_scale"))


def moe(layer: int) -> nn.Module:
    at = f"layers.{layer}.ffn"
    experts = range(TEXT.n_routed_experts)

    def up(e: object) -> Tensor:
        return torch.cat((W(f"{at}.{e}.w1.weight"), W(f"{at}.{e}.w3.weight")))

    return put(
        v4.DeepseekV4SparseMoeBlock(config_of(2), 0),
        gate__weight=W(f"{at}.gate.weight"),
        gate__e_score_correction_bias=W(f"{at}.gate.bias"),
        experts__gate_up_proj=torch.stack([up(f"experts.{e}") for e in experts]),
        experts__down_proj=torch.stack([W(f"{at}.experts.{e}.w2.weight") for e in experts]),
        shared_experts__gate_proj__weight=W(f"{at}.shared_experts.w1.weight"),
        shared_experts__up_proj__weight=W(f"{at}.shared_experts.w3.weight"),
        shared_experts__down_proj__weight=W(f"{at}.shared_experts.w2.weight"),
    )


class SharedEntries(nn.Module):
    """Stands for the compressor of a layer that reads another's entries."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self._source = [source]

    def forward(self, *_: object) -> tuple[Tensor, Tensor]:
        return self._source[0].last


def compressor(layer: int) -> nn.Module:
    at, ratio = f"layers.{layer}.attn.compressor", TEXT.ratio(layer)
    module = v4.DeepseekV4HCACompressor(config_of(ratio))
    gate = W(f"{at}.wgate.weight") if ratio == 2 else torch.zeros_like(W(f"{at}.wkv.weight"))
    put(
        module,
        kv_proj__weight=W(f"{at}.wkv.weight"),
        gate_proj__weight=gate,
        position_bias=torch.zeros_like(module.position_bias),
        kv_norm__weight=W(f"{at}.norm.weight"),
    )
    original = module.forward

    def remember(*args: object) -> tuple[Tensor, Tensor]:
        module.last = original(*args)
        return module.last

    module.forward = remember
    return module


def attention(layer: int, entries: nn.Module | None) -> nn.Module:
    at = f"layers.{layer}.attn"
    kind = 1 if TEXT.ratio(layer) else 0
    module = v4.DeepseekV4Attention(config_of(TEXT.ratio(layer) or 2), kind)
    module.compressor = None
    put(
        module,
        q_a_proj__weight=W(f"{at}.wq_a.weight"),
        q_a_norm__weight=W(f"{at}.q_norm.weight"),
        q_b_proj__weight=W(f"{at}.wq_b.weight"),
        kv_proj__weight=W(f"{at}.wkv.weight"),
        kv_norm__weight=W(f"{at}.kv_norm.weight"),
        o_a_proj__weight=W(f"{at}.wo_a.weight"),
        o_b_proj__weight=W(f"{at}.wo_b.weight"),
        sinks=W(f"{at}.attn_sink"),
    )
    module.q_b_norm = nn.Identity()  # V4.1 has no norm per head
    module.compressor = entries
    return module


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=tolerance, rtol=1e-5)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


@torch.no_grad()
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_rms_norm_is_that_of_v4(impl: str) -> None:
    x, weight = random(7, 64), random(64, seed=4)
    norm = put(v4.DeepseekV4RMSNorm(64, eps=TEXT.rms_norm_eps), weight=weight)
    ours = kernels.get("rms_norm", impl=impl)
    close(ours(x, weight, TEXT.rms_norm_eps), norm(x))
    assert ours(torch.zeros(2, 64), weight, TEXT.rms_norm_eps).abs().max() == 0


@torch.no_grad()
def test_rotation_with_and_without_yarn_is_that_of_v4() -> None:
    module = v4.DeepseekV4RotaryEmbedding(config_of(2))
    positions = torch.tensor([0, 1, 5, 300, 4000])
    x = random(5, 3, TEXT.head_dim)
    scaling, dim = TEXT.rope_scaling, TEXT.qk_rope_head_dim
    ours = {
        "main": rope_frequencies(TEXT.rope_theta, dim),
        "compress": rope_frequencies(
            TEXT.compress_rope_theta,
            dim,
            factor=scaling.factor,
            original_len=scaling.original_max_position_embeddings,
        ),
    }
    for kind, frequencies in ours.items():
        cos, sin = module(x, positions[None], layer_type=kind)
        expected = v4.apply_rotary_pos_emb(x[None], cos, sin, unsqueeze_dim=2)[0]
        turns = rotations(positions, frequencies)
        found = kernels.get("rope_")(x.clone(), turns)
        close(found, expected, 2e-4)
        close(kernels.get("rope_")(found.clone(), turns, inverse=True), x, 1e-5)


def test_yarn_range_of_the_flash_model() -> None:
    assert yarn_range(160000.0, 64, 65536, 32, 1) == (15, 25)


@torch.no_grad()
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_hyper_connections_are_those_of_v4(impl: str) -> None:
    at, h = "layers.2.hc_attn", random(6, TEXT.hc_mult, TEXT.hidden_size)
    post, comb, collapsed = hyper(at)(h[None])
    found = kernels.get("hc_mixes", impl=impl)(
        h,
        W(f"{at}_fn"),
        W(f"{at}_base"),
        W(f"{at}_scale"),
        iterations=TEXT.hc_sinkhorn_iters,
        hc_eps=TEXT.hc_eps,
        norm_eps=TEXT.rms_norm_eps,
    )
    close(found[1], post[0])
    close(found[2], comb[0])
    close(kernels.get("hc_collapse")(h, found[0]), collapsed[0])
    y = random(6, TEXT.hidden_size, seed=5)
    expected = post[0][:, :, None] * y[:, None] + comb[0].transpose(1, 2) @ h
    close(kernels.get("hc_expand")(y, h, found[1], found[2]), expected)


@torch.no_grad()
def test_routing_and_experts_are_those_of_v4() -> None:
    x = random(30, TEXT.hidden_size)
    expected = moe(1)(x[None])[0]
    net = network(PLAIN, EXACT)
    driver = Driver(net)
    close(driver.runner.backbone.blocks.moe(net.model.layers[1], x, None), expected)


@torch.no_grad()
def test_index_scores_are_those_of_v4() -> None:
    at = "layers.1.attn.indexer"
    x, queries = random(5, TEXT.hidden_size), random(5, TEXT.index_n_heads, TEXT.index_head_dim)
    keys = random(40, TEXT.index_head_dim, seed=6)
    scorer = put(
        v4.DeepseekV4IndexerScorer(config_of(2)),
        weights_proj__weight=W(f"{at}.weights_proj.weight"),
    )
    expected = scorer(queries[None], keys[None], x[None])[0]
    weights = x @ W(f"{at}.weights_proj.weight").T
    weights = weights * TEXT.index_head_dim**-0.5 * TEXT.index_n_heads**-0.5
    close(kernels.get("index_scores")(queries, weights, keys), expected)
    per_row = keys.expand(5, -1, -1)
    close(kernels.get("index_scores")(queries, weights, per_row, 16), expected)


@torch.no_grad()
def test_a_backbone_of_v4_modules_gives_the_same_logits() -> None:
    ids = prompt(37, 30)
    n = len(ids)
    rotary = v4.DeepseekV4RotaryEmbedding(config_of(2))
    positions = torch.arange(n)[None]
    turns = {
        kind: rotary(torch.zeros(1), positions, layer_type=kind) for kind in ("main", "compress")
    }
    at = torch.arange(n)
    back = at[:, None] - at
    seen = (back >= 0) & (back < TEXT.sliding_window)
    mask = torch.zeros(1, 1, n, n).masked_fill_(~seen, float("-inf"))
    h = W("embed.weight")[ids][None, :, None, :].repeat(1, 1, TEXT.hc_mult, 1)
    pre = torch.zeros(1, n, TEXT.hc_mult)
    pre[..., 0] = 1
    sources: dict[int, nn.Module] = {}
    for layer in range(TEXT.num_hidden_layers):
        entries = None
        if layer in TEXT.kv_source_layer_ids:
            entries = sources[layer] = compressor(layer)
        elif TEXT.ratio(layer):
            entries = SharedEntries(sources[TEXT.kv_source(layer)])
        block = attention(layer, entries)
        h, a_pre = _site(
            h,
            pre,
            hyper(f"layers.{layer}.hc_attn"),
            W(f"layers.{layer}.attn_norm.weight"),
            lambda x, block=block: block(
                x, position_embeddings=turns, position_ids=positions, attention_mask=mask
            )[0],
        )
        h, pre = _site(
            h,
            a_pre,
            hyper(f"layers.{layer}.hc_ffn"),
            W(f"layers.{layer}.ffn_norm.weight"),
            moe(layer),
        )
    norm = put(v4.DeepseekV4RMSNorm(TEXT.hidden_size, TEXT.rms_norm_eps), weight=W("norm.weight"))
    x = norm((pre.unsqueeze(-1) * h).sum(2))[0]
    expected = x[-1] @ W("head.weight").T
    driver = Driver(network(PLAIN, EXACT), truncation="off")
    found = logits_of(driver, tuple(ids))
    assert expected.abs().max() > 1
    close(found, expected, 5e-4)


def _site(h: Tensor, pre: Tensor, site: nn.Module, weight: Tensor, inner) -> tuple[Tensor, Tensor]:
    """One site of V4.1 out of V4's parts: its own mixes, collapsed by the site before."""
    post, comb, _ = site(h)
    norm = put(v4.DeepseekV4RMSNorm(TEXT.hidden_size, TEXT.rms_norm_eps), weight=weight)
    y = inner(norm((pre.unsqueeze(-1) * h).sum(2)))
    flat = site.input_norm(h.flatten(2))
    z = flat @ site.fn.T
    m = TEXT.hc_mult
    own = torch.sigmoid(z[..., :m] * site.scale[0] + site.base[:m]) + TEXT.hc_eps
    mixed = torch.matmul(comb.transpose(-1, -2), h)
    return post.unsqueeze(-1) * y.unsqueeze(-2) + mixed, own
