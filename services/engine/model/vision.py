"""The vision tower and its aligner: from pixels to the rows that a prompt's image span takes.

Geometry is planned elsewhere, from declared sizes; pixels come resized and padded.
Source: model.md, section 17; engine.md, section 6.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import kernels
from kernels.reference.vision import rotations_2d
from services.engine.model.checkpoint import TensorSource
from services.engine.model.config import ModelConfig
from services.engine.model.device import CpuDevice, Device

NORM_EPS = 1e-6
PAD_GREY = 127
_MEAN = _STD = 0.5


def fit_pixels(data: bytes, width: int, height: int, *, stretch: bool = False) -> np.ndarray:
    """Decodes an image and fits it into the planned size, [height, width, 3] uint8.

    The shape is kept and the rest is grey, unless `stretch` or a side would vanish.
    Raises: OSError or ValueError for bytes that are no image.
    """
    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB")
    w, h = image.size
    fitted = (width, height)
    if not stretch and w * height > width * h:
        fitted = (width, round(h / w * width))
    elif not stretch and w * height < width * h:
        fitted = (round(w / h * height), height)
    if 0 in fitted:
        fitted = (width, height)
    image = image.resize(fitted, Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (width, height), (PAD_GREY,) * 3)
    canvas.paste(image, (round((width - fitted[0]) / 2), round((height - fitted[1]) / 2)))
    return np.asarray(canvas)


@dataclass(frozen=True)
class _Block:
    norm1: Tensor
    norm2: Tensor
    wqkv: Tensor
    bqkv: Tensor
    wo: Tensor
    bo: Tensor
    w1: Tensor
    w2: Tensor


class VisionTower:
    """Weights and forward pass; one image is one sequence of patches."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        *,
        native: bool = False,
        device: Device | None = None,
    ) -> None:
        if config.vision is None:
            raise ValueError("this configuration has no vision tower")
        self._vision = config.vision
        self._native = native
        self._device = held = device or CpuDevice()

        def get(name: str) -> Tensor:
            return held.place(source.matrix(name))

        self._patch = (get("vision.patch_embed.proj.weight"), get("vision.patch_embed.proj.bias"))
        self._blocks = [
            _Block(
                get(f"vision.blocks.{i}.norm1.weight"),
                get(f"vision.blocks.{i}.norm2.weight"),
                get(f"vision.blocks.{i}.attn.wqkv.weight"),
                get(f"vision.blocks.{i}.attn.wqkv.bias"),
                get(f"vision.blocks.{i}.attn.wo.weight"),
                get(f"vision.blocks.{i}.attn.wo.bias"),
                get(f"vision.blocks.{i}.mlp.w1.weight"),
                get(f"vision.blocks.{i}.mlp.w2.weight"),
            )
            for i in range(config.vision.num_hidden_layers)
        ]
        self._norm = get("vision.norm.weight")
        self._aligner = tuple(
            get(f"aligner.{name}") for name in ("w1.weight", "w1.bias", "w2.weight", "w2.bias")
        )
        self._marks = tuple(get(name) for name in ("image_start", "image_newline", "image_end"))
        self._rms_norm = kernels.get("rms_norm", held.kind)
        self._attention = kernels.get("vit_attention", held.kind)
        self._patchify = kernels.get("patchify", held.kind)

    def encode(self, images: Sequence[np.ndarray]) -> list[Tensor]:
        """Encodes images of planned sizes ([h, w, 3] uint8); returns [tokens, D] of each span.

        The spans are on the host: they leave for other machines.
        """
        with self._device.computing():
            spans = [self.span(*self._cells(image)) for image in images]
            return [self._device.fetch(span) for span in spans]

    def span(self, cells: Tensor, rows: int, columns: int) -> Tensor:
        """Lays cells [rows * columns, D] out as a span: START, rows with NEWLINE, END."""
        start, newline, end = (mark[None].to(cells.dtype) for mark in self._marks)
        grid = cells.view(rows, columns, -1)
        lines = torch.cat((grid, newline.expand(rows, 1, -1)), 1).flatten(0, 1)
        return torch.cat((start, lines, end))

    def features(self, image: np.ndarray) -> Tensor:
        """Returns the tower's output, one row per patch. image: [h, w, 3] uint8."""
        vision = self._vision
        pixels = self._device.upload(image.copy()).permute(2, 0, 1).float()
        pixels = self._cast((pixels / 255 - _MEAN) / _STD)
        x = self._linear(self._patchify(pixels, vision.patch_size), *self._patch)
        rows, columns = (side // vision.patch_size for side in image.shape[:2])
        angles = self._device.place(rotations_2d(rows, columns, vision.head_dim, vision.rope_theta))
        heads = (vision.num_attention_heads, vision.head_dim)
        for block in self._blocks:
            y = self._rms_norm(x, block.norm1, NORM_EPS)
            q, k, v = self._linear(y, block.wqkv, block.bqkv).chunk(3, -1)
            o = self._attention(*(part.unflatten(-1, heads) for part in (q, k, v)), angles)
            x = x + self._linear(o.flatten(1), block.wo, block.bo)
            y = self._rms_norm(x, block.norm2, NORM_EPS)
            gate, up = self._linear(y, block.w1).chunk(2, -1)
            x = x + self._linear(F.silu(gate) * up, block.w2)
        return self._rms_norm(x, self._norm, NORM_EPS)

    def _cells(self, image: np.ndarray) -> tuple[Tensor, int, int]:
        vision, step = self._vision, self._vision.downsample_ratio
        rows, columns = (side // vision.patch_size for side in image.shape[:2])
        grid = self.features(image).view(rows, columns, -1)
        grid = F.pad(grid, (0, 0, 0, -columns % step, 0, -rows % step))
        cell_rows, cell_columns = grid.shape[0] // step, grid.shape[1] // step
        cells = grid.view(cell_rows, step, cell_columns, step, -1)
        # Channels outermost, then the place inside the cell.
        cells = cells.permute(0, 2, 4, 1, 3).reshape(cell_rows * cell_columns, -1)
        w1, b1, w2, b2 = self._aligner
        out = self._linear(F.gelu(self._linear(cells, w1, b1)), w2, b2)
        return out, cell_rows, cell_columns

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16) if self._native else x

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._cast(F.linear(x.float(), weight, bias))
