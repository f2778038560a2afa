"""RoleChanges has instances change their role while the fleet is at work: a prefiller becomes a decoder, or a decoder a
prefiller.

What must hold: no attempt is cut off, an instance is never at work in two roles, and the last ready instance of a role
is not taken away unless somebody else may answer or the operator forces it. A violation would be seen as requests that
fail while a role changes, or that find no instance of a role which had one. However a change ends, the instance is in
use in one of the two roles afterwards, and its status tells which and why.

An instance is drained first. When nothing is under way there and none of its pages is held, the engine is told, where
it has to know. In the same instant the instance leaves the fleet in its old role and joins it in the new one, and like
any newcomer it gets requests once a canary has gone through it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import anyio

from pdproxy.config.values import Role
from pdproxy.engines.adapter import Call, MalformedReply, RoleRefused
from pdproxy.engines.http.base import EngineBroken, EngineUnreachable
from pdproxy.errors import ConfigError, InstanceConflict, InvalidRequest
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import ROLES, Pool

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks at an instance whose role changes."""
NUM_CANARIES = 2
"""The number of canaries that may take their longest time before an instance goes back to its old role."""
REMARK = "role_change"
"""The member of an instance's status that tells of the last change of its role."""

Origin = Literal["admin", "controller"]


class Phase(StrEnum):
    DRAINING = "draining"
    """The instance is in its old role, and finishes the requests that it has."""
    SWITCHING = "switching"
    """The engine is told its new role."""
    PROVING = "proving"
    """The instance is in its new role, and waits for its canary."""
    DONE = "done"
    FAILED = "failed"


@runtime_checkable
class RoleSwitcher(Protocol):
    """RoleSwitcher is an adapter of engines that have to be told when their role changes."""

    def role_switch(self, role: Role) -> Call:
        """Returns the call after which an idle engine has this role."""

    def read_role_switch(self, status: int, body: bytes) -> None:
        """Reads the answer. Raises `RoleRefused` where the engine has not changed, and `MalformedReply`."""


@dataclass(slots=True, eq=False)
class RoleChange:
    """RoleChange is one change of the role of `instance`, which is the one of the present role. With `is_forced`, it
    may leave a role without a ready instance."""

    instance: Instance
    old: Role
    new: Role
    origin: Origin
    is_forced: bool
    was_routable: bool
    was_draining: bool
    reason: str
    phase: Phase = Phase.DRAINING
    why: str = ""
    is_begun: bool = False

    def step(self, phase: Phase, why: str = "") -> None:
        """Goes on to `phase`, for whoever looks at the instance's status."""
        self.phase, self.why = phase, why
        self.instance.remarks[REMARK] = self.status()
        self.instance.on_news()

    def status(self) -> dict[str, Any]:
        return {
            "from": self.old,
            "to": self.new,
            "by": self.origin,
            "phase": self.phase.value,
            "why": self.why or self.reason,
        }


class _NotChanged(Exception):
    """`_NotChanged` says why a change ends without the new role. With `is_restored`, the instance is put in use again
    as it was."""

    def __init__(self, why: str, *, is_restored: bool = True) -> None:
        super().__init__(why)
        self.is_restored = is_restored


