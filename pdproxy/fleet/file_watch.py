"""FileWatch follows the file that names the fleet: every instance in it belongs to the fleet.

A file that cannot be read, or that makes no fleet that could work, changes nothing. A changed file is left alone until
two looks in a row find it the same: it may still be being written, and its first half may well be a valid file.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio

from pdproxy.config.instances import InstanceSettings
from pdproxy.errors import ConfigError
from pdproxy.fleet.roster import Entry, Roster

log = logging.getLogger(__name__)

Version = tuple[int, ...]
"""A value that changes when the file is written or replaced, or when the link to it points elsewhere; it is empty where
there is no file."""


class FileWatch:
    """FileWatch has `roster` keep those instances in the fleet that `read` names.

    `read` makes a fleet of the file at `path`, and raises `ConfigError`.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], Iterable[InstanceSettings]],
        roster: Roster,
        *,
        interval_s: float | None,
    ) -> None:
        """`interval_s` is the time between two looks; with None there are none, unless `reload` asks for one."""
        self._path = path
        self._read = read
        self._roster = roster
        self._interval_s = interval_s
        # State: the version that was acted on and the one last seen.
        self._version = self._seen = _version(path)
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Looks at the file every `interval_s` seconds, and whenever it is asked to, until cancelled."""
        while True:
            with anyio.move_on_after(self._interval_s):
                await self._asked.wait()
            if not self._asked.is_set():
                await self.look()
                continue
            self._asked.clear()
            await self._look_now()

    def reload(self) -> None:
        """Has `run` read the file again at once, whether it has changed or not, and tell so in the log."""
        self._asked.set()

    async def look(self) -> None:
        """Looks once: reads the file again where it has changed, and tries whatever is still to be done about it."""
        seen, self._seen = self._seen, await anyio.to_thread.run_sync(_version, self._path)
        if self._seen != self._version and self._seen == seen:
            self._version = self._seen
            await self._reread()
        self._roster.converge()

    async def _look_now(self) -> None:
        self._version = self._seen = await anyio.to_thread.run_sync(_version, self._path)
        if await self._reread():
            log.info("%s was read again, as asked: it names %d instances", self._path, self._roster.num_wanted)
        self._roster.converge()

    async def _reread(self) -> bool:
        """Tells whether the file can be used."""
        try:
            fleet = await anyio.to_thread.run_sync(self._read)
        except ConfigError as error:
            log.warning("the fleet stays as it is, for the changed %s cannot be used: %s", self._path, error)
            return False
        self._roster.want(map(Entry, fleet))
        self._roster.tell_again()
        return True


def _version(path: Path) -> Version:
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
