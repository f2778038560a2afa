"""Patches lead from one picture to the next, and say no more than they must."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.dashboard.patch import difference
from tests.fakes.eyes import merged

LEAVES = st.one_of(st.integers(0, 2), st.text("ab", max_size=1), st.booleans(), st.lists(st.integers(0, 1), max_size=2))
PICTURES = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(LEAVES, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=6),
)


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({}, {}, {}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"b": 3}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}}, {"a": {"y": 3}}),
        ({"a": 1, "b": {"x": 1}}, {"b": {}}, {"a": None, "b": {"x": None}}),
        ({"a": [1, 2]}, {"a": [1, 3]}, {"a": [1, 3]}),
        ({"a": 1}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"a": {"x": 1}}, {"a": 1}, {"a": 1}),
    ],
)
def test_what_is_different(before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]) -> None:
    assert difference(before, after) == patch


@given(PICTURES, PICTURES)
def test_merging_the_difference_makes_the_second_of_the_first(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert merged(before, difference(before, after)) == after
