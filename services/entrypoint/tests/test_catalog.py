"""Which engine model answers to which name, and the identity under which its cache is matched."""

from __future__ import annotations

from hashlib import sha256

import pytest
from pelagos.engine.v1 import engine_control_pb2 as control
from pelagos.engine.v1 import records_pb2 as records
from pelagos.recipe.v1 import recipe_pb2 as recipe

from services.common.errors import Failure, Reason
from services.common.layout import Keys
from services.common.membership import ClusterView
from services.common.rpc_client import Channels
from services.common.store_memory import MemoryStore
from services.entrypoint.catalog import Catalog, profile_of


def description(model_id: str, tokenizer_id: str = "t1") -> control.DescribeResponse:
    return control.DescribeResponse(
        model_id=model_id,
        weights_id="w",
        tokenizer_id=tokenizer_id,
        layout_signature="ab" * 32,
        max_model_len=1000,
        ranks=[control.RankCapacity(blocks=10), control.RankCapacity(blocks=20)],
        kv_layout=records.KvLayout(block_tokens=64, ring_tokens=70),
    )


async def catalog_of(*models: str, aliases: dict[str, str] | None = None) -> Catalog:
    view = ClusterView(MemoryStore(), Keys("test"))
    catalog = Catalog(view, Channels(), aliases=aliases or {})
    for model in models:
        catalog._profiles[(model, "")] = profile_of(description(model))
    return catalog


async def test_one_model_answers_to_every_name_of_its_vocabulary() -> None:
    catalog = await catalog_of("small")
    assert catalog.profile("DeepSeek-V4.1-Flash").model_id == "small"
    known = [
        recipe.Model(name="DeepSeek-V4.1-Flash", tokenizer_id="t1"),
        recipe.Model(name="DeepSeek-V4-Pro", tokenizer_id="t0"),
    ]
    assert catalog.names(known) == ["DeepSeek-V4.1-Flash"]
    with pytest.raises(Failure) as caught:
        catalog.profile("DeepSeek-V4.1-Flash", is_exact=True)
    assert caught.value.reason is Reason.NOT_FOUND


async def test_with_several_models_names_and_aliases_decide() -> None:
    catalog = await catalog_of("a", "b", aliases={"front": "b", "gone": "c"})
    assert catalog.profile("a").model_id == "a"
    assert catalog.profile("front").model_id == "b"
    for name in ("gone", "other"):
        with pytest.raises(Failure) as caught:
            catalog.profile(name)
        assert caught.value.reason is Reason.NOT_FOUND


async def test_no_engine_at_all_is_said_differently() -> None:
    with pytest.raises(Failure) as caught:
        (await catalog_of()).profile("a")
    assert caught.value.reason is Reason.NO_INSTANCE


def test_the_cache_identity_holds_weights_and_layout() -> None:
    profile = profile_of(description("small"))
    assert profile.cache_model_id == "small@w"
    assert profile.layout_digest == bytes.fromhex("ab" * 32)
    assert (profile.block_tokens, profile.ring_tokens) == (64, 70)
    assert profile.max_tokens_per_rank == 20 * 64
    odd = description("small")
    odd.layout_signature = "not hex"
    assert profile_of(odd).layout_digest == sha256(b"not hex").digest()
    odd.layout_signature = ""
    assert profile_of(odd).layout_digest == b""  # uncacheable
