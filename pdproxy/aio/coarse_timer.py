"""All the limits of an event loop on one timer.

A timer of the loop's own costs about as much as reading a socket, and a request sets several, of which hardly any ever
goes off. So those that are a second away or more are looked at together: to set one is an entry in a dict, and to move
it is an assignment. Once in a second everybody is looked at, for who is due before the next time, and eight times in a
second those who are. What is due sooner gets a timer of its own, for it is also expected to be exact.
"""

from __future__ import annotations

import asyncio
import math
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

LOOK_S = 0.125
MIN_S = 1.0
"""From here on an eighth of a second does not matter. Nobody is set for, or moved to, a time that is nearer than that,
so that who is due before the next look at everybody is among those found at this one."""


class Alarm(Protocol):
    """What can be due. Hashed by identity."""

    @property
    def due_at(self) -> float:
        """When, on the loop's clock. It may move."""

    def ring(self) -> None:
        """It is due. Must not raise. It is no longer set then."""


class CoarseTimer:
    """Mutable state: what is set; who of them was found to be due soon; when everybody is looked at again; the
    timer while there is anything."""

    __slots__ = ("_everybody_at", "_set", "_soon", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._set: dict[Alarm, None] = {}
        self._soon: list[Alarm] = []
        self._everybody_at = -math.inf
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
        if now >= self._everybody_at:
            self._everybody_at = before = now + MIN_S - LOOK_S
            self._soon = [alarm for alarm in self._set if alarm.due_at <= before]
        for alarm in [alarm for alarm in self._soon if alarm.due_at <= now]:
            if alarm in self._set:  # another one may have taken it back
                del self._set[alarm]
                alarm.ring()
        if self._set:
            self._timer = self.loop.call_later(LOOK_S, self._look)
        else:
            self._timer = None
            self._soon.clear()


class _Latest:
    """Whose alarms were asked for last: a process has one loop, as a rule. Mutable state: them."""

    alarms: ClassVar[CoarseTimer | None] = None


_all: WeakKeyDictionary[asyncio.AbstractEventLoop, CoarseTimer] = WeakKeyDictionary()


def alarms_of(loop: asyncio.AbstractEventLoop) -> CoarseTimer:
    """The loop's own."""
    alarms = _Latest.alarms
    if alarms is None or alarms.loop is not loop:
        alarms = _all.get(loop) or _all.setdefault(loop, CoarseTimer(loop))
        _Latest.alarms = alarms
    return alarms
