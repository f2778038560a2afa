"""Up and down with some patience."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.fleet.hysteresis import Hysteresis


def test_it_falls_after_so_many_misses_in_a_row():
    health = Hysteresis(misses=3, successes=2, is_up=True)
    assert [health.missed() for _ in range(4)] == [False, False, True, False]
    assert not health.is_up


def test_it_rises_after_so_many_successes_in_a_row():
    health = Hysteresis(misses=3, successes=2)
    assert [health.succeeded() for _ in range(3)] == [False, True, False]
    assert health.is_up


def test_a_success_between_misses_starts_the_count_anew():
    health = Hysteresis(misses=2, successes=1, is_up=True)
    for _ in range(5):
        health.missed()
        health.succeeded()
    assert health.is_up


def test_a_miss_between_successes_starts_the_count_anew():
    health = Hysteresis(misses=1, successes=2)
    for _ in range(5):
        health.succeeded()
        health.missed()
    assert not health.is_up


def test_a_fall_beyond_doubt_is_not_counted_out():
    health = Hysteresis(misses=3, successes=2, is_up=True)
    assert health.fell()
    assert not health.fell()
    health.succeeded()
    health.fell()
    assert [health.succeeded(), health.succeeded()] == [False, True]


@pytest.mark.parametrize("counts", [{"misses": 0, "successes": 1}, {"misses": 1, "successes": 0}])
def test_counts_are_at_least_one(counts):
    with pytest.raises(ValueError, match="at least 1"):
        Hysteresis(**counts)


def test_repr_is_a_status_line():
    health = Hysteresis(misses=3, successes=2, is_up=True)
    health.missed()
    assert repr(health) == "<Hysteresis up, 1 of 3 misses>"
    health.fell()
    assert repr(health) == "<Hysteresis down, 0 of 2 successes>"


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans()))
def test_it_is_what_the_last_long_enough_run_says(misses, successes, answers):
    health, is_up = Hysteresis(misses=misses, successes=successes), False
    for end in range(1, len(answers) + 1):
        changed = health.succeeded() if answers[end - 1] else health.missed()
        was_up = is_up
        if end >= misses and not any(answers[end - misses : end]):
            is_up = False
        if end >= successes and all(answers[end - successes : end]):
            is_up = True
        assert (health.is_up, changed) == (is_up, is_up is not was_up)
