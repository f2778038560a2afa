"""Faults that are planted one at a time, in the ends, in the links or in the rules of time: the search must find every
one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from pdproxy.admission.account import Account
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Custody
from pdproxy.fronts import messages
from pdproxy.fronts.front_admission import FrontAdmission, Held
from pdproxy.fronts.hub import Session
from scripts.dev.check_kernel.fleet import world
from scripts.dev.check_kernel.fleet.parts import TTL_S, Beat, Front, Leader
from scripts.dev.check_kernel.fleet.world import Plan, World
from scripts.dev.common.planted import planted

PLAN = Plan("fleet: planted")
ROOM = Plan("fleet: planted, with room", capacities=(4,), num_attempts=3)
LOST = replace(
    ROOM,
    prelude="ask a 2,ask b 2,settle,send a1,arrive a1,ready a1,send b1,arrive b1,settle,die b,forget,elect,follow a,"
    "settle,glance 2 d0,tick,settle,tick,settle,tick,settle",
)
UNTOLD = replace(PLAN, knows_terms=False)
HELD = replace(UNTOLD, prelude="ask b 2,settle,forget,elect,follow a,ask a 2,settle,tick,settle,tick", num_faults=0)
LOOKED = replace(HELD, prelude=HELD.prelude + ",look 2 d0,told 2 d0,send b1")
HEARD_LATE = replace(HELD, prelude="ask b 2,settle,forget,elect,follow a,ask a 2,settle,tick,up 1,tick")
LATE = replace(PLAN, prelude="ask b 2,settle,stop b,forget,elect,follow a,ask a 2,settle")
SENT = replace(PLAN, prelude="ask b 2,settle,send b1,settle,stop b,forget,elect,follow a,ask a 2,settle")
ORPHAN = replace(PLAN, prelude="ask a 2,settle,send a1,arrive a1")


Original = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A `Fault` is a mistake: what stands where instead, or another plan of the time. `seed`: where the walks begin,
    close to one that finds it, which saves time."""

    name: str
    plan: Plan
    patches: tuple[tuple[Any, str, Any], ...] = ()
    seed: int = 1

    @contextmanager
    def planted(self) -> Iterator[Plan]:
        with planted(self.patches):
            yield self.plan


# ── wrong leaders ───────────────────────────────────────────────────────────────────────────────────────────────────


def _sure_by_any_look(original: Original) -> Original:
    def heard(self: Account, capacity: int, occupied: int | None, *args: Any) -> bool:
        *others, _ = args
        return bool(original(self, capacity, occupied, *others, float("inf") if args[0] >= self._sure_at else -1.0))

    return heard


def _claims_are_filled(self: Account) -> int:
    return sum(lease.pages for lease in self.leases if lease.custody in (Custody.FILLING, Custody.READY))


def _heard_trusts_claims(original: Original) -> Original:
    """Takes the pages that were claimed for those that are in use at the end of the window."""

    def heard(self: Account, capacity: int, occupied: int | None, *args: Any) -> bool:
        was_sure, foreign = self.is_sure, self.foreign
        changed = original(self, capacity, occupied, *args)
        if self.is_sure and not was_sure and occupied is not None:
            self.foreign = max(0, min(occupied - _claims_are_filled(self), capacity))
            self._set_limit()
        return bool(changed or foreign != self.foreign)

    return heard


def _heard_takes_claims_for_filled(original: Original) -> Original:
    """Has what was claimed hide what somebody else has left, at any look."""

    def heard(self: Account, capacity: int, occupied: int | None, *args: Any) -> bool:
        foreign = self.foreign
        changed = original(self, capacity, occupied, *args)
        if self.is_sure and occupied is not None:
            self._num_found = min(self._num_found, max(0, occupied - _claims_are_filled(self)))
            self.foreign = min(self.foreign, self._num_found)
            self._set_limit()
        return bool(changed or foreign != self.foreign)

    return heard


def _always(self: Any) -> bool:
    return True


def _close_reaps(original: Original) -> Original:
    """Takes fronts for gone that another leader has by now."""

    def close(self: Session) -> None:
        with patch.object(self._hub, "may_grant", lambda: True):
            original(self)

    return close


def _claim_forgets_early(original: Original) -> Original:
    def owner_heard(self: Session, owner: Any) -> None:
        self._early.clear()

    return owner_heard


def _deaf_to(*kinds: type[Any]) -> Original:
    """Returns what makes messages of these kinds go lost."""

    def wrong(original: Original) -> Original:
        def init(self: Session, *args: Any) -> None:
            original(self, *args)
            self.handlers = {**self.handlers, **dict.fromkeys(kinds, lambda message: None)}

        return init

    return wrong


def _twice(hear: Original, message: Any) -> None:
    hear(message)
    hear(message)


def _hears_twice(*kinds: type[Any]) -> Original:
    def wrong(original: Original) -> Original:
        def init(self: Session, *args: Any) -> None:
            original(self, *args)
            handlers = self.handlers
            self.handlers = {
                **handlers,
                **{kind: partial(_twice, handlers[kind]) for kind in kinds},
            }

        return init

    return wrong


