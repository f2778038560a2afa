"""The four latencies by which an answer is judged, and percentiles of them. Pure.

A percentile is the smallest value that at least so many of a hundred do not exceed: one that was really measured, never
something between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pdproxy.loadtest.gaps import Gaps, merged
from pdproxy.loadtest.record import Record

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per token after the first",
    "itl": "time between two pieces",
    "e2e": "whole request",
}
INTERRUPTED = "interrupted"
"""`Record.error` of those that the generator itself cut off: they tell nothing of the target."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; None where there was nothing."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None


COLUMNS = {"mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9", "max": "max"}
"""A `Distribution`'s members as they are called in tables."""
_PERCENTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Of values in ascending order."""
    if not ordered:
        return None
    # Rounded, because 99.9 % of 1000 are 999, and not a hair more.
    rank = math.ceil(round(len(ordered) * percent / 100, 9))
    return ordered[min(len(ordered), max(1, rank)) - 1]


def distribution(values: Iterable[float]) -> Distribution:
    ordered = sorted(values)
    if not ordered:
        return Distribution(count=0)
    percentiles = {name: percentile(ordered, percent) for name, percent in _PERCENTS.items()}
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(count=len(ordered), mean=mean, max=ordered[-1], **percentiles)


def distribution_of_gaps(gaps: Gaps) -> Distribution:
    """To one percent, as far as percentiles go."""
    if not gaps.count:
        return Distribution(count=0)
    percentiles = {name: gaps.percentile(percent) for name, percent in _PERCENTS.items()}
    return Distribution(count=gaps.count, mean=gaps.mean_s, max=gaps.max_s, **percentiles)


def is_failed(record: Record) -> bool:
    """The target did not answer it, or not to the end."""
    return bool(record.error) and record.error != INTERRUPTED


def seconds_of(records: Iterable[Record], metric: str) -> Iterator[float]:
    """``ttft``, ``tpot`` or ``e2e`` of those that have one: of whole answers, and TTFT also of those left later on."""
    for record in records:
        if not record.error and (not record.aborted or metric == "ttft"):
            seconds = seconds_of_one(record, metric)
            if seconds is not None:
                yield seconds


def seconds_of_one(record: Record, metric: str) -> float | None:
    match metric:
        case "ttft":
            return record.ttft_s
        case "tpot":
            return record.tpot_s
        case "e2e":
            return record.e2e_s
    raise ValueError(f"there is no latency called {metric!r}; there are {', '.join(TITLES)}")


def gaps_of(records: Iterable[Record]) -> Gaps:
    """Between all pieces of all answers, as far as they went."""
    return merged(record.gaps for record in records if record.gaps is not None and not record.error)


def distribution_of(records: Sequence[Record], metric: str) -> Distribution:
    """Of one of `TITLES`."""
    if metric == "itl":
        return distribution_of_gaps(gaps_of(records))
    return distribution(seconds_of(records, metric))
