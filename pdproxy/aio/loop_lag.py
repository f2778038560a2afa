"""The module knows how late the event loop is, so that nobody else is blamed for what this process did not look at in
time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from time import monotonic

TICK_S = 0.1
STALL_S = 0.05
"""The lag in seconds from which on the loop stood still. It is less where the loop only has much to do."""


class LoopLag:
    """A `LoopLag` measures its event loop while it runs. `observe` is called with each lag, in seconds: how much later
    than it should a task was woken.

    Mutable state: when the next tick is due, on the monotonic clock; the seconds for which the loop stood still so far.
    """

    def __init__(self, observe: Callable[[float], object]) -> None:
        self._observe = observe
        self._due_at = math.inf
        self._stalled_s = 0.0

    async def run(self) -> None:
        """Measures every `TICK_S` seconds, until cancelled."""
        try:
            while True:
                self._due_at = monotonic() + TICK_S
                await asyncio.sleep(TICK_S)
                lag_s = self._lag_s()
                self._stalled_s += _stalled(lag_s)
                self._observe(lag_s)
        finally:
            self._due_at = math.inf

    def stalled_s(self) -> float:
        """Returns the seconds for which the loop has stood still so far, those included that no tick has seen yet. Two
        calls tell for how long it did in between."""
        return self._stalled_s + _stalled(self._lag_s())

    def _lag_s(self) -> float:
        return max(0.0, monotonic() - self._due_at)  # uvloop's own clock stands still while the loop does


def _stalled(lag_s: float) -> float:
    return lag_s if lag_s >= STALL_S else 0.0
