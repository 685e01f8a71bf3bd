"""The vision tower as a service: an image in, the rows of its span out."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
import torch
from PIL import Image

from services.common.errors import Failure, Reason
from services.common.rpc_client import Channels
from services.common.service import RuntimeConfig, running
from services.common.store_memory import MemoryStore
from services.encoder.client import EncoderClient, Picture
from services.encoder.config import EncoderConfig, EncoderModelConfig
from services.encoder.main import build
from services.engine.model.serve import tower_of
from services.engine.model.settings import TorchConfig
from services.engine.model.vision import fit_pixels

pytestmark = pytest.mark.engine


def picture(width: int, height: int, data: bytes | None = None) -> Picture:
    if data is None:
        out = io.BytesIO()
        pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(out, "PNG")
        data = out.getvalue()
    return Picture(width, height, data, hashlib.sha256(data).digest())


async def test_an_image_is_encoded_by_the_models_own_tower():
    settings = TorchConfig()
    config = EncoderConfig(
        model=EncoderModelConfig(engine="torch", torch=settings),
        runtime=RuntimeConfig(uvloop=False),
    )
    assert config.model.hidden == 128
    channels = Channels()
    async with running("encoder", config, build, store=MemoryStore()) as runtime:
        client = EncoderClient(channels)
        given = picture(200, 90)
        found = await client.encode(runtime.address, given)
        (plan,) = await client.plan(runtime.address, [(200, 90)])
        broken = picture(200, 90, given.data[:-200])
        with pytest.raises(Failure) as refused:
            await client.encode(runtime.address, broken)
        await channels.close()
    assert refused.value.reason is Reason.IMAGE_INVALID
    assert (found.hidden, found.size.num_tokens) == (128, plan.num_tokens)
    geometry = found.size
    with torch.inference_mode():
        pixels = fit_pixels(given.data, geometry.width, geometry.height)
        expected = tower_of(settings).encode([pixels])[0].to(torch.bfloat16)
    assert expected.shape == (plan.num_tokens, 128)
    assert found.data == expected.contiguous().view(torch.uint8).numpy().tobytes()
