"""What engines take from the store and put into it, on real servers."""

from __future__ import annotations

import re

import pytest
from pelagos.engine.v1 import records_pb2 as pb

from services.common.errors import Failure, Reason
from services.common.shm_ring import PREFIX, SHM_FOLDER, SlotRing
from services.engine.keys import chain
from tests.integration.engine_kit import (
    ROOT,
    ask,
    cluster,
    eventually,
    nothing_held,
    prompt_ids,
    spec,
)


def with_hit(request, stored, found, swa=None):
    """The request as CHECK would send it, for `stored` tokens in the store."""
    ids = request.prompt_tokens
    request.layout_signature = found.prefills[0].core.layout.signature
    request.hit.stored_tokens = stored
    request.hit.block_keys = b"".join(chain(ROOT, ids, 16))
    if swa is not None:
        request.hit.swa.CopyFrom(swa)
    return request


async def stored_prompt(found, ids, max_tokens=40, **sampling):
    """Runs a prompt once and waits until its full blocks are stored; returns the answer."""
    answer = await ask(found, spec("first", ids, max_tokens=max_tokens, **sampling))
    decode = found.decodes[0].core
    wanted = (len(ids) + max_tokens - 1) // 16
    await eventually(
        lambda: decode.persister.counts.persisted >= wanted, "all full blocks in the store"
    )
    return answer


async def test_a_stored_prefix_is_loaded_and_the_answer_is_the_same(tmp_path):
    ids = prompt_ids(200)
    async with cluster(tmp_path, with_store=True) as found:
        first = await stored_prompt(found, ids)
        prefill = found.prefills[0].core.ranks[0].counts
        before = prefill.computed_tokens
        request = with_hit(spec("again", ids, max_tokens=40), 176, found)
        again = await ask(found, request)
        assert again.token_ids == first.token_ids
        usage = again.event.finished.usage
        # No window is known: one block is replayed and counts as computed, not as cached.
        assert (usage.cached_tokens, usage.replayed_tokens) == (160, 16)
        assert prefill.computed_tokens - before == 40
        await nothing_held(found)


async def test_generated_blocks_are_hit_by_the_next_turn(tmp_path):
    ids = prompt_ids(100)
    async with cluster(tmp_path, with_store=True) as found:
        first = await stored_prompt(found, ids, max_tokens=80)
        turn = ids[:]
        turn.extend(first.token_ids)
        turn.extend(prompt_ids(40, seed=9))
        stored = (100 + 79) // 16 * 16
        again = await ask(found, with_hit(spec("turn2", turn), stored, found))
        assert again.event.finished.usage.cached_tokens == stored - 16
        cold = await ask(found, spec("cold", turn))
        assert again.token_ids == cold.token_ids


async def test_1_8_a_stored_window_makes_the_hit_exact(tmp_path):
    ids = prompt_ids(200)
    async with cluster(tmp_path, with_store=True) as found:
        first = await stored_prompt(found, ids)
        core = found.prefills[0].core
        # The window at 192 was kept after the prompt; a longer prompt resumes exactly there.
        longer = ids[:]
        longer.extend(prompt_ids(50, seed=3))
        pool = core._keep_window.__self__.pool
        (location,) = [place for _, place in pool.locations() if place.position == 192]
        swa = pb.SwaLocation(
            position=192,
            host_instance_id=location.host,
            address=location.address,
            slot=location.slot,
            length_bytes=location.num_bytes,
            digest=location.digest,
            host_epoch=location.host_epoch,
        )
        again = await ask(found, with_hit(spec("longer", longer), 192, found, swa))
        usage = again.event.finished.usage
        assert (usage.cached_tokens, usage.replayed_tokens) == (192, 0)
        cold = await ask(found, spec("cold", longer))
        assert again.token_ids == cold.token_ids
        assert first.end == "finished"


async def test_a_promise_that_the_store_cannot_keep_only_shortens_the_hit(tmp_path):
    ids = prompt_ids(200)
    async with cluster(tmp_path, with_store=True) as found:
        cold = await ask(found, spec("cold", ids))
        never_stored = prompt_ids(200, seed=4)
        answer = await ask(found, with_hit(spec("x", never_stored), 176, found))
        assert answer.end == "finished"
        assert answer.event.finished.usage.cached_tokens == 0
        assert cold.end == "finished"


