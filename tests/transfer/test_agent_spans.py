"""Spans before they are posted: what is refused, and what is joined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.agents.base import Region, Spans
from transfer.agents.spans import as_spans, check_spans, merge, total_bytes
from transfer.errors import TransferError

LOCAL, REMOTE = Region(1 << 40, 1000), Region(1 << 41, 500)
HUGE = 2**63 - 1


def moved(spans: Spans) -> list[tuple[int, int]]:
    """(from, to) of every byte, in order."""
    return [(ours + i, theirs + i) for ours, theirs, size in spans.tolist() for i in range(size)]


INSIDE = [(0, 0, 1), (0, 0, 500), (999, 499, 1), (500, 0, 500)]
OUTSIDE = [
    (-1, 0, 1),
    (0, -1, 1),
    (0, 0, 0),
    (0, 0, -1),
    (0, 0, 501),
    (501, 0, 500),
    (1000, 0, 1),
    (0, 500, 1),
    (HUGE, 0, 1),
    (0, HUGE, HUGE),
    (1, 1, HUGE),
    (1, 1, -HUGE - 1),
]


@pytest.mark.parametrize("row", INSIDE)
def test_spans_inside_both_regions(row: tuple[int, int, int]) -> None:
    check_spans(as_spans([row]), LOCAL, REMOTE)
    check_spans(as_spans([(1, 1, 1), row]), LOCAL, REMOTE)


@pytest.mark.parametrize("row", OUTSIDE)
def test_spans_outside_a_region(row: tuple[int, int, int]) -> None:
    with pytest.raises(TransferError, match="span 0 "):
        check_spans(as_spans([row]), LOCAL, REMOTE)
    with pytest.raises(TransferError, match="span 2 "):
        check_spans(as_spans([(1, 1, 1), (2, 2, 2), row, row]), LOCAL, REMOTE)


def test_no_spans_are_inside() -> None:
    check_spans(as_spans([]), LOCAL, REMOTE)
    assert total_bytes(as_spans([])) == 0


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 0, 1)],
        None,
        np.zeros((1, 2), dtype=np.int64),
        np.zeros(3, dtype=np.int64),
        np.ones((1, 3), dtype=np.int32),
        np.ones((1, 3), dtype=np.uint64),
        np.ones((1, 3)),
    ],
)
def test_what_is_no_array_of_spans(spans: object) -> None:
    with pytest.raises(TransferError, match="int64 array"):
        check_spans(spans, LOCAL, REMOTE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([(5, 7, 2)], [(5, 7, 2)]),
        ([(0, 10, 4), (4, 14, 4), (8, 18, 1)], [(0, 10, 9)]),
        ([(0, 10, 4), (4, 15, 4)], [(0, 10, 4), (4, 15, 4)]),
        ([(0, 10, 4), (5, 14, 4)], [(0, 10, 4), (5, 14, 4)]),
        ([(4, 14, 4), (0, 10, 4)], [(4, 14, 4), (0, 10, 4)]),
        ([(0, 10, 4), (3, 13, 4)], [(0, 10, 4), (3, 13, 4)]),
        ([(9, 9, 1), (0, 0, 4), (4, 4, 4), (1, 1, 1), (2, 2, 2)], [(9, 9, 1), (0, 0, 8), (1, 1, 3)]),
    ],
)
def test_neighbours_on_both_sides_are_joined(
    rows: list[tuple[int, int, int]], expected: list[tuple[int, int, int]]
) -> None:
    spans = as_spans(rows)
    assert merge(spans).tolist() == [list(row) for row in expected]
    assert spans.tolist() == [list(row) for row in rows], "what it was given stays as it is"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)), max_size=12))
def test_joining_moves_the_same_bytes_in_the_same_order(rows: list[tuple[int, int, int]]) -> None:
    spans = as_spans(rows)
    joined = merge(spans)
    assert moved(joined) == moved(spans)
    assert merge(joined).tolist() == joined.tolist(), "nothing is left to join"
