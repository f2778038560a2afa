"""The module has the roles of instances follow the load: where prefillers are busy and decoders are not, a decoder
becomes a prefiller, and the other way round.

What must hold: no role is left without a ready instance, and under a load that stays the same moves come to an end. A
violation would be seen as an instance that goes back and forth: moves in opposite directions, one soon after the other.

`RoleController` decides, without I/O and without a clock. `RoleFollower` feeds it and has its moves made by
`RoleChanges`, as the admin API does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf

import anyio

from pdproxy.config.values import Role
from pdproxy.errors import InvalidRequest
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import ROLES, Pool
from pdproxy.fleet.role_changes import RoleChanges

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the load."""
WINDOW_S = 10.0
"""Seconds over which a role's use is averaged, and for which it is watched after each change of the fleet before the
next move."""
HURRY_S = 4.0
"""The same seconds where all of a role was in use all the time, so that there is no doubt."""
FULL = 0.95
"""The use from which on all of a role is in use."""
BUSY = 0.6
"""The use of a role from which on it may get another instance."""
MARGIN = 0.1
"""The share by which a move must lower the use of the busier role, as far as can be told beforehand: the move back
would raise it."""
REVERSE_MARGIN = 0.3
"""The same share for a move in the opposite direction of the one before: the load must have turned."""
REVERSE_S = 120.0
"""Seconds after a move until one in the opposite direction; twice as many after each that came."""
FORGET_S = 3600.0
"""Seconds without a move after which moves in opposite directions are forgotten."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load is how much of a ready instance is in `use`, from 0 to 1, and whether its role can be changed."""

    name: str
    use: float
    can_move: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """Move says which instance gets which role, and why."""

    name: str
    role: Role
    why: str


class RoleController:
    """RoleController decides for instances that serve the same: at each moment none or one gets the other role.

    What decides is the use of the busier role. A move has to lower it by `MARGIN`, and one back by `REVERSE_MARGIN`, so
    the same load never asks for the way back. The rest is patience: each role is watched anew for `WINDOW_S` after each
    change, and opposite moves have to be further and further apart.

    Mutable state: how many ready instances each role had, and since when; the use of each role, averaged since then,
    and when it was looked at last; the last move's role and time; how many moves were opposite to the one before; until
    when nothing is moved.
    """

    def __init__(self) -> None:
        self._numbers = (0, 0)
        self._since = self._looked_at = -inf
        self._use = (0.0, 0.0)
        self._last_role: Role | None = None
        self._last_at = -inf
        self._num_reversed = 0
        self._not_before = -inf

    def decide(self, now: float, prefillers: Sequence[Load], decoders: Sequence[Load]) -> Move | None:
        """Takes the load of the instances that are ready at the time `now`, in seconds. Returns the move that should be
        made, which counts as made; None where all is well as it is."""
        self._look(now, prefillers, decoders)
        settles_s = HURRY_S if max(self._use) >= FULL else WINDOW_S
        if now - self._since < settles_s or now < self._not_before or not (prefillers and decoders):
            return None
        takes_prefill = self._use[0] >= self._use[1]
        role: Role = "prefill" if takes_prefill else "decode"
        givers, num_takers = (decoders, len(prefillers)) if takes_prefill else (prefillers, len(decoders))
        busy, other = self._use if takes_prefill else self._use[::-1]
        movable = [one for one in givers if one.can_move]
        if busy < BUSY or len(givers) < 2 or not movable:
            return None
        after = max(busy * num_takers / (num_takers + 1), other * len(givers) / (len(givers) - 1))
        is_back = self._last_role not in (None, role)
        if after > (1.0 - (REVERSE_MARGIN if is_back else MARGIN)) * busy:
            return None
        if is_back and now - self._last_at < REVERSE_S * 2**self._num_reversed:
            return None
        self._moved(role, now)
        name = min(movable, key=lambda one: (one.use, one.name)).name
        why = (
            f"{num_takers} {role} instances are {busy:.0%} in use and {len(givers)} others {other:.0%}; "
            f"after the move the busier role would be {after:.0%}"
        )
        return Move(name, role, why)

    def hold(self, now: float) -> None:
        """Takes note that a move came to nothing. No other is tried for a while."""
        self._not_before = now + REVERSE_S

    def _look(self, now: float, prefillers: Sequence[Load], decoders: Sequence[Load]) -> None:
        numbers = len(prefillers), len(decoders)
        if numbers != self._numbers:
            self._numbers, self._since, self._looked_at = numbers, now, now
            self._use = _mean(prefillers), _mean(decoders)
            return
        # The mean since the last change, and from `WINDOW_S` on an exponential one.
        lasted_s = now - self._since
        fade = 1.0 - exp(-(now - self._looked_at) / WINDOW_S)
        if lasted_s < WINDOW_S:
            fade = max(fade, (now - self._looked_at) / (lasted_s + LOOK_S))
        self._looked_at = now
        self._use = (
            self._use[0] + fade * (_mean(prefillers) - self._use[0]),
            self._use[1] + fade * (_mean(decoders) - self._use[1]),
        )

    def _moved(self, role: Role, now: float) -> None:
        if now - self._last_at >= FORGET_S:
            self._num_reversed = 0
        elif self._last_role not in (None, role):
            self._num_reversed += 1
        self._last_role, self._last_at = role, now

    def __repr__(self) -> str:
        uses = ", ".join(f"{number} at {use:.0%}" for number, use in zip(self._numbers, self._use, strict=True))
        return f"<RoleController: prefill, decode: {uses}>"