async def test_ur_33_a_hit_for_other_tokens_is_no_hit(tmp_path):
    ids = prompt_ids(200)
    async with cluster(tmp_path, with_store=True) as found:
        await stored_prompt(found, ids)
        other = prompt_ids(200, seed=8)
        request = with_hit(spec("other", other), 176, found)
        request.hit.block_keys = b"".join(chain(ROOT, ids.tobytes(), 16))
        answer = await ask(found, request)
        cold = await ask(found, spec("cold", other))
        assert answer.token_ids == cold.token_ids
        assert answer.event.finished.usage.cached_tokens == 0


async def test_a_hit_under_another_layout_is_refused(tmp_path):
    async with cluster(tmp_path) as found:
        request = with_hit(spec("r", prompt_ids(100)), 64, found)
        request.layout_signature = "another"
        with pytest.raises(Failure) as failure:
            await ask(found, request)
        assert failure.value.reason is Reason.LAYOUT_MISMATCH


async def test_no_store_policy_stores_nothing(tmp_path):
    async with cluster(tmp_path, with_store=True) as found:
        request = spec("r", prompt_ids(100))
        request.namespace.store_policy = pb.STORE_POLICY_NONE
        await ask(found, request)
        await nothing_held(found)
        counts = found.decodes[0].core.persister.counts
        assert (counts.persisted, counts.dropped) == (0, 0)


def ring_files() -> set[str]:
    return {path.name for path in SHM_FOLDER.glob(f"{PREFIX}*-put-*")} | {
        path.name for path in SHM_FOLDER.glob(f"{PREFIX}*-fetch-*")
    }


def ring_blocks(engine) -> int:
    text = engine.runtime.metrics.render().decode()
    (value,) = re.findall(r"^pelagos_\w+_ring_blocks(?:{.*})? ([\d.]+)$", text, re.MULTILINE)
    return int(float(value))


@pytest.mark.parametrize("slots", [32, 4, 0])
async def test_blocks_of_one_machine_go_by_shared_memory_both_ways(tmp_path, slots):
    ids, before = prompt_ids(200), ring_files()
    rings = {"store_ring_blocks": slots}
    async with cluster(tmp_path, with_store=True, prefill=rings, decode=rings) as found:
        first = await stored_prompt(found, ids)
        (prefill,), (decode,) = found.prefills, found.decodes
        assert (ring_blocks(decode) > 0) == (slots > 0)
        again = await ask(found, with_hit(spec("again", ids, max_tokens=40), 176, found))
        assert again.token_ids == first.token_ids
        # More blocks than slots come in several fetches.
        assert again.event.finished.usage.cached_tokens == 160
        assert ring_blocks(prefill) == (11 if slots else 0)
        await nothing_held(found)
    assert ring_files() == before


async def test_without_room_for_a_ring_blocks_go_by_the_rpc(tmp_path, monkeypatch):
    def no_room(*_, **__):
        raise Failure(Reason.ENGINE_FULL, "no room for 1 bytes of shared memory")

    monkeypatch.setattr(SlotRing, "create", no_room)
    ids = prompt_ids(200)
    async with cluster(tmp_path, with_store=True) as found:
        first = await stored_prompt(found, ids)
        again = await ask(found, with_hit(spec("again", ids, max_tokens=40), 176, found))
        assert again.token_ids == first.token_ids
        assert again.event.finished.usage.cached_tokens == 160


async def test_a_store_that_sees_other_memory_gets_blocks_by_the_rpc(tmp_path, monkeypatch):
    monkeypatch.setattr("services.kvstore.store.main.host_id", lambda: "another")
    ids = prompt_ids(200)
    async with cluster(tmp_path, with_store=True) as found:
        first = await stored_prompt(found, ids)
        again = await ask(found, with_hit(spec("again", ids, max_tokens=40), 176, found))
        assert again.token_ids == first.token_ids
        assert again.event.finished.usage.cached_tokens == 160
        assert ring_blocks(found.prefills[0]) == ring_blocks(found.decodes[0]) == 0
