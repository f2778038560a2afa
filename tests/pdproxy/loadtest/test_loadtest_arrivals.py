"""When requests are due: rate, burstiness and ramp are what was asked for, and the seed decides all of it."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from statistics import fmean, pvariance

import pytest

from pdproxy.loadtest.arrivals import Pace, Process, arrivals
from pdproxy.loadtest.errors import WorkloadError

NUM = 20_000


def gaps(process: Process, *, burstiness: float = 1.0, rate: float = 50.0) -> list[float]:
    times = islice(arrivals(process, Pace(rate=rate), random.Random(7), burstiness=burstiness), NUM)
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(
    ("process", "burstiness", "variance"),
    [("poisson", 1.0, 1.0), ("gamma", 4.0, 4.0), ("gamma", 0.25, 0.25), ("constant", 1.0, 0.0)],
)
def test_mean_and_variance_of_the_gaps(process: Process, burstiness: float, variance: float) -> None:
    drawn = gaps(process, burstiness=burstiness)
    assert fmean(drawn) * 50 == pytest.approx(1, rel=0.05)
    assert pvariance(drawn) * 50**2 == pytest.approx(variance, rel=0.15, abs=1e-6)


def test_a_poisson_process_has_no_memory() -> None:
    """Of gaps that are longer than the mean as many go on for another mean as of all gaps."""
    drawn = [gap * 50 for gap in gaps("poisson")]
    longer = [gap for gap in drawn if gap > 1]
    assert sum(gap > 2 for gap in longer) / len(longer) == pytest.approx(len(longer) / len(drawn), abs=0.02)


def test_the_seed_decides() -> None:
    def first(seed: int) -> list[float]:
        return list(islice(arrivals("gamma", Pace(rate=3), random.Random(seed), burstiness=2), 50))

    assert first(1) == first(1) != first(2)


def test_a_ramp_rises_in_a_straight_line() -> None:
    times = list(islice(arrivals("constant", Pace(rate=100, ramp_s=10, from_rate=20), random.Random()), 2000))
    counts = [sum(start <= at < start + 2 for at in times) for start in range(0, 14, 2)]
    assert counts == pytest.approx([56, 88, 120, 152, 184, 200, 200], abs=1)
    assert times == sorted(times)


@pytest.mark.parametrize("from_rate", [0, 5, 20, 40])
def test_time_is_the_inverse_of_the_number_of_arrivals(from_rate: float) -> None:
    """Up, level, or down to the rate."""
    pace = Pace(rate=20, ramp_s=8, from_rate=from_rate)
    for at_s in (0.5, 3, 7.9):
        num = from_rate * at_s + (20 - from_rate) * at_s**2 / 16
        assert pace.time_of(num) == pytest.approx(at_s)
    assert pace.time_of(pace.num_in_ramp + 20) == pytest.approx(9)
    assert pace.time_of(0) == 0


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_is_above_zero(rate: float) -> None:
    with pytest.raises(WorkloadError, match="above 0"):
        Pace(rate=rate)


def test_a_burstiness_is_above_zero() -> None:
    with pytest.raises(WorkloadError, match="burstiness"):
        arrivals("gamma", Pace(rate=1), random.Random(), burstiness=0)
