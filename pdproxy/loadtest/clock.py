"""The module counts the seconds since a run began, and waits for one of them.

An event loop's timers are exact to a millisecond, and late rather than early. So one waits until a millisecond before
the time; a request that becomes due within that millisecond counts as due when the wait is over. This does not change
an arrival process, and no request is late for want of a better timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TIMER_S = 1e-3


class Clock:
    """Clock tells the seconds since a run began.

    Mutable state: when the run began, on `now`.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()

    def start(self) -> None:
        """Sets the clock to 0."""
        self._began = self._now()

    def now_s(self) -> float:
        return self._now() - self._began

    async def sleep_until(self, at_s: float) -> float:
        """Sleeps until `at_s`, or up to `TIMER_S` before it. Returns when the request is due after all: `at_s`, or now
        if that is earlier. Other tasks get their turn in any case."""
        while True:
            left_s = at_s - self.now_s()
            await asyncio.sleep(max(0.0, left_s - TIMER_S))
            if left_s <= TIMER_S or at_s - self.now_s() <= TIMER_S:
                return min(at_s, self.now_s())
