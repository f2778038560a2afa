"""The page pool: nothing is handed out twice, nothing is lost, neighbours stay together."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import IntegrityError
from transfer.memory.pages import PagePool


def longest_run(pages: list[int]) -> int:
    best = run = 1
    for before, after in pairwise(pages):
        run = run + 1 if after == before + 1 else 1
        best = max(best, run)
    return best


def test_pages_are_handed_out_as_one_run() -> None:
    pool = PagePool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(5) == [3, 4, 5, 6, 7]
    assert (pool.num_free, pool.num_held) == (0, 8)


def test_the_smallest_run_that_fits_is_taken() -> None:
    pool = PagePool(10)
    pool.allocate(10)
    pool.free([0, 1, 2, 3, 6, 7])
    assert pool.allocate(2) == [6, 7]
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_a_request_that_fits_no_run_gets_the_longest_ones() -> None:
    pool = PagePool(10)
    pool.allocate(10)
    pool.free([0, 2, 3, 4, 7, 8])
    assert pool.allocate(5) == [2, 3, 4, 7, 8]


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    assert not pool.can_allocate(3)
    with pytest.raises(ValueError, match="cannot allocate 3 pages, 2 of 4"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("count", [-1, -5])
def test_a_negative_count_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        PagePool(4).allocate(count)


def test_nothing_is_a_valid_request() -> None:
    assert PagePool(0).allocate(0) == []


@pytest.mark.parametrize("wrong", [[1, 1], [3], [4], [-1], [0, 3]])
def test_pages_not_held_are_refused_and_nothing_changes(wrong: list[int]) -> None:
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(IntegrityError):
        pool.free(wrong)
    assert pool.num_held == 3
    pool.free([0, 1, 2])
    assert pool.num_held == 0


def test_a_pool_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        PagePool(-1)


@given(st.integers(0, 24), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_no_page_is_held_twice_or_lost(num_pages: int, steps: list[tuple[bool, int]]) -> None:
    pool = PagePool(num_pages)
    loans: list[list[int]] = []
    for is_allocation, number in steps:
        if is_allocation and pool.can_allocate(number):
            before = set(range(num_pages)) - {page for loan in loans for page in loan}
            pages = pool.allocate(number)
            assert len(pages) == number
            assert set(pages) <= before
            if number:
                runs = [run for run in _runs(before) if len(run) >= number]
                assert longest_run(pages) == number or not runs
            loans.append(pages)
        elif not is_allocation and loans:
            pool.free(loans.pop(number % len(loans)))
        held = [page for loan in loans for page in loan]
        assert len(held) == len(set(held)) == pool.num_held
        assert pool.num_free + pool.num_held == num_pages
    for loan in loans:
        pool.free(loan)
    assert pool.num_free == num_pages


def _runs(pages: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and runs[-1][-1] + 1 == page:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs
