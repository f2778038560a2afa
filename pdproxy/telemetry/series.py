"""Counts and Durations are counters and histograms that cost next to nothing to count with.

The metrics page shows them like any other. Those of `prometheus_client` take a lock, a search for the labels and a walk
through the buckets each time: 1.5 µs, and a request is counted a dozen times. Here there is one thread, so that
counting is adding to a number in a dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pdproxy.telemetry.histogram import BOUNDS_S, Histogram, Histograms, Tally

_BUCKETS = (*(str(bound_s) for bound_s in BOUNDS_S), "+Inf")


class Counts(Collector):
    """Counts is a counter by the values of its `labels`; without labels there is one, which is shown from the start."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._tally = Tally()
        self.add = self._tally.add
        """Adds an amount to the count that has these label values, in the order of `labels`; see `Tally.add`."""
        if not labels:
            self.add((), 0)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        is_told = _are_beginnings_told()
        for values, count in self._tally.counts.items():
            family.add_metric(values, count, self._tally.began[values] if is_told else None)
        yield family


class Durations(Collector):
    """Durations is a histogram of seconds by the value of its one `label`; without a label there is one, shown from the
    start."""

    def __init__(self, name: str, text: str, label: str | None = None) -> None:
        self._name = name
        self._text = text
        self._labels = () if label is None else (label,)
        histograms = Histograms()
        self._series = histograms.series
        self.observe = histograms.observe
        """Counts one more duration in each series, by the value of the label (``""`` where there is no label)."""
        if label is None:
            self._series[""] = Histogram()

    def totals_s(self) -> dict[str, float]:
        """Returns the sum of all seconds so far, by the value of the label."""
        return {value: one.total_s for value, one in self._series.items()}

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        is_told = _are_beginnings_told()
        for value, one in self._series.items():
            labels = [value] if self._labels else []
            family.add_metric(labels, list(zip(_BUCKETS, accumulate(one.counts), strict=True)), one.total_s)
            if is_told:
                named = dict(zip(self._labels, labels, strict=True))
                family.samples.append(Sample(f"{self._name}_created", named, one.began))
        yield family


def _are_beginnings_told() -> bool:
    """Tells whether ``_created`` is shown, as `prometheus_client` was told: by a variable of its own, or by a call."""
    [probe] = Counter("probe", "", registry=None).collect()
    return any(sample.name.endswith("_created") for sample in probe.samples)
