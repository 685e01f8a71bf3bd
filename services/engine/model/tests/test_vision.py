"""The vision tower beside loops, and the span it fills. Source: model.md, section 17."""

from __future__ import annotations

import io
import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image

from services.encoder.patches import PatchConfig, plan_geometry
from services.engine.model.checkpoint import RandomSource
from services.engine.model.presets import TINY
from services.engine.model.vision import VisionTower, fit_pixels

pytestmark = pytest.mark.engine

PATCHES = PatchConfig(14, 3, 64, 7056)


@lru_cache(maxsize=2)
def tower(native: bool = False) -> VisionTower:
    return VisionTower(TINY, RandomSource(TINY, 1), native=native)


def picture(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)


def encoded(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture(width, height)).save(out, "PNG")
    return out.getvalue()


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / math.sqrt(float((x * x).mean()) + 1e-6) * weight


def naive(image: np.ndarray) -> np.ndarray:
    """Features per patch, one at a time, float64."""
    vision, source = TINY.vision, RandomSource(TINY, 1)

    def w(name: str) -> np.ndarray:
        return source.matrix(f"vision.{name}").double().numpy()

    rows, columns = image.shape[0] // 14, image.shape[1] // 14
    pixels = (image.astype(np.float64) / 255 - 0.5) / 0.5
    x = []
    for r in range(rows):
        for c in range(columns):
            patch = pixels[r * 14 : r * 14 + 14, c * 14 : c * 14 + 14]
            flat = [patch[i, j, k] for k in range(3) for i in range(14) for j in range(14)]
            x.append(w("patch_embed.proj.weight") @ np.array(flat) + w("patch_embed.proj.bias"))
    heads, dim = vision.num_attention_heads, vision.head_dim

    def rotate(v: np.ndarray, at: int) -> np.ndarray:
        quarter, half = dim // 4, dim // 2
        place = [at // columns] * quarter + [at % columns] * quarter
        out = v.copy()
        for i in range(half):
            angle = place[i] * vision.rope_theta ** (-2 * (i % quarter) / half)
            a, b = v[i], v[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    for layer in range(vision.num_hidden_layers):
        at = f"blocks.{layer}"
        wqkv, bqkv = w(f"{at}.attn.wqkv.weight"), w(f"{at}.attn.wqkv.bias")
        qkv = [(wqkv @ rms(v, w(f"{at}.norm1.weight")) + bqkv).reshape(3, heads, dim) for v in x]
        after = []
        for p, v in enumerate(x):
            out = []
            for h in range(heads):
                q = rotate(qkv[p][0, h], p)
                logits = [q @ rotate(other[1, h], o) * dim**-0.5 for o, other in enumerate(qkv)]
                e = np.exp(np.array(logits) - max(logits))
                out.append(sum(e[o] / e.sum() * qkv[o][2, h] for o in range(len(x))))
            v = v + w(f"{at}.attn.wo.weight") @ np.concatenate(out) + w(f"{at}.attn.wo.bias")
            gate, up = np.split(w(f"{at}.mlp.w1.weight") @ rms(v, w(f"{at}.norm2.weight")), 2)
            after.append(v + w(f"{at}.mlp.w2.weight") @ (gate / (1 + np.exp(-gate)) * up))
        x = after
    return np.stack([rms(v, w("norm.weight")) for v in x])


def test_features_are_those_of_the_slow_tower():
    image = picture(14 * 3, 14 * 2)
    with torch.inference_mode():
        found = tower().features(image)
        rough = tower(native=True).features(image).float()
    expected = naive(image)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(rough.numpy(), expected, atol=0.3)


def test_a_span_is_start_rows_with_newlines_end_and_cells_reach_over_the_edge():
    source = RandomSource(TINY, 1)
    image = picture(14 * 5, 14 * 4)  # two by two cells, two of them beyond the edge
    with torch.inference_mode():
        span = tower().encode([image])[0]
        features = tower().features(image).view(4, 5, -1)
    assert len(span) == 2 * 3 + 2
    for row, name in ((0, "start"), (3, "newline"), (6, "newline"), (7, "end")):
        assert torch.equal(span[row], source.matrix(f"image_{name}"))
    # The lower right cell: channel outermost, then its row and column; zeros outside.
    cell = torch.zeros(64, 3, 3)
    cell[:, :1, :2] = features[3:, 3:].permute(2, 0, 1)
    w1, b1 = source.matrix("aligner.w1.weight"), source.matrix("aligner.w1.bias")
    w2, b2 = source.matrix("aligner.w2.weight"), source.matrix("aligner.w2.bias")
    hidden = torch.nn.functional.gelu(w1 @ cell.flatten() + b1)
    torch.testing.assert_close(span[5], w2 @ hidden + b2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 3000), (3000, 1), (640, 480), (85, 84), (14, 14), (2000, 90)]
)
def test_extreme_shapes_fill_exactly_the_tokens_that_were_planned(size):
    plan = plan_geometry(*size, PATCHES)
    pixels = fit_pixels(encoded(*size), plan.width, plan.height)
    assert pixels.shape == (plan.height, plan.width, 3)
    with torch.inference_mode():
        span = tower().encode([pixels])[0]
    assert span.shape == (plan.num_tokens, 128)
    assert plan.num_tokens <= 64
    assert bool(span.isfinite().all())


def test_an_image_keeps_its_shape_on_a_grey_canvas():
    out = io.BytesIO()
    Image.new("RGB", (40, 20), (255, 0, 0)).save(out, "PNG")
    pixels = fit_pixels(out.getvalue(), 42, 42)
    assert pixels[0].tolist() == [[127] * 3] * 42
    assert pixels[21].tolist() == [[255, 0, 0]] * 42
    assert fit_pixels(out.getvalue(), 42, 42, stretch=True)[0].tolist() == [[255, 0, 0]] * 42
    with pytest.raises(OSError, match="identify"):
        fit_pixels(b"no image", 42, 42)


def test_images_of_one_batch_do_not_see_each_other():
    one, two = picture(56, 42), picture(42, 42)
    with torch.inference_mode():
        together = tower().encode([one, two])
        alone = tower().encode([two])
    assert torch.equal(together[1], alone[0])
