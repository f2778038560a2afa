"""The module shows what a service gives at each rate: answers within the target beside those asked for, and its
percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pdproxy.loadtest.report.html import figure, legend, pictures, runs_legend, table
from pdproxy.loadtest.report.scale import Scale
from pdproxy.loadtest.report.sides import Shown
from pdproxy.loadtest.report.svg import Panel, Point, colour, dot, level, line
from pdproxy.loadtest.report.words import NOTHING, milliseconds, rate, seconds, share
from pdproxy.loadtest.slo import ERRORS, Objective, Slo

WITHOUT_TARGET = Slo.parse("ttft:p99<1000,tpot:p95<1000,e2e:p99<1000")
"""The percentiles which are worth a look where no target was given."""


def rates(shown: Sequence[Shown], slo: Slo) -> str:
    """Returns the figure that shows goodput and each objective against the rate."""
    by_side = _by_side(shown)
    objectives = [one for one in (slo if slo.objectives else WITHOUT_TARGET).objectives if one.metric != ERRORS]
    limits = f"Good is what was answered within {slo}." if slo.objectives else "Every whole answer is good."
    return figure(
        "Goodput against rate",
        f"{limits} Good requests and whole answers per second, both until the last answer had come.",
        runs_legend((runs[0].index, name) for name, runs in by_side.items()),
        legend([("faint", "all that was asked for"), ("dashed", "whole answers"), ("hollow", "generator was late")]),
        pictures(
            _goodput(by_side),
            *(_objective(objective, by_side, has_limit=bool(slo.objectives)) for objective in objectives),
        ),
        _numbers(shown, objectives),
    )


def _by_side(shown: Sequence[Shown]) -> Mapping[str, list[Shown]]:
    """Returns each side's runs by its name, in the order of their rates."""
    sides: dict[int, list[Shown]] = {}
    for one in sorted(shown, key=lambda one: one.rate or 0.0):
        sides.setdefault(one.index, []).append(one)
    return {runs[0].side: runs for _, runs in sorted(sides.items())}


def _rate_axis(by_side: Mapping[str, Sequence[Shown]]) -> Scale:
    return Scale.rising(one.rate or 0.0 for runs in by_side.values() for one in runs)


def _goodput(by_side: Mapping[str, Sequence[Shown]]) -> str:
    good = {name: [_point(one, one.summary.goodput_rps) for one in runs] for name, runs in by_side.items()}
    whole = {name: [_point(one, one.summary.throughput_rps) for one in runs] for name, runs in by_side.items()}
    x = _rate_axis(by_side)
    panel = Panel(
        title="good answers per second",
        x=x,
        y=Scale.rising([x.high / 1.06, *(y for points in (*good.values(), *whole.values()) for _, y in points)]),
        x_title="requests per second",
    )
    marks = [line(panel, [(0.0, 0.0), (x.high, x.high)], "faint", "all that was asked for")]
    for name, runs in by_side.items():
        style = colour(runs[0].index)
        marks.append(line(panel, whole[name], f"{style} dashed", f"{name}: whole answers"))
        marks.append(line(panel, good[name], style, name))
        marks.append(_dots(panel, runs, good[name]))
    return panel.drawn(*marks)


def _objective(objective: Objective, by_side: Mapping[str, Sequence[Shown]], *, has_limit: bool) -> str:
    found = {name: list(_values(objective, runs)) for name, runs in by_side.items()}
    values = [y for points in found.values() for _, (_, y) in points]
    panel = Panel(
        title=f"{objective.metric.upper()} p{objective.percent:g}",
        x=_rate_axis(by_side),
        y=Scale.durations([*values, objective.limit] if has_limit else values),
        x_title="requests per second",
    )
    marks = [level(panel, objective.limit, f"< {seconds(objective.limit)}", "limit")] if has_limit else []
    for name, runs in by_side.items():
        points = [point for _, point in found[name]]
        marks.append(line(panel, points, colour(runs[0].index), name))
        marks.append(_dots(panel, [one for one, _ in found[name]], points))
    return panel.drawn(*marks)


def _values(objective: Objective, runs: Sequence[Shown]) -> Iterator[tuple[Shown, Point]]:
    """Yields each run with its point, where there is a value. An infinite value is in the table alone."""
    for one in runs:
        value = objective.value(one.run.measured)
        if value is not None and 0 < value < math.inf and one.rate is not None:
            yield one, (one.rate, value)


def _dots(panel: Panel, runs: Sequence[Shown], points: Sequence[Point]) -> str:
    """Returns the dots of the runs; a dot is hollow where the generator was late."""
    return "".join(
        dot(
            panel,
            point,
            colour(one.index) + ("" if one.summary.is_trusted else " hollow"),
            f"{one.label}: {rate(one.summary.goodput_rps)} good answers/s",
        )
        for one, point in zip(runs, points, strict=True)
    )


def _point(one: Shown, per_s: float | None) -> Point:
    return (one.rate or 0.0, per_s or 0.0)


def _numbers(shown: Sequence[Shown], objectives: Sequence[Objective]) -> str:
    rows = []
    for one in sorted(shown, key=lambda one: (one.index, one.rate or 0.0)):
        found = one.summary
        rows.append(
            [
                one.label,
                rate(found.offered_rps),
                rate(found.throughput_rps),
                rate(found.goodput_rps),
                share(found.good_share),
                *(_told(objective.value(one.run.measured)) for objective in objectives),
                f"{found.num_failed}",
                {True: "yes", False: "no", None: NOTHING}[found.is_slo_met] if found.is_slo_judged else "not judged",
                "" if found.is_trusted else "generator late",
            ]
        )
    headings = ["", "asked/s", "answered/s", "good/s", "good"]
    headings += [f"{one.metric.upper()} p{one.percent:g} ms" for one in objectives]
    return table([*headings, "failed", "target met", ""], rows, "By rate")


def _told(value: float | None) -> str:
    return "failed" if value == math.inf else milliseconds(value)
