"""The module notes what is done to the target during a run, to which instance, and when; the pictures show it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pdproxy.loadtest.clock import Clock
from pdproxy.loadtest.record import Event


class EventLog:
    """EventLog collects the events of a run.

    Mutable state: the events.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events: list[Event] = []

    def note(self, what: str, whom: str = "", note: str = "") -> None:
        """Adds an event that happens now."""
        self.events.append(Event(at_s=self.clock.now_s(), what=what, whom=whom, note=note))


Alongside = Callable[[EventLog], Awaitable[None]]
"""A coroutine function that goes on beside the load, from the load's start, and is cancelled when the load ends. Its
errors end the run."""
