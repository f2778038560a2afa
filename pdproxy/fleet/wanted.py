"""Wanted remembers what requests asked for while too few instances were ready. Those that could help are then looked at
often, which would be a waste otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

KEPT_S = 10.0
"""Seconds for which a model stays wanted after a request. Who was refused is told to come back after five."""
MAX_MODELS = 64
"""Number of models that are remembered, the latest ones: requests may name anything."""


class Wanted:
    """Wanted holds the models that were asked for in vain, by `clock` in seconds.

    Mutable state: until when each model is wanted, the one that was asked for last at the end.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str | None, float] = {}
        self.noted = asyncio.Event()
        """Set when a model is asked for, or another instance could be looked at for one. The one task that waits for it
        clears it."""

    def note(self, model: str | None) -> None:
        """Notes that a request for `model` (None: for any) found too few instances just now."""
        self._until.pop(model, None)
        if len(self._until) >= MAX_MODELS:
            del self._until[next(iter(self._until))]
        self._until[model] = self._clock() + KEPT_S
        self.noted.set()

    def models(self) -> list[str | None]:
        """Returns the models that are wanted now, and forgets the others."""
        now = self._clock()
        self._until = {model: until for model, until in self._until.items() if until > now}
        return list(self._until)

    def __repr__(self) -> str:
        return f"<Wanted {len(self._until)} models>"
