"""Encryption at rest: keys per tenant, nothing readable on the disk, a wrong key is a miss."""

import asyncio
import hashlib
import hmac
import re
import secrets

import pytest

from services.common.config import ConfigError
from services.kvstore.client import PutStatus
from services.kvstore.cluster_key import cluster_key_of
from services.kvstore.config import StoreConfig
from services.kvstore.formats import FLAG_SEALED, ObjectHeader
from services.kvstore.hash_chain import tenant_tag
from services.kvstore.inspect_files import shards_in
from services.kvstore.seal import Sealer, domain_key
from services.kvstore.tests.cluster_kit import cluster
from services.kvstore.tests.kit import LAYOUT, blocks_of, match_request, stack, token_ids, until

KEY = bytes(range(32))
ACME, GLOBEX = tenant_tag("acme"), tenant_tag("globex")


def test_s_11_each_tenant_has_a_key_of_its_own_as_the_design_names_it() -> None:
    assert domain_key(KEY, ACME) == hmac.new(KEY, b"enc" + ACME, hashlib.sha256).digest()
    assert len({domain_key(KEY, ACME), domain_key(KEY, GLOBEX), domain_key(bytes(32), ACME)}) == 3


def test_what_is_sealed_opens_only_under_its_key_its_tenant_and_its_place() -> None:
    sealer = Sealer(KEY)
    payload, key = secrets.token_bytes(5000), secrets.token_bytes(32)
    stored, seal = sealer.seal(payload, ACME, key, LAYOUT)
    assert len(stored) == len(payload)
    assert bytes(stored) != payload
    again, other_seal = sealer.seal(payload, ACME, key, LAYOUT)
    assert (bytes(again), other_seal) != (bytes(stored), seal), "no nonce is used twice"
    out = bytearray(stored)
    assert sealer.open(out, seal, ACME, key, LAYOUT)
    assert out == payload
    flipped = bytes([seal[0] ^ 1]) + seal[1:]
    for wrong in (
        (Sealer(bytes(32)), stored, seal, ACME, key, LAYOUT),
        (sealer, stored, seal, GLOBEX, key, LAYOUT),
        (sealer, stored, seal, ACME, bytes(32), LAYOUT),
        (sealer, stored, seal, ACME, key, bytes(32)),
        (sealer, stored, flipped, ACME, key, LAYOUT),
        (sealer, stored, other_seal, ACME, key, LAYOUT),
        (sealer, bytes(stored)[:-1], seal, ACME, key, LAYOUT),
    ):
        opener, data, *rest = wrong
        out = bytearray(data)
        assert not opener.open(out, *rest)
        assert out == bytes(data), "nothing half decrypted is left behind"
    assert "0" not in repr(sealer)


def encrypted(folder) -> dict[str, str]:
    return {"encryption": "aes-256-gcm", "cluster_key_file": str(folder / "cluster.key")}


async def fetched(s, blocks) -> list[bytes | None]:
    keys = b"".join(block.key for block in blocks)
    async with s.store.fetch(keys, LAYOUT) as parts:
        found = {part.index: part.payload if part.is_ok else None async for part in parts}
    return [found[number] for number in range(len(blocks))]


def headers_in(data: bytes) -> list[ObjectHeader]:
    # By their mark and not by a key: a child's header has its parent's key too.
    starts = (found.start() for found in re.finditer(rb"DIKVBLK1", data))
    found = (ObjectHeader.parse(data[start : start + 256]) for start in starts)
    return [header for header in found if header is not None]


