"""Who belongs to the fleet, and how that changes while it is at work.

Nobody is cut off: who leaves gets nothing new, keeps what is under way, and is let go when that has ended. Only then is
its client closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import anyio

from pdproxy.config.settings import InstanceSettings
from pdproxy.errors import ConfigError, InstanceConflict, InvalidRequest, NoSuchInstance
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Between two looks at those who are leaving, while there are any."""

MakeInstance = Callable[[InstanceSettings], Instance]
Check = Callable[[Sequence[InstanceSettings]], None]
"""Raises `ConfigError` where these cannot be together."""


class Membership:
    """Adds to `pool` and takes out of it. `run` must be running for those who leave to be let go.

    Mutable state: the pool's, and an event for `run` that somebody is leaving.
    """

    def __init__(self, pool: Pool, *, make_instance: MakeInstance, check: Check) -> None:
        self._pool = pool
        self._make_instance = make_instance
        self._check = check
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.sweep()
            with anyio.move_on_after(SWEEP_S if self._pool.leaving else None):
                await self._left.wait()
            self._left.clear()

    async def sweep(self) -> None:
        """Let go of those who are leaving and have nothing under way any more."""
        for instance in self._pool.let_go():
            log.info("%s has left", instance.name)
            await instance.client.aclose()

    def add(self, settings: InstanceSettings) -> Instance:
        """It gets requests as soon as it is ready. Raises `InstanceConflict`, `InvalidRequest` naming the field."""
        members = self._pool.instances
        if any(other.settings.name == settings.name for other in members):
            raise InstanceConflict(f"there is an instance of the name {settings.name!r}", param="name")
        if any(other.settings.place == settings.place for other in members):
            raise InstanceConflict(f"there is an instance of the url {settings.url!r}", param="url")
        try:
            self._check([*(other.settings for other in members), settings])
            instance = self._make_instance(settings)
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
        for other in self._pool.leaving:
            if other.settings.place == settings.place and not other.is_same_kind(instance):
                message = (
                    f"the instance removed from {settings.url} has work under way in another role; try again later"
                )
                raise InstanceConflict(message, param="url")
        self._pool.add(instance)
        log.info("%s was added: %s, %s", instance.name, instance.role, instance.url)
        return instance

    def drain(self, name: str) -> Instance:
        """It gets no new attempts; those under way go on. Raises `NoSuchInstance`."""
        instance = self._find(name)
        instance.drain()
        log.info("%s is draining", name)
        return instance

    def remove(self, name: str, *, force: bool) -> Instance:
        """It is no part of the fleet any more. Raises `NoSuchInstance`, and `InstanceConflict` for a busy one.

        With `force` also a busy one: what is under way there is finished.
        """
        instance = self._find(name)
        if not instance.is_idle and not force:
            raise InstanceConflict(
                f"{name!r} has {instance.num_legs} legs under way or pages held; drain it first and remove it when "
                "they have ended, or use force=true",
                param="force",
            )
        return self._take_out(name)

    def retire(self, name: str) -> Instance:
        """It gets no new attempts, and is let go when those under way have ended. Raises `NoSuchInstance`."""
        self._find(name)
        return self._take_out(name)

    def _take_out(self, name: str) -> Instance:
        instance = self._pool.take_out(name)
        self._left.set()
        log.info("%s was removed", name)
        return instance

    def _find(self, name: str) -> Instance:
        instance = self._pool.find(name)
        if instance is None:
            known = ", ".join(repr(instance.name) for instance in self._pool.instances) or "none"
            raise NoSuchInstance(f"there is no instance {name!r}; there are {known}", param="name")
        return instance
