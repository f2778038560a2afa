"""LastMinute tells of the last minute from counters that are kept anyway, so that nothing is counted only for viewers.

The numbers of a moment between two looks are taken from a straight line between them. Where nobody looked for longer
than that can be said of, the history has a gap: what ended meanwhile is known, and not in which second.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WINDOW_S = 60.0
UNSEEN_S = 3.0
"""The most seconds between two looks of which the history is told second by second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts holds what had happened by the time `at`, which is in seconds since the proxy started."""

    at: float
    ended: Mapping[str, float]
    """Number of requests that ended, by outcome."""
    failures: Mapping[str, float]
    """Number of requests that failed, by error code."""
    phase_s: Mapping[str, float]
    """The time, in seconds, that requests which have ended spent in each phase."""
    tokens: float
    """Number of tokens of the answers that clients were given."""

    @property
    def num_ended(self) -> float:
        return sum(self.ended.values())

    @property
    def num_failed(self) -> float:
        return self.ended.get("failed", 0)


class LastMinute:
    """LastMinute computes what happened in the last minute.

    Mutable state: the counts of the last minute's looks, oldest first, and of the one before.
    """

    def __init__(self) -> None:
        self._looks: list[Counts] = []

    def note(self, counts: Counts) -> None:
        """Adds a look, which is later than any before."""
        looks = self._looks
        if looks and counts.at - looks[-1].at > WINDOW_S:
            looks.clear()  # what has happened since may have happened at any time
        looks.append(counts)
        oldest = counts.at - WINDOW_S - 1.0  # the history begins with a whole second
        while len(looks) > 2 and looks[1].at <= oldest:
            del looks[0]

    def facts(self) -> dict[str, Any]:
        """Returns the facts of the last minute.

        They are ``window_s`` (how many seconds of the minute are known), ``collecting_s`` (how many more it takes),
        ``ended`` in it by outcome, ``failures`` by error code, ``per_s``, ``tokens_per_s``, ``phase_s`` per request
        that ended, and a history: ``all``, ``failed`` and ``tokens`` in each of the last whole seconds that are known;
        None for seconds in which nobody looked.
        """
        last = self._looks[-1]
        first = self._at(max(last.at - WINDOW_S, self._looks[0].at))
        window_s, num_ended = last.at - first.at, last.num_ended - first.num_ended
        return {
            "window_s": max(1, round(window_s)) if window_s else 0,
            "collecting_s": math.ceil(WINDOW_S - window_s),
            "per_s": round(num_ended / window_s, 2) if window_s else 0.0,
            "tokens_per_s": round((last.tokens - first.tokens) / window_s, 1) if window_s else 0.0,
            "ended": {name: round(num) for name, num in _since(first.ended, last.ended).items()},
            "failures": {
                name: num for name, part in _since(first.failures, last.failures).items() if (num := round(part))
            },
            "phase_s": _each(_since(first.phase_s, last.phase_s), num_ended),
            **self._history(),
        }

    def _history(self) -> dict[str, list[float | None]]:
        end = math.floor(self._looks[-1].at)
        begin = max(math.ceil(self._looks[0].at), end - int(WINDOW_S))
        pairs = list(pairwise(self._at(float(second)) for second in range(begin, end + 1)))
        gaps = [(one.at, other.at) for one, other in pairwise(self._looks) if other.at - one.at > UNSEEN_S]
        is_seen = [all(after.at <= left or back <= before.at for left, back in gaps) for before, after in pairs]
        told = list(zip(pairs, is_seen, strict=True))

        def grown(read: Callable[[Counts], float]) -> list[float | None]:
            return [round(read(after) - read(before), 1) if seen else None for (before, after), seen in told]

        return {
            "all": grown(lambda counts: counts.num_ended),
            "failed": grown(lambda counts: counts.num_failed),
            "tokens": grown(lambda counts: counts.tokens),
        }

    def _at(self, at: float) -> Counts:
        """Returns the counts at a moment that is no earlier than the first look, and no later than the last."""
        place = bisect_right(self._looks, at, key=lambda look: look.at)
        before = self._looks[place - 1]
        if before.at == at:
            return before
        after = self._looks[place]
        share = (at - before.at) / (after.at - before.at)
        return Counts(
            at=at,
            ended=_on_the_way(before.ended, after.ended, share),
            failures=_on_the_way(before.failures, after.failures, share),
            phase_s=_on_the_way(before.phase_s, after.phase_s, share),
            tokens=before.tokens + share * (after.tokens - before.tokens),
        )


def _since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns by how much each number has grown; numbers that have not changed are left out."""
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def _on_the_way(before: Mapping[str, float], after: Mapping[str, float], share: float) -> dict[str, float]:
    return {name: value - (1 - share) * (value - before.get(name, 0)) for name, value in after.items()}


def _each(seconds: Mapping[str, float], num: float) -> dict[str, float]:
    """Returns the seconds per request; empty where there were no requests."""
    return {name: round(value / num, 5) for name, value in seconds.items()} if num > 0 else {}
