"""The module shows the instances behind a proxy over time: which were ready, which were not, and what each has
served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pdproxy.loadtest.record import Moment
from pdproxy.loadtest.report.html import figure, legend, pictures, table
from pdproxy.loadtest.report.scale import Scale, Tick
from pdproxy.loadtest.report.sides import Shown
from pdproxy.loadtest.report.svg import BOTTOM, TOP, Panel, bar
from pdproxy.loadtest.report.timelines import WIDTH, flags, time_axis
from pdproxy.loadtest.report.words import NOTHING, number, share

ROW = 20
STYLES = {"ready": "good", "draining": "faint"}
"""The style of each state; every other state is trouble."""


def instances(shown: Sequence[Shown]) -> str:
    """Returns the figure of the instances; it is empty where no run had a proxy that tells of them."""
    telling = [one for one in shown if any(moment.states for moment in one.run.moments)]
    if not telling:
        return ""
    return figure(
        "Instances",
        "State of each, as the proxy saw it.",
        legend([("good", "ready"), ("faint", "draining"), ("bad", "anything else")]),
        pictures(*(_strips(one) for one in telling), is_wide=True),
        *(_numbers(one) for one in telling),
    )


def _names(one: Shown) -> list[str]:
    return list(dict.fromkeys(name for moment in one.run.moments for name in moment.states))


def _strips(one: Shown) -> str:
    names = _names(one)
    ticks = tuple(Tick(len(names) - index - 0.5, name) for index, name in enumerate(names))
    panel = Panel(
        title=one.label,
        x=time_axis(one.run.head.wall_s),
        y=Scale(0.0, float(len(names)), lambda value: value, ticks),
        x_title="seconds since the run began",
        width=WIDTH,
        height=TOP + BOTTOM + ROW * len(names),
    )
    bars = [
        bar(panel, begin_s, end_s, len(names) - row - 0.85, len(names) - row - 0.15, style_of(state), f"{name} {state}")
        for row, name in enumerate(names)
        for begin_s, end_s, state in spells(one.run.moments, name)
    ]
    return panel.drawn(*bars, flags(panel, [one], are_named=False))


def spells(moments: Sequence[Moment], name: str) -> Iterator[tuple[float, float, str]]:
    """Yields begin, end and state of each stretch in which an instance's state stays the same. It leaves out the time
    in which the instance was not in the fleet."""
    seen = [(moment.at_s, moment.states.get(name)) for moment in moments if moment.states]
    changes = [point for index, point in enumerate(seen) if not index or point[1] != seen[index - 1][1]]
    for (begin_s, state), (end_s, _) in pairwise([*changes, seen[-1]] if seen else []):
        if state is not None and end_s > begin_s:
            yield begin_s, end_s, state


def style_of(state: str) -> str:
    return STYLES.get(state, "bad")


def _numbers(one: Shown) -> str:
    served = {**one.summary.prefillers, **one.summary.decoders}
    rows = [
        [name, f"{served.get(name, 0):,}", share(_ready_share(one, name)), *_slots(one.run.moments, name)]
        for name in _names(one)
    ]
    headings = ["instance", "answers", "of the time ready", "slots held, mean", "most", "slots", "waiting, most"]
    return table(headings, rows, one.label)


def _ready_share(one: Shown, name: str) -> float | None:
    found = list(spells(one.run.moments, name))
    whole_s = sum(end_s - begin_s for begin_s, end_s, _ in found)
    ready_s = sum(end_s - begin_s for begin_s, end_s, state in found if state == "ready")
    return ready_s / whole_s if whole_s else None


def _slots(moments: Sequence[Moment], name: str) -> list[str]:
    held = [moment.held[name] for moment in moments if name in moment.held]
    if not held:
        return [NOTHING] * 4
    capacity = max((moment.capacity.get(name, 0) for moment in moments), default=0)
    waiting = max((moment.waiting.get(name, 0) for moment in moments), default=0)
    return [number(sum(held) / len(held)), f"{max(held)}", f"{capacity}", f"{waiting}"]
