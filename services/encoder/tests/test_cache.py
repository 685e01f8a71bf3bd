from services.encoder.cache import EmbeddingCache


def test_the_longest_unused_make_room_and_a_read_one_is_young():
    cache = EmbeddingCache(max_bytes=30, ttl_s=100)
    for name in (b"a", b"b", b"c"):
        cache.put(name, bytes(10), now_s=0)
    assert cache.get(b"a", 1) is not None
    cache.put(b"d", bytes(10), now_s=2)
    assert [name for name in (b"a", b"b", b"c", b"d") if cache.get(name, 3)] == [b"a", b"c", b"d"]
    assert cache.num_bytes == 30


def test_an_embedding_ends_with_its_time_to_live():
    cache = EmbeddingCache(max_bytes=30, ttl_s=10)
    cache.put(b"a", bytes(10), now_s=0)
    assert cache.get(b"a", 9.9) is not None
    assert cache.get(b"a", 10) is None
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_one_larger_than_all_is_not_kept_and_a_newer_replaces_an_older():
    cache = EmbeddingCache(max_bytes=30, ttl_s=10)
    cache.put(b"big", bytes(31), now_s=0)
    assert len(cache) == 0
    cache.put(b"a", bytes(20), now_s=0)
    cache.put(b"a", bytes(30), now_s=0)
    assert cache.num_bytes == 30
