"""Shards: sizes, places, the vectors of ISA-L's matrix, and every pattern of loss."""

import itertools
import random

import pytest

from services.kvstore.checksums import crc32c, crc32c_plain, native, xxh3_128, xxh3_128_plain
from services.kvstore.erasure import (
    PlainErasureCode,
    code_for,
    cut,
    cut_plain,
    generator_rows,
    inverse,
    join,
    multiply,
    split,
)
from services.kvstore.formats import ShardHeader
from services.kvstore.placement import (
    DEFAULT_PROFILE,
    WHOLE,
    Profile,
    member_of_shard,
    placement_group,
    rotation,
    shard_bytes,
    shard_of_member,
    slot_bytes,
)

CODES = {"native": native.ErasureCode, "plain": PlainErasureCode}
VECTOR = [bytes((31 * i + 7 * b + 1) % 256 for b in range(11_520)) for i in range(10)]


def test_t_ec_size() -> None:
    size = shard_bytes(114_688 + 256, DEFAULT_PROFILE)
    assert size == 11_520
    assert size * 10 - 114_944 == 256
    assert size + 128 == 11_648
    assert slot_bytes(114_688, DEFAULT_PROFILE) == 12_288 == 3 * 4096
    assert 12 * 12_288 == 147_456
    assert round(147_456 / 114_688, 3) == 1.286
    assert slot_bytes(114_688, WHOLE) == 118_784


def test_t_place() -> None:
    key = bytes.fromhex("47dc540c94ceb704a23875c11273e16b")
    assert placement_group(key, 1024) == 988
    assert rotation(key, DEFAULT_PROFILE) == 0
    assert [member_of_shard(key, j, DEFAULT_PROFILE) for j in range(12)] == list(range(12))
    turned = bytes([0, 0, 5]) + bytes(13)
    members = [member_of_shard(turned, j, DEFAULT_PROFILE) for j in range(12)]
    assert members == [*range(5, 12), *range(5)]
    assert [shard_of_member(turned, m, DEFAULT_PROFILE) for m in members] == list(range(12))


def test_t_ec_vec_rows() -> None:
    rows = generator_rows(10, 2)
    assert bytes(rows[10]).hex(" ") == "dd 98 ad 9d 5d 96 3d aa 8e f4"
    assert bytes(rows[11]).hex(" ") == "98 dd 9d ad 96 5d aa 3d f4 8e"
    assert all(multiply(a, inverse(a)) == 1 for a in range(1, 256))


@pytest.mark.parametrize("make", CODES.values(), ids=CODES)
def test_t_ec_vec_parity(make) -> None:
    assert crc32c(b"123456789") == crc32c_plain(b"123456789") == 0xE3069283
    assert (crc32c(VECTOR[0]), crc32c(VECTOR[9])) == (0xD7E181DD, 0x6105DFB8)
    parity = make(10, 2).encode(b"".join(VECTOR))
    first, second = parity[:11_520], parity[11_520:]
    assert first[:16].hex(" ") == "d6 53 09 42 9c 5a 9f 8f 5b 0f 83 38 48 43 ae 51"
    assert second[:16].hex(" ") == "68 0e e8 ea 7d a1 7e d4 ba a6 89 15 a9 e5 7e df"
    assert (crc32c(first), crc32c(second)) == (0xD08EEFB7, 0x823E6D4B)


@pytest.mark.parametrize("path", native.ec_paths())
def test_every_path_of_the_processor_gives_the_same_parity(path) -> None:
    rng = random.Random(1)
    for size in (1, 31, 63, 64, 65, 127, 4000):
        data = rng.randbytes(10 * size)
        expected = PlainErasureCode(10, 2).encode(data)
        assert native.ErasureCode(10, 2).encode(data, path) == expected


@pytest.mark.parametrize("make", CODES.values(), ids=CODES)
def test_all_66_double_losses_recover_and_all_220_triple_losses_are_refused(make) -> None:
    rng = random.Random(2)
    code, size = make(10, 2), 192
    data = rng.randbytes(10 * size)
    whole = data + code.encode(data)
    shards = [whole[at : at + size] for at in range(0, len(whole), size)]
    doubles = list(itertools.combinations(range(12), 2))
    assert len(doubles) == 66
    for lost in doubles:
        present = [(j, shards[j]) for j in range(12) if j not in lost]
        assert code.decode(present, list(lost)) == shards[lost[0]] + shards[lost[1]]
    triples = list(itertools.combinations(range(12), 3))
    assert len(triples) == 220
    for lost in triples:
        present = [(j, shards[j]) for j in range(12) if j not in lost]
        with pytest.raises(ValueError, match="fewer"):
            code.decode(present, list(lost))


@pytest.mark.parametrize("profile", ["10+2", "4+2", "2+1", "1+2", "1+0"])
def test_objects_survive_every_loss_their_profile_allows(profile) -> None:
    profile = Profile.parse(profile)
    data = random.Random(3).randbytes(5_000)
    shards = split(data, profile)
    assert len(shards) == profile.num_shards
    for lost in itertools.combinations(range(profile.num_shards), profile.m):
        left = {j: shard for j, shard in enumerate(shards) if j not in lost}
        assert join(left, len(data), profile) == data
    few = dict(list(enumerate(shards))[: profile.k - 1])
    assert join(few, len(data), profile) is None


def test_the_native_code_is_the_one_in_use() -> None:
    assert isinstance(code_for(DEFAULT_PROFILE), native.ErasureCode)


def test_digests_of_the_two_implementations_agree() -> None:
    rng = random.Random(4)
    for size in (0, 1, 16, 17, 128, 240, 241, 1024, 114_688):
        data = rng.randbytes(size)
        assert xxh3_128(data) == xxh3_128_plain(data)
        assert xxh3_128(data, 77) == xxh3_128_plain(data, 77)
        assert crc32c(data, 5) == crc32c_plain(data, 5)


@pytest.mark.parametrize("profile", ["10+2", "4+2", "2+1", "1+2", "1+0"])
def test_shards_are_cut_alike_by_native_code_and_its_twin(profile: str) -> None:
    rng = random.Random(profile)
    shape = Profile.parse(profile)
    for size in (1, 63, 64, 65, 1_000, 114_688 + 256):
        data = rng.randbytes(size)
        header = ShardHeader(
            shard=0,
            k=shape.k,
            m=shape.m,
            algorithm=1,
            ttl_class=1,
            shard_bytes=shard_bytes(size, shape),
            object_bytes=size,
            block_index=3,
            key16=rng.randbytes(16),
            parent16=rng.randbytes(16),
            put_id=rng.getrandbits(64),
            created_s=9,
            data_crc=0,
        )
        at = rng.randint(0, size)
        shards = cut(header.pack(), [data[:at], memoryview(data)[at:]], shape)
        assert shards == cut_plain(header.pack(), [data], shape)
        parsed = [ShardHeader.parse(shard[:128]) for shard in shards]
        assert [p.shard for p in parsed if p] == list(range(shape.num_shards))
        assert all(p and p.data_crc == crc32c(s[128:]) for p, s in zip(parsed, shards, strict=True))
        kept = dict(rng.sample(list(enumerate(s[128:] for s in shards)), shape.k))
        assert join(kept, size, shape) == data
