"""The module measures how fast pages come back. Every `Retry-After` is computed from that.

A mere count of returns per second would call a decoder slow that only had little to do, just when a burst arrives. So
the module measures how long a page is held, in page-seconds per page returned. An idle buffer does not change that
number. The rate follows from the number of pages held now. On a full buffer it is exactly the number of pages returned
per second.
"""

from __future__ import annotations

from math import exp
from typing import Final

WINDOW_S: Final = 30.0
"""The seconds, counted only while pages are held, after which a measurement has faded to 1/e."""
_NUM_PACES: Final = 200
"""The number of paces in a window. What is measured within one pace fades together, at the pace's end."""


class DrainRate:
    """A `DrainRate` measures the pages returned per second, smoothed exponentially over `window_s` seconds."""

    __slots__ = ("_measured_at", "_pace_s", "_page_seconds", "_returned", "_unfaded_s", "_window_s")

    def __init__(self, now: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._pace_s = window_s / _NUM_PACES
        # State: both sums fade alike, and only while something is held. They have not yet faded for `_unfaded_s`.
        self._page_seconds = 0.0
        self._returned = 0.0
        self._unfaded_s = 0.0
        self._measured_at = now

    @property
    def is_known(self) -> bool:
        """Tells whether any page has ever come back."""
        return self._returned > 0.0 and self._page_seconds > 0.0

    def measure(self, held: int, now: float) -> None:
        """Takes note that `held` pages were held since the last call. The caller calls it before that number
        changes.
        """
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
        """Counts `pages` that came back just now."""
        self._returned += pages

    def per_second(self, held: int) -> float:
        """Returns the pages per second that come back while `held` pages are held; 0 while nothing is known."""
        return held * self._returned / self._page_seconds if self.is_known else 0.0
