"""The module limits how much the proxy retries: a fleet that fails must not be asked twice as much because it fails.

Every request earns a fraction of a retry, and every retry costs a whole one. So retries stay a share of the requests. A
small number per second comes on top, so that a single request may be retried as well. What was earned fades, so that a
busy morning does not pay for a retry storm at noon.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Final

WINDOW_S: Final = 10.0
LEAST_RETRIES: Final = 2.0
"""The retries in a window below which a budget fades before it can be spent."""

_NUM_PACES: Final = 200
"""The number of paces in a window. What requests earn within one pace fades as if all had come in at the pace's
beginning.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStatistics:
    """`RetryStatistics` shows a retry budget at one moment."""

    num_available: float
    num_requests: int
    num_retries: int
    num_refused: int


def part_of(min_per_s: float, num_parts: int) -> float:
    """Returns the retries per second that one of `num_parts` processes may make which share `min_per_s`: not so few
    that none of them could ever retry."""
    return max(min_per_s / num_parts, min(min_per_s, LEAST_RETRIES / WINDOW_S))


class RetryBudget:
    """A `RetryBudget` allows retries of at most `share` of the requests, plus `min_per_s` per second. `clock` gives
    seconds.

    It is a token bucket. From any moment on there are never more retries than it held then + `share` × requests +
    `min_per_s` × seconds. Its content fades to 1/e in `window_s` seconds. It starts with `min_per_s` × `window_s`, and
    comes back to that without traffic. It does no I/O.

    Raises `ValueError` for a negative number, a window of 0, and a `min_per_s` above 0 that gives fewer than 2 retries
    in a window.
    """

    def __init__(
        self,
        *,
        share: float = 0.2,
        min_per_s: float = 1.0,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if share < 0.0 or min_per_s < 0.0 or window_s <= 0.0:
            raise ValueError(
                f"share {share} and min_per_s {min_per_s} must not be below 0, and window_s {window_s} must be above 0"
            )
        if 0.0 < min_per_s * window_s < LEAST_RETRIES:
            raise ValueError(f"{min_per_s} per second come to less than 2 retries in {window_s} s: they fade too soon")
        self._share = share
        self._min_per_s = min_per_s
        self._window_s = window_s
        self._pace_s = window_s / _NUM_PACES
        self._clock = clock
        # State: retries in the bucket, as if all of them had been in it at `_measured_at`; the rest is only counted.
        self._level = min_per_s * window_s
        self._measured_at = clock()
        self._num_requests = 0
        self._num_retries = 0
        self._num_refused = 0

    @property
    def num_available(self) -> float:
        """Returns the number of retries in the bucket now."""
        self._measure(self._clock())
        return self._level

    def requested(self) -> None:
        """Counts a request that came in. The caller calls it once for each request, not for its retries."""
        now = self._clock()
        if now - self._measured_at > self._pace_s:
            self._measure(now)
        self._level += self._share
        self._num_requests += 1

    def spend(self) -> bool:
        """Takes one retry, if there is one. Returns whether there was one."""
        if self.num_available < 1.0:
            self._num_refused += 1
            return False
        self._level -= 1.0
        self._num_retries += 1
        return True

    def statistics(self) -> RetryStatistics:
        return RetryStatistics(
            num_available=self.num_available,
            num_requests=self._num_requests,
            num_retries=self._num_retries,
            num_refused=self._num_refused,
        )

    def _measure(self, now: float) -> None:
        elapsed_s = now - self._measured_at
        if elapsed_s <= 0.0:
            return
        self._measured_at = now
        rest = self._min_per_s * self._window_s
        self._level = rest + (self._level - rest) * exp(-elapsed_s / self._window_s)

    def __repr__(self) -> str:
        return f"<RetryBudget {self.num_available:.1f} left, {self._num_retries} for {self._num_requests} requests>"
