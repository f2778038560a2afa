"""The module tells whether the generator kept up: a generator that was late says little about its target.

Three things tell it: how much of a core it used, how late it sent what was due, and how late its event loop looked at
what had come. (Poisson arrivals see the loop as it is on average; the meter has a pulse of its own for all other
loads.)
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pdproxy.loadtest.clock import TIMER_S, Clock
from pdproxy.loadtest.latency import percentile
from pdproxy.loadtest.record import GeneratorHealth

PULSE_S = 0.01
LATE_LIMIT_S = 0.005
"""The limit in seconds for the ninety-ninth percentiles. Above it the run's figures are not to be quoted."""
_YOUNG = (20_000, 20, 1_000_000)


class Meter:
    """Meter measures how well the generator keeps up.

    Mutable state: how late each request was sent, how late each pulse was; the CPU time at the start and at the end.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late = array("d")
        self._lags = array("d")
        self._cpu_s = time.process_time()
        self._cpu_end_s: float | None = None

    def start(self) -> None:
        """Starts to count the CPU time; call it together with the clock's `start`."""
        self._cpu_s = time.process_time()

    def stop(self) -> None:
        """Ends the count of the CPU time; call it when the time that is measured ends. What is computed afterwards is
        no part of the load."""
        self._cpu_end_s = time.process_time()

    def sent(self, late_s: float) -> None:
        self._late.append(late_s)

    async def pulse(self) -> None:
        """Notes every `PULSE_S` how late the event loop is, until it is cancelled. What a timer is late by its own
        nature does not count."""
        while True:
            due_s = self._clock.now_s() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self._lags.append(max(0.0, self._clock.now_s() - due_s - TIMER_S))

    def health(self, wall_s: float, limit_s: float = LATE_LIMIT_S) -> GeneratorHealth:
        late, lags = sorted(self._late), sorted(self._lags)
        cpu_end_s = time.process_time() if self._cpu_end_s is None else self._cpu_end_s
        return GeneratorHealth(
            cpu_share=(cpu_end_s - self._cpu_s) / wall_s if wall_s > 0 else 0.0,
            late_p50_s=_percentile(late, 50),
            late_p99_s=_percentile(late, 99),
            late_max_s=_percentile(late, 100),
            lag_p50_s=_percentile(lags, 50),
            lag_p99_s=_percentile(lags, 99),
            lag_max_s=_percentile(lags, 100),
            limit_s=limit_s,
        )


@contextmanager
def calm_collector() -> Iterator[None]:
    """Makes the garbage collector look at young objects only, while the block runs. Records are many, live on, and are
    in no cycles; to look at all of them again and again would stop the generator for longer each time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(*_YOUNG)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns the percentile, or 0 where there are no values."""
    return percentile(ordered, percent) or 0.0
