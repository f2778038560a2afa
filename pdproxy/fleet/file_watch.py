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
from pdproxy.errors import ConfigError, InvalidRequest
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool

log = logging.getLogger(__name__)

Version = tuple[int, ...]
"""A value that changes when the file is written or replaced, or when the link to it points elsewhere; it is empty where
there is no file."""


class FileWatch:
    """FileWatch keeps those instances in the fleet that `read` names; others, added by hand, are left alone.

    `read` makes a fleet of the file at `path`, and raises `ConfigError`. `present` are those it named at the start.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], Iterable[InstanceSettings]],
        membership: Membership,
        pool: Pool,
        *,
        present: Iterable[InstanceSettings],
        interval_s: float | None,
    ) -> None:
        """`interval_s` is the time between two looks; with None there are none, unless `reload` asks for one."""
        self._path = path
        self._read = read
        self._membership = membership
        self._pool = pool
        self._interval_s = interval_s
        # State: what the file wants and what of it is done, by name; the version that was acted on and the one last
        # seen; what could not be done so far, and was told.
        self._done = {one.name: one for one in present}
        self._wanted = dict(self._done)
        self._version = self._seen = _version(path)
        self._told: set[str] = set()
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
        self._converge()

    async def _look_now(self) -> None:
        self._version = self._seen = await anyio.to_thread.run_sync(_version, self._path)
        if await self._reread():
            log.info("%s was read again, as asked: it names %d instances", self._path, len(self._wanted))
        self._converge()

    async def _reread(self) -> bool:
        """Tells whether the file can be used."""
        try:
            fleet = await anyio.to_thread.run_sync(self._read)
        except ConfigError as error:
            log.warning("the fleet stays as it is, for the changed %s cannot be used: %s", self._path, error)
            return False
        self._wanted = {one.name: one for one in fleet}
        self._told.clear()
        return True

    def _converge(self) -> None:
        """Removes the instances that are not wanted any more, or not with these settings; then adds the new ones."""
        for name in [name for name, one in self._done.items() if self._wanted.get(name) != one]:
            instance = self._pool.find(name)
            if instance is not None and instance.settings == self._done[name]:
                self._membership.retire(name)
            del self._done[name]
        for name in self._wanted.keys() - self._done.keys():
            self._add(self._wanted[name])

    def _add(self, one: InstanceSettings) -> None:
        try:
            self._membership.add(one)
        except InvalidRequest as error:
            if one.name not in self._told:
                log.warning("%s: %r cannot be added yet: %s", self._path, one.name, error)
                self._told.add(one.name)
        else:
            self._done[one.name] = one


def _version(path: Path) -> Version:
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
