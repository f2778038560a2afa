"""The module shows what happened when: requests under way, slots, queue, answers, errors, first tokens, and what was
done meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdproxy.loadtest.latency import INTERRUPTED, distribution_of, is_failed
from pdproxy.loadtest.record import Moment, Record
from pdproxy.loadtest.report.bins import Bins
from pdproxy.loadtest.report.html import figure, legend, pictures, runs_legend, table
from pdproxy.loadtest.report.scale import Scale
from pdproxy.loadtest.report.sides import Shown
from pdproxy.loadtest.report.svg import Panel, Point, bar, colour, flag, specks, stairs, thinned
from pdproxy.loadtest.report.words import NOTHING, milliseconds, number, seconds
from pdproxy.loadtest.summary import told

WIDTH, HEIGHT = 940, 190
MOST_BINS, MOST_ROWS = 160, 12
MOST_SPECKS = 1500
NOTE = (
    "Seconds since the run began. Dashed lines down: what was done to the target. Requests under way are those that "
    "have been sent and have not ended{}; slots and queue are the proxy's own, all decoders together."
)
FAR = 4
"""The factor up to which slots are drawn: if there are more than this many times the slots that were ever held, the
report tells their number and does not draw it."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """_Curve is what one panel shows of a run."""

    title: str
    value: Callable[[Moment], float | None]


_SLOTS = _Curve("slots held", lambda moment: sum(moment.held.values()) if moment.capacity or moment.held else None)
_SEEN = (
    _Curve("requests under way, here", lambda moment: moment.num_open),
    _Curve("requests under way, at the proxy", lambda moment: moment.in_flight),
    _SLOTS,
    _Curve("requests waiting for slots", lambda moment: sum(moment.waiting.values()) if moment.capacity else None),
)


def timelines(shown: Sequence[Shown]) -> str:
    """Returns one figure with a panel for each thing that was seen, one below the other."""
    span_s = max(one.run.head.wall_s for one in shown)
    drawn = [_moments(curve, shown, span_s) for curve in _SEEN]
    drawn += [_answers(shown, span_s), _first_tokens(shown, span_s)]
    return figure(
        "Timelines",
        NOTE.format("" if len(shown) == 1 else "; one colour per run"),
        runs_legend((one.index, one.label) for one in shown),
        pictures(*filter(None, drawn), is_wide=True),
        legend(_keys(shown)),
        *(_numbers(one) for one in shown),
    )


def _keys(shown: Sequence[Shown]) -> Iterator[tuple[str, str]]:
    """Yields the style and name of what is drawn in all runs alike."""
    if any(one.summary.num_failed for one in shown):
        yield "bad", "failed"
    if len(shown) > 1 and any(one.summary.num_failed for one in shown):
        yield "dashed", "failures per second, in the run's colour"
    if _near_limits(shown):
        yield "faint", "slots there are"
    if any(one.run.head.warmup_s for one in shown):
        yield "warmup", "warm-up, which does not count"


def warm_ups(panel: Panel, shown: Iterable[Shown]) -> str:
    """Returns the marks of the warm-ups of all runs, behind everything else: that time does not count."""
    ends = sorted({min(one.run.head.warmup_s, panel.x.high) for one in shown} - {0.0})
    return "".join(bar(panel, 0.0, end_s, panel.y.low, panel.y.high, "warmup") for end_s in ends)


def flags(panel: Panel, shown: Iterable[Shown], *, are_named: bool) -> str:
    """Returns the flags of the events of all runs; an event that several runs have is drawn once."""
    events = dict.fromkeys((round(event.at_s, 1), told(event)) for one in shown for event in one.run.events)
    marks = [flag(panel, at_s, what if are_named else "", index) for index, (at_s, what) in enumerate(sorted(events))]
    return "".join(marks)


def time_axis(span_s: float) -> Scale:
    return Scale.linear(0.0, span_s, num_ticks=10)


def _moments(curve: _Curve, shown: Sequence[Shown], span_s: float) -> str:
    """Returns the panel of a curve; it is empty where no run saw such a thing."""
    lines = [_points(one.run.moments, curve.value) for one in shown]
    if not any(lines):
        return ""
    limits = _near_limits(shown) if curve is _SLOTS else []
    panel = Panel(
        title=curve.title + (_of_how_many(shown) if curve is _SLOTS else ""),
        x=time_axis(span_s),
        y=Scale.rising([y for points in (*lines, *limits) for _, y in points], num_ticks=4),
        width=WIDTH,
        height=HEIGHT,
    )
    return panel.drawn(
        warm_ups(panel, shown),
        *(stairs(panel, points, "faint") for points in limits),
        *(stairs(panel, points, colour(one.index), one.label) for points, one in zip(lines, shown, strict=True)),
        flags(panel, shown, are_named=True),
    )


def _points(moments: Iterable[Moment], value: Callable[[Moment], float | None]) -> list[Point]:
    """Returns a point where the value changes, and at both ends: a value that stays needs no point."""
    seen = [(moment.at_s, found) for moment in moments if (found := value(moment)) is not None]
    last = len(seen) - 1
    return [point for index, point in enumerate(seen) if index in (0, last) or point[1] != seen[index - 1][1]]


def _near_limits(shown: Sequence[Shown]) -> list[list[Point]]:
    """Returns how many slots there were over time, run by run. It is empty where there were far more slots than were
    ever held, because then nothing else could be seen."""
    limits = [_limit(one) for one in shown]
    held = [amount for one in shown for _, amount in _points(one.run.moments, _SLOTS.value)]
    highest = max((amount for points in limits for _, amount in points), default=0)
    return limits if highest <= FAR * max(held, default=0) else []


def _of_how_many(shown: Sequence[Shown]) -> str:
    most = {f"{max(amount for _, amount in points):,g}" for one in shown if (points := _limit(one))}
    return f" of {most.pop()}" if len(most) == 1 else ""


def _limit(one: Shown) -> list[Point]:
    return _points(one.run.moments, lambda moment: sum(moment.capacity.values()) if moment.capacity else None)


def _answers(shown: Sequence[Shown], span_s: float) -> str:
    """Returns the panel of answers and failures per second, by the time at which they had come."""
    bins = Bins.over(span_s, MOST_BINS)
    whole = [_per_s(one, bins, is_ok=True) for one in shown]
    failed = [_per_s(one, bins, is_ok=False) for one in shown]
    panel = Panel(
        title=f"whole answers and failures per second (over {bins.width_s:g} s)",
        x=time_axis(span_s),
        y=Scale.rising([y for points in (*whole, *failed) for _, y in points], num_ticks=4),
        width=WIDTH,
        height=HEIGHT,
    )
    return panel.drawn(
        warm_ups(panel, shown),
        *(stairs(panel, points, colour(one.index), one.label) for points, one in zip(whole, shown, strict=True)),
        *(
            stairs(panel, points, "bad" if len(shown) == 1 else f"{colour(one.index)} dashed", f"{one.label}: failed")
            for points, one in zip(failed, shown, strict=True)
            if any(y for _, y in points)
        ),
        flags(panel, shown, are_named=False),
    )


def _per_s(one: Shown, bins: Bins, *, is_ok: bool) -> list[Point]:
    chosen = [record for record in one.run.records if (record.is_ok if is_ok else is_failed(record))]
    pieces = bins.sorted_in(chosen, lambda record: record.done_s)
    points = [(bins.begin(index), len(piece) / bins.width_s) for index, piece in enumerate(pieces)]
    return [*points, (min(bins.end(bins.num - 1), one.run.head.wall_s), points[-1][1])]


def _first_tokens(shown: Sequence[Shown], span_s: float) -> str:
    """Returns the panel of each request's time to first token, by when it was due. A request that is not streamed
    counts with its whole time. Failures have no such time, and lie on the upper edge."""
    runs = [one.run for one in shown]
    answered = [thinned(list(_answered(one.run.records)), MOST_SPECKS) for one in shown]
    failed = [thinned([(one.due_s, 0.0) for one in run.records if is_failed(one)], MOST_SPECKS) for run in runs]
    if not any(answered):
        return ""
    panel = Panel(
        title="time to first token, by when the request was due (on the upper edge: failed)",
        x=time_axis(span_s),
        y=Scale.durations(y for points in answered for _, y in points),
        x_title="seconds since the run began",
        width=WIDTH,
        height=HEIGHT + 30,
    )
    return panel.drawn(
        warm_ups(panel, shown),
        *(specks(panel, points, colour(one.index)) for points, one in zip(answered, shown, strict=True)),
        *(specks(panel, [(at_s, panel.y.high) for at_s, _ in dues], "failures") for dues in failed),
        flags(panel, shown, are_named=False),
    )


def _answered(records: Iterable[Record]) -> Iterator[Point]:
    for record in records:
        took_s = record.ttft_s if record.is_stream else record.e2e_s
        if took_s is not None and not record.error:
            yield record.due_s, max(took_s, 1e-6)


def _numbers(one: Shown) -> str:
    """Returns the same figures as a table of about a dozen rows."""
    bins = Bins.over(one.run.head.wall_s, MOST_ROWS)
    due = bins.sorted_in(one.run.records, lambda record: record.due_s)
    done = bins.sorted_in(one.run.records, lambda record: record.done_s)
    seen = bins.sorted_in(one.run.moments, lambda moment: moment.at_s)
    rows = []
    for index in range(bins.num):
        ttft = distribution_of(due[index], "ttft")
        rows.append(
            [
                f"{seconds(bins.begin(index))} – {seconds(bins.end(index))}",
                f"{len(due[index])}",
                f"{sum(record.is_ok for record in done[index])}",
                f"{sum(map(is_failed, done[index]))}",
                *(_mean_and_most(seen[index], curve.value) for curve in _SEEN),
                milliseconds(ttft.p50),
                milliseconds(ttft.p99),
                _happened(one, bins.begin(index), bins.end(index)),
            ]
        )
    headings = ["time", "due", "answered", "failed", "under way", "at the proxy", "slots held", "waiting"]
    headings += ["TTFT p50 ms", "TTFT p99 ms", "what was done"]
    return table(headings, rows, f"{one.label}: over time; under way, slots and waiting as mean, most")


def _mean_and_most(moments: Sequence[Moment], value: Callable[[Moment], float | None]) -> str:
    found = [amount for moment in moments if (amount := value(moment)) is not None]
    return f"{number(sum(found) / len(found))}, {max(found):g}" if found else NOTHING


def _happened(one: Shown, begin_s: float, end_s: float) -> str:
    return "; ".join(_names(one, begin_s, end_s))


def _names(one: Shown, begin_s: float, end_s: float) -> Iterator[str]:
    for event in one.run.events:
        if begin_s <= event.at_s < end_s:
            yield f"{event.at_s:.1f} s {told(event)}"
    num_cut = sum(record.error == INTERRUPTED and begin_s <= record.done_s < end_s for record in one.run.records)
    if num_cut:
        yield f"{num_cut} cut off by the generator"