# ── wrong fronts ────────────────────────────────────────────────────────────────────────────────────────────────────


def _begin_keeps_grants(self: FrontAdmission, term: int) -> None:
    self.term = term
    self._is_known = False
    self.shapes.clear()


def _claims_none_abandoned(original: Original) -> Original:
    def claim(self: FrontAdmission, attempt: str, held: Held, now: float) -> None:
        if held.abandoned is None:
            original(self, attempt, held, now)

    return claim


def _claims_live(original: Original) -> Original:
    """Claims what was abandoned, and does not say so."""

    def claim(self: FrontAdmission, attempt: str, held: Held, now: float) -> None:
        abandoned, held.abandoned = held.abandoned, None
        original(self, attempt, held, now)
        held.abandoned = abandoned

    return claim


def _asks_as_new(original: Original) -> Original:
    def ask(self: FrontAdmission, demand: Any, now: float, *, is_again: bool) -> None:
        age, demand.age = demand.age, now if is_again else demand.age
        original(self, demand, now, is_again=is_again)
        demand.age = age

    return ask


def _asks_nobody_who_is_late(original: Original) -> Original:
    """Keeps a request for the next leader while this one is late."""

    def ask(self: FrontAdmission, demand: Any, now: float, *, is_again: bool) -> None:
        if is_again or self.has_leader:
            original(self, demand, now, is_again=is_again)
        else:
            self._asked[demand.attempt] = demand

    return ask


def _answers_always(original: Original) -> Original:
    """Answers beats also when its time is over."""

    def do_up(self: World, who: str, how: str) -> None:
        link = self.links[int(who)]
        if isinstance(link.up[0][1], Beat):
            link.down.append(link.up[0][1])
        original(self, who, how)

    return do_up


def _lease_from_answer(original: Original) -> Original:
    def answered(self: Front, beat: Beat) -> None:
        original(self, Beat(self.clock()))

    return answered


def _of(kind: Any, name: str, wrong: Original) -> tuple[Any, str, Any]:
    return kind, name, wrong(getattr(kind, name))


FAULTS = (
    Fault("nobody waits for claims", replace(HELD, window_s=0.0), seed=8),
    Fault("claims are waited for as long as one lease", replace(HELD, window_s=TTL_S), seed=8),
    Fault(
        "an answer from before the end of the claims counts",
        LOOKED,
        (_of(Account, "heard", _sure_by_any_look),),
        seed=33,
    ),
    Fault("claims are taken for what is in use", LOST, (_of(Account, "heard", _heard_trusts_claims),), seed=13),
    Fault("claims are taken for filled", LOST, (_of(Account, "heard", _heard_takes_claims_for_filled),)),
    Fault(
        "a leader grants whose time is over",
        PLAN,
        ((Leader, "leads", property(lambda self: not self.is_dead)),),
        seed=20,
    ),
    Fault("a leader answers beats when its time is over", HELD, (_of(World, "do_up", _answers_always),), seed=27),
    Fault("a front does not look at its clock", HELD, ((Front, "is_held", property(_always)),), seed=29),
    Fault("a lease runs from the answer", HEARD_LATE, (_of(Front, "answered", _lease_from_answer),), seed=18),
    Fault("what was granted before is sent for", LATE, ((FrontAdmission, "begin", _begin_keeps_grants),), seed=15),
    Fault("engines are told no term when they are looked at", SENT, ((Admission, "told_term", None),)),
    Fault("a front is taken for gone too soon", ORPHAN, ((world, "MAX_SILENT", 0),)),
    Fault("abandoned attempts are not claimed", ORPHAN, (_of(FrontAdmission, "_claim", _claims_none_abandoned),)),
    Fault("abandoned attempts are claimed as live", ORPHAN, (_of(FrontAdmission, "_claim", _claims_live),), seed=6),
    Fault("early claims are forgotten", ORPHAN, (_of(Session, "owner_heard", _claim_forgets_early),)),
    Fault("those who wait lose their turn", PLAN, (_of(FrontAdmission, "_ask", _asks_as_new),)),
    Fault("a late leader is not asked", PLAN, (_of(FrontAdmission, "_ask", _asks_nobody_who_is_late),), seed=24),
    Fault("a Free is lost", ORPHAN, (_of(Session, "__init__", _deaf_to(messages.Free)),)),
    Fault("an Unbound is lost", ORPHAN, (_of(Session, "__init__", _deaf_to(messages.Unbound)),)),
    Fault("an Abandon is lost", ORPHAN, (_of(Session, "__init__", _deaf_to(messages.Abandon)),), seed=6),
    Fault("an Ask is heard twice", PLAN, (_of(Session, "__init__", _hears_twice(messages.Ask)),)),
    Fault("a Claim is heard twice", ORPHAN, (_of(Session, "__init__", _hears_twice(messages.Claim)),), seed=16),
)
