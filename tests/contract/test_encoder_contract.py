"""EncoderService: the same cases on the fake and on the real server."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from PIL import Image

from services.common.errors import Failure, Reason
from services.common.service import RuntimeConfig, running
from services.encoder.client import EncoderClient, Picture
from services.encoder.config import EncoderConfig, EncoderModelConfig
from services.encoder.engine import EncoderEngine
from services.encoder.fake import FakeEncoder
from services.encoder.main import build_engine
from services.engine.sim.pattern import embedding

MODEL = EncoderModelConfig(time_scale=0.0, hidden=8)
CONFIG = EncoderConfig(max_image_bytes=100_000, model=MODEL, runtime=RuntimeConfig(uvloop=False))


@dataclass
class Subject:
    client: Any
    address: str
    engine: EncoderEngine

    async def encode(self, picture: Picture) -> Any:
        return await self.client.encode(self.address, picture)


@pytest.fixture(params=["fake", "real"])
async def subject(request) -> AsyncIterator[Subject]:
    if request.param == "fake":
        async with FakeEncoder(CONFIG) as fake:
            yield Subject(fake, "", fake.engine)
            assert fake.engine.num_in_progress == fake.engine.patches_in_progress == 0
        return
    engines: list[EncoderEngine] = []

    async def build(runtime: Any) -> None:
        engines.append(await build_engine(runtime))

    async with running("encoder", CONFIG, build) as runtime:
        yield Subject(EncoderClient(runtime.channels), runtime.address, engines[0])
        assert engines[0].num_in_progress == engines[0].patches_in_progress == 0


def picture(width: int = 64, height: int = 48, colour: int = 0, kind: str = "PNG") -> Picture:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(data, kind)
    digest = hashlib.sha256(data.getvalue()).digest()
    return Picture(width, height, data.getvalue(), digest)


async def test_planning_reads_no_pixels(subject):
    (size,) = await subject.client.plan(subject.address, [(1920, 1080)])
    assert (size.width, size.height, size.num_tokens) == (1708, 966, 968)
    with pytest.raises(Failure) as failure:
        await subject.client.plan(subject.address, [(0, 10)])
    assert failure.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_an_image_gives_one_row_per_token_of_its_span(subject, kind):
    given = picture(kind=kind)
    found = await subject.encode(given)
    assert found.hidden == 8
    assert found.data == embedding(given.digest, found.size.num_tokens, 8)
    assert not found.cached


async def test_a_large_embedding_comes_whole_in_pieces(subject):
    wide = replace(picture(1920, 1080), digest=bytes(32))
    object.__setattr__(subject.engine, "config", replace(CONFIG, model=replace(MODEL, hidden=4096)))
    subject.engine._encoder._config = subject.engine.config
    found = await subject.encode(wide)
    assert len(found.data) == found.size.num_tokens * 4096 * 2 > 4 << 20


async def test_the_second_time_it_comes_from_the_cache_per_tenant(subject):
    given = picture()
    first = await subject.encode(given)
    again = await subject.encode(given)
    assert (again.cached, again.data) == (True, first.data)
    assert not (await subject.encode(replace(given, tenant="other"))).cached


async def test_equal_images_at_once_are_computed_once(subject):
    given = picture()
    results = await asyncio.gather(*(subject.encode(given) for _ in range(5)))
    assert len({result.data for result in results}) == 1
    assert subject.engine.num_encoded == 1


async def test_t17_images_of_equal_size_give_different_rows(subject):
    first, second = await asyncio.gather(
        subject.encode(picture(colour=1)), subject.encode(picture(colour=2))
    )
    assert first.size == second.size
    assert first.data != second.data


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"data": b""}, Reason.IMAGE_INVALID),
        ({"data": b"not an image"}, Reason.IMAGE_INVALID),
        ({"data": b"\x89PNG\r\n\x1a\n"}, Reason.IMAGE_INVALID),
        ({"data": b"\x89PNG" + bytes(200_000)}, Reason.IMAGE_INVALID),
        ({"data": b"BM" + bytes(64)}, Reason.IMAGE_INVALID),
        ({"digest": b"short"}, Reason.INVALID_REQUEST),
        ({"width": 0}, Reason.INVALID_REQUEST),
    ],
)
async def test_p_07_a_bad_image_fails_alone(subject, broken, reason):
    good = asyncio.create_task(subject.encode(picture(colour=9)))
    with pytest.raises(Failure) as failure:
        await subject.encode(replace(picture(), **broken))
    assert failure.value.reason is reason
    assert (await good).data


async def test_a_size_other_than_declared_is_encoded_at_the_planned_one_and_counted(subject):
    given = replace(picture(64, 48), width=640, height=480)
    found = await subject.encode(given)
    (planned,) = await subject.client.plan(subject.address, [(640, 480)])
    assert found.size == planned
    assert subject.engine.num_resized == 1


async def test_a_full_card_refuses_and_says_when_to_come_back(subject):
    object.__setattr__(subject.engine, "config", replace(CONFIG, max_queued_patches=10))
    with pytest.raises(Failure) as failure:
        await subject.encode(picture(900, 900))
    assert failure.value.reason is Reason.ENGINE_FULL


async def test_a_draining_card_takes_nothing_new(subject):
    subject.engine.accepting = False
    with pytest.raises(Failure) as failure:
        await subject.encode(picture())
    assert failure.value.reason is Reason.DRAINING
