"""Retries as a share of the traffic, on a clock that only the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.admission.retry_budget import RetryBudget, part_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def drain(budget: RetryBudget) -> int:
    num = 0
    while budget.spend():
        num += 1
    return num


def test_a_lonely_request_may_be_retried(clock):
    budget = RetryBudget(share=0.2, min_per_s=1.0, window_s=10.0, clock=clock)
    budget.requested()
    assert budget.spend()


def test_when_everything_fails_only_a_share_is_retried(clock):
    """1000 requests in 10 s, every one of which fails: about 20 % and the trickle, not 100 %."""
    budget = RetryBudget(share=0.2, min_per_s=1.0, window_s=10.0, clock=clock)
    num_retries = 0
    for _ in range(1000):
        clock.now += 0.01
        budget.requested()
        num_retries += budget.spend()
    assert 190 <= num_retries <= 200 + 10 + 10
    assert budget.statistics().num_refused == 1000 - num_retries


def test_without_a_trickle_retries_have_to_be_earned(clock):
    budget = RetryBudget(share=0.5, min_per_s=0.0, clock=clock)
    assert not budget.spend()
    budget.requested()
    budget.requested()
    assert (budget.spend(), budget.spend()) == (True, False)


def test_an_empty_bucket_fills_again_without_traffic(clock):
    budget = RetryBudget(share=0.2, min_per_s=1.0, window_s=10.0, clock=clock)
    assert drain(budget) == 10
    clock.now += 1.2
    assert drain(budget) == 1
    clock.now += 1000.0
    assert budget.num_available == pytest.approx(10.0)


def test_what_was_earned_fades(clock):
    budget = RetryBudget(share=0.2, min_per_s=0.0, window_s=10.0, clock=clock)
    for _ in range(500):
        budget.requested()
    assert budget.num_available == pytest.approx(100.0)
    clock.now += 10.0
    assert budget.num_available == pytest.approx(100.0 / 2.71828, rel=1e-4)
    clock.now += 100.0
    assert not budget.spend()


def test_steady_traffic_earns_its_share_of_a_window(clock):
    """At 1000 requests/s each of them fades by itself: 0.2 × 1000/s × 10 s, and the trickle, within a percent."""
    budget = RetryBudget(share=0.2, min_per_s=1.0, window_s=10.0, clock=clock)
    for _ in range(100_000):
        clock.now += 0.001
        budget.requested()
    assert budget.num_available == pytest.approx(2000.0 + 10.0, rel=0.01)


def test_a_burst_that_nobody_looked_at_fades(clock):
    budget = RetryBudget(share=0.2, min_per_s=0.0, window_s=10.0, clock=clock)
    for _ in range(500):
        budget.requested()
    clock.now += 100.0
    assert not budget.spend()


def test_a_clock_that_stands_still_or_steps_back_gives_nothing(clock):
    budget = RetryBudget(share=1.0, clock=clock)
    for _ in range(90):
        budget.requested()
    clock.now -= 5.0
    assert budget.num_available == 100.0


@pytest.mark.parametrize(
    "options", [{"share": -0.1}, {"min_per_s": -1.0}, {"window_s": 0.0}, {"min_per_s": 0.1, "window_s": 10.0}]
)
def test_senseless_options_are_refused(options):
    with pytest.raises(ValueError, match=r"below 0|too soon"):
        RetryBudget(**options)


def test_repr_is_a_status_line(clock):
    budget = RetryBudget(share=0.5, clock=clock)
    budget.requested()
    budget.spend()
    assert repr(budget) == "<RetryBudget 9.5 left, 1 for 1 requests>"


@given(
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.lists(st.sampled_from(["request", "retry", "retry", 0.1, 1.0, 30.0]), max_size=200),
)
def test_from_any_moment_on_retries_stay_within_the_bound(share, min_per_s, steps):
    clock = Clock()
    budget = RetryBudget(share=share, min_per_s=min_per_s, window_s=10.0, clock=clock)
    slack = budget.num_available
    """What may still be spent by the bound of whichever earlier moment is the strictest."""
    for step in steps:
        if step == "request":
            budget.requested()
            slack += share
        elif step == "retry":
            slack -= budget.spend()
        else:
            clock.now += step
            slack += min_per_s * step
        assert slack >= -1e-6
        slack = min(slack, budget.num_available)


@pytest.mark.parametrize("num_parts", [1, 2, 5, 6, 64])
def test_however_many_share_a_budget_each_of_them_has_one(num_parts: int, clock: Clock) -> None:
    assert drain(RetryBudget(min_per_s=part_of(1.0, num_parts), clock=clock)) >= 2
    assert part_of(0.0, num_parts) == 0.0
    assert part_of(100.0, num_parts) == 100.0 / num_parts
