"""What the last minute was like, from counters that somebody looked at now and then."""

from __future__ import annotations

from typing import Any

from pdproxy.dashboard.minute import Counts, LastMinute


def minute(*looks: tuple[float, int, int]) -> dict[str, Any]:
    """Of looks at (time, done, failed); each request that was done had 0.1 s of prefill and 0.3 s of decode."""
    last = LastMinute()
    for at, done, failed in looks:
        phase_s = {"prefill": 0.1 * done, "decode": 0.3 * done}
        last.note(Counts(at=at, ended={"done": done, "failed": failed}, phase_s=phase_s))
    return last.facts()


def test_the_first_look_knows_nothing_yet() -> None:
    facts = minute((100.5, 7, 1))
    assert facts == {"window_s": 0, "per_s": 0.0, "ended": {}, "phase_s": {}, "all": [], "failed": []}


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
        last.note(Counts(at=tick / 2, ended={}, phase_s={}))
    assert len(last._looks) < 130


def test_who_comes_back_soon_finds_the_time_between_and_who_stays_away_does_not() -> None:
    soon = minute((0.0, 0, 0), (30.0, 60, 0))
    assert (soon["window_s"], soon["per_s"], len(soon["all"])) == (30, 2.0, 30)
    late = minute((0.0, 0, 0), (90.0, 60, 0))
    assert (late["window_s"], late["ended"]) == (0, {})


def test_a_look_before_the_minute_is_shared_out_as_well() -> None:
    facts = minute((0.0, 0, 0), (50.0, 100, 0), (80.0, 100, 0))
    assert facts["window_s"] == 60
    assert facts["ended"] == {"done": 60}, "of the hundred within fifty seconds, those of the last thirty"
