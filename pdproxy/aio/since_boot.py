"""The module has the clock for what another machine reckons with: it goes on while this machine is suspended."""

from __future__ import annotations

import time


def since_boot() -> float:
    """Returns the seconds since the machine was started, those included in which it was suspended. The monotonic clock
    leaves those out: who goes by it would take its time for not over when everybody else does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
