"""Percentiles from counts, and levels over time."""

from __future__ import annotations

import math
import random

import pytest

from pdproxy.loadtest.slo import Slo
from pdproxy.simulate.figures import Figures, Histogram, Level


def test_percentiles_are_known_to_half_a_percent() -> None:
    dice, histogram = random.Random(1), Histogram()
    values = [dice.lognormvariate(-2.0, 1.5) for _ in range(20_000)]
    for value in values:
        histogram.add(value)
    values.sort()
    for percent in (1.0, 50.0, 95.0, 99.0, 99.9):
        exact = values[math.ceil(len(values) * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.006)
    assert histogram.percentile(100.0) == pytest.approx(values[-1], rel=0.006)
    assert histogram.mean_s == pytest.approx(sum(values) / len(values))
    assert histogram.max_s == values[-1]


def test_nothing_has_no_percentile() -> None:
    histogram = Histogram()
    assert histogram.percentile(50.0) is None
    assert histogram.as_plain() == {
        "count": 0,
        "mean": None,
        "p50": None,
        "p90": None,
        "p95": None,
        "p99": None,
        "max": 0,
    }


def test_no_time_at_all_is_no_time() -> None:
    histogram = Histogram()
    histogram.add(0.0)
    assert histogram.percentile(50.0) == 0.0


def test_what_failed_took_for_ever() -> None:
    histogram = Histogram()
    for _ in range(98):
        histogram.add(1.0)
    assert histogram.percentile(98.0, num_infinite=2) == 1.0
    assert histogram.percentile(99.0, num_infinite=2) == math.inf


def test_a_level_is_averaged_over_time() -> None:
    level = Level()
    level.change(1, 10.0)
    level.change(2, 20.0)
    level.change(-3, 30.0)
    assert level.mean(40.0) == pytest.approx((10 + 30) / 40)
    assert (level.most, level.now) == (3, 0)


def test_an_objective_is_held_against_what_was_seen() -> None:
    figures = Figures(Slo.parse("ttft:p50<0.5,tpot:p99<50ms,errors<10%"))
    figures.outcomes = {"done": 9, "failed": 1}
    for _ in range(9):
        figures.served(0.2, 0.04, 1.0)
    assert [str(one) for one in figures.broken()] == ["TPOT p99 < 0.05 s", "errors < 0.1"]
    plain = figures.as_plain()
    assert [one["is_met"] for one in plain["slo"]] == [True, False, False]
    assert plain["slo"][1]["value"] is None
    assert plain["good_share"] == 0.9


def test_what_nothing_is_known_of_is_not_met() -> None:
    assert Figures(Slo.parse("ttft:p50<0.5")).broken()
