"""The module shows where the time went: a stack per piece of time, and each phase in figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pdproxy.loadtest.latency import COLUMNS, Distribution, told_of
from pdproxy.loadtest.record import Record
from pdproxy.loadtest.report.bins import Bins
from pdproxy.loadtest.report.html import figure, folded, legend, pictures, table
from pdproxy.loadtest.report.scale import Scale
from pdproxy.loadtest.report.sides import Shown
from pdproxy.loadtest.report.svg import Panel, bar, colour
from pdproxy.loadtest.report.timelines import HEIGHT, WIDTH, flags, time_axis, warm_ups
from pdproxy.loadtest.report.words import NOTHING, milliseconds, seconds, share
from pdproxy.loadtest.summary import OUTER_PHASES, PROXY_PHASES, outer_split

MOST_BINS = 60
TITLES = {
    "tokenize": "tokenize",
    "slot_wait": "slot wait",
    "prefill": "prefill",
    "kv_wait": "KV wait",
    "first_byte": "handover to first decode byte",
    "decode": "decode",
    "unsent": "due, not yet sent",
    "first_token": "sent, no token yet",
    "rest": "first token to the end",
}

Split = Callable[[Record], Mapping[str, float]]
Means = list[dict[str, float]]
"""The mean seconds of each phase, for each piece of time."""


def phases(shown: Sequence[Shown]) -> str:
    """Returns the figures of the phases: by the proxy's own clock where it told, and as seen from outside for every
    server."""
    inner = [one for one in shown if one.summary.phases]
    outer = [one for one in shown if one.summary.outer_phases]
    parts = []
    if inner:
        parts.append(
            _figure(
                "Where the time went, by the proxy",
                "Mean of the requests due in each piece of time, by the proxy's Server-Timing header; of the attempt "
                "that answered.",
                PROXY_PHASES,
                inner,
                lambda record: record.phases,
                lambda one: one.summary.phases,
            )
        )
    if outer:
        parts.append(
            _figure(
                "Where the time went, from outside",
                "Mean of the streamed requests due in each piece of time, by the generator's clock; any server can be "
                "looked at in this way.",
                OUTER_PHASES,
                outer,
                outer_split,
                lambda one: one.summary.outer_phases,
            )
        )
    return "".join(parts)


def _figure(
    title: str,
    note: str,
    names: Sequence[str],
    shown: Sequence[Shown],
    split: Split,
    summed: Callable[[Shown], Mapping[str, Distribution]],
) -> str:
    span_s = max(one.run.head.wall_s for one in shown)
    bins = Bins.over(span_s, MOST_BINS)
    means = [_means(one, bins, split) for one in shown]
    y = Scale.rising([sum(one.values()) for run in means for one in run], num_ticks=4, label=seconds)
    there = [name for name in names if any(name in summed(one) for one in shown)]
    return figure(
        title,
        note,
        legend((colour(index), TITLES[name]) for index, name in enumerate(names) if name in there),
        pictures(*(_stacks(one, run, bins, y, names) for one, run in zip(shown, means, strict=True)), is_wide=True),
        *(_numbers(one.label, there, summed(one)) for one in shown),
        folded(
            "the stacks in figures",
            *(_stack_numbers(one, run, bins, there) for one, run in zip(shown, means, strict=True)),
        ),
    )


def _means(one: Shown, bins: Bins, split: Split) -> Means:
    pieces = bins.sorted_in((record for record in one.run.records if record.is_ok), lambda record: record.due_s)
    return [_mean([found for record in piece if (found := split(record))]) for piece in pieces]


def _mean(splits: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean seconds by phase. A phase that a request did not go through took it no time."""
    names = dict.fromkeys(name for split in splits for name in split)
    return {name: sum(split.get(name, 0.0) for split in splits) / len(splits) for name in names}


def _stacks(one: Shown, means: Means, bins: Bins, y: Scale, names: Sequence[str]) -> str:
    panel = Panel(
        title=one.label,
        x=time_axis(bins.end(bins.num - 1)),
        y=y,
        x_title="seconds since the run began",
        width=WIDTH,
        height=HEIGHT + 30,
    )
    bars = []
    for index, mean in enumerate(means):
        low = 0.0
        left, right = bins.begin(index) + bins.width_s * 0.08, bins.end(index) - bins.width_s * 0.08
        for place, name in enumerate(names):
            if mean.get(name, 0.0) > 0:
                told = f"{seconds(bins.begin(index))}: {TITLES[name]} {milliseconds(mean[name])} ms"
                bars.append(bar(panel, left, right, low, low + mean[name], colour(place), told))
                low += mean[name]
    return panel.drawn(warm_ups(panel, [one]), *bars, flags(panel, [one], are_named=True))


def _numbers(label: str, names: Sequence[str], found: Mapping[str, Distribution]) -> str:
    whole_s = sum((one.mean or 0.0) * one.count for one in found.values())
    rows = []
    for name in names:
        one = found.get(name)
        if one is None:
            rows.append([TITLES[name], *[NOTHING] * (len(COLUMNS) + 2)])
            continue
        part = (one.mean or 0.0) * one.count / whole_s if whole_s else None
        figures = [milliseconds(told_of(one, column)) for column in COLUMNS]
        rows.append([TITLES[name], share(part), f"{one.count:,}", *figures])
    return table(["phase", "of the time", "count", *COLUMNS.values()], rows, f"{label}: milliseconds")


def _stack_numbers(one: Shown, means: Means, bins: Bins, names: Sequence[str]) -> str:
    rows = [
        [
            f"{seconds(bins.begin(index))} – {seconds(bins.end(index))}",
            *(milliseconds(mean[name]) if name in mean else NOTHING for name in names),
        ]
        for index, mean in enumerate(means)
        if mean
    ]
    return table(["due", *(TITLES[name] for name in names)], rows, f"{one.label}: mean milliseconds")
