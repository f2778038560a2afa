"""The module draws how long answers took: what share of the requests was faster than what, and the tail by its
nines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pdproxy.loadtest.latency import COLUMNS, TITLES, gaps_of, percentile, seconds_of, told_of
from pdproxy.loadtest.record import Record
from pdproxy.loadtest.report.html import figure, pictures, runs_legend, table
from pdproxy.loadtest.report.scale import Scale
from pdproxy.loadtest.report.sides import Shown
from pdproxy.loadtest.report.svg import Panel, Point, colour, line
from pdproxy.loadtest.report.words import milliseconds, seconds

MOST_POINTS = 300
NUM_TAIL_POINTS = 90
SHORTEST_S = 1e-5
"""The least seconds at which a time is drawn: the axis is logarithmic, and pieces that came together are 0 s apart."""

_WHAT = {"itl": "gaps"}
"""The things that a latency's values belong to, for each latency whose values do not belong to answers."""

AtPercent = Callable[[float], float | None]


def distributions(shown: Sequence[Shown]) -> Iterator[str]:
    """Yields a figure for each latency that any of the runs has."""
    for metric, title in TITLES.items():
        there = [one for one in shown if one.summary.latencies[metric].count]
        if there:
            yield _figure(metric, title, there)


def _figure(metric: str, title: str, shown: Sequence[Shown]) -> str:
    failed = sum(one.summary.num_failed for one in shown)
    note = f"The share of {_WHAT.get(metric, 'answers')} that took at most so long; and the tail, each nine as wide as "
    note += f"the next. {failed:,} failed requests have none, and are not among them." if failed else "the next."
    return figure(
        f"{metric.upper()}: {title}",
        note,
        runs_legend((one.index, one.label) for one in shown),
        pictures(_shares(metric, shown), _tail(metric, shown)),
        numbers(metric, shown),
    )


def numbers(metric: str, shown: Iterable[Shown]) -> str:
    """Returns a table with the figures that the pictures show."""
    rows = []
    for one in shown:
        found = one.summary.latencies[metric]
        figures = [milliseconds(told_of(found, name)) for name in COLUMNS]
        rows.append([one.label, f"{found.count:,}", *figures])
    return table(["", "count", *COLUMNS.values()], rows, f"{metric.upper()} in milliseconds")


def _shares(metric: str, shown: Sequence[Shown]) -> str:
    curves = [_cumulative(at_percent(one.run.measured, metric), _count(one, metric)) for one in shown]
    panel = Panel(
        title=f"{metric.upper()}, share of {_WHAT.get(metric, 'answers')}",
        x=Scale.durations(x for curve in curves for x, _ in curve),
        y=Scale.linear(0.0, 1.0, num_ticks=5, label=lambda share: f"{share:.0%}"),
        x_title="seconds, logarithmic",
    )
    return panel.drawn(*(_line(panel, curve, one, metric) for curve, one in zip(curves, shown, strict=True)))


def _tail(metric: str, shown: Sequence[Shown]) -> str:
    scale = Scale.percents(max(_count(one, metric) for one in shown))
    curves = [list(_above_median(at_percent(one.run.measured, metric), scale, _count(one, metric))) for one in shown]
    panel = Panel(
        title=f"{metric.upper()} by percentile",
        x=scale,
        y=Scale.durations(y for curve in curves for _, y in curve),
        x_title="percentile",
    )
    return panel.drawn(*(_line(panel, curve, one, metric) for curve, one in zip(curves, shown, strict=True)))


def at_percent(records: Sequence[Record], metric: str) -> AtPercent:
    """Returns a function from a percentage to that percentile of one latency, in seconds."""
    if metric == "itl":
        return gaps_of(records).percentile
    ordered = sorted(seconds_of(records, metric))
    return lambda percent: percentile(ordered, percent)


def _cumulative(at: AtPercent, count: int) -> list[Point]:
    num_points = min(count, MOST_POINTS)
    found = [(at(100 * index / num_points), index / num_points) for index in range(1, num_points + 1)]
    points = [(max(value, SHORTEST_S), share) for value, share in found if value is not None]
    return [(points[0][0], 0.0), *points] if points else []


def _above_median(at: AtPercent, scale: Scale, count: int) -> Iterator[Point]:
    """Yields the points above the median, up to the highest percentile for which `count` values are enough."""
    for index in range(NUM_TAIL_POINTS + 1):
        percent = 100 * (1 - 0.5 * ((100 - scale.high) / 50) ** (index / NUM_TAIL_POINTS))
        value = at(percent)
        if value is not None and count * (100 - percent) >= 99.9:
            yield percent, max(value, SHORTEST_S)


def _line(panel: Panel, points: Sequence[Point], one: Shown, metric: str) -> str:
    median = one.summary.latencies[metric].p50 or 0.0
    return line(panel, points, colour(one.index), f"{one.label}, median {seconds(median)}")


def _count(one: Shown, metric: str) -> int:
    return one.summary.latencies[metric].count
