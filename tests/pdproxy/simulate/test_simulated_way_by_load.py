"""Decoders that read prompts themselves while their prefiller is behind: when that helps, and when nothing changes."""

from __future__ import annotations

from typing import Any

import pytest

from pdproxy.loadtest.lengths import Fixed, Independent
from pdproxy.simulate.simulation import Result, simulate
from pdproxy.simulate.speed import Speed
from pdproxy.simulate.traffic import Traffic
from tests.fakes.simulated import make_plan

LONG = Independent(Fixed(4000), Fixed(200))


def found(traffic: Traffic, *, is_on: bool, **plan: Any) -> Result:
    settings = {"path_by_load": is_on}
    return simulate(make_plan(traffic=traffic, speed=Speed(), settings=settings, **plan))


def ttft_p95_s(result: Result) -> float:
    seconds = result.as_plain()["ttft_s"]["p95"]
    assert isinstance(seconds, float)
    return seconds


@pytest.mark.parametrize("proxies", [1, 3])
def test_bursts_that_one_prefiller_cannot_read_in_time_are_read_by_decoders_too(proxies: int) -> None:
    bursts = Traffic(sizes=LONG, rate=3.0, process="gamma", burstiness=8.0)
    plan: dict[str, Any] = {"prefillers": 1, "decoders": 3, "num_requests": 600, "proxies": proxies}
    off, on = (found(bursts, is_on=is_on, **plan) for is_on in (False, True))
    assert off.figures.outcomes == on.figures.outcomes == {"done": 600}
    assert off.figures.paths.keys() == {"disaggregated"}
    assert 50 < on.figures.paths["local"] < 300
    assert ttft_p95_s(on) < 0.6 * ttft_p95_s(off)


def test_a_fleet_that_keeps_up_goes_on_as_before() -> None:
    even = Traffic(sizes=Independent(Fixed(1000), Fixed(200)), rate=40.0, process="poisson")
    off, on = (found(even, is_on=is_on, prefillers=4, decoders=4, num_requests=2000) for is_on in (False, True))
    assert on.figures.outcomes == {"done": 2000}
    assert on.figures.paths["local"] < 20
    assert ttft_p95_s(on) < 1.05 * ttft_p95_s(off)
