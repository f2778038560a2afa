"""The module computes the four latencies by which an answer is judged, and percentiles of them. It is pure.

The percentile N is the smallest value which at least N of a hundred values do not exceed: it was really measured, and
is never something between two values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pdproxy.loadtest.log_histogram import LogHistogram, merged
from pdproxy.loadtest.record import Record

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per token after the first",
    "itl": "time between two pieces",
    "e2e": "whole request",
}
INTERRUPTED = "interrupted"
"""The `Record.error` of requests that the generator itself cut off: they tell nothing of the target."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution holds the count of some values, and their mean, percentiles and maximum in seconds; these are None
    where there was no value."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None


COLUMNS = {"mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9", "max": "max"}
"""The titles of a `Distribution`'s members in tables."""
ENOUGH = {"p999": 1000}
"""The least number of values for which a percentile is told; with fewer, it is nothing but the largest of them."""
_PERCENTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}


def told_of(found: Distribution, column: str) -> float | None:
    """Returns one of `COLUMNS` in seconds; it is None where there are too few values for it."""
    value: float | None = getattr(found, column)
    return value if found.count >= ENOUGH.get(column, 1) else None


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Returns a percentile of values in ascending order, or None where there are none."""
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


def distribution_of_gaps(gaps: LogHistogram) -> Distribution:
    """Returns the distribution of gaps; its percentiles are known to one percent."""
    if not gaps.count:
        return Distribution(count=0)
    percentiles = {name: gaps.percentile(percent) for name, percent in _PERCENTS.items()}
    return Distribution(count=gaps.count, mean=gaps.mean_s, max=gaps.max_s, **percentiles)


def is_failed(record: Record) -> bool:
    """Tells whether the target did not answer a request, or not to the end."""
    return bool(record.error) and record.error != INTERRUPTED


def seconds_of(records: Iterable[Record], metric: str, delay_s: float = 0.0) -> Iterator[float]:
    """Yields the seconds of ``ttft``, ``tpot`` or ``e2e`` for those records which have one. Whole answers count; for
    TTFT, answers that the client left later on count too. `delay_s` is added to the whole of each latency; of that,
    each token after the first has its part."""
    for record in records:
        if not record.error and (not record.aborted or metric == "ttft"):
            seconds = seconds_of_one(record, metric)
            if seconds is not None:
                num_parts = (record.answer_tokens or 2) - 1 if metric == "tpot" else 1
                yield seconds + delay_s / num_parts


def seconds_of_one(record: Record, metric: str) -> float | None:
    match metric:
        case "ttft":
            return record.ttft_s
        case "tpot":
            return record.tpot_s
        case "e2e":
            return record.e2e_s
    raise ValueError(f"there is no latency called {metric!r}; there are {', '.join(TITLES)}")


def gaps_of(records: Iterable[Record]) -> LogHistogram:
    """Returns the gaps between all pieces of all answers without an error, as far as the answers went."""
    return merged(record.gaps for record in records if record.gaps is not None and not record.error)


def distribution_of(records: Sequence[Record], metric: str) -> Distribution:
    """Returns the distribution of one of the latencies in `TITLES`."""
    if metric == "itl":
        return distribution_of_gaps(gaps_of(records))
    return distribution(seconds_of(records, metric))
