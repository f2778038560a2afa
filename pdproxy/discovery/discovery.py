"""Discovery gathers what its sources find, and has the fleet follow it.

What must hold: what a source has once told is in the fleet within the same turn of the event loop, and a source that
cannot see changes nothing. A violation would be seen as requests that failed at an instance which was said to end, or
as a fleet that went away together with the machine that names it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import anyio

from pdproxy.fleet.roster import Entry, Roster

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Seconds between two tries to do what could not be done at once: a pod whose role changes joins when it has left."""

AFTER_BUG_S = 10.0
"""Seconds after which a source that met a bug begins anew."""

Tell = Callable[[Iterable[Entry]], None]
"""A function that is told all instances which a source sees now, whenever that may have changed."""


class Source(Protocol):
    """Source is a place where instances are found. Its string is what messages call it."""

    async def run(self, tell: Tell) -> None:
        """Looks for instances, until cancelled. It survives whatever the other side does. Where it has met a bug it
        may be run again, and tells nothing before it knows as much as before."""
        ...

    @property
    def complaints(self) -> Sequence[str]:
        """The sentences that say what keeps it from finding instances now."""
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

    @property
    def has_looked(self) -> bool:
        """Tells whether each source has told something."""
        return len(self._found) == len(self._sources)

    @property
    def complaints(self) -> list[str]:
        """The sentences of all sources that say what keeps them from finding instances now."""
        return [complaint for source in self._sources for complaint in source.complaints]

    def status(self) -> dict[str, Any]:
        """Returns what the status page shows."""
        return {"found": sum(map(len, self._found.values())), "complaints": self.complaints}

    async def run(self) -> None:
        """Looks in all sources, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for number, source in enumerate(self._sources):
                tasks.start_soon(self._look, source, self._teller(number))

    async def _look(self, source: Source, tell: Tell) -> None:
        """Runs the source. Requests are served without it, so a bug that it meets ends it for a moment only."""
        while True:
            try:
                await source.run(tell)
            except Exception:
                log.exception("the instances stay as they are, for looking for %s met a bug", source)
            await anyio.sleep(AFTER_BUG_S)

    def _teller(self, number: int) -> Tell:
        def tell(entries: Iterable[Entry]) -> None:
            told = tuple(rank for one in entries for rank in one.ranks())
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
