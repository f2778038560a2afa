"""A process keeps the highest term of a leader that it has heard of, and by it knows leaders that have been replaced.

Several replicas of a proxy have one leader at a time, which admits for all of them. Each leader has a higher term than
those before it. One that was replaced may not know it yet, because it stood still, or cannot be reached. The pages that
it gives out may be somebody else's by now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from transfer.errors import StaleTerm

log = logging.getLogger(__name__)


class HighestTerm:
    """The `HighestTerm` that a process has heard of keeps out the attempts of leaders that have been replaced.

    What must hold: once this process has heard of a term, it begins nothing that is said to be of a lower one. What was
    begun before goes on to its end: its pages are held, and the new leader has been told of them. A violation would be
    seen as pages that are reserved or filled for an attempt of a leader that has been replaced.

    Mutable state: `value`, which is None where no term was heard of; `_on_raised`, who is told when it rises. Use it on
    the event loop's thread only.
    """

    def __init__(self) -> None:
        self.value: int | None = None
        self._on_raised: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<HighestTerm {self.value}>"

    def when_raised(self, callback: Callable[[], None]) -> None:
        """Calls back whenever a higher term than before was heard of."""
        self._on_raised.append(callback)

    def is_stale(self, term: int | None) -> bool:
        """Returns whether `term` is lower than the highest. None, which stands for a proxy that has no others, never
        is."""
        return term is not None and self.value is not None and term < self.value

    def hear(self, term: int | None) -> None:
        """Notes that there is, or was, a leader of `term`."""
        if term is not None and (self.value is None or term > self.value):
            log.info("the leader of term %d has been heard of; before it: %s", term, self.value)
            self.value = term
            for callback in self._on_raised:
                callback()

    def check(self, term: int | None) -> None:
        """Lets something of `term` begin, and notes that term. Raises `StaleTerm` where a higher one has been heard
        of."""
        self.hear(term)
        if self.is_stale(term):
            assert term is not None
            assert self.value is not None
            raise StaleTerm(term, self.value)