def _mean(loads: Sequence[Load]) -> float:
    return sum(one.use for one in loads) / len(loads) if loads else 0.0


class RoleFollower:
    """RoleFollower looks at the load of `pool` once in `LOOK_S` seconds and has `changes` made. `run` must be running.

    Instances of one kind that serve the same models are decided upon together. Mutable state: a controller for each
    such group; how many changes had failed at the last look.
    """

    def __init__(self, pool: Pool, changes: RoleChanges, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._changes = changes
        self._clock = clock
        self._controllers: dict[tuple[str, frozenset[str]], RoleController] = {}
        self._num_failed = 0

    async def run(self) -> None:
        """Follows the load, until cancelled."""
        while True:
            await anyio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Looks at the load once."""
        groups: dict[tuple[str, frozenset[str]], list[Instance]] = {}
        for instance in self._pool.instances:
            if instance.is_routable:
                groups.setdefault((instance.adapter.name, instance.models), []).append(instance)
        self._controllers = {group: self._controllers.get(group) or RoleController() for group in groups}
        for group, instances in groups.items():
            self._follow(self._controllers[group], instances)

    def _follow(self, controller: RoleController, instances: Iterable[Instance]) -> None:
        prefillers, decoders = ([one for one in instances if one.role == role] for role in ROLES)
        now = self._clock()
        if (num_failed := self._changes.num_failed) != self._num_failed:
            self._num_failed = num_failed
            controller.hold(now)
        move = controller.decide(now, self._loads(prefillers), self._loads(decoders))
        if move is None:
            return
        log.info("%s is to become a %s instance: %s", move.name, move.role, move.why)
        try:
            self._changes.change(move.name, move.role, origin="controller", reason=move.why)
        except InvalidRequest as error:
            log.warning("%s keeps its role: %s", move.name, error)
            controller.hold(now)

    def _loads(self, instances: Sequence[Instance]) -> list[Load]:
        """Returns the loads of instances of one role. While any role changes, nothing else can be moved."""
        is_free = not self._changes.is_busy
        return [Load(one.name, use_of(one), is_free and self._changes.can_change(one)) for one in instances]


def use_of(instance: Instance) -> float:
    """Returns how much of the instance is in use, from 0 to 1: of a prefiller whether it has a prompt to read, of a
    decoder the share of its memory, and all of it where answers wait there."""
    if instance.role == "prefill":
        return 1.0 if instance.queued_tokens > 0 else 0.0
    facts, account, residency = instance.facts, instance.account, instance.residency
    if facts is not None and facts.cache.is_queueing:
        return 1.0
    pages = account.held / account.limit if account is not None and account.limit > 0 else 0.0
    tokens = residency.used / residency.capacity if residency.capacity else 0.0
    return min(1.0, max(pages, tokens))
