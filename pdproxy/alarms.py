"""All the limits of an event loop on one timer.

A timer of the loop's own costs about as much as reading a socket, and a request sets several, of which hardly any ever
goes off. So limits of a second and more are kept in slots of a sixteenth of a second, and the loop is asked to call
back for the first of them only: to set one and to take it back is an entry in a dict. What is due sooner gets a timer
of its own, for it is also expected to be exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

SLOTS_PER_S = 16
MIN_S = 1.0
"""From here on a sixteenth of a second does not matter."""

Ring = Callable[[], None]


class Alarms:
    """Mutable state: who is to be called, by slot (a number of sixteenths on the loop's clock); the timer, and the slot
    it is set for, which is not later than the first."""

    __slots__ = ("_loop", "_slots", "_timer", "_timer_slot")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, dict[Ring, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_slot = 0

    def set(self, due_at: float, ring: Ring) -> int:
        """Call `ring` at `due_at`, or up to a sixteenth of a second later. Returns what `take_back` wants to know."""
        slot = int(due_at * SLOTS_PER_S) + 1
        rings = self._slots.get(slot)
        if rings is None:
            self._slots[slot] = {ring: None}
            if self._timer is None or slot < self._timer_slot:
                self._arm(slot)
        else:
            rings[ring] = None
        return slot

    def take_back(self, slot: int, ring: Ring) -> None:
        """It need not be called any more. Idempotent."""
        rings = self._slots.get(slot)
        if rings is not None:
            rings.pop(ring, None)

    def _arm(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_slot = slot
        self._timer = self._loop.call_at(slot / SLOTS_PER_S, self._tick)

    def _tick(self) -> None:
        """Call whoever is due. The timer runs only as long as there is somebody."""
        self._timer = None
        now = self._loop.time() * SLOTS_PER_S
        for slot in sorted(slot for slot in self._slots if slot <= now):
            for ring in self._slots.pop(slot):
                ring()
        self._slots = {slot: rings for slot, rings in self._slots.items() if rings}
        first = min(self._slots, default=None)
        if first is not None and (self._timer is None or first < self._timer_slot):
            self._arm(first)


_all: WeakKeyDictionary[asyncio.AbstractEventLoop, Alarms] = WeakKeyDictionary()


def alarms_of(loop: asyncio.AbstractEventLoop) -> Alarms:
    """The loop's own."""
    alarms = _all.get(loop)
    if alarms is None:
        alarms = _all[loop] = Alarms(loop)
    return alarms
