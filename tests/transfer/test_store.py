"""The object store: the races that lost other systems their pages, each by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transfer.errors import IllegalTransition, IntegrityError
from transfer.memory.pages import PagePool
from transfer.memory.store import KvStore, StoreFull

A, B, C, D = b"a", b"b", b"c", b"d"


class Watched:
    """A store of 6 pages whose every test ends with all of it given back."""

    def __init__(self, num_pages: int = 6) -> None:
        self.pool = PagePool(num_pages)
        self.store = KvStore(self.pool)

    def cached(self, *keys: bytes) -> list[int]:
        """Idle objects under these keys, as a prompt that was computed and released leaves them."""
        pages = self.store.allocate("earlier", len(keys))
        for key, page in zip(keys, pages, strict=True):
            assert self.store.publish("earlier", key, page)
        self.store.release("earlier")
        return pages

    def found(self, *keys: bytes) -> tuple[bytes, ...]:
        """The run that a lookup would find, leaving nothing held."""
        hits = self.store.lookup("finder", keys)
        self.store.release("finder")
        return hits.keys


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.store.check_integrity()
    for owner in ("r", "s"):
        watched.store.release(owner)
    watched.store.check_integrity()
    end = watched.store.statistics()
    assert (end.num_owners, end.num_private) == (0, 0)
    assert watched.store.num_available == end.num_pages == 6
    assert watched.pool.num_held == end.num_idle


@pytest.fixture
def store(watched: Watched) -> KvStore:
    return watched.store


# ── pins ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ends", [("unpin", "release"), ("release", "unpin")], ids=["load first", "abort first"])
def test_a_pin_goes_back_once_whichever_comes_first(watched: Watched, store: KvStore, ends: tuple[str, str]) -> None:
    watched.cached(A, B)
    ways = {"unpin": lambda: store.unpin("r", [A, B]), "release": lambda: store.release("r")}
    store.lookup("s", [A, B])
    store.lookup("r", [A, B])
    for way in (*ends, ends[0]):
        ways[way]()
        assert store.statistics().num_owners == 1
        assert store.statistics().num_pinned == 2  # by s
    store.unpin("s", [A, B])
    assert store.statistics().num_idle == 2


def test_a_repeated_lookup_does_not_pin_twice(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B)
    first = store.lookup("r", [A, B, C])
    again = store.lookup("r", [A, B, C])
    assert store.statistics().num_pinned == 2
    assert first.keys == again.keys == (A, B)
    assert first.pages == again.pages
    store.unpin("r", [A, B])
    assert store.statistics().num_idle == 2


def test_a_repeated_lookup_with_other_keys_pins_these_besides(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B)
    store.lookup("r", [A])
    assert store.lookup("r", [B]).keys == (B,)
    assert store.statistics().num_pinned == 2
    store.unpin("r", [A, B])
    assert store.statistics().num_pinned == 0


def test_a_lookup_of_nothing_leaves_no_owner_behind(store: KvStore) -> None:
    assert store.lookup("r", [A]).keys == ()
    assert store.statistics().num_owners == 0


def test_unpin_leaves_other_pins_and_private_pages_alone(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B)
    store.lookup("r", [A, B])
    store.allocate("r", 1)
    store.unpin("r", [B, C])
    count = store.statistics()
    assert (count.num_pinned, count.num_idle, count.num_private) == (1, 1, 1)
    with pytest.raises(StoreFull):
        store.allocate("s", 5)


# ── room ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_can_never_fit_says_so(store: KvStore) -> None:
    with pytest.raises(StoreFull, match="7 pages can never be had: 6 are free and 0 could be evicted, of 6"):
        store.allocate("r", 7)


def test_what_cannot_fit_now_takes_and_evicts_nothing(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B)
    store.allocate("s", 3)
    before = store.statistics()
    with pytest.raises(StoreFull, match="4 pages cannot be had now: 1 are free and 2 could be evicted"):
        store.allocate("r", 4)
    assert store.statistics() == before


def test_idle_objects_make_room(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B, C)
    assert store.num_available == 6
    assert len(set(store.allocate("r", 5))) == 5
    assert watched.found(A, B, C) == (A,)
    assert store.statistics().num_evicted == 2


def test_pinned_objects_are_not_evicted(watched: Watched, store: KvStore) -> None:
    pages = dict(zip([A, B, C], watched.cached(A, B, C), strict=True))
    store.lookup("r", [A, B])
    with pytest.raises(StoreFull):
        store.allocate("s", 5)
    taken = store.allocate("s", 4)
    assert pages[C] in taken
    assert not {pages[A], pages[B]} & set(taken)


def test_least_recently_used_first_and_the_tail_before_the_head(watched: Watched, store: KvStore) -> None:
    a, b = watched.cached(A, B)
    c, d = watched.cached(C, D)
    assert watched.found(A, B) == (A, B)  # used again
    store.allocate("r", 2)  # the free ones
    assert [store.allocate("r", 1) for _ in range(4)] == [[d], [c], [b], [a]]


# ── a sequence's own pages ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_sequence_is_pinned_objects_and_private_pages(watched: Watched, store: KvStore) -> None:
    head = watched.cached(A)
    hits = store.lookup("r", [A, B, C])
    private = store.allocate("r", 3)
    assert list(hits.pages) == head
    assert store.publish("r", B, private[0])
    count = store.statistics()
    assert (count.num_pinned, count.num_private, count.num_free) == (2, 2, 2)
    store.release("r")
    store.release("r")
    assert store.statistics().num_free == 4
    again = store.lookup("s", [A, B, C])
    assert again.pages == (head[0], private[0])


def test_two_sequences_that_computed_the_same_chunk_keep_a_copy_each(watched: Watched, store: KvStore) -> None:
    (first,) = store.allocate("r", 1)
    (second,) = store.allocate("s", 1)
    assert store.publish("r", A, first)
    assert not store.publish("s", A, second)
    store.release("r")
    assert store.statistics().num_private == 1
    store.release("s")
    assert watched.found(A) == (A,)
    assert store.statistics().num_free == 5


def test_a_chunk_that_cannot_be_shared_stays_private(store: KvStore) -> None:
    (page,) = store.allocate("r", 1)
    assert not store.publish("r", b"", page)
    assert store.statistics().num_private == 1


def test_only_the_owners_private_page_can_be_published(store: KvStore) -> None:
    (page,) = store.allocate("r", 1)
    for owner, wrong in (("s", page), ("r", page + 1)):
        with pytest.raises(IllegalTransition, match="is not a private page"):
            store.publish(owner, A, wrong)
    store.publish("r", A, page)
    with pytest.raises(IllegalTransition, match="is not a private page"):
        store.publish("r", B, page)


def test_no_pages_are_no_owner(store: KvStore) -> None:
    assert store.allocate("r", 0) == []
    assert store.statistics().num_owners == 0
    with pytest.raises(ValueError, match="cannot take -1 pages"):
        store.allocate("r", -1)


# ── what it says of itself ──────────────────────────────────────────────────────────────────────────────────────────


def test_statistics_and_status_line(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B, C)
    store.lookup("r", [A, D])
    store.allocate("s", 1)
    count = store.statistics()
    assert (count.num_objects, count.num_pinned, count.num_idle) == (3, 1, 2)
    assert (count.num_hits, count.num_misses, count.num_owners) == (1, 1, 2)
    assert repr(store) == "<KvStore 2/6 pages free, 3 objects (1 pinned, 2 idle), 1 private>"


def test_integrity_sees_a_page_that_was_lost() -> None:
    watched = Watched()
    watched.pool.allocate(1, "a stranger")
    with pytest.raises(IntegrityError, match="0 pages in objects or private"):
        watched.store.check_integrity()


def test_integrity_sees_a_holder_that_nobody_knows() -> None:
    watched = Watched()
    watched.cached(A)
    watched.store._objects.pin("a stranger", [A])
    with pytest.raises(IntegrityError, match="what owners hold differ"):
        watched.store.check_integrity()


def test_integrity_sees_an_owner_left_behind() -> None:
    watched = Watched()
    watched.store._holding("r")
    with pytest.raises(IntegrityError, match="owners left behind that hold nothing"):
        watched.store.check_integrity()
