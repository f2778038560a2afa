"""Reading a request's priority, within what the operator allows."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.errors import InvalidRequest
from pdproxy.openai.priority import HEADER, MAX_LEVELS, PriorityLimits, read_priority

LIMITS = PriorityLimits(least=-2, most=5)


def body(text: str) -> dict[str, msgspec.Raw]:
    return {"priority": msgspec.Raw(text.encode())}


@pytest.mark.parametrize(
    ("fields", "headers", "priority"),
    [
        ({}, {}, 0),
        (body("3"), {}, 3),
        (body("-1"), {}, -1),
        (body("null"), {}, 0),
        ({}, {HEADER: "3"}, 3),
        ({}, {HEADER: " +4 "}, 4),
        (body("2"), {HEADER: "4"}, 2),
        (body("null"), {HEADER: "4"}, 4),
        (body("6"), {}, 5),
        (body("-3"), {}, -2),
        (body("100000000000000000000000000"), {}, 5),
        ({}, {HEADER: "-999999999999999999"}, -2),
    ],
)
def test_the_body_then_the_header_then_nought_within_the_limits(fields, headers, priority):
    assert read_priority(fields, headers, LIMITS) == priority


@pytest.mark.parametrize("text", ['"3"', "1.5", "true", "[1]", "{}"])
def test_a_field_that_is_no_integer_is_refused_by_its_name(text):
    with pytest.raises(InvalidRequest, match="priority must be an integer") as refused:
        read_priority(body(text), {}, LIMITS)
    assert (refused.value.param, refused.value.status) == ("priority", 400)


@pytest.mark.parametrize("text", ["", "high", "1.5", "0x3", "٣", "1" * 5000])
def test_a_header_that_is_no_integer_is_refused_by_its_name(text):
    with pytest.raises(InvalidRequest, match="the header x-pdproxy-priority must be an integer") as refused:
        read_priority({}, {HEADER: text}, LIMITS)
    assert refused.value.param == HEADER


def test_nought_is_within_limits_that_leave_it_out():
    assert read_priority({}, {}, PriorityLimits(least=3, most=9)) == 3


def test_equal_limits_make_all_equal():
    assert read_priority(body("7"), {}, PriorityLimits(least=0, most=0)) == 0


@pytest.mark.parametrize(("least", "most"), [(1, 0), (0, MAX_LEVELS)])
def test_senseless_limits_are_refused(least, most):
    with pytest.raises(ValueError, match="are possible"):
        PriorityLimits(least=least, most=most)


@given(st.integers())
def test_any_integer_ends_within_the_limits(asked):
    assert LIMITS.least <= read_priority(body(str(asked)), {}, LIMITS) <= LIMITS.most
