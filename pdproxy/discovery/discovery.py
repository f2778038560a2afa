"""Discovery gathers what its sources find, and has the fleet follow it.

What must hold: what a source has once told is in the fleet within the same turn of the event loop, and a source that
cannot see changes nothing. A violation would be seen as requests that failed at an instance which was said to end, or
as a fleet that went away together with the machine that names it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import anyio

from pdproxy.fleet.roster import Entry, Roster

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Seconds between two tries to do what could not be done at once: a pod whose role changes joins when it has left."""

Tell = Callable[[Iterable[Entry]], None]
"""A function that is told all instances which a source sees now, whenever that may have changed."""


class Source(Protocol):
    """Source is a place where instances are found. Its string is what messages call it."""

    async def run(self, tell: Tell) -> None:
        """Looks for instances, until cancelled. It survives whatever the other side does."""
        ...


class Discovery:
    """Discovery knows what all its sources have found. It outlives the fleets that follow it: a replica looks while it
    does not lead, so that it knows the instances when it does.

    Mutable state: what each source has told; who follows.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._found: dict[int, tuple[Entry, ...]] = {}
        self._rosters: dict[Roster, asyncio.Event] = {}

    @property
    def found(self) -> list[Entry]:
        """The instances that were found so far, each name once."""
        by_name: dict[str, Entry] = {}
        for number in sorted(self._found):
            for one in self._found[number]:
                by_name.setdefault(one.name, one)
        return list(by_name.values())

    async def run(self) -> None:
        """Looks in all sources, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for number, source in enumerate(self._sources):
                tasks.start_soon(source.run, self._teller(number))

    def _teller(self, number: int) -> Tell:
        def tell(entries: Iterable[Entry]) -> None:
            told = tuple(entries)
            if self._found.get(number) == told:
                return
            self._found[number] = told
            for roster in self._rosters:
                self._update(roster)

        return tell

    def _update(self, roster: Roster) -> None:
        roster.want(self.found)
        roster.converge()
        if not roster.is_done:
            self._rosters[roster].set()

    async def lead(self, roster: Roster) -> None:
        """Has the roster's fleet follow what is found, until cancelled."""
        is_pending = self._rosters[roster] = asyncio.Event()
        try:
            self._update(roster)
            while True:
                await is_pending.wait()
                is_pending.clear()
                while not roster.is_done:
                    await anyio.sleep(AGAIN_S)
                    roster.converge()
        finally:
            del self._rosters[roster]

    def __repr__(self) -> str:
        return f"<Discovery {sum(map(len, self._found.values()))} found by {len(self._sources)} sources>"
