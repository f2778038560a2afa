"""The module makes axes: they turn values into a place between 0 and 1, and choose the values at which a line is worth
drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from pdproxy.loadtest.report.words import seconds

MAX_DECADES = 9
_STEPS = (1.0, 2.0, 5.0, 10.0)
NINES = (50.0, 90.0, 99.0, 99.9, 99.99)

Label = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Tick:
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Scale is an axis: `low` lies at 0 and `high` at 1. What is further out lies on the edge."""

    low: float
    high: float
    bend: Callable[[float], float]
    """Holds a function from a value to a number that is even on the axis."""
    ticks: tuple[Tick, ...]

    def at(self, value: float) -> float:
        low, high = self.bend(self.low), self.bend(self.high)
        inside = min(max(value, self.low), self.high)
        return (self.bend(inside) - low) / (high - low)

    @classmethod
    def linear(cls, low: float, high: float, *, num_ticks: int = 6, label: Label | None = None) -> Self:
        if not high > low:
            high = low + 1.0
        step = _nice_step((high - low) / num_ticks)
        first = math.ceil(round(low / step, 9))
        last = math.floor(round(high / step, 9))
        values = (index * step for index in range(first, last + 1))
        return cls(low, high, _as_it_is, tuple(Tick(value, (label or _plain)(value)) for value in values))

    @classmethod
    def rising(cls, values: Iterable[float], *, num_ticks: int = 5, label: Label | None = None) -> Self:
        """Returns a linear axis from 0 to a little above the highest value."""
        highest = max(values, default=0.0)
        return cls.linear(0.0, highest * 1.06 if highest > 0 else 1.0, num_ticks=num_ticks, label=label)

    @classmethod
    def durations(cls, values: Iterable[float]) -> Self:
        """Returns an axis over seconds above 0. It is logarithmic, with lines at 1, 2 and 5 where there is room."""
        there = [value for value in values if value > 0 and math.isfinite(value)]
        high = max(there, default=1.0) * 1.15
        low = max(min(there, default=0.001) / 1.15, high / 10**MAX_DECADES)
        decades = math.log10(high / low)
        if decades < 0.7:
            even = cls.linear(low, high, num_ticks=4).ticks
            return cls(low, high, math.log10, tuple(Tick(tick.value, seconds(tick.value)) for tick in even))
        steps = (1,) if decades > 3.2 else (1, 3) if decades > 2.2 else (1, 2, 5)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values_at = (step * 10.0**power for power in powers for step in steps)
        return cls(low, high, math.log10, tuple(Tick(v, seconds(v)) for v in values_at if low <= v <= high))

    @classmethod
    def percents(cls, num_values: int) -> Self:
        """Returns an axis from the median to the highest percentile for which `num_values` values are enough; each nine
        is as wide as the next."""
        enough = [percent for percent in NINES if num_values * (100 - percent) >= 99.9]
        high = enough[-1] if len(enough) > 1 else NINES[1]
        return cls(NINES[0], high, _nines, tuple(Tick(p, f"{p:g} %") for p in NINES if p <= high))


def _as_it_is(value: float) -> float:
    return value


def _nines(percent: float) -> float:
    return -math.log10(1 - percent / 100)


def _plain(value: float) -> str:
    return f"{value:,.10g}"


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * 0.999)
