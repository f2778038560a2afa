"""The module says when requests are due. A process says how arrivals follow one another, at one per unit of time; a
pace says how long a unit is.

So every process can run at every rate, rising rates included. All chance comes from the `dice` that are passed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from pdproxy.config.options import Process
from pdproxy.loadtest.errors import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Pace means `rate` arrivals per second; in the first `ramp_s` seconds the rate goes in a straight line from
    `from_rate` to `rate`. It raises `WorkloadError` where the rate is not above 0 or a ramp value is negative."""

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
        """Returns the mean number of arrivals within the ramp."""
        return (self.from_rate + self.rate) * self.ramp_s / 2

    def time_of(self, units: float) -> float:
        """Returns the time in seconds at which `units` requests have arrived, on average."""
        if units >= self.num_in_ramp:
            return self.ramp_s + (units - self.num_in_ramp) / self.rate
        slope = (self.rate - self.from_rate) / self.ramp_s
        root = math.sqrt(self.from_rate**2 + 2 * slope * units)
        return 2 * units / (self.from_rate + root) if units else 0.0  # as good as a quotient by `slope`, which may be 0


def arrivals(process: Process, pace: Pace, dice: random.Random, *, burstiness: float = 1.0) -> Iterator[float]:
    """Yields the arrival times in seconds from the start, without an end. `burstiness` counts for Gamma only: it is the
    variance of the gaps between arrivals, at the same mean."""
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
    """Yields times whose gaps have mean 1 and variance `burstiness`; with 1 the gaps are exponential, which makes a
    Poisson process."""
    at = 0.0
    while True:
        at += dice.gammavariate(1 / burstiness, burstiness)
        yield at
