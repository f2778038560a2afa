"""Numbers as runs, and back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.plan.runs import Run, are_within, num_in, numbers_of, runs_of


@given(st.lists(st.integers(-50, 2**40)))
def test_runs_have_the_same_numbers_in_the_same_order(numbers: list[int]) -> None:
    runs = runs_of(numbers)
    assert numbers_of(runs) == numbers
    assert num_in(runs) == len(numbers)
    assert len(runs) == sum(left + 1 != right for left, right in pairwise(numbers)) + bool(numbers)


@pytest.mark.parametrize(
    ("runs", "is_within"),
    [
        ([], True),
        ([(3, 4)], True),
        ([(2, 1)], False),
        ([(3, 5)], False),
        ([(6, 1), (3, 1)], True),
        ([(3, 0)], False),
        ([(6, -1)], False),
        ([(3, 2**80)], False),
    ],
)
def test_within_3_to_7(runs: list[Run], is_within: bool) -> None:
    assert are_within(runs, 3, 7) == is_within
