"""Events that an engine's data plane can ask about though it is another process: they are flags in shared memory.

A flag is a count per slot, which only grows. An event is a slot and a count: it has happened once the slot's count has
reached that number. So a slot can serve one event after the other. What must always hold: an event that was asked about
tells "happened" only after its own `set`. So a slot is used again only when nobody refers to its last event any more,
and each event of a slot has a higher count than the one before, which no earlier `set` can reach.
"""

from __future__ import annotations

import threading

from transfer.errors import TransferError
from transfer.memory.shared import SharedMemory

NUM_SLOTS = 4096
SLOT_BYTES = 8


class SharedFlags:
    """`SharedFlags` holds the counts of `NUM_SLOTS` events. Every process that has the memory's descriptor maps
    them."""

    NUM_BYTES = NUM_SLOTS * SLOT_BYTES

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self.memory = memory or SharedMemory.create("kv-events", self.NUM_BYTES)
        self._counts = self.memory.map().cast("Q")

    def read(self, slot: int) -> int:
        return self._counts[slot]

    def write(self, slot: int, count: int) -> None:
        self._counts[slot] = count


class EventPool:
    """An `EventPool` hands out events. Any thread may ask it.

    Mutable state, under `_lock`: `_free`, slots without an event; `_next`, the count of each slot's next event.
    """

    def __init__(self) -> None:
        self.flags = SharedFlags()
        self._lock = threading.Lock()
        self._free = list(range(NUM_SLOTS))
        self._next = [1] * NUM_SLOTS

    def new(self) -> SharedEvent:
        """Returns an event that has not happened. Raises `TransferError` where `NUM_SLOTS` others are in use."""
        with self._lock:
            if not self._free:
                raise TransferError(f"{NUM_SLOTS} events are in use, which is the most that there can be")
            slot = self._free.pop()
            count = self._next[slot]
            self._next[slot] += 1
        return SharedEvent(self, slot, count)

    def take_back(self, slot: int) -> None:
        """Takes the slot back, because nobody refers to its event any more."""
        self._free.append(slot)  # one operation: this may be called by the garbage collector while the lock is held


class SharedEvent:
    """An event that one thread sets, and that the data plane asks about. Keep a reference to it while it is waited
    for."""

    def __init__(self, pool: EventPool, slot: int, count: int) -> None:
        self._pool = pool
        self.slot = slot
        self.count = count

    def __repr__(self) -> str:
        return f"<SharedEvent {self.slot}:{self.count}, {'set' if self.query() else 'not set'}>"

    def __del__(self) -> None:
        self._pool.take_back(self.slot)

    def is_of(self, pool: EventPool) -> bool:
        """Returns whether this event belongs to `pool`. The same slot of another pool means another event."""
        return self._pool is pool

    def set(self) -> None:
        """Notes that the work is done. Idempotent."""
        self._pool.flags.write(self.slot, self.count)

    def query(self) -> bool:
        """Returns whether the event was set."""
        return self._pool.flags.read(self.slot) >= self.count


class SeenFlag:
    """A `SeenFlag` is the other process's view of a `SharedEvent`."""

    def __init__(self, flags: SharedFlags, slot: int, count: int) -> None:
        self._flags = flags
        self._slot = slot
        self._count = count

    def __eq__(self, other: object) -> bool:
        """Returns whether both are the same event. Pages that wait for equal events can go together."""
        return isinstance(other, SeenFlag) and (self._slot, self._count) == (other._slot, other._count)

    def __hash__(self) -> int:
        return hash((self._slot, self._count))

    def query(self) -> bool:
        return self._flags.read(self._slot) >= self._count
