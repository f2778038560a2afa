"""The page pool: nothing is handed out twice, nothing is lost, neighbours stay together, chunks are found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.fakes.snapshot import snapshot
from transfer.errors import IntegrityError
from transfer.memory.free_runs import FreeRuns
from transfer.memory.pages import PagePool


def longest_run(pages: list[int]) -> int:
    best = run = 1
    for before, after in pairwise(pages):
        run = run + 1 if after == before + 1 else 1
        best = max(best, run)
    return best


def runs_of(pages: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and runs[-1][-1] + 1 == page:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


def pool_with_free(num_pages: int, free: list[int]) -> PagePool:
    pool = PagePool(num_pages)
    pool.allocate(num_pages, "all")
    pool.leave("all", free)
    return pool


# ── handing out ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pages_are_handed_out_as_one_run() -> None:
    pool = PagePool(8)
    assert pool.allocate(3, "a") == [0, 1, 2]
    assert pool.allocate(5, "b") == [3, 4, 5, 6, 7]
    assert (pool.num_free, pool.num_held) == (0, 8)


def test_the_smallest_run_that_fits_is_taken() -> None:
    pool = pool_with_free(10, [0, 1, 2, 3, 6, 7])
    assert pool.allocate(2, "a") == [6, 7]
    assert pool.allocate(4, "b") == [0, 1, 2, 3]


def test_a_request_that_fits_no_run_gets_the_longest_ones() -> None:
    assert pool_with_free(10, [0, 2, 3, 4, 7, 8]).allocate(5, "a") == [2, 3, 4, 7, 8]


def test_what_is_missing_after_the_longest_run_comes_from_the_smallest_that_holds_it() -> None:
    assert pool_with_free(12, [0, 1, 2, 4, 6, 7, 8, 10, 11]).allocate(4, "a") in ([6, 7, 8, 4], [0, 1, 2, 4])


def test_runs_grow_together_again() -> None:
    pool = PagePool(6)
    for owner in "abc":
        pool.allocate(2, owner)
    for owner in "acb":
        pool.leave(owner)
    assert pool.allocate(6, "d") == [0, 1, 2, 3, 4, 5]


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pool = PagePool(4)
    pool.allocate(2, "a")
    before = snapshot(pool)
    assert not pool.can_allocate(3)
    with pytest.raises(ValueError, match="cannot allocate 3 pages, 2 of 4"):
        pool.allocate(3, "b")
    assert snapshot(pool) == before


@pytest.mark.parametrize("count", [-1, -5])
def test_a_negative_count_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        PagePool(4).allocate(count, "a")


def test_nothing_is_a_valid_request() -> None:
    pool = PagePool(0)
    assert pool.allocate(0, "a") == pool.leave("a") == []
    pool.check_integrity()


def test_a_pool_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        PagePool(-1)


# ── owners ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_page_is_free_when_its_last_owner_has_left() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2, "a")
    pool.share(pages, "b")
    assert pool.leave("a") == []
    assert pool.owners(0) == {"b"}
    assert pool.leave("b") == [0, 1]
    assert pool.num_free == 4


def test_an_owner_can_leave_some_of_its_pages() -> None:
    pool = PagePool(4)
    pool.allocate(3, "a")
    assert pool.leave("a", [1]) == [1]
    assert pool.pages_of("a") == [0, 2]
    pool.check_integrity()


def test_joining_twice_is_joining_once() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1, "a")
    pool.share(pages, "a")
    assert pool.leave("a") == [0]
    pool.check_integrity()


@pytest.mark.parametrize("wrong", [[1, 1], [2], [3], [4], [-1], [0, 2], [0, 1, 3]])
def test_leaving_what_one_does_not_own_is_refused_and_changes_nothing(wrong: list[int]) -> None:
    pool = PagePool(4)
    pool.allocate(2, "a")
    pool.allocate(1, "b")
    before = snapshot(pool)
    with pytest.raises(IntegrityError, match="does not hold"):
        pool.leave("a", wrong)
    assert snapshot(pool) == before


def test_an_owner_leaves_a_page_once() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1, "a")
    pool.share(pages, "b")
    pool.leave("a", pages)
    with pytest.raises(IntegrityError):
        pool.leave("a", pages)
    assert pool.leave("a") == []
    assert pool.owners(0) == {"b"}


@pytest.mark.parametrize("wrong", [[2], [0, 2], [9], [-1]])
def test_sharing_what_nobody_holds_or_remembers_is_refused_and_changes_nothing(wrong: list[int]) -> None:
    pool = PagePool(4)
    pool.allocate(2, "a")
    before = snapshot(pool)
    with pytest.raises(IntegrityError, match="nobody holds or remembers"):
        pool.share(wrong, "b")
    assert snapshot(pool) == before


# ── whose bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def remembered(pool: PagePool, owner: str, *keys: str) -> list[int]:
    """Pages that hold these chunks and that nobody holds any more."""
    pages = pool.allocate(len(keys), owner)
    for page, key in zip(pages, keys, strict=True):
        assert pool.remember(page, key)
    pool.leave(owner)
    return pages


def test_a_chunk_is_found_until_its_page_is_allocated_again() -> None:
    pool = PagePool(2)
    [page] = remembered(pool, "a", "x")
    assert (pool.find("x"), pool.num_free) == (page, 2)
    pool.allocate(1, "b")
    assert pool.find("x") == page, "the blank page goes first"
    pool.allocate(1, "c")
    assert pool.find("x") is None


def test_sharing_a_free_page_takes_it_out_of_the_free_ones() -> None:
    pool = PagePool(2)
    [page] = remembered(pool, "a", "x")
    assert pool.can_allocate(2)
    assert not pool.can_allocate(2, shared=[page])
    assert pool.can_allocate(1, shared=[page, page])
    pool.share([page], "b")
    assert (pool.num_free, pool.owners(page)) == (1, {"b"})
    assert pool.leave("b") == [page]
    assert pool.find("x") == page


def test_the_chunks_left_longest_ago_are_forgotten_first() -> None:
    pool = PagePool(4)
    for owner in "abcd":
        remembered(pool, owner, owner)
    pool.share([0], "again")
    pool.leave("again")
    pool.allocate(2, "e")
    assert [key for key in "abcd" if pool.find(key) is not None] == ["a", "d"]


def test_the_end_of_a_prompt_is_forgotten_before_its_front() -> None:
    pool = PagePool(4)
    remembered(pool, "a", "x0", "x1", "x2", "x3")
    assert pool.allocate(3, "b") == [1, 2, 3]
    assert pool.find("x0") == 0


def test_as_much_is_forgotten_as_is_missing_and_joins_the_blank_pages_beside_it() -> None:
    pool = PagePool(6)
    remembered(pool, "a", "x0", "x1", "x2")
    assert pool.allocate(4, "b") == [2, 3, 4, 5]
    assert [pool.find(key) for key in ("x0", "x1", "x2")] == [0, 1, None]


def test_old_neighbours_of_the_oldest_are_forgotten_with_it() -> None:
    """4 is the oldest; of those beside it 2 to 6 are in the older half, 1 and 7 are not; 0 is the next oldest."""
    pool = PagePool(16)
    pool.allocate(16, "all")
    for page in range(16):
        pool.remember(page, page)
    for page in (4, 0, 5, 9, 6, 2, 3, 12, 1, 7, 8, 10, 11, 13, 14, 15):
        pool.leave("all", [page])
    assert sorted(pool.allocate(6, "a")) == [0, 2, 3, 4, 5, 6]


def test_the_first_page_of_a_chunk_wins_and_a_later_one_stays_private() -> None:
    pool = PagePool(2)
    [first], [second] = pool.allocate(1, "a"), pool.allocate(1, "b")
    assert pool.remember(first, "x")
    assert pool.remember(first, "x"), "saying it again changes nothing"
    assert not pool.remember(second, "x")
    pool.leave("a")
    pool.allocate(1, "c")
    assert pool.find("x") is None, "the private page does not take over"
    pool.leave("b")
    pool.check_integrity()


@pytest.mark.parametrize("page", [0, 1, 2, 3])
def test_only_a_page_that_somebody_holds_becomes_a_chunk_and_only_one(page: int) -> None:
    pool = PagePool(3)
    remembered(pool, "a", "x")
    pool.allocate(1, "b")
    pool.remember(1, "y")
    before = snapshot(pool)
    with pytest.raises(IntegrityError, match="cannot be chunk"):
        pool.remember(page, "z")
    assert snapshot(pool) == before


def test_statistics_and_repr() -> None:
    pool = PagePool(6)
    pages = pool.allocate(2, "a")
    pool.share(pages[:1], "b")
    remembered(pool, "c", "x")
    expected = {"pages": 6, "free": 4, "held": 2, "shared": 1, "findable": 1, "idle": 1}
    assert pool.statistics() == expected
    assert repr(pool) == "<PagePool 2/6 held, 1 findable>"


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._owners.pop(0),
        lambda pool: pool._owners.update({0: pool.owners(0) | {"stranger"}}),
        lambda pool: pool._pages_of.pop("a"),
        lambda pool: pool._idle.popitem(),
        lambda pool: pool._key_of.pop(2),
        lambda pool: pool._page_of.update(other=2),
        lambda pool: pool.forget([2]),  # it is idle, and cannot be found
        lambda pool: (pool._page_of.update(y=3), pool._key_of.update({3: "y"})),  # it is blank, and can be
        lambda pool: pool._blank.take(1),
        lambda pool: pool._blank.add([0]),
        lambda pool: pool._blank._lengths.append(9),
        lambda pool: pool._blank._length_to.clear(),
    ],
)
def test_damage_is_noticed(damage: Callable[[PagePool], object]) -> None:
    pool = PagePool(6)
    pool.allocate(2, "a")
    remembered(pool, "b", "x")
    pool.check_integrity()
    damage(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


# ── against plain models ────────────────────────────────────────────────────────────────────────────────────────────


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 24), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_free_runs_are_a_set_that_hands_out_runs(num_pages: int, steps: list[tuple[bool, int]]) -> None:
    runs = FreeRuns(num_pages)
    free = set(range(num_pages))
    loans: list[list[int]] = []
    for is_taking, number in steps:
        if is_taking and number <= len(free):
            pages = runs.take(number)
            assert len(set(pages)) == number
            assert set(pages) <= free
            fitting = [run for run in runs_of(free) if len(run) >= number]
            if number and fitting:
                assert longest_run(pages) == number
                assert min(map(len, fitting)) == next(len(run) for run in runs_of(free) if pages[0] in run)
            elif number:
                assert longest_run(pages) == max(map(len, runs_of(free)))
            free -= set(pages)
            loans.append(pages)
        elif not is_taking and loans:
            pages = loans.pop(number % len(loans))
            runs.add(pages)
            free |= set(pages)
        runs.check_integrity()
        assert set(runs) == free
        assert len(runs) == len(free)


class PoolModel(RuleBasedStateMachine):
    """Sets of owners and a dictionary of keys; the pool chooses which free pages go, but not how many matter."""

    num_pages = 7
    owner = st.sampled_from("abcd")
    page = st.integers(0, num_pages - 1)
    some = st.lists(page, max_size=4, unique=True)
    key = st.sampled_from("xyz")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.num_pages)
        self.owners: dict[int, set[str]] = {page: set() for page in range(self.num_pages)}
        self.chunks: dict[str, int] = {}

    def free(self) -> set[int]:
        return {page for page, owners in self.owners.items() if not owners}

    def idle(self) -> set[int]:
        return self.free() & set(self.chunks.values())

    def refused(self, step: Callable[[], object], error: type[Exception]) -> None:
        before = snapshot(self.pool)
        with pytest.raises(error):
            step()
        assert snapshot(self.pool) == before

    @rule(count=st.integers(0, num_pages + 1), owner=owner)
    def allocate(self, count: int, owner: str) -> None:
        free, idle = self.free(), self.idle()
        if count > len(free):
            return self.refused(lambda: self.pool.allocate(count, owner), ValueError)
        pages = self.pool.allocate(count, owner)
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= free
        num_blank = len(free - idle)
        assert len(set(pages) & idle) == max(0, count - num_blank)
        for page in pages:
            self.owners[page].add(owner)
        self.chunks = {key: page for key, page in self.chunks.items() if page not in pages}
        return None

    @rule(pages=some, owner=owner)
    def share(self, pages: list[int], owner: str) -> None:
        if set(pages) & (self.free() - self.idle()):
            return self.refused(lambda: self.pool.share(pages, owner), IntegrityError)
        self.pool.share(pages, owner)
        for page in pages:
            self.owners[page].add(owner)
        return None

    @rule(owner=owner)
    def leave_all(self, owner: str) -> None:
        own = [page for page, owners in self.owners.items() if owner in owners]
        self.check_left(owner, own, self.pool.leave(owner))

    @rule(owner=owner, pages=some)
    def leave_some(self, owner: str, pages: list[int]) -> None:
        if any(owner not in self.owners[page] for page in pages):
            self.refused(lambda: self.pool.leave(owner, pages), IntegrityError)
        else:
            self.check_left(owner, pages, self.pool.leave(owner, pages))

    def check_left(self, owner: str, pages: list[int], freed: list[int]) -> None:
        for page in pages:
            self.owners[page].discard(owner)
        assert sorted(freed) == sorted(page for page in pages if not self.owners[page])

    @rule(page=page, key=key)
    def remember(self, page: int, key: str) -> None:
        others = {k for k, p in self.chunks.items() if p == page and k != key}
        if not self.owners[page] or others:
            return self.refused(lambda: self.pool.remember(page, key), IntegrityError)
        is_first = self.chunks.setdefault(key, page) == page
        assert self.pool.remember(page, key) == is_first
        return None

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        for page, owners in self.owners.items():
            assert self.pool.owners(page) == owners
        for owner in "abcd":
            assert set(self.pool.pages_of(owner)) == {p for p, owners in self.owners.items() if owner in owners}
        assert {key: self.pool.find(key) for key in "xyz"} == {key: self.chunks.get(key) for key in "xyz"}
        assert self.pool.num_free == len(self.free())


PoolModel.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)
TestPool = PoolModel.TestCase
