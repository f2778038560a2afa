"""The object store: the races that lost other systems their pages, each by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

import pytest

from transfer.errors import IllegalTransition, IntegrityError
from transfer.memory.pages import PagePool
from transfer.memory.read_lock import LockRefused, num_kv_readers
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
        hits = self.store.lookup("finder", keys, now=0)
        self.store.release("finder")
        return hits.keys


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.store.check_integrity()
    for owner in ("r", "s", "w"):
        watched.store.release(owner)
    watched.store.sweep(1e9)
    watched.store.check_integrity()
    end = watched.store.statistics()
    assert (end.num_owners, end.num_locks, end.num_private, end.num_writing) == (0, 0, 0, 0)
    assert watched.store.num_available == end.num_pages == 6
    assert watched.pool.num_held == end.num_idle


@pytest.fixture
def store(watched: Watched) -> KvStore:
    return watched.store


# ── pins ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ends", [("unpin", "release"), ("release", "unpin")], ids=["load first", "abort first"])
def test_a_pin_goes_back_once_whichever_comes_first(watched: Watched, store: KvStore, ends: tuple[str, str]) -> None:
    watched.cached(A, B)
    store.lookup("s", [A, B], now=0)
    store.lookup("r", [A, B], now=0)
    getattr(store, ends[0])("r")
    assert store.statistics().num_pinned == 2  # by s
    getattr(store, ends[1])("r")
    getattr(store, ends[0])("r")
    assert store.statistics().num_pinned == 2
    store.unpin("s")
    assert store.statistics().num_idle == 2


def test_a_repeated_lookup_does_not_pin_twice(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B)
    first = store.lookup("r", [A, B, C], now=0)
    again = store.lookup("r", [A, B, C], now=0)
    assert (first.num_pinned, again.num_pinned) == (2, 0)
    assert first.keys == again.keys == (A, B)
    assert first.pages == again.pages
    store.unpin("r")
    assert store.statistics().num_idle == 2


def test_a_repeated_lookup_with_other_keys_pins_these_besides(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B)
    store.lookup("r", [A], now=0)
    assert store.lookup("r", [B], now=0).num_pinned == 1
    assert store.statistics().num_pinned == 2
    store.unpin("r")
    assert store.statistics().num_pinned == 0


def test_a_lookup_of_nothing_leaves_no_owner_behind(store: KvStore) -> None:
    assert store.lookup("r", [A], now=0).keys == ()
    assert store.statistics().num_owners == 0


def test_what_is_being_written_is_invisible(watched: Watched, store: KvStore) -> None:
    watched.cached(A, C)
    store.reserve("w", [B])
    assert watched.found(A, B, C) == (A,)
    assert store.lookup("w", [A, B, C], now=0).keys == (A,)
    store.commit("w", [B])
    assert watched.found(A, B, C) == (A, B, C)


def test_unpin_leaves_what_is_being_written_and_private_pages_alone(watched: Watched, store: KvStore) -> None:
    watched.cached(A)
    store.lookup("w", [A], now=0)
    store.reserve("w", [B])
    store.allocate("w", 1)
    store.unpin("w")
    count = store.statistics()
    assert (count.num_pinned, count.num_writing, count.num_private) == (0, 1, 1)


@pytest.mark.parametrize("num_readers", [0, -1, 129])
def test_a_wrong_number_of_readers_changes_nothing(watched: Watched, store: KvStore, num_readers: int) -> None:
    watched.cached(A)
    before = store.statistics()
    with pytest.raises(ValueError, match="num_readers must be from 1 to 128"):
        store.lookup("r", [A], now=0, num_readers=num_readers)
    assert store.statistics() == before


# ── read locks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def temporary(store: KvStore, *keys: bytes, owner: str = "w") -> None:
    store.reserve(owner, keys, is_temporary=True)
    store.commit(owner, keys)


def test_the_first_readers_unlock_does_not_free(store: KvStore) -> None:
    temporary(store, A)
    hits = store.lookup("r", [A], now=0, num_readers=2)
    first, second = store.lock(hits.readers, hits.keys, deadline=10, now=0)
    store.release("w")
    store.release("r")
    store.unlock([first.token])
    assert store.statistics().num_locked == 1
    assert store.unlock([second.token]) == 1
    assert store.statistics().num_objects == 0


def test_four_engines_of_two_ranks_are_not_eight_readers(store: KvStore) -> None:
    temporary(store, A)
    num_readers = num_kv_readers(tp_size=2, is_mla=True)
    engines = [store.lookup(name, [A], now=0, num_readers=num_readers) for name in ("e0", "e1", "e2", "e3")]
    assert [len(hits.readers) for hits in engines] == [2, 2, 2, 2]
    locks = store.lock(engines[0].readers, [A], deadline=10, now=0)
    for name in ("w", "e0", "e1", "e2", "e3"):
        store.release(name)
    assert store.unlock(lock.token for lock in locks) == 2
    assert store.statistics().num_objects == 0


def test_an_aborted_request_does_not_pull_the_page_from_under_its_readers(watched: Watched, store: KvStore) -> None:
    watched.cached(A)
    hits = store.lookup("r", [A], now=0)
    (lock,) = store.lock(hits.readers, hits.keys, deadline=10, now=0)
    store.release("r")
    with pytest.raises(StoreFull):
        store.allocate("s", 6)
    store.unlock([lock.token])
    assert len(store.allocate("s", 6)) == 6


def test_an_expired_readers_late_unlock_takes_no_other_readers_lock(store: KvStore) -> None:
    temporary(store, A)
    (late,) = store.lock([("r", 0)], [A], deadline=10, now=0)
    (other,) = store.lock([("s", 0)], [A], deadline=30, now=0)
    store.release("w")
    assert store.sweep(10) == [late]
    (again,) = store.lock([("r", 0)], [A], deadline=30, now=11)
    assert store.unlock([late.token]) == 0
    assert store.statistics().num_locks == 2
    assert store.unlock([again.token, other.token]) == 2
    assert store.statistics().num_objects == 0


def test_one_missing_key_and_nothing_is_locked(watched: Watched, store: KvStore) -> None:
    watched.cached(A, C)
    store.reserve("w", [B])
    for keys in ([A, D], [A, C, B]):
        with pytest.raises(LockRefused, match=f"none of {len(keys)} was locked"):
            store.lock([("r", 0), ("r", 1)], keys, deadline=10, now=0)
        assert store.statistics().num_locks == 0
    assert store.statistics().num_idle == 2


def test_a_deadline_that_has_passed_and_nothing_is_locked(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B)
    with pytest.raises(LockRefused, match="the deadline is 5 and now is 5"):
        store.lock([("r", 0), ("r", 1)], [A, B], deadline=5, now=5)
    assert (store.statistics().num_locks, store.statistics().num_idle) == (0, 2)


def test_a_renewed_lock_outlives_its_first_deadline(store: KvStore) -> None:
    temporary(store, A)
    (lock,) = store.lock([("r", 0)], [A], deadline=10, now=0)
    store.release("w")
    assert store.renew([lock.token], deadline=20, now=9) == []
    assert store.sweep(10) == []
    assert store.next_deadline() == 20
    assert len(store.sweep(20)) == 1
    assert store.statistics().num_objects == 0
    assert store.renew([lock.token], deadline=30, now=20) == [lock.token]


@pytest.mark.parametrize("ends", ["unlock", "expiry", "both"])
def test_a_temporary_object_goes_with_its_last_reader(store: KvStore, ends: str) -> None:
    temporary(store, A, B)
    first, second = store.lock([("r", 0), ("r", 1)], [A, B], deadline=10, now=0)
    store.unpin("w")
    if ends != "expiry":
        store.unlock([first.token])
        assert store.statistics().num_objects == 2
    if ends == "unlock":
        store.unlock([second.token])
    else:
        store.sweep(10)
    assert store.statistics().num_objects == 0
    assert store.statistics().num_free == 6


def test_a_temporary_object_whose_reader_has_expired_is_not_found(store: KvStore) -> None:
    """Nobody has swept: whoever is told the time sees what is over."""
    temporary(store, A)
    store.lock([("x", 0)], [A], deadline=10, now=0)
    store.release("w")
    assert store.lookup("s", [A], now=10).keys == ()
    temporary(store, A)
    store.lock([("x", 0)], [A], deadline=10, now=0)
    store.release("w")
    with pytest.raises(LockRefused, match="not there to be read"):
        store.lock([("s", 0)], [A], deadline=20, now=10)


def test_a_lasting_object_stays_when_its_last_reader_leaves(watched: Watched, store: KvStore) -> None:
    watched.cached(A)
    (lock,) = store.lock([("r", 0)], [A], deadline=10, now=0)
    store.unlock([lock.token])
    assert watched.found(A) == (A,)


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_writers_of_one_key_the_second_is_refused(store: KvStore) -> None:
    store.reserve("w", [A])
    for state in ("WRITING", "READY"):
        for owner in ("w", "s"):
            with pytest.raises(IllegalTransition, match=f"is {state} already"):
                store.reserve(owner, [B, A])
        assert store.statistics().num_objects == 1
        if state == "WRITING":
            store.commit("w", [A])
    assert store.statistics().num_free == 5


@pytest.mark.parametrize("keys", [[b""], [A, b""], [A, B, A]])
def test_keys_that_cannot_be_reserved(store: KvStore, keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="empty or repeated"):
        store.reserve("w", keys)


@pytest.mark.parametrize("keys", [[A, C], [A, D], [A, B, A]], ids=["another's", "unknown", "twice"])
def test_a_commit_is_all_or_nothing(store: KvStore, keys: list[bytes]) -> None:
    store.reserve("w", [A, B])
    store.reserve("s", [C])
    with pytest.raises(IllegalTransition, match="nothing was committed"):
        store.commit("w", keys)
    assert store.statistics().num_writing == 3


def test_committed_twice_is_refused(store: KvStore) -> None:
    store.reserve("w", [A])
    store.commit("w", [A])
    with pytest.raises(IllegalTransition, match="nothing was committed"):
        store.commit("w", [A])


def test_abort_frees_what_was_not_committed(watched: Watched, store: KvStore) -> None:
    store.reserve("w", [A, B, C])
    store.commit("w", [A])
    store.abort("w")
    store.abort("w")
    count = store.statistics()
    assert (count.num_pinned, count.num_writing, count.num_free) == (1, 0, 5)
    with pytest.raises(IllegalTransition):
        store.commit("w", [B])
    assert store.reserve("s", [B])
    assert watched.found(A, B) == (A,)


# ── room ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_can_never_fit_says_so(store: KvStore) -> None:
    with pytest.raises(StoreFull, match="7 pages can never be had: 6 are free and 0 could be evicted, of 6") as never:
        store.allocate("r", 7)
    assert not never.value.can_ever_fit


@pytest.mark.parametrize("want", ["allocate", "reserve"])
def test_what_cannot_fit_now_takes_and_evicts_nothing(watched: Watched, store: KvStore, want: str) -> None:
    watched.cached(A, B)
    store.allocate("s", 3)
    wants: dict[str, Callable[[], object]] = {
        "allocate": lambda: store.allocate("r", 4),
        "reserve": lambda: store.reserve("r", [b"1", b"2", b"3", b"4"]),
    }
    before = store.statistics()
    with pytest.raises(StoreFull, match=r"pages cannot be had now: 1 are free and 2 could be evicted") as now:
        wants[want]()
    assert now.value.can_ever_fit
    assert store.statistics() == before


def test_idle_objects_make_room(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B, C)
    assert store.num_available == 6
    assert len(set(store.allocate("r", 5))) == 5
    assert watched.found(A, B, C) == (A,)
    assert store.statistics().num_evicted == 2


def test_pinned_locked_and_unwritten_objects_are_not_evicted(watched: Watched, store: KvStore) -> None:
    pages = dict(zip([A, B, C], watched.cached(A, B, C), strict=True))
    store.lookup("r", [A], now=0)
    store.lock([("x", 0)], [B], deadline=10, now=0)
    writing = store.reserve("w", [D])
    with pytest.raises(StoreFull):
        store.allocate("s", 4)
    taken = store.allocate("s", 3)
    assert pages[C] in taken
    assert not {pages[A], pages[B], *writing} & set(taken)


def test_least_recently_used_first_and_the_tail_before_the_head(watched: Watched, store: KvStore) -> None:
    a, b = watched.cached(A, B)
    c, d = watched.cached(C, D)
    assert watched.found(A, B) == (A, B)  # used again
    store.allocate("r", 2)  # the free ones
    assert [store.allocate("r", 1) for _ in range(4)] == [[d], [c], [b], [a]]


# ── a sequence's own pages ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_sequence_is_pinned_objects_and_private_pages(watched: Watched, store: KvStore) -> None:
    head = watched.cached(A)
    hits = store.lookup("r", [A, B, C], now=0)
    private = store.allocate("r", 3)
    assert list(hits.pages) == head
    assert store.publish("r", B, private[0])
    count = store.statistics()
    assert (count.num_pinned, count.num_private, count.num_free) == (2, 2, 2)
    store.release("r")
    store.release("r")
    assert store.statistics().num_free == 4
    again = store.lookup("s", [A, B, C], now=0)
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


def test_a_chunk_that_somebody_is_writing_is_not_published_over(watched: Watched, store: KvStore) -> None:
    store.reserve("w", [A])
    (page,) = store.allocate("r", 1)
    assert not store.publish("r", A, page)
    store.commit("w", [A])
    assert watched.found(A) == (A,)


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
    assert store.reserve("r", []) == []
    assert store.statistics().num_owners == 0
    with pytest.raises(ValueError, match="cannot take -1 pages"):
        store.allocate("r", -1)


# ── every order ─────────────────────────────────────────────────────────────────────────────────────────────────────


ENDS = ["w leaves", "r leaves", "first unlocks", "second unlocks", "expiry"]


@pytest.mark.parametrize("order", list(permutations(ENDS)), ids=", ".join)
def test_whatever_the_order_the_object_goes_with_the_last_of_them(order: tuple[str, ...]) -> None:
    """Two owners and two readers of one temporary object; the locks run out at 10, which ends both."""
    store = Watched().store
    temporary(store, A)
    store.lookup("r", [A], now=0)
    first, second = store.lock([("r", 0), ("r", 1)], [A], deadline=10, now=0)
    ends: dict[str, Callable[[], object]] = {
        "w leaves": lambda: store.release("w"),
        "r leaves": lambda: store.release("r"),
        "first unlocks": lambda: store.unlock([first.token]),
        "second unlocks": lambda: store.unlock([second.token]),
        "expiry": lambda: store.sweep(10),
    }
    left = {"w leaves", "r leaves", "first unlocks", "second unlocks"}
    for end in order:
        ends[end]()
        left -= {"first unlocks", "second unlocks"} if end == "expiry" else {end}
        assert store.statistics().num_objects == bool(left)
        store.check_integrity()
    assert store.statistics().num_free == 6


# ── what it says of itself ──────────────────────────────────────────────────────────────────────────────────────────


def test_statistics_and_status_line(watched: Watched, store: KvStore) -> None:
    watched.cached(A, B, C)
    store.lookup("r", [A, D], now=0)
    store.lock([("r", 0), ("r", 1)], [A, B], deadline=10, now=0)
    store.reserve("w", [D])
    store.allocate("s", 1)
    count = store.statistics()
    assert (count.num_objects, count.num_pinned, count.num_locked, count.num_writing, count.num_idle) == (4, 1, 2, 1, 1)
    assert (count.num_hits, count.num_misses, count.num_locks, count.num_owners) == (1, 1, 4, 3)
    assert repr(store) == "<KvStore 1/6 pages free, 4 objects (1 pinned, 2 locked, 1 writing, 1 idle), 1 private>"
    store.sweep(10)
    assert store.statistics().num_expired == 2


def test_integrity_sees_a_page_that_was_lost() -> None:
    watched = Watched()
    watched.pool.allocate(1, "a stranger")
    with pytest.raises(IntegrityError, match="0 pages in objects or private"):
        watched.store.check_integrity()


def test_integrity_sees_a_lock_that_nobody_knows() -> None:
    watched = Watched()
    watched.cached(A)
    (lock,) = watched.store.lock([("r", 0)], [A], deadline=10, now=0)
    watched.store._locks.give_back(lock.token)
    with pytest.raises(IntegrityError, match="what holders hold differ"):
        watched.store.check_integrity()


def test_integrity_sees_an_owner_left_behind() -> None:
    watched = Watched()
    watched.store._holding("r")
    with pytest.raises(IntegrityError, match="owners left behind that hold nothing"):
        watched.store.check_integrity()
