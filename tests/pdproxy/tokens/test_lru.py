"""What is kept, and what has to go."""

from __future__ import annotations

from pdproxy.tokens.lru import LruCache


def cache(limit_bytes: int = 30) -> LruCache[str]:
    return LruCache(limit_bytes, overhead_bytes=0)


def test_what_was_used_last_stays() -> None:
    kept = cache()
    for key in (b"a", b"b", b"c"):
        kept.put(key, key.decode(), 10)
    assert kept.get(b"a") == "a"
    kept.put(b"d", "d", 10)
    assert [kept.get(key) for key in (b"a", b"b", b"c", b"d")] == ["a", None, "c", "d"]
    assert kept.num_bytes == 30


def test_a_large_value_takes_the_room_of_several() -> None:
    kept = cache()
    for key in (b"a", b"b", b"c"):
        kept.put(key, "x", 10)
    kept.put(b"d", "large", 25)
    assert [kept.get(key) for key in (b"a", b"b", b"c", b"d")] == [None, None, None, "large"]
    assert kept.num_bytes == 25


def test_what_is_put_again_counts_once() -> None:
    kept = cache()
    kept.put(b"a", "old", 20)
    kept.put(b"a", "new", 5)
    assert (kept.get(b"a"), kept.num_bytes) == ("new", 5)


def test_what_is_larger_than_everything_is_not_kept_nor_what_it_was_to_replace() -> None:
    kept = cache()
    kept.put(b"a", "small", 5)
    kept.put(b"b", "small", 5)
    kept.put(b"a", "large", 31)
    assert (kept.get(b"a"), kept.get(b"b"), kept.num_bytes) == (None, "small", 5)


def test_each_value_costs_something_besides_its_size() -> None:
    kept: LruCache[int] = LruCache(100, overhead_bytes=50)
    for number in range(5):
        kept.put(bytes([number]), number, 0)
    assert kept.num_bytes == 100
    assert repr(kept) == "<LruCache: 2 values, 100 of 100 bytes>"
