"""The module looks for the highest rate that meets a target: it doubles the rate until the target is missed, then
halves the distance.

Which rate comes next is a plain function of what was found so far (`Search`); the measuring is done elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.record import Run
from pdproxy.loadtest.slo import Slo, all_met
from pdproxy.loadtest.workload import Workload

LOWEST = 1 / 64
"""The lowest rate that a sweep looks at, as a share of the first rate."""
MOST_TRIES = 3
"""The most times that a sweep measures one rate: a run in which the generator was too late tells nothing about the
rate."""


@dataclass(slots=True)
class Search:
    """Search looks from `first` upwards, not beyond `most`. It is done when the rate that meets the target and the one
    that does not are `precision` apart (0.05: the one is a twentieth above the other), or after `most_runs`.

    Mutable state: the highest rate that met it, the lowest that did not, and how many were looked at.
    """

    first: float
    most: float = math.inf
    precision: float = 0.05
    most_runs: int = 16
    best: float | None = field(default=None, init=False)
    broken: float | None = field(default=None, init=False)
    num_runs: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.most or not self.precision > 0 or self.most_runs < 1:
            raise LoadTestError("a sweep's first rate is above 0 and not above its last, its precision is above 0")

    def next_rate(self) -> float | None:
        """Returns the next rate to measure, or None where there is nothing more to find out."""
        if self.num_runs >= self.most_runs:
            return None
        if self.broken is None:
            return self._higher()
        if self.best is None:
            lower = self.broken / 2
            return lower if lower >= self.first * LOWEST else None
        if self.broken / self.best <= 1 + self.precision:
            return None
        return (self.best + self.broken) / 2

    def found(self, rate: float, *, is_met: bool) -> None:
        """Notes whether a rate met the target."""
        self.num_runs += 1
        if is_met:
            self.best = rate if self.best is None else max(self.best, rate)
        else:
            self.broken = rate if self.broken is None else min(self.broken, rate)

    def _higher(self) -> float | None:
        if self.best is None:
            return self.first
        return min(self.best * 2, self.most) if self.best < self.most else None


@dataclass(frozen=True, slots=True)
class Step:
    """Step is one rate of a sweep, with its run."""

    rate: float
    run: Run
    is_met: bool
    is_known: bool = True
    """False where the generator was late, so that it is not known whether the target would have been met."""


Measure = Callable[[Workload], Awaitable[Run]]
Tell = Callable[[Step], None]


async def sweep(search: Search, workload: Workload, slo: Slo, measure: Measure, tell: Tell) -> list[Step]:
    """Makes a sweep and returns its steps. Each rate is measured when the answers of the one before have all come. A
    rate at which the generator was late, by as much as matters, is measured again. If that is so every time, the rate
    is not judged, and the search goes on below it: what it finds is a lower bound. A run that was stopped ends the
    sweep early, and is the last one.

    `tell` is told of each step as it ends. Raises `LoadTestError` where nothing is asked of the target.
    """
    check_target(slo)
    steps: list[Step] = []
    while (rate := search.next_rate()) is not None:
        run = await _in_time(measure, workload, rate, slo)
        verdict = _verdict(run, slo)
        steps.append(Step(rate, run, verdict is True, verdict is not None))
        tell(steps[-1])
        if run.head.is_interrupted:
            break
        search.found(rate, is_met=steps[-1].is_met)
    return steps


def check_target(slo: Slo) -> None:
    """Raises `LoadTestError` where the target has no objectives."""
    if not slo.objectives:
        raise LoadTestError("a sweep needs a target to hold rates against: give --slo, as ttft:p99<0.5,tpot:p95<0.05")


async def _in_time(measure: Measure, workload: Workload, rate: float, slo: Slo) -> Run:
    """Returns the first run of which it is known whether it met the target, else the last one there is."""
    for again in range(MOST_TRIES):
        run = await measure(at_rate(workload, rate, again))
        if _verdict(run, slo) is not None or run.head.is_interrupted:
            break
    return run


def _verdict(run: Run, slo: Slo) -> bool | None:
    """Tells whether the run met the target; None where the generator was too late to tell."""
    return all_met(slo.judge(run.measured, run.health))


def at_rate(workload: Workload, rate: float, again: int = 0) -> Workload:
    """Returns the workload at another rate. Each rate has questions of its own, and the same ones in every sweep.
    `again` counts the repetitions at one rate: each asks the same traffic in other words. Otherwise the engine would
    find prompts in its cache that were asked before."""
    return replace(workload.at_rate(rate), seed=workload.seed + round(rate * 1000), edition=again)