class RoleChanges:
    """RoleChanges changes roles of instances of `pool`, any number at a time. `run` must be running.

    An instance may take `timeout_s` seconds to drain, and an engine as long to switch. One that is not ready in its new
    role after `NUM_CANARIES` times `canary_timeout_s` goes back to the old one.

    Mutable state: the changes under way, by the instance's name, and an event that one of them is to begin; how many
    have ended, by role, origin and outcome.
    """

    def __init__(self, pool: Pool, membership: Membership, *, timeout_s: float, canary_timeout_s: float) -> None:
        self._pool = pool
        self._membership = membership
        self._timeout_s = timeout_s
        self._ready_s = NUM_CANARIES * canary_timeout_s
        self._under_way: dict[str, RoleChange] = {}
        self._asked = asyncio.Event()
        outcomes = product(ROLES, get_args(Origin), (Phase.DONE.value, Phase.FAILED.value))
        self.ended: Counter[tuple[str, str, str]] = Counter(dict.fromkeys(outcomes, 0))
        self.on_end: Callable[[RoleChange], object] = lambda change: None
        """Called when a change is over; must not raise."""

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    @property
    def num_failed(self) -> int:
        """Returns how many changes have failed that the controller wanted."""
        return sum(number for (_, by, how), number in self.ended.items() if by == "controller" and how == Phase.FAILED)

    async def run(self) -> None:
        """Carries out the changes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._asked.clear()
                for change in self._under_way.values():
                    if not change.is_begun:
                        change.is_begun = True
                        tasks.start_soon(self._carry_out, change)
                await self._asked.wait()

    def can_change(self, instance: Instance) -> bool:
        """Tells whether the instance's engine can take the other role."""
        try:
            self._check_able(instance)
        except InvalidRequest:
            return False
        return True

    def change(
        self,
        name: str,
        role: Role,
        *,
        force: bool = False,
        origin: Origin = "admin",
        reason: str = "",
    ) -> Instance:
        """Begins to change the role of an instance, which goes on whatever becomes of the caller. Returns the instance
        as it is now. Does nothing where it has the role already, or is about to get it.

        Raises `NoSuchInstance`; `InvalidRequest` for an engine that cannot change its role; and `InstanceConflict`
        where a change is under way, or where the instance is the last ready one of its role, which `force` allows.
        """
        instance = self._membership.find(name)
        under_way = self._under_way.get(name)
        if under_way is not None and under_way.new != role:
            raise InstanceConflict(
                f"{name!r} is about to become a {under_way.new} instance; wait until its role_change is over, or end "
                f"that with POST /admin/instances/{name}/resume while it drains",
                param="role",
            )
        if under_way is not None or instance.role == role:
            return instance
        self._check_able(instance)
        was_draining = instance.is_draining
        was = instance.is_routable
        change = RoleChange(instance, instance.role, role, origin, force, was, was_draining, reason)
        if (why := self._why_needed(change)) is not None:
            raise InstanceConflict(why, param="force")
        try:
            self._membership.check_role(instance, role)
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
        self._under_way[name] = change
        instance.drain()
        change.step(Phase.DRAINING)
        log.info("%s is to become a %s instance (%s): it drains", name, role, origin)
        self._asked.set()
        return instance

    # ── what speaks against it ──────────────────────────────────────────────────────────────────────────────────────

    def _check_able(self, instance: Instance) -> None:
        """Raises `InvalidRequest` for an engine that has one role for good, and `InstanceConflict` for one that has not
        told yet."""
        kind, name = instance.adapter.name, instance.name
        if not instance.adapter.traits.changes_role:
            raise InvalidRequest(
                f"role: engines of the kind {kind} cannot change their role while they run; start {name!r} anew in the "
                "other role",
                param="role",
            )
        if isinstance(instance.adapter, RoleSwitcher):
            return
        if instance.facts is None:
            raise InstanceConflict(
                f"{name!r} has not answered yet, so nobody knows whether it may change", param="role"
            )
        if instance.facts.role is not None:
            raise InvalidRequest(
                f"role: the engine of {name!r} was started for {instance.facts.role} alone; start it with --role both",
                param="role",
            )

    def _why_needed(self, change: RoleChange) -> str | None:
        """Returns why the instance must keep its role, because nobody else ready has it; None where it may change."""
        instance = change.instance
        if change.is_forced or not change.was_routable:
            return None
        others = [one for one in self._pool.of_role(change.old) if one is not instance and one.is_routable]
        alone = [one for one in self._pool.of_role(change.new) if one.is_routable and one.serves_alone]
        if change.origin == "controller":
            alone = []
        for model in sorted(instance.models) or (None,):
            if any(one.serves(model) and one.revision.fits(instance.revision) for one in others):
                continue
            if any(one.serves(model) for one in alone):
                continue
            of = "" if model is None else f" of {model!r}"
            return (
                f"{instance.name!r} is the last ready {change.old} instance{of}; add or resume another one first, or "
                "use force=true"
            )
        return None

    # ── the change ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _carry_out(self, change: RoleChange) -> None:
        name = change.instance.name
        try:
            await self._drained(change)
            await self._switch(change, change.new)
            await self._proven(change)
        except _NotChanged as error:
            self._give_up(change, str(error), is_restored=error.is_restored)
        except Exception:
            log.exception("changing the role of %s met a bug", name)
            self._give_up(change, "changing its role met a bug", is_restored=True)
        else:
            change.step(Phase.DONE)
            log.info("%s is a %s instance now, and ready", name, change.new)
        finally:
            self.ended[change.new, change.origin, change.phase.value] += 1
            del self._under_way[name]
            self.on_end(change)

    def _give_up(self, change: RoleChange, why: str, *, is_restored: bool) -> None:
        instance = change.instance
        if self._is_there(instance):
            if not is_restored:
                instance.drain()  # also where somebody has put it in use again while its engine was told
            elif not change.was_draining:
                instance.resume()
        change.step(Phase.FAILED, why)
        log.warning("%s did not become a %s instance: %s", instance.name, change.new, why)

    def _is_there(self, instance: Instance) -> bool:
        return self._pool.find(instance.name) is instance

    async def _drained(self, change: RoleChange) -> None:
        """Waits until nothing is under way at the instance. Raises `_NotChanged` where that does not come, or is not
        wanted any more."""
        instance = change.instance
        until = anyio.current_time() + self._timeout_s
        while True:
            if not self._is_there(instance):
                raise _NotChanged("it was taken out of the fleet")
            if not instance.is_draining:
                raise _NotChanged("it was put in use again")
            if (why := self._why_needed(change)) is not None:
                raise _NotChanged(why)
            if self._pool.is_over(instance):
                return
            if anyio.current_time() >= until:
                raise _NotChanged(
                    f"after {self._timeout_s:g} s it still had {instance.num_attempts} requests under way and "
                    f"{instance.held} pages held"
                )
            await anyio.sleep(LOOK_S)

    async def _switch(self, change: RoleChange, role: Role) -> None:
        """Puts the instance, at which nothing is under way, into `role`. Raises `_NotChanged`."""
        change.step(Phase.SWITCHING, change.why)
        instance = change.instance
        if isinstance(instance.adapter, RoleSwitcher):
            await self._tell_engine(instance, instance.adapter, role)
            await self._emptied(instance)
            if not self._is_there(instance):
                raise _NotChanged("it was taken out of the fleet")
        try:
            change.instance = self._membership.change_role(instance, role)
        except ConfigError as error:
            raise _NotChanged(str(error)) from None
        change.step(Phase.PROVING, change.why)

    async def _tell_engine(self, instance: Instance, adapter: RoleSwitcher, role: Role) -> None:
        """Has the engine take the role. An engine of which nobody knows whether it did so gets no requests: it stays
        drained."""
        call = adapter.role_switch(role)
        try:
            with anyio.fail_after(self._timeout_s):
                leg = await instance.client.post(call.path, call.body, {"content-type": "application/json"})
                try:
                    adapter.read_role_switch(leg.status, await leg.read())
                finally:
                    leg.close()
        except EngineUnreachable as error:
            raise _NotChanged(f"its engine cannot be reached: {error}") from None
        except RoleRefused as error:
            raise _NotChanged(f"its engine refused: {error}", is_restored=error.is_unharmed) from None
        except (EngineBroken, MalformedReply, TimeoutError) as error:
            why = str(error) or f"no answer within {self._timeout_s:g} s"
            raise _NotChanged(
                f"nobody knows whether its engine changed, so it stays drained: {why}; ask again, or resume it",
                is_restored=False,
            ) from None

    async def _emptied(self, instance: Instance) -> None:
        """Waits until nothing is under way at an instance whose engine has changed: meanwhile it may have been put in
        use again, or a canary may have been sent there. Raises `_NotChanged` where that does not come."""
        until = anyio.current_time() + self._timeout_s
        while self._is_there(instance) and not self._pool.is_over(instance):
            if not instance.is_draining:
                instance.drain()
            if anyio.current_time() >= until:
                raise _NotChanged(
                    f"its engine changed, and got requests in the old role, which were not over {self._timeout_s:g} s "
                    "later, so it stays drained; ask again",
                    is_restored=False,
                )
            await anyio.sleep(LOOK_S)

    async def _proven(self, change: RoleChange) -> None:
        """Waits until the instance is ready in its new role. Has it go back and raises `_NotChanged` where it is
        not."""
        if await self._is_ready_in_time(change.instance):
            return
        if not self._is_there(change.instance):
            raise _NotChanged("it was taken out of the fleet")
        why = f"it was not ready within {self._ready_s:g} s ({change.instance.why}) and goes back to {change.old}"
        change.why, change.was_routable = why, False
        change.instance.drain()
        await self._drained(change)
        await self._switch(change, change.old)
        if change.was_draining:
            change.instance.drain()
        raise _NotChanged(why)

    async def _is_ready_in_time(self, instance: Instance) -> bool:
        with anyio.move_on_after(self._ready_s):
            while not instance.is_ready and self._is_there(instance):  # noqa: ASYNC110
                await anyio.sleep(LOOK_S)
        return instance.is_ready and self._is_there(instance)

    def __repr__(self) -> str:
        return f"<RoleChanges: {', '.join(f'{name} {one.phase}' for name, one in self._under_way.items()) or 'none'}>"
