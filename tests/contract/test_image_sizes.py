"""The codec counts an image's span, the encoder fills it: both must plan the same size."""

from __future__ import annotations

import random

import pytest
from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.encoder.patches import PatchConfig, plan_geometry
from services.entrypoint.media import media_spans
from services.recipe import codec

SLIM = [(1, 8192), (8192, 1), (1, 4096), (16, 8192), (2, 2)]


@pytest.mark.parametrize("detail", ["low", "high", "original", "auto", ""])
def test_ur_77_the_encoder_plans_what_the_codec_has_counted(detail: str) -> None:
    rng = random.Random(77)
    sizes = [(round(2 ** rng.uniform(0, 13)), round(2 ** rng.uniform(0, 13))) for _ in range(400)]
    for width, height in [*SLIM, (1000, 1000), (513, 512), *sizes]:
        target = codec.image_target_size(width, height, detail or "auto")
        num_tokens = codec.image_num_tokens(*target)
        image = recipe.Image(
            num_tokens=num_tokens, width=width, height=height, data=b"x", detail=detail
        )
        (span,) = media_spans([image], "r1", 100)
        plan = plan_geometry(span.width, span.height, PatchConfig())
        assert (plan.width, plan.height) == target, (width, height)
        assert plan.num_tokens == span.num_tokens == num_tokens
