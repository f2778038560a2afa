"""Membership decides which instances belong to the fleet, and changes that while the fleet is at work.

No request is cut off: an instance which leaves gets nothing new, keeps what is under way, and is let go when that has
ended. Only then is its client closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import anyio

from pdproxy.config.instances import InstanceSettings, in_role
from pdproxy.config.values import Role
from pdproxy.errors import ConfigError, InstanceConflict, InvalidRequest, NoSuchInstance
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Seconds between two looks at the instances that are leaving, while there are any."""

MakeInstance = Callable[[InstanceSettings], Instance]
Check = Callable[[Sequence[InstanceSettings]], None]
"""A function that raises `ConfigError` where these instances cannot be together."""


class Membership:
    """Membership adds instances to `pool` and takes them out of it. `run` must be running, so that those which leave
    are let go.

    Mutable state: the pool's, and an event which tells `run` that an instance is leaving.
    """

    def __init__(self, pool: Pool, *, make_instance: MakeInstance, check: Check) -> None:
        self._pool = pool
        self._make_instance = make_instance
        self._check = check
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Lets go of the instances that have left, until cancelled."""
        while True:
            await self.sweep()
            with anyio.move_on_after(SWEEP_S if self._pool.leaving else None):
                await self._left.wait()
            self._left.clear()

    async def sweep(self) -> None:
        """Lets go of those that are leaving and have nothing under way any more."""
        for instance in self._pool.let_go():
            log.info("%s has left", instance.name)
            await instance.client.aclose()

    def check(self, newcomers: Sequence[InstanceSettings]) -> None:
        """Raises `InstanceConflict`, or `InvalidRequest` that names the field, where these cannot be added together."""
        members = self._pool.instances
        names, places = ({getattr(one.settings, what) for one in members} for what in ("name", "place"))
        for settings in newcomers:
            if settings.name in names:
                raise InstanceConflict(f"there is an instance of the name {settings.name!r}", param="name")
            if settings.place in places:
                raise InstanceConflict(f"there is an instance of the url {settings.url!r}", param="url")
        try:
            self._check([*(other.settings for other in members), *newcomers])
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None

    def add(self, settings: InstanceSettings, *, is_checked: bool = False) -> Instance:
        """Adds an instance, which gets requests as soon as it is ready. With `is_checked`, `check` has just taken it.
        Raises `InstanceConflict`, or `InvalidRequest` that names the field."""
        if not is_checked:
            self.check([settings])
        try:
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

    def find(self, name: str) -> Instance:
        """Returns the instance of this name. Raises `NoSuchInstance`."""
        instance = self._pool.find(name)
        if instance is None:
            known = ", ".join(repr(instance.name) for instance in self._pool.instances) or "none"
            raise NoSuchInstance(f"there is no instance {name!r}; there are {known}", param="name")
        return instance

    def drain(self, name: str) -> Instance:
        """Ends the sending of new attempts to the instance; those under way go on. Raises `NoSuchInstance`."""
        instance = self.find(name)
        instance.drain()
        log.info("%s is draining", name)
        return instance

    def resume(self, name: str) -> Instance:
        """Undoes `drain`: the instance gets new attempts again. Raises `NoSuchInstance`."""
        instance = self.find(name)
        instance.resume()
        log.info("%s is in use again", name)
        return instance

    def remove(self, name: str, *, force: bool) -> Instance:
        """Takes the instance out of the fleet. Raises `NoSuchInstance`, and `InstanceConflict` for a busy one.

        With `force` it takes out a busy one too: what is under way there is finished.
        """
        instance = self.find(name)
        if not instance.is_idle and not force:
            raise InstanceConflict(
                f"{name!r} has {instance.num_attempts} requests under way or pages held; drain it first and remove it "
                "when they have ended, or use force=true",
                param="force",
            )
        return self._take_out(name)

    def retire(self, name: str) -> Instance:
        """Takes out the instance: it gets no new attempts, and is let go when those under way have ended. Raises
        `NoSuchInstance`."""
        self.find(name)
        return self._take_out(name)

    def check_role(self, instance: Instance, role: Role) -> None:
        """Raises `ConfigError` where the instance cannot be in the fleet in this role."""
        others = (other.settings for other in self._pool.instances if other is not instance)
        self._check([*others, in_role(instance.settings, role)])

    def change_role(self, instance: Instance, role: Role) -> Instance:
        """Has an instance of the fleet, at which nothing is under way, leave it and join it in another role in the same
        instant. Returns the newcomer, which is to be proven yet. Raises `ConfigError`, and changes nothing, where it
        cannot be."""
        if not self._pool.is_over(instance):
            raise RuntimeError(f"{instance!r} has work under way")
        newcomer = self._make_instance(in_role(instance.settings, role))
        self._take_out(instance.name)
        self._pool.add(newcomer)
        log.info("%s was added: %s, %s", newcomer.name, newcomer.role, newcomer.url)
        return newcomer

    def _take_out(self, name: str) -> Instance:
        instance = self._pool.take_out(name)
        self._left.set()
        log.info("%s was removed", name)
        return instance
