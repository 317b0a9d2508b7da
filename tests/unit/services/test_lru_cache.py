from __future__ import annotations

from penstock.services.lru_cache import LruCache

BYTES = 300


def test_values_that_are_used_stay() -> None:
    cache: LruCache[str] = LruCache(BYTES)
    for name in "abc":
        cache.put(name, name.upper(), BYTES // 3)
    assert cache.get("a") == "A"
    cache.put("d", "D", BYTES // 3)
    assert [cache.get(name) for name in "abcd"] == ["A", None, "C", "D"]


def test_replaced_and_dropped_values_free_their_bytes() -> None:
    cache: LruCache[int] = LruCache(BYTES)
    cache.put("a", 0, BYTES)
    cache.put("a", 1, BYTES)
    assert cache.get("a") == 1
    cache.drop("a")
    cache.drop("a")
    cache.put("b", 2, BYTES // 2)
    cache.put("c", 3, BYTES // 2)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, 2, 3)


def test_cleared_cache_has_room() -> None:
    cache: LruCache[int] = LruCache(BYTES)
    cache.put("a", 1, BYTES)
    cache.clear()
    cache.put("b", 2, BYTES // 2)
    cache.put("c", 3, BYTES // 2)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, 2, 3)


def test_value_that_is_too_large_is_not_kept() -> None:
    cache: LruCache[int] = LruCache(BYTES)
    cache.put("a", 1, 10)
    cache.put("b", 2, BYTES + 1)
    assert (cache.get("a"), cache.get("b")) == (1, None)
