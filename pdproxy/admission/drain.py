"""How fast pages come back: the measured ground of every `Retry-After`.

Counting returns per second would say "slow" of a decoder that merely had little to do, just when a burst arrives. So
what is measured is how long a page is held (page-seconds per page returned, which an idle buffer does not change), and
the rate follows from how many are held now: on a full buffer it is exactly pages returned per second.
"""

from __future__ import annotations

from math import exp

WINDOW_S = 30.0
"""Seconds (with pages held) after which a measurement has faded to 1/e."""
_NUM_PACES = 200
"""In a window. What is measured within one pace fades together, at its end."""


class DrainRate:
    """Pages returned per second, exponentially smoothed over `window_s`."""

    __slots__ = ("_measured_at", "_pace_s", "_page_seconds", "_returned", "_unfaded_s", "_window_s")

    def __init__(self, now: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._pace_s = window_s / _NUM_PACES
        # State: both sums fade alike, and only while something is held; for `_unfaded_s` they have not yet.
        self._page_seconds = 0.0
        self._returned = 0.0
        self._unfaded_s = 0.0
        self._measured_at = now

    @property
    def is_known(self) -> bool:
        """Has anything ever come back?"""
        return self._returned > 0.0 and self._page_seconds > 0.0

    def measure(self, held: int, now: float) -> None:
        """`held` pages were held since the last call. To be called before that number changes."""
        elapsed_s = now - self._measured_at
        self._measured_at = now
        if held == 0 or elapsed_s <= 0.0:
            return
        self._unfaded_s += elapsed_s
        if self._unfaded_s > self._pace_s:
            fade = exp(-self._unfaded_s / self._window_s)
            self._page_seconds *= fade
            self._returned *= fade
            self._unfaded_s = 0.0
        self._page_seconds += held * elapsed_s

    def count(self, pages: int) -> None:
        """`pages` came back just now."""
        self._returned += pages

    def per_second(self, held: int) -> float:
        """Pages per second that come back while `held` are held; 0 while nothing is known."""
        return held * self._returned / self._page_seconds if self.is_known else 0.0
