"""The module draws by hand: a panel with its axes, and lines, bars and marks on it, as text of SVG.

It does not say colours but names them: the page has the classes ``c0``, ``c1`` … for light and for dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from pdproxy.loadtest.report.scale import Scale

NUM_COLOURS = 8
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 26, 40
"""The room around the axes, in pixels, for what is written there."""
LETTER_PX = 7.2
"""The approximate width, in pixels, of a letter in the page's small print."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Panel is one pair of axes. Its `x_title` is empty where the panel below has the same axis."""

    title: str
    x: Scale
    y: Scale
    x_title: str = ""
    y_title: str = ""
    width: int = 460
    height: int = 260

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def place(self, point: Point) -> Point:
        x, y = point
        return (LEFT + self.x.at(x) * (self.right - LEFT), self.bottom - self.y.at(y) * (self.bottom - TOP))

    def drawn(self, *marks: str) -> str:
        """Returns the whole picture; its axes lie below what is on them."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">'
            f"{''.join(self._axes())}{''.join(marks)}</svg>"
        )

    def _axes(self) -> Iterable[str]:
        yield text(LEFT, TOP - 10, self.title, "title")
        for tick in self.y.ticks:
            _, y = self.place((self.x.low, tick.value))
            yield f'<line class="grid" x1="{LEFT}" x2="{px(self.right)}" y1="{px(y)}" y2="{px(y)}"/>'
            yield text(LEFT - 6, y + 4, tick.label, "tick end")
        taken = -math.inf
        for tick in self.x.ticks:
            x, _ = self.place((tick.value, self.y.low))
            yield f'<line class="grid" x1="{px(x)}" x2="{px(x)}" y1="{TOP}" y2="{px(self.bottom)}"/>'
            half = len(tick.label) * LETTER_PX / 2
            if x - half > taken:
                taken = x + half + 4
                yield text(min(x, self.width - half), self.bottom + 15, tick.label, "tick middle")
        yield f'<path class="frame" d="M{LEFT} {TOP}V{px(self.bottom)}H{px(self.right)}"/>'
        if self.x_title:
            yield text((LEFT + self.right) / 2, self.height - 8, self.x_title, "axis middle")
        if self.y_title:
            middle = (TOP + self.bottom) / 2
            turned = f'transform="translate(13 {px(middle)}) rotate(-90)"'
            yield f'<text class="axis middle" {turned}>{escape(self.y_title)}</text>'


def line(panel: Panel, points: Sequence[Point], style: str, told: str = "") -> str:
    """Returns a line through all points; `told` is the text that a pointer on the line shows."""
    if not points:
        return ""
    path = "L".join(f"{px(x)} {px(y)}" for x, y in map(panel.place, points))
    return f'<path class="line {style}" d="M{path}">{_told(told)}</path>'


def stairs(panel: Panel, points: Sequence[Point], style: str, told: str = "") -> str:
    """Returns the line of a value that stays until the next one."""
    steps = [points[0]] if points else []
    for (_, before), (x, y) in pairwise(points):
        steps += [(x, before), (x, y)]
    return line(panel, steps, style, told)


def dot(panel: Panel, point: Point, style: str, told: str) -> str:
    x, y = panel.place(point)
    return f'<circle class="dot {style}" cx="{px(x)}" cy="{px(y)}" r="4">{_told(told)}</circle>'


def specks(panel: Panel, points: Iterable[Point], style: str) -> str:
    """Returns many points as one path, because nobody looks at a single one of them."""
    path = "".join(f"M{px(x)} {px(y)}h0" for x, y in map(panel.place, points))
    return f'<path class="specks {style}" d="{path}"/>' if path else ""


def bar(panel: Panel, left: float, right: float, low: float, high: float, style: str, told: str = "") -> str:
    """Returns a bar between two values on each axis."""
    (x1, y1), (x2, y2) = panel.place((left, high)), panel.place((right, low))
    return (
        f'<rect class="bar {style}" x="{px(x1)}" y="{px(y1)}" width="{px(max(x2 - x1, 0.4))}" '
        f'height="{px(max(y2 - y1, 0))}">{_told(told)}</rect>'
    )


def level(panel: Panel, value: float, label: str, style: str) -> str:
    """Returns a line across, as for a limit; it is empty where the line would not be in the picture."""
    if not panel.y.low <= value <= panel.y.high:
        return ""
    _, y = panel.place((panel.x.low, value))
    across = f'<line class="level {style}" x1="{LEFT}" x2="{px(panel.right)}" y1="{px(y)}" y2="{px(y)}"/>'
    return across + text(panel.right - 2, y - 4, label, "tick end")


def flag(panel: Panel, at: float, label: str, num_before: int = 0) -> str:
    """Returns the mark of an event: a line down, and its name beside the top. The name of each further one is a line
    lower; after four it begins again at the top."""
    x, _ = panel.place((at, panel.y.low))
    down = f'<line class="flag" x1="{px(x)}" x2="{px(x)}" y1="{TOP}" y2="{px(panel.bottom)}"/>'
    if not label:
        return down
    y, is_far = TOP + 10 + 12 * (num_before % 4), x > panel.width * 0.7
    return down + (text(x - 4, y, label, "event end") if is_far else text(x + 4, y, label, "event"))


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text class="{style.strip()}" x="{px(x)}" y="{px(y)}">{escape(words)}</text>'


def colour(index: int) -> str:
    return f"c{index % NUM_COLOURS}"


def px(value: float) -> str:
    """Returns a number of pixels as text: a tenth of a pixel is enough, and short."""
    return f"{value:.1f}".removesuffix(".0")


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Returns `most` points at most: of each few points the first and the highest, so that nothing that stands
    out is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    parts = (points[begin : begin + size] for begin in range(0, len(points), size))
    return [point for part in parts for point in dict.fromkeys((part[0], max(part, key=lambda one: one[1])))]


def _told(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
