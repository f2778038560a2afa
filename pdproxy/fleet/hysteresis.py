"""Hysteresis decides between up and down slowly: one lost answer is no outage, one answer after an outage no
recovery."""

from __future__ import annotations


class Hysteresis:
    """Hysteresis goes down after `misses` misses in a row and comes back after `successes` successes in a row.

    Mutable state: which of the two it is; how many looks in a row have spoken against that.
    """

    def __init__(self, *, misses: int, successes: int, is_up: bool = False) -> None:
        if misses < 1 or successes < 1:
            raise ValueError(f"misses {misses} and successes {successes} must be at least 1")
        self._misses = misses
        self._successes = successes
        self.is_up = is_up
        self._num_against = 0

    @property
    def is_doubted(self) -> bool:
        """Tells whether the last look spoke against the present state."""
        return self._num_against > 0

    def succeeded(self) -> bool:
        """Counts a success. Returns whether that changed the state to up."""
        return self._saw(True, self._successes)

    def missed(self) -> bool:
        """Counts a miss. Returns whether that changed the state to down."""
        return self._saw(False, self._misses)

    def fell(self) -> bool:
        """Goes down at once, without counting, because there can be no doubt. Returns whether that changed the
        state."""
        return self._saw(False, 1)

    def _saw(self, is_up: bool, num_needed: int) -> bool:
        if is_up is self.is_up:
            self._num_against = 0
            return False
        self._num_against += 1
        if self._num_against < num_needed:
            return False
        self.is_up, self._num_against = is_up, 0
        return True

    def __repr__(self) -> str:
        needed, what = (self._misses, "misses") if self.is_up else (self._successes, "successes")
        return f"<Hysteresis {'up' if self.is_up else 'down'}, {self._num_against} of {needed} {what}>"
