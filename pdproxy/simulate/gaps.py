"""The module counts the times between two tokens of an answer, for one decoder: many at once, in bounded memory."""

from __future__ import annotations

import math

_FLOOR_S = 1e-6
_LOG_GROWTH = math.log(1.01)


class Gaps:
    """Gaps counts times between tokens, each known to half a percent.

    Mutable state: the weights of the classes that there are.
    """

    __slots__ = ("_weights",)

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}

    def add(self, seconds: float, num: float) -> None:
        """Counts `num` tokens, each of which came `seconds` after the one before. Parts of one count, too."""
        each = int(math.log(seconds / _FLOOR_S) / _LOG_GROWTH) if seconds > _FLOOR_S else 0
        weights = self._weights
        weights[each] = weights.get(each, 0.0) + num

    def percentile(self, percent: float) -> float | None:
        """Returns the time, in seconds, that `percent` of a hundred do not exceed; None where there are none."""
        left = sum(self._weights.values()) * percent / 100.0
        if not self._weights:
            return None
        for each in sorted(self._weights):
            left -= self._weights[each]
            if left <= 1e-9:
                break
        return _FLOOR_S * math.exp(_LOG_GROWTH * (each + 0.5))
