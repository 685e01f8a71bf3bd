"""Keys: the worked numbers of T-KEY, and that no two identities ever share one."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore import hash_chain as hc
from services.kvstore.checksums import HAS_NATIVE

CLUSTER_KEY = bytes(range(32))
DOCUMENT = {
    "block_tokens": 128,
    "fmt": 1,
    "layers": 4,
    "parts": ["main_kv", "indexer_k"],
    "payload_bytes": 114688,
}
LAYOUT = hc.layout_fingerprint(DOCUMENT)
MODEL = "deepseek-v4.1-flash@rev0"


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def root(tenant: str = "acme", **changes: object) -> bytes:
    fields = {"model_id": MODEL, "layout": LAYOUT, "tenant": tenant} | changes
    return hc.root_of(CLUSTER_KEY, hc.Identity(**fields))  # type: ignore[arg-type]


CHAINS = [hc.chain, hc.chain_plain]


def test_the_crate_is_built() -> None:
    assert HAS_NATIVE, "both implementations must be under test here"


@pytest.mark.parametrize("chain", CHAINS)
def test_t_key_every_hash(chain) -> None:
    assert LAYOUT.hex() == "be288f501fa0ecd9f5f8cabe28c5b4a539e24f485ff4856f96670392c5ca84c6"
    domain = hc.salt_domain(CLUSTER_KEY, "tenant", "acme", "")
    assert domain.hex() == "63fd138ff6c55dc5f8b68eef06d223a70a2952133cccea053ad2fe6723d98896"
    h0 = hc.chain_root(MODEL, LAYOUT, domain)
    assert h0.hex() == "15bb88fc0cc49704b69da99488287940d361cdf80451de1f2d10aaa6c6c1670e"
    assert root() == h0
    keys = chain(h0, ids(*range(256)), 128)
    assert keys.hex() == (
        "08564040a131b04b610289ede3f439af85fd02227ac0a470c0529339a1e8c647"
        "a963b890fd6a0eb08182ef79092000cb6b69e3cb4df3649eeb373d39b92f489f"
    )
    media = [hc.MediaSpan(10, 16, hashlib.sha256(b"img").digest())]
    extras = hc.block_extras(media, 128, 128)
    assert (
        chain(h0, ids(*range(128)), 128, extras).hex()
        == "03107dbd8cdc423a580f0514e21915cfd16cfd50938ecc40990a03bb8aafd07f"
    )
    assert (
        chain(root("globex"), ids(*range(128)), 128).hex()
        == "42e5a056fa3ffda506886b7c7c1cd4c9ab534fed1f522b8e7182f7d98ca90d80"
    )


@given(
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    block_tokens=st.integers(1, 40),
    media=st.lists(
        st.tuples(st.integers(0, 199), st.integers(1, 60), st.binary(min_size=32, max_size=32)),
        max_size=4,
    ),
)
@settings(max_examples=150, deadline=None)
def test_the_native_chain_equals_the_plain_one(token_ids, block_tokens, media) -> None:
    spans = [
        hc.MediaSpan(start, min(length, len(token_ids) - start), digest)
        for start, length, digest in media
        if start < len(token_ids)
    ]
    extras = hc.block_extras(spans, len(token_ids), block_tokens)
    raw = ids(*token_ids)
    keys = hc.chain(root(), raw, block_tokens, extras)
    assert keys == hc.chain_plain(root(), raw, block_tokens, extras)
    assert len(keys) == len(token_ids) // block_tokens * 32


def test_media_that_spans_blocks_marks_each_of_them() -> None:
    digest = bytes(32)
    extras = hc.block_extras([hc.MediaSpan(100, 200, digest)], 512, 128)
    parts = [(block, struct.unpack("<HH", extra[:4])) for block, extra in extras]
    assert parts == [(0, (100, 28)), (1, (0, 128)), (2, (0, 44))]
    # The last block is incomplete: it has no key, so no extra either.
    assert hc.block_extras([hc.MediaSpan(130, 10, digest)], 140, 128) == []


@pytest.mark.parametrize("span", [(-1, 5), (0, 0), (120, 9)])
def test_a_media_span_outside_the_prompt_is_uncacheable(span) -> None:
    with pytest.raises(hc.Uncacheable):
        hc.block_extras([hc.MediaSpan(*span, bytes(32))], 128, 128)


def test_ur_34_one_text_in_four_fields_gives_four_keys() -> None:
    digest = hashlib.sha256(b"X").digest()
    roots = [root(), root(adapter="X"), root(user_salt="X"), root(model_id="X"), root(tenant="X")]
    tokens = ids(*range(128))
    keys = [hc.chain(r, tokens, 128) for r in roots]
    keys.append(
        hc.chain(root(), tokens, 128, hc.block_extras([hc.MediaSpan(0, 1, digest)], 128, 128))
    )
    assert len(set(keys)) == len(keys)
    # Text that moves over the border between two fields changes the key as well.
    assert root(tenant="ab", user_salt="c") != root(tenant="a", user_salt="bc")
    assert root(model_id="ab", adapter="c") != root(model_id="a", adapter="bc")


def test_ur_35_one_pixel_changes_every_key_past_the_image_and_none_before() -> None:
    tokens = ids(*range(640))
    chains = []
    for pixel in range(200):
        image = bytes([pixel]) + bytes(99)
        span = hc.MediaSpan(300, 20, hc.media_digest("rev1", 10, 10, image))
        chains.append(hc.chain(root(), tokens, 128, hc.block_extras([span], 640, 128)))
    assert len({keys[:64] for keys in chains}) == 1
    for block in (2, 3, 4):
        assert len({keys[32 * block : 32 * block + 32] for keys in chains}) == 200


def test_ur_35_size_and_preprocessor_are_part_of_the_image() -> None:
    digests = [
        hc.media_digest("rev1", 10, 20, b"img"),
        hc.media_digest("rev1", 20, 10, b"img"),
        hc.media_digest("rev2", 10, 20, b"img"),
    ]
    assert len(set(digests)) == 3


def test_ur_37_every_part_of_the_identity_changes_the_root() -> None:
    full = DOCUMENT | {
        "weights": "sha-a",
        "adapter": "",
        "dtype": "fp8",
        "tokenizer": "t1",
        "template": "c1",
        "rope_theta": 10000,
    }
    roots = {root(layout=hc.layout_fingerprint(full))}
    for field, value in [
        ("weights", "sha-b"),
        ("adapter", "digest"),
        ("dtype", "bf16"),
        ("block_tokens", 64),
        ("tokenizer", "t2"),
        ("template", "c2"),
        ("rope_theta", 20000),
    ]:
        roots.add(root(layout=hc.layout_fingerprint(full | {field: value})))
    roots.add(root(layout=hc.layout_fingerprint(full), model_id="deepseek-v4.1-flash@rev1"))
    roots.add(root(layout=hc.layout_fingerprint(full), adapter="digest"))
    assert len(roots) == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"model_id": ""},
        {"model_id": "a\0b"},
        {"layout": b""},
        {"layout": bytes(31)},
        {"tenant": ""},
        {"scope": "everyone"},
        {"scope": "user"},
    ],
)
def test_a_missing_identity_field_is_uncacheable(changes) -> None:
    with pytest.raises(hc.Uncacheable):
        root(**changes)


def test_the_global_scope_forgets_the_tenant() -> None:
    assert root("acme", scope="global") == root("globex", scope="global") != root("acme")


def test_a_layout_document_has_one_spelling_and_no_floats() -> None:
    assert hc.layout_digest(b'{ "b":1, "a":[2,3]}') == hc.layout_fingerprint({"a": [2, 3], "b": 1})
    assert hc.layout_digest(LAYOUT) == LAYOUT
    for bad in (b"", b"[]", b"{}", b"\xff\xfe", b"12", b'{"a":1.5}'):
        with pytest.raises(hc.Uncacheable):
            hc.layout_digest(bad)


def test_a_follow_up_hashes_only_its_new_blocks() -> None:
    sessions = hc.SessionChains()
    first, second = ids(*range(300)), ids(*range(700))
    keys = sessions.keys("s", root(), first, 128)
    assert sessions.num_blocks_reused == 0
    assert sessions.keys("s", root(), second, 128) == hc.chain(root(), second, 128)
    assert sessions.num_blocks_reused == len(keys) // 32 == 2
    assert sessions.keys("s", root(), second, 128) == hc.chain(root(), second, 128)
    assert sessions.num_blocks_reused == 2 + 5


def test_a_session_id_with_other_tokens_or_another_root_reuses_nothing() -> None:
    sessions = hc.SessionChains()
    sessions.keys("s", root(), ids(*range(300)), 128)
    other = ids(7, *range(1, 300))
    assert sessions.keys("s", root(), other, 128) == hc.chain(root(), other, 128)
    same = ids(*range(300))
    assert sessions.keys("s", root("globex"), same, 128) == hc.chain(root("globex"), same, 128)
    extras = hc.block_extras([hc.MediaSpan(5, 3, bytes(32))], 300, 128)
    assert sessions.keys("s", root(), same, 128, extras) == hc.chain(root(), same, 128, extras)
    assert sessions.num_blocks_reused == 0


def test_media_in_new_blocks_of_a_follow_up_is_hashed_at_its_place() -> None:
    sessions = hc.SessionChains()
    media = [hc.MediaSpan(5, 3, bytes(32)), hc.MediaSpan(400, 30, bytes([1]) * 32)]
    short = hc.block_extras(media[:1], 300, 128)
    long = hc.block_extras(media, 700, 128)
    sessions.keys("s", root(), ids(*range(300)), 128, short)
    tokens = ids(*range(700))
    assert sessions.keys("s", root(), tokens, 128, long) == hc.chain(root(), tokens, 128, long)
    assert sessions.num_blocks_reused == 2


def test_sessions_are_bounded_in_number_and_bytes() -> None:
    sessions = hc.SessionChains(max_sessions=3, max_bytes=32 * 10)
    for number in range(20):
        sessions.keys(str(number), root(), ids(*range(128)), 128)
        assert len(sessions) <= 3
    for number in range(20):
        sessions.keys(str(number), root(), ids(*range(128 * 4)), 128)
        assert sessions.num_bytes <= 32 * 10
