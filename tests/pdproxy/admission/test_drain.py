"""The drain rate is what its definition says, however often it is measured."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.admission.drain import DrainRate

WINDOW_S = 30.0


def by_definition(history: list[tuple[float, int, int]], held: int) -> float:
    """Of stretches (seconds, pages held, pages returned at their end): both sums faded by the time held since."""
    page_seconds = returned = 0.0
    for seconds, num_held, num_returned in history:
        if num_held:
            fade = exp(-seconds / WINDOW_S)
            page_seconds, returned = page_seconds * fade + num_held * seconds, returned * fade
        returned += num_returned
    return held * returned / page_seconds


def measured(history: list[tuple[float, int, int]], held: int) -> float:
    now = 0.0
    rate = DrainRate(now, WINDOW_S)
    for seconds, num_held, num_returned in history:
        now += seconds
        rate.measure(num_held, now)
        rate.count(num_returned)
    return rate.per_second(held)


def test_nothing_is_known_at_first() -> None:
    rate = DrainRate(0.0)
    assert (rate.is_known, rate.per_second(10)) == (False, 0.0)
    rate.measure(4, 1.0)
    assert not rate.is_known
    rate.count(1)
    assert rate.per_second(4) == 1.0


def test_an_idle_buffer_forgets_nothing() -> None:
    history = [(1.0, 4, 2), (1.0, 2, 2)]
    assert measured([*history, (1e6, 0, 0)], 6) == measured(history, 6)


def test_many_short_stretches_fade_like_a_long_one() -> None:
    """Two minutes in steps of a millisecond, after a past that was ten times as fast."""
    past = [(1.0, 10, 100)] * 30
    fine = [*past, *[(0.001, 10, 0), (0.009, 10, 1)] * 12_000]
    assert measured(fine, 10) == pytest.approx(by_definition(fine, 10), rel=0.005)
    assert measured(fine, 10) == pytest.approx(100.0, rel=0.2)


@given(
    st.lists(
        st.tuples(st.sampled_from([1e-5, 0.01, 0.2, 3.0, 100.0]), st.integers(0, 50), st.integers(0, 5)),
        min_size=1,
        max_size=60,
    )
)
def test_any_history_is_measured_within_one_percent(history: list[tuple[float, int, int]]) -> None:
    history = [(1.0, 1, 1), *history]
    assert measured(history, 7) == pytest.approx(by_definition(history, 7), rel=0.01)
