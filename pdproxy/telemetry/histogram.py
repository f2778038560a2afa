"""Tally counts events, and Histogram durations, in the buckets that ``/metrics`` shows. They have a module of their own
because this one can be compiled, and the classes of `telemetry.series` cannot."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]
"""Upper bounds of the buckets, in seconds. One more bucket has no bound. The bounds are a list because compiled code
takes a tuple of floats apart, and makes it anew for each search."""
_FIRST_BOUND_S: Final = BOUNDS_S[0]


class Tally:
    """Tally counts by the values of some labels. It holds the counts, and when each was begun (seconds since 1970)."""

    __slots__ = ("began", "counts")

    def __init__(self) -> None:
        self.began: dict[tuple[str, ...], float] = {}
        self.counts: dict[tuple[str, ...], float] = {}

    def add(self, values: tuple[str, ...] = (), amount: float = 1.0) -> None:
        """Adds `amount` to the count that has these label `values`."""
        counted = self.counts.get(values)
        if counted is None:
            self.began[values] = time.time()
            counted = 0.0
        self.counts[values] = counted + amount


class Histogram:
    """Histogram counts the durations of one series. It holds how many fell into each bucket, their sum in seconds, and
    when the counting began (seconds since 1970)."""

    __slots__ = ("began", "counts", "total_s")

    def __init__(self) -> None:
        self.began = time.time()
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0


class Histograms:
    """Histograms holds one series of durations for each value of a label."""

    __slots__ = ("series",)

    def __init__(self) -> None:
        self.series: dict[str, Histogram] = {}

    def observe(self, seconds: dict[str, float]) -> None:
        """Counts one more duration in each series that `seconds` names, and begins those that are not there yet."""
        for name, duration_s in seconds.items():
            one = self.series.get(name)
            if one is None:
                one = self.series[name] = Histogram()
            one.total_s += duration_s
            # Most steps of a short request are in the first bucket; so it is found in a third of the time.
            one.counts[bisect_left(BOUNDS_S, duration_s) if duration_s > _FIRST_BOUND_S else 0] += 1
