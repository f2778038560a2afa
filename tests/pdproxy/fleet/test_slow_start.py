"""The weight of an instance that has come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.fleet.slow_start import SlowStart


@pytest.mark.parametrize(
    ("now", "weight"), [(99.0, 0.2), (100.0, 0.2), (105.0, 0.4), (110.0, 0.6), (120.0, 1.0), (1e9, 1.0)]
)
def test_the_weight_rises_in_a_straight_line(now, weight):
    assert SlowStart(ramp_s=20.0, floor=0.2).weight(100.0, now) == pytest.approx(weight)


def test_one_that_was_never_away_has_all_its_weight():
    assert SlowStart(ramp_s=20.0).weight(None, 0.0) == 1.0


def test_no_ramp_is_no_ramp():
    assert SlowStart(ramp_s=0.0).weight(100.0, 100.0) == 1.0


@pytest.mark.parametrize("options", [{"ramp_s": -1.0}, {"ramp_s": 1.0, "floor": 0.0}, {"ramp_s": 1.0, "floor": 1.1}])
def test_senseless_options_are_refused(options):
    with pytest.raises(ValueError, match="ramp_s"):
        SlowStart(**options)


@given(st.floats(0.0, 1e4), st.floats(0.01, 1.0), st.floats(0.0, 2e4), st.floats(0.0, 1e3))
def test_it_never_falls_and_stays_between_floor_and_one(ramp_s, floor, now, later_s):
    ramp = SlowStart(ramp_s=ramp_s, floor=floor)
    early, late = ramp.weight(0.0, now), ramp.weight(0.0, now + later_s)
    assert floor <= early <= 1.0
    assert early <= late + 1e-9
