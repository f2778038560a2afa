"""When requests are due. A process says how they follow one another, at one per unit; a pace says how long a unit is.

So every process can be had at every rate, rising ones included. Everything is drawn from the `dice` that is passed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

from pdproxy.loadtest.errors import WorkloadError

Process = Literal["poisson", "gamma", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`rate` arrivals per second, reached in a straight line from `from_rate` in the first `ramp_s` seconds."""

    rate: float
    ramp_s: float = 0.0
    from_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise WorkloadError(f"a rate of {self.rate:g} requests per second: it has to be above 0")
        if self.ramp_s < 0 or self.from_rate < 0:
            raise WorkloadError("a ramp's length and its first rate must not be negative")

    @property
    def num_in_ramp(self) -> float:
        """Arrivals, on average."""
        return (self.from_rate + self.rate) * self.ramp_s / 2

    def time_of(self, units: float) -> float:
        """When so many have arrived, on average; in seconds."""
        if units >= self.num_in_ramp:
            return self.ramp_s + (units - self.num_in_ramp) / self.rate
        slope = (self.rate - self.from_rate) / self.ramp_s
        root = math.sqrt(self.from_rate**2 + 2 * slope * units)
        return 2 * units / (self.from_rate + root) if units else 0.0  # as good as a quotient by `slope`, which may be 0


def arrivals(process: Process, pace: Pace, dice: random.Random, *, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds from the start, without an end. `burstiness` is Gamma's: its gaps' variance at the same mean."""
    return map(pace.time_of, _units(process, dice, burstiness))


def _units(process: Process, dice: random.Random, burstiness: float) -> Iterator[float]:
    if process == "constant":
        return map(float, count())
    if process == "poisson":
        return _gamma(dice, 1.0)
    if burstiness <= 0:
        raise WorkloadError(f"a burstiness of {burstiness:g}: it has to be above 0, and 1 is Poisson's")
    return _gamma(dice, burstiness)


def _gamma(dice: random.Random, burstiness: float) -> Iterator[float]:
    """Gaps of mean 1 and variance `burstiness`; with 1 they are exponential: a Poisson process."""
    at = 0.0
    while True:
        at += dice.gammavariate(1 / burstiness, burstiness)
        yield at
