"""Taking turns, and taking part in fewer of them: what every load-based policy decides equal cases by.

Load alone cannot hold an instance back that has just come up: having nothing to do, it is always the least loaded one.
So a smaller weight is made true by letting it take part less often, whatever the load says.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.fleet.base import Candidate

MAX_REMEMBERED = 4096
"""Names, where instances come and go under ever new ones."""
MAX_CREDIT = 2.0
"""Picks that may be saved up; more would be a burst onto the one that should be spared."""


class Turns:
    """Who was picked longest ago.

    Mutable state: names in the order of their last pick, with its number.
    """

    def __init__(self) -> None:
        self._picked: dict[str, int] = {}
        self._num_picks = 0

    def take(self, candidates: Sequence[Candidate]) -> Candidate:
        """The one of `candidates` whose last pick is the longest ago; the first where several were never picked."""
        candidate = min(candidates, key=lambda candidate: self._picked.get(candidate.name, -1))
        self._num_picks += 1
        self._picked.pop(candidate.name, None)
        self._picked[candidate.name] = self._num_picks
        if len(self._picked) > MAX_REMEMBERED:
            del self._picked[next(iter(self._picked))]
        return candidate


class Ramp:
    """Lets an instance of weight w take part in so many picks that it gets at most w of a full share.

    Mutable state: picks saved up, by name, of those with less than the greatest weight among them.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def taking_part(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those that may be picked this time; those of the greatest weight always. To be called once per pick."""
        greatest = max(candidate.weight for candidate in candidates)
        held_back = [candidate for candidate in candidates if candidate.weight < greatest]
        if not held_back:
            return candidates
        if len(self._credit) > MAX_REMEMBERED:
            self._credit.clear()
        total = sum(candidate.weight for candidate in candidates)
        for candidate in held_back:
            saved = self._credit.get(candidate.name, 0.0) + candidate.weight / total
            self._credit[candidate.name] = min(saved, MAX_CREDIT)
        return [c for c in candidates if c.weight == greatest or self._credit[c.name] >= 1.0]

    def spend(self, picked: Candidate) -> None:
        """`picked` was picked from among them."""
        if picked.name in self._credit:
            self._credit[picked.name] = max(0.0, self._credit[picked.name] - 1.0)
