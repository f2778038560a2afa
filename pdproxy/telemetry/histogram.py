"""Histogram counts durations in the buckets that ``/metrics`` shows. It has a module of its own because this one can be
compiled, and the classes of `telemetry.series` cannot."""

from __future__ import annotations

import time
from bisect import bisect_left

BOUNDS_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]
"""Upper bounds of the buckets, in seconds. One more bucket has no bound. The bounds are a list because compiled code
takes a tuple of floats apart, and makes it anew for each search."""
_FIRST_BOUND_S = BOUNDS_S[0]


class Histogram:
    """Histogram counts the durations of one series. It holds how many fell into each bucket, their sum in seconds, and
    when the counting began (seconds since 1970)."""

    __slots__ = ("began", "counts", "total_s")

    def __init__(self) -> None:
        self.began = time.time()
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0


def observe(histograms: dict[str, Histogram], seconds: dict[str, float]) -> None:
    """Counts one more duration in each histogram that `seconds` names, and begins those that are not there yet."""
    for name, duration_s in seconds.items():
        one = histograms.get(name)
        if one is None:
            one = histograms[name] = Histogram()
        one.total_s += duration_s
        # Most steps of a short request are in the first bucket; so it is found in a third of the time.
        one.counts[bisect_left(BOUNDS_S, duration_s) if duration_s > _FIRST_BOUND_S else 0] += 1
