"""Rotation lets instances take turns, and Ramp lets an instance take part in fewer turns.

Every policy that goes by load decides equal cases by them. Load alone cannot hold back an instance that has just come
up: it has nothing to do, so it is always the least loaded one. So an instance of smaller weight takes part less often,
whatever the load says.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Final

MAX_REMEMBERED: Final = 4096
"""Number of names that are remembered, where instances come and go under ever new ones."""
MAX_CREDIT: Final = 2.0
"""Number of picks that may be saved up. With more, an instance that should be spared would get a burst of requests."""
NOBODY: Final[frozenset[str]] = frozenset()


class Rotation:
    """Rotation counts rounds, in each of which everybody is picked once, in an order drawn anew.

    Two roles that take their turns in the same order would always meet in the same pairs.

    Mutable state: the round in which a name was last picked, in the order of the picks.
    """

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.random
        self._picked: dict[str, int] = {}

    def last(self, name: str) -> int:
        """Returns the round in which `name` was last picked; 0: never."""
        return self._picked.get(name, 0)

    def draw(self, num: int) -> int:
        """Draws one of the `num` candidates whose turn it is. Returns its number, 0 to `num` - 1."""
        return int(self._random() * num) if num > 1 else 0

    def took(self, name: str, rounds: Collection[int]) -> None:
        """Notes that `name` was picked. `rounds` are those of its equals' last picks, and its own last pick was in the
        earliest.

        An instance that was away for several rounds has missed them, and takes part in the round that the others are
        in.
        """
        picked = self._picked
        last = picked.pop(name, 0)
        picked[name] = 1 + (last if len(rounds) < 2 else _caught_up(last, rounds))
        if len(picked) > MAX_REMEMBERED:
            del picked[next(iter(picked))]


def _caught_up(last: int, rounds: Collection[int]) -> int:
    is_late = max(rounds) > last + 1
    return min(other for other in rounds if other > last) if is_late else last


class Ramp:
    """Ramp lets an instance of weight w take part in so many picks that it gets at most w of a full share.

    Mutable state: picks saved up, by name, of those with less than the greatest weight among them.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def resting(self, weights: Mapping[str, float], num_full: int) -> frozenset[str]:
        """Returns the names of less than a full weight that must not be picked this time; `num_full` others are of full
        weight.

        The caller calls it once per pick. An instance that has the greatest weight always takes part.
        """
        greatest = 1.0 if num_full else max(weights.values(), default=1.0)
        total = num_full + sum(weights.values(), 0.0)
        if len(self._credit) > MAX_REMEMBERED:
            self._credit.clear()
        for name, weight in weights.items():
            if weight < greatest:
                self._credit[name] = min(self._credit.get(name, 0.0) + weight / total, MAX_CREDIT)
        return frozenset(name for name, weight in weights.items() if weight < greatest and self._credit[name] < 1.0)

    def spend(self, name: str) -> None:
        """Takes one pick off what `name` has saved up, because it was picked."""
        if name in self._credit:
            self._credit[name] = max(0.0, self._credit[name] - 1.0)
