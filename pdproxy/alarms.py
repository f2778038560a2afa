"""All the limits of an event loop on one timer.

A timer of the loop's own costs about as much as reading a socket, and a request sets several, of which hardly any ever
goes off. So those that are a second away or more are looked at together, eight times in a second while there are any:
to set one is an entry in a dict, and to move it is an assignment. What is due sooner gets a timer of its own, for it is
also expected to be exact.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

LOOK_S = 0.125
MIN_S = 1.0
"""From here on an eighth of a second does not matter."""


class Alarm(Protocol):
    """What can be due. Hashed by identity."""

    @property
    def due_at(self) -> float:
        """When, on the loop's clock. It may move."""

    def ring(self) -> None:
        """It is due. Must not raise. It is no longer set then."""


class Alarms:
    """Mutable state: what is set, and the timer while there is anything."""

    __slots__ = ("_set", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._set: dict[Alarm, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, alarm: Alarm) -> None:
        """It rings when it is due, or up to `LOOK_S` later. Idempotent."""
        self._set[alarm] = None
        if self._timer is None:
            self._timer = self.loop.call_later(LOOK_S, self._look)

    def take_back(self, alarm: Alarm) -> None:
        """It need not ring any more. Idempotent."""
        self._set.pop(alarm, None)

    def _look(self) -> None:
        now = self.loop.time()
        due = [alarm for alarm in self._set if alarm.due_at <= now]
        for alarm in due:
            if alarm in self._set:  # another one may have taken it back
                del self._set[alarm]
                alarm.ring()
        self._timer = self.loop.call_later(LOOK_S, self._look) if self._set else None


class _Latest:
    """Whose alarms were asked for last: a process has one loop, as a rule. Mutable state: them."""

    alarms: ClassVar[Alarms | None] = None


_all: WeakKeyDictionary[asyncio.AbstractEventLoop, Alarms] = WeakKeyDictionary()


def alarms_of(loop: asyncio.AbstractEventLoop) -> Alarms:
    """The loop's own."""
    alarms = _Latest.alarms
    if alarms is None or alarms.loop is not loop:
        alarms = _all.get(loop) or _all.setdefault(loop, Alarms(loop))
        _Latest.alarms = alarms
    return alarms
