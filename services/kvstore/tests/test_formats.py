"""Headers and records: offsets as written down, and a parser that accepts nothing else."""

import random
import struct

import pytest

from services.kvstore.checksums import crc32c, native, xxh3_128
from services.kvstore.formats import ObjectHeader, Record, ShardHeader

PAYLOAD = bytes(range(256)) * 4
OBJECT = ObjectHeader(
    key=bytes([1]) * 32,
    parent=bytes([2]) * 32,
    layout=bytes([3]) * 32,
    block_index=7,
    num_tokens=128,
    ttl_class=2,
    payload_bytes=len(PAYLOAD),
    payload_digest=xxh3_128(PAYLOAD),
    put_id=0x1122334455667788,
    created_ms=1_700_000_000_123,
    writer=bytes([4]) * 16,
    tenant_tag=bytes([5]) * 16,
    flags=6,
)
SHARD = ShardHeader(
    shard=3,
    k=10,
    m=2,
    algorithm=1,
    ttl_class=1,
    shard_bytes=11_520,
    object_bytes=114_944,
    block_index=9,
    key16=bytes([6]) * 16,
    parent16=bytes([7]) * 16,
    put_id=0x99,
    created_s=1_700_000_000,
    data_crc=0xDEADBEEF,
    flags=4,
)
RECORD = Record(
    put_id=5,
    block_index=2,
    created_s=1_700_000_000,
    access_epoch=2_833_333,
    shards=0xFFF,
    state=1,
    ttl_class=2,
    flags=4,
    parent16=bytes([8]) * 16,
)


def test_object_header_offsets() -> None:
    data = OBJECT.pack()
    assert len(data) == 256
    assert data[:8] == b"DIKVBLK1"
    assert struct.unpack_from("<HHI", data, 8) == (256, 1, 6)
    assert (data[16:48], data[48:80], data[80:112]) == (OBJECT.key, OBJECT.parent, OBJECT.layout)
    assert struct.unpack_from("<IHB", data, 112) == (7, 128, 2)
    assert struct.unpack_from("<I", data, 120) == (len(PAYLOAD),)
    assert data[128:144] == OBJECT.payload_digest
    assert struct.unpack_from("<QQ", data, 144) == (OBJECT.put_id, OBJECT.created_ms)
    assert data[160:176] == OBJECT.writer
    assert data[192:252] == bytes(60)
    assert struct.unpack_from("<I", data, 252) == (crc32c(data[:252]),)


def test_shard_header_offsets() -> None:
    data = SHARD.pack()
    assert len(data) == 128
    assert data[:10] == b"DKSH" + bytes([1, 3, 10, 2, 1, 1])
    assert struct.unpack_from("<H", data, 10) == (4,)
    assert struct.unpack_from("<III", data, 12) == (11_520, 114_944, 9)
    assert (data[24:40], data[40:56]) == (SHARD.key16, SHARD.parent16)
    assert struct.unpack_from("<QII", data, 56) == (0x99, 1_700_000_000, 0xDEADBEEF)
    assert data[72:124] == bytes(52)
    assert struct.unpack_from("<I", data, 124) == (crc32c(data[:124]),)


def test_record_offsets() -> None:
    data = RECORD.pack(988)
    assert len(data) == 48
    assert struct.unpack_from("<Q", data) == (5,)
    assert data[8:24] == RECORD.parent16
    assert struct.unpack_from("<IIIBBHHH", data, 24) == (
        2, 1_700_000_000, 2_833_333, 2, 1, 0xFFF, 988, 4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "data", "parse"),
    [
        (OBJECT, OBJECT.pack(), ObjectHeader.parse),
        (SHARD, SHARD.pack(), ShardHeader.parse),
        (RECORD, RECORD.pack(1), Record.parse),
    ],
)
def test_round_trip_and_every_flipped_bit_is_refused(value, data, parse) -> None:
    assert parse(data) == value
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            assert parse(bytes(bad)) is None
    rng = random.Random(5)
    for _ in range(300):
        assert parse(rng.randbytes(rng.randrange(2 * len(data)))) is None
    assert parse(data[:-1]) is None
    assert parse(data + b"\0") is None


def test_the_native_check_knows_the_same_header() -> None:
    header = OBJECT.pack()
    assert native.verify_object(header, PAYLOAD, OBJECT.key, OBJECT.layout) == 0
    assert native.verify_object(header, PAYLOAD, bytes(32), OBJECT.layout) == 6
    assert native.verify_object(header, PAYLOAD, OBJECT.key, bytes(32)) == 7
    assert native.verify_object(header, PAYLOAD[:-1], OBJECT.key, OBJECT.layout) == 8
    assert native.verify_object(header[:-1], PAYLOAD, OBJECT.key, OBJECT.layout) == 5
