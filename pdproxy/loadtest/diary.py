"""What is done to the target while it is asked, by whom it is done, and when: for the pictures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pdproxy.loadtest.clock import Clock
from pdproxy.loadtest.record import Event


class EventLog:
    """Mutable state: the events."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events: list[Event] = []

    def note(self, what: str, whom: str = "", note: str = "") -> None:
        """Just now."""
        self.events.append(Event(at_s=self.clock.now_s(), what=what, whom=whom, note=note))


Alongside = Callable[[EventLog], Awaitable[None]]
"""Goes on beside the load, from its start; cancelled when that ends. Its errors end the run."""
