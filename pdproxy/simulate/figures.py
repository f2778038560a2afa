"""The module keeps what a simulation found out, in bounded memory, however many requests there were."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from pdproxy.loadtest.log_histogram import FINE_GROWTH, LogHistogram
from pdproxy.loadtest.slo import ERRORS, Objective, Slo

AT_ONCE = 1024
"""The number of durations that are counted together."""
PERCENTS = (50.0, 90.0, 95.0, 99.0)
PHASES = ("slot_wait", "prefill", "kv_wait", "first_byte", "decode")


class Histogram:
    """Histogram counts durations, in seconds, many of them at once.

    Mutable state: those that are counted, and the latest, which are not counted yet.
    """

    __slots__ = ("_counted", "_latest")

    def __init__(self) -> None:
        self._counted = LogHistogram(growth=FINE_GROWTH)
        self._latest: list[float] = []

    def add(self, seconds: float) -> None:
        latest = self._latest
        latest.append(seconds)
        if len(latest) >= AT_ONCE:
            self._count_latest()

    def _count_latest(self) -> LogHistogram:
        if self._latest:
            self._counted.add_all(self._latest)
            self._latest.clear()
        return self._counted

    @property
    def count(self) -> int:
        return self._count_latest().count

    @property
    def max_s(self) -> float:
        return self._count_latest().max_s

    @property
    def mean_s(self) -> float | None:
        return self._count_latest().mean_s

    def percentile(self, percent: float, num_infinite: int = 0) -> float | None:
        """Returns what `LogHistogram.percentile` does."""
        return self._count_latest().percentile(percent, num_infinite)

    def as_plain(self) -> dict[str, Any]:
        """Returns the figures for a JSON file, in seconds."""
        percentiles = {f"p{percent:g}": _rounded(self.percentile(percent)) for percent in PERCENTS}
        return {"count": self.count, "mean": _rounded(self.mean_s), **percentiles, "max": _rounded(self.max_s)}


class Level:
    """Level is something that goes up and down, averaged over time.

    Mutable state: the level, its sum over time, its maximum.
    """

    __slots__ = ("_since", "_sum", "most", "now")

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self._sum = 0.0
        self._since = 0.0

    def change(self, by: int, at_s: float) -> None:
        self._sum += self.now * (at_s - self._since)
        self._since = at_s
        self.now += by
        if self.now > self.most:
            self.most = self.now

    def mean(self, until_s: float) -> float:
        """Returns the mean since 0."""
        total = self._sum + self.now * (until_s - self._since)
        return total / until_s if until_s > 0.0 else 0.0


class Figures:
    """Figures holds the figures of the requests that count.

    Mutable state: all of it grows as requests end.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self.latencies = {"ttft": Histogram(), "tpot": Histogram(), "e2e": Histogram()}
        self.phases = {name: Histogram() for name in PHASES}
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.num_retries = 0
        self.num_good = 0

    def served(self, ttft_s: float, tpot_s: float | None, e2e_s: float) -> None:
        """Notes a whole answer."""
        latencies = self.latencies
        latencies["ttft"].add(ttft_s)
        latencies["e2e"].add(e2e_s)
        if tpot_s is not None:
            latencies["tpot"].add(tpot_s)
        objectives = self._slo.objectives
        self.num_good += not objectives or all(_is_met(one, ttft_s, tpot_s, e2e_s) for one in objectives)

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())

    @property
    def num_failed(self) -> int:
        """Returns how many requests were answered with an error, or not to the end. A client that left by itself does
        not count."""
        return self.count - self.outcomes.get("done", 0) - self.outcomes.get("client_gone", 0)

    def value(self, objective: Objective) -> float | None:
        """Returns the value to compare with an objective's limit: a request that failed took for ever. Returns None
        where nothing is known."""
        if objective.metric == ERRORS:
            judged = self.count - self.outcomes.get("client_gone", 0)
            return self.num_failed / judged if judged else None
        return self.latencies[objective.metric].percentile(objective.percent, self.num_failed)

    def broken(self) -> list[Objective]:
        """Returns the objectives that were not met."""
        return [one for one in self._slo.objectives if not _is_below(self.value(one), one.limit)]

    def as_plain(self) -> dict[str, Any]:
        judged = self.count - self.outcomes.get("client_gone", 0)
        plain: dict[str, Any] = {f"{name}_s": histogram.as_plain() for name, histogram in self.latencies.items()}
        plain["phases_s"] = {name: histogram.as_plain() for name, histogram in self.phases.items()}
        plain |= {"outcomes": _sorted(self.outcomes), "errors": _sorted(self.errors), "paths": _sorted(self.paths)}
        plain["retries"] = self.num_retries
        if self._slo.objectives:
            plain["slo"] = [
                {
                    "objective": str(one),
                    "limit": one.limit,
                    "value": _rounded(self.value(one)),
                    "is_met": _is_below(self.value(one), one.limit),
                }
                for one in self._slo.objectives
            ]
            plain["good_share"] = _rounded(self.num_good / judged) if judged else None
        return plain


def _is_met(objective: Objective, ttft_s: float, tpot_s: float | None, e2e_s: float) -> bool:
    seconds = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}.get(objective.metric)
    return seconds is None or seconds < objective.limit


def _is_below(value: float | None, limit: float) -> bool:
    """Tells whether a value is below its limit; an unknown value is not."""
    return value is not None and value < limit


def _rounded(value: float | None) -> float | None:
    """Returns a value with six digits, or None for one that JSON cannot hold: JSON has no infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