async def test_s_11_no_payload_stands_on_the_disk_and_every_check_works_without_the_key(
    tmp_path,
) -> None:
    tokens = token_ids(1, 600)
    async with stack(tmp_path, **encrypted(tmp_path)) as s:
        root = (await s.check.match(match_request(tokens), timeout_s=30)).namespace.root
        blocks = blocks_of(root, tokens, tenant="acme")
        assert await s.put_all(blocks) == [PutStatus.COMMITTED] * 4
        assert await fetched(s, blocks) == [block.payload for block in blocks]
    data = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("seg-*"))
    for block in blocks:
        assert block.payload[:32] not in data
        assert block.payload[-32:] not in data
    assert {header.key for header in headers_in(data)} == {block.key for block in blocks}
    assert all(header.flags & FLAG_SEALED for header in headers_in(data))
    assert [found.fault for found in shards_in(tmp_path / "kv", verify=True)] == [""] * 4
    async with stack(tmp_path, **encrypted(tmp_path)) as s:
        assert await fetched(s, blocks) == [block.payload for block in blocks]


@pytest.mark.parametrize("later", ["another key", "off"])
async def test_a_wrong_key_or_none_is_a_miss_and_the_block_can_be_put_again(
    tmp_path, later
) -> None:
    tokens = token_ids(2, 600)
    async with stack(tmp_path, **encrypted(tmp_path)) as s:
        root = (await s.check.match(match_request(tokens), timeout_s=30)).namespace.root
        blocks = blocks_of(root, tokens, tenant="acme")
        await s.put_all(blocks)
    more = {}
    if later == "another key":
        (tmp_path / "other.key").write_bytes(bytes(32))
        (tmp_path / "other.key").chmod(0o600)
        more = encrypted(tmp_path) | {"cluster_key_file": str(tmp_path / "other.key")}
    async with stack(tmp_path, **more) as s:
        assert await fetched(s, blocks) == [None] * 4
        assert (await s.store.stat()).corrupt_blocks == 0
        assert set(await s.put_all(blocks)) == {PutStatus.COMMITTED}
        assert await fetched(s, blocks) == [block.payload for block in blocks]


async def test_what_was_stored_before_encryption_was_turned_on_is_still_read(tmp_path) -> None:
    tokens = token_ids(3, 600)
    async with stack(tmp_path) as s:
        root = (await s.check.match(match_request(tokens), timeout_s=30)).namespace.root
        blocks = blocks_of(root, tokens, tenant="acme")
        await s.put_all(blocks)
    async with stack(tmp_path, **encrypted(tmp_path)) as s:
        assert await fetched(s, blocks) == [block.payload for block in blocks]


def test_encryption_without_a_usable_key_does_not_start(tmp_path) -> None:
    with pytest.raises(ValueError, match="cluster_key_file"):
        StoreConfig(encryption="aes-256-gcm")
    (tmp_path / "short").write_bytes(b"x" * 31)
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").write_bytes(bytes(32))
    (tmp_path / "open").chmod(0o644)
    for name in ("short", "open"):
        with pytest.raises(ConfigError):
            cluster_key_of(str(tmp_path / name))


async def test_blocks_over_nodes_are_encrypted_too_and_a_wrong_key_is_a_miss(tmp_path) -> None:
    async with cluster(tmp_path, 3, store=encrypted(tmp_path), profile="2+1") as c:
        blocks = await c.put(1, tenant="acme")
        assert await c.read(blocks) == [True] * 4
        data = b"".join(path.read_bytes() for path in tmp_path.rglob("seg-*"))
        for block in blocks:
            assert block.key in data
            assert not any(block.payload[at : at + 32] in data for at in range(0, 4900, 100))
        right = c.blocks._sealer
        for other in (Sealer(bytes(32)), None):
            c.blocks._sealer = other
            assert await c.read(blocks[1:]) == [False] * 3
            await until(lambda: not any(c.index.find(block.key[:16]) for block in blocks[1:]))
            c.blocks._sealer = right
            assert await c.read(blocks[:1]) == [True]
            statuses = await asyncio.gather(*(c.store.put(block) for block in blocks))
            assert statuses == [PutStatus.EXISTS, *[PutStatus.COMMITTED] * 3]
            assert await c.read(blocks) == [True] * 4
