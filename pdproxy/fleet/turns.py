"""Taking turns, and taking part in fewer of them: what every load-based policy decides equal cases by.

Load alone cannot hold an instance back that has just come up: having nothing to do, it is always the least loaded one.
So a smaller weight is made true by letting it take part less often, whatever the load says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdproxy.fleet.base import Candidate

MAX_REMEMBERED = 4096
"""Names, where instances come and go under ever new ones."""
MAX_CREDIT = 2.0
"""Picks that may be saved up; more would be a burst onto the one that should be spared."""


class Turns:
    """Rounds, in each of which everybody is picked once, in an order drawn anew.

    Two roles that take their turns in the same order would always meet in the same pairs.

    Mutable state: the round in which a name was last picked, in the order of the picks.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        """Without `rng`, each round goes in the candidates' order."""
        self._rng = rng
        self._picked: dict[str, int] = {}

    def take(self, candidates: Sequence[Candidate]) -> Candidate:
        """One of those of `candidates` whose last pick was in the earliest round, or never."""
        rounds = [self._picked.get(candidate.name, 0) for candidate in candidates]
        earliest = min(rounds)
        waiting = [candidate for candidate, last in zip(candidates, rounds, strict=True) if last == earliest]
        candidate = waiting[0] if self._rng is None else self._rng.choice(waiting)
        # Who was away for several rounds has missed them, and takes part in the one that the others are in.
        is_late = max(rounds) > earliest + 1
        self._picked.pop(candidate.name, None)
        self._picked[candidate.name] = 1 + (min(last for last in rounds if last > earliest) if is_late else earliest)
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
