"""Our counters and histograms show on the page as `prometheus_client`'s own do, byte for byte."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from pdproxy.telemetry.series import Counts, Durations

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""As the page has had them since its first release."""
EACH_BUCKET_S = (0.0, -1e-9, *BOUNDS_S, *(bound_s * 1.5 for bound_s in BOUNDS_S), 1e9)
STRANGE = ["plain", 'with "quotes"', "a\\b", "two\nlines", "größe", ""]


def page(*collectors: Collector, created: bool = False) -> str:
    """Without the moments at which series began, unless they are the point."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    text = generate_latest(registry).decode()
    return text if created else re.sub(r"(?m)^(\w+_created(?:\{.*\})?) \S+$", r"\1 then", text)


@pytest.fixture
def without_created() -> Iterator[None]:
    disable_created_metrics()
    yield
    enable_created_metrics()


# ── counters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_counter_by_labels() -> None:
    ours, theirs = Counts("x", "Of \\ things", ("b", "a")), Counter("x", "Of \\ things", ["b", "a"], registry=None)
    assert page(ours) == page(theirs)
    for value in [*STRANGE, *STRANGE[:2]]:
        ours.add((value, "1"))
        theirs.labels(value, "1").inc()
    assert page(ours) == page(theirs)


def test_a_counter_without_labels_is_there_from_the_start() -> None:
    ours, theirs = Counts("x", "Things"), Counter("x", "Things", registry=None)
    assert "x_total 0.0" in page(ours)
    assert page(ours) == page(theirs)
    for amount in (3, 0, 12345678):
        ours.add(amount=amount)
        theirs.inc(amount)
        assert page(ours) == page(theirs)


# ── histograms ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_histogram_by_label() -> None:
    ours, theirs = Durations("x", "Things", "kind"), Histogram("x", "Things", ["kind"], buckets=BOUNDS_S, registry=None)
    assert page(ours) == page(theirs)
    for value in STRANGE:
        for seconds in EACH_BUCKET_S:
            ours.observe({value: seconds})
            theirs.labels(value).observe(seconds)
    assert page(ours) == page(theirs)


def test_a_histogram_without_a_label_is_there_from_the_start() -> None:
    ours, theirs = Durations("x", "Things"), Histogram("x", "Things", buckets=BOUNDS_S, registry=None)
    assert "x_count 0.0" in page(ours)
    assert page(ours) == page(theirs)
    for seconds in EACH_BUCKET_S:
        ours.observe({"": seconds})
        theirs.observe(seconds)
    assert page(ours) == page(theirs)


@given(st.lists(st.floats(0.0, 200.0) | st.sampled_from(BOUNDS_S)))
def test_everything_is_in_its_bucket(durations_s: list[float]) -> None:
    ours, theirs = Durations("x", "Things"), Histogram("x", "Things", buckets=BOUNDS_S, registry=None)
    for duration_s in durations_s:
        ours.observe({"": duration_s})
        theirs.observe(duration_s)
    assert page(ours) == page(theirs)


def test_several_at_once() -> None:
    at_once, in_turn = Durations("x", "Things", "kind"), Durations("x", "Things", "kind")
    at_once.observe({"a": 0.1, "b": 0.2})
    in_turn.observe({"a": 0.1})
    in_turn.observe({"b": 0.2})
    assert page(at_once) == page(in_turn)


# ── since when ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_series_began_when_it_was_first_counted() -> None:
    counts, durations = Counts("x", "Things", ("kind",)), Durations("y", "Things", "kind")
    moments = [time.time()]
    for value in ("a", "b"):
        counts.add((value,))
        durations.observe({value: 1.0})
        moments.append(time.time())
    counts.add(("a",))
    durations.observe({"a": 1.0})
    began = {
        (name, value): float(moment)
        for name, value, moment in re.findall(
            r'(?m)^(\w)_created\{kind="(\w)"\} (\S+)$', page(counts, durations, created=True)
        )
    }
    assert began.keys() == {("x", "a"), ("y", "a"), ("x", "b"), ("y", "b")}
    for (_, value), moment in began.items():
        first = "ab".index(value)
        assert moments[first] <= moment <= moments[first + 1]


@pytest.mark.usefixtures("without_created")
def test_beginnings_are_left_out_where_the_library_was_told_so() -> None:
    ours, theirs = Durations("x", "Things", "kind"), Histogram("x", "Things", ["kind"], buckets=BOUNDS_S, registry=None)
    ours.observe({"a": 1.0})
    theirs.labels("a").observe(1.0)
    assert page(ours, Counts("y", "Things")) == page(theirs, Counter("y", "Things", registry=None))
    assert "_created" not in page(ours)
