"""What the last minute was like, from counters that somebody looked at now and then."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.dashboard.minute import Counts, LastMinute


def minute(*looks: tuple[float, int, int]) -> dict[str, Any]:
    """Of looks at (time, done, failed); each request that was done had 0.1 s of prefill, 0.3 s of decode and 8 tokens,
    and every other failure was of another kind."""
    last = LastMinute()
    for at, done, failed in looks:
        phase_s = {"prefill": 0.1 * done, "decode": 0.3 * done}
        failures = {"leg_failed": failed - failed // 2, "deadline_exceeded": failed // 2}
        ended = {"done": done, "failed": failed}
        last.note(Counts(at=at, ended=ended, failures=failures, phase_s=phase_s, tokens=8 * done))
    return last.facts()


def test_the_first_look_knows_nothing_yet() -> None:
    facts = minute((100.5, 7, 1))
    assert facts == {
        "window_s": 0, "collecting_s": 60, "per_s": 0.0, "tokens_per_s": 0.0, "ended": {}, "failures": {},
        "phase_s": {}, "all": [], "failed": [], "tokens": [],
    }  # fmt: skip


def test_how_long_it_still_has_to_collect() -> None:
    looks = [(0.5 + second, second, 0) for second in range(100)]
    assert [minute(*looks[:num])["collecting_s"] for num in (1, 2, 41, 60, 61, 100)] == [60, 59, 20, 1, 0, 0]
    assert minute(*looks, (300.0, 500, 0))["collecting_s"] == 60, "and again when nobody has looked for so long"


def test_tokens_and_why_requests_failed() -> None:
    facts = minute((100.0, 50, 7), (101.0, 60, 9), (110.0, 70, 10))
    assert facts["tokens_per_s"] == 16.0
    assert facts["tokens"] == [80.0] + [None] * 9, "eight seconds are a gap"
    assert facts["failures"] == {"leg_failed": 1, "deadline_exceeded": 2}
    assert minute((100.0, 50, 7), (101.0, 60, 7))["failures"] == {}


def test_rate_outcomes_and_phases_of_the_time_that_is_known() -> None:
    facts = minute((100.0, 50, 0), (110.0, 70, 0))
    assert (facts["window_s"], facts["per_s"], facts["ended"]) == (10, 2.0, {"done": 20})
    assert facts["phase_s"] == {"prefill": 0.1, "decode": 0.3}


def test_a_failed_request_has_a_share_in_the_mean() -> None:
    facts = minute((0.0, 0, 0), (10.0, 5, 5))
    assert facts["ended"] == {"done": 5, "failed": 5}
    assert facts["phase_s"] == {"prefill": 0.05, "decode": 0.15}


def test_history_is_by_whole_seconds_and_looks_between_them_are_shared_out() -> None:
    facts = minute((0.5, 0, 0), (1.5, 10, 0), (2.5, 10, 4), (3.5, 10, 4))
    assert facts["all"] == [7.0, 2.0], "from 1 to 2: half of the ten, and half of the four that failed"
    assert facts["failed"] == [2.0, 2.0]


def test_what_is_longer_ago_than_a_minute_counts_no_more() -> None:
    looks = [(float(second), 10 * min(second, 100), 0) for second in range(200)]
    facts = minute(*looks[:150])
    assert (facts["window_s"], facts["ended"]) == (60, {"done": 110})  # of second 89 to 100
    assert len(facts["all"]) == 60
    assert sum(facts["all"]) == 110
    quiet = minute(*looks)
    assert (quiet["per_s"], quiet["ended"], quiet["phase_s"]) == (0.0, {}, {})
    assert set(quiet["all"]) == {0.0}


def test_only_what_is_needed_is_kept() -> None:
    last = LastMinute()
    for tick in range(10_000):
        last.note(Counts(at=tick / 2, ended={}, failures={}, phase_s={}, tokens=0))
    assert len(last._looks) < 130


def test_who_comes_back_soon_finds_the_time_between_and_who_stays_away_does_not() -> None:
    soon = minute((0.0, 0, 0), (30.0, 60, 0))
    assert (soon["window_s"], soon["per_s"], soon["ended"]) == (30, 2.0, {"done": 60})
    late = minute((0.0, 0, 0), (90.0, 60, 0))
    assert (late["window_s"], late["ended"]) == (0, {})


def test_seconds_that_nobody_looked_at_are_a_gap_and_not_even_traffic() -> None:
    looks = [(float(second), 10 * second, 0) for second in (*range(6), *range(15, 21))]
    facts = minute(*looks)
    assert facts["all"] == [10.0] * 5 + [None] * 10 + [10.0] * 5
    assert facts["failed"] == [0.0] * 5 + [None] * 10 + [0.0] * 5
    assert (facts["window_s"], facts["ended"]) == (20, {"done": 200}), "what ended in the gap is known"
    between = minute((0.5, 0, 0), (1.5, 5, 0), (9.5, 95, 0), (10.5, 100, 0), (11.5, 105, 0))
    assert between["all"] == [None] * 9 + [5.0], "a second that was seen in part is not known"
    short = minute((0.0, 0, 0), (3.0, 30, 0), (4.0, 40, 0))
    assert short["all"] == [10.0] * 4, "looks that are a little late leave no gap"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.25, 30.0), st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=60))
def test_no_second_has_more_than_ended_whoever_looked_whenever(steps: list[tuple[float, int, int]]) -> None:
    at, done, failed = 0.3, 0, 0
    looks = [(at, done, failed)]
    for passed_s, more, wrong in steps:
        at, done, failed = at + passed_s, done + more, failed + wrong
        looks.append((at, done, failed))
    facts = minute(*looks)
    ended = facts["ended"].get("done", 0) + facts["ended"].get("failed", 0)
    seen = [second for second in facts["all"] if second is not None]
    assert len(facts["all"]) == len(facts["failed"]) <= 60
    assert sum(seen) <= ended + 1 + 0.05 * len(seen), "rounded to tenths"
    if facts["window_s"] >= 5:
        assert facts["per_s"] * facts["window_s"] == pytest.approx(ended, rel=0.6 / facts["window_s"], abs=1.5)
    assert facts["window_s"] or not ended
    for whole, wrong in zip(facts["all"], facts["failed"], strict=True):
        assert (whole is None) == (wrong is None)
        assert whole is None or 0 <= wrong <= whole


def test_a_look_before_the_minute_is_shared_out_as_well() -> None:
    facts = minute((0.0, 0, 0), (50.0, 100, 0), (80.0, 100, 0))
    assert facts["window_s"] == 60
    assert facts["ended"] == {"done": 60}, "of the hundred within fifty seconds, those of the last thirty"
