"""Faults that are planted one at a time, each in the smallest world that shows it: a search must find every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from pdproxy.admission.account import Account, Lease, Place
from pdproxy.admission.custody import Custody, Evidence
from pdproxy.admission.grant import OpenPlaces
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from scripts.dev.check_kernel.model import Model
from scripts.dev.check_kernel.world import FINISHES, NOW, REQUESTS, Ask, Plan, Request, World

ONE = Plan("one pair", (Ask(2),), num_owners=1, num_peers=1, num_faults=0, faults=frozenset())
LINE = Plan(
    "a line", (Ask(3), Ask(1)), num_owners=1, num_peers=1, num_requests=3, num_faults=0, events=REQUESTS | FINISHES
)
BOTH = Plan("two accounts", (Ask(2, 2),), num_owners=1, num_peers=1, num_faults=0, peer_capacity=3)


def _with(plan: Plan, *faults: str, num_faults: int = 1, **changes: Any) -> Plan:
    return Plan(**{**vars(plan), "faults": frozenset(faults), "num_faults": num_faults, **changes})


@dataclass(frozen=True)
class Fault:
    """A `Fault` is a mistake in the kernel (`patches`: what stands where instead) or in whoever drives it (`model`)."""

    name: str
    plan: Plan
    patches: tuple[tuple[Any, str, Any], ...] = ()
    model: type[Model] = field(default=Model)

    @contextmanager
    def planted(self) -> Iterator[Model]:
        patchers = [patch.object(*one) for one in self.patches]
        for patcher in patchers:
            patcher.start()
        try:
            yield self.model(self.plan)
        finally:
            for patcher in reversed(patchers):
                patcher.stop()


# ── wrong kernels ───────────────────────────────────────────────────────────────────────────────────────────────────


def _lost_is_proof(self: Kernel, place: Place) -> None:
    place.is_up = False
    if place.account is not None:
        for lease in list(place.account.leases):
            self.free(lease, Evidence.INCARNATION_ENDED, NOW)


def _lost_drops_orphans(self: Kernel, place: Place) -> None:
    place.is_up = False
    for lease in list(self.orphans):
        if lease.account.place is place:
            self.orphans.remove(lease)


def _take_back_always(self: Account, lease: Lease, evidence: Evidence, now: float) -> bool:
    pages = 2 if lease.is_returned else lease.pages
    lease.custody, lease.pages = Custody.RETURNED, 0
    self.leases.pop(lease, None)
    self._return(pages, now)
    return True


def _no_wake(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `original`, after which nobody is looked at again."""

    def without(self: Kernel, *args: Any, **options: Any) -> Any:
        with patch.object(Kernel, "_pump", lambda self, now: self._changed.clear()):
            return original(self, *args, **options)

    return without


def _leave_without_saving(self: Kernel, demand: Demand) -> None:
    line = self._lines[demand.model]
    line.remove(demand)
    if not len(line):
        del self._lines[demand.model]
    demand.is_waiting = False
    self._exhausted.pop(demand, None)


def _issue_half(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, demand, place, now: original(self, demand, place, now) if place.is_owner else []


def _open_includes_closed(self: Kernel, model: str | None) -> OpenPlaces:
    return OpenPlaces(self.places, self._chooser)


def _expire_by_answer(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, account, asked_at, now: original(self, account, now, now)


def _errand_always_done(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, lease, is_done, now: original(self, lease, True, now)


def _errand_stays_busy(original: Callable[..., Any]) -> Callable[..., Any]:
    def errand_ended(self: Kernel, lease: Lease, is_done: bool, now: float) -> None:
        original(self, lease, is_done, now)
        lease.is_busy = not is_done

    return errand_ended


def _heard_of_any_process(original: Callable[..., Any]) -> Callable[..., Any]:
    def heard(self: Kernel, place: Place, incarnation: str, **options: Any) -> None:
        original(self, place, place.incarnation or incarnation, **options)

    return heard


def _heard_inherits(original: Callable[..., Any]) -> Callable[..., Any]:
    def heard(self: Kernel, place: Place, incarnation: str, **options: Any) -> None:
        place.incarnation = incarnation
        original(self, place, incarnation, **options)

    return heard


def _bind_counts_no_trials(original: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: Kernel, demand: Demand, at: Place | None, now: float) -> Any:
        trials = {place: place.trials for place in self.places}
        for place in self.places:
            place.trials = None
        try:
            return original(self, demand, at, now)
        finally:
            for place, number in trials.items():
                place.trials = number

    return bind


def _pump_once(self: Kernel, now: float) -> None:
    for place in list(self._changed):
        self._grant_one(place, now)
    self._changed.clear()


def _fits_too_much(self: Account, pages: int) -> bool:
    return pages <= self.capacity


def _forget_nothing(self: Kernel) -> None:
    return


def _free_anything(self: Lease, evidence: Evidence) -> None:
    return


def _save_one_side(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, demand, is_owner: original(self, demand, is_owner) if is_owner else True


# ── wrong drivers ───────────────────────────────────────────────────────────────────────────────────────────────────


class ForgetsThePeer(Model):
    """Gives back the owner's lease only."""

    def give_back(self, world: World, request: Request, evidence: Evidence) -> None:
        lease = request.leases[0]
        if lease is not None and not lease.is_returned:
            world.kernel.free(lease, evidence, NOW)


class SaysNeverSent(Model):
    """Says of every abandoned attempt that it was never sent."""

    def do_abandon(self, world: World, number: int, variant: int) -> None:
        self.give_back(world, world.requests[number], Evidence.NEVER_SENT)
        world.requests[number].phase = "over"


class SaysNeverSentOfReady(SaysNeverSent):
    """Says the same, but only of attempts that are being decoded."""

    def do_abandon(self, world: World, number: int, variant: int) -> None:
        if world.requests[number].phase == "decoding":
            super().do_abandon(world, number, variant)
        else:
            Model.do_abandon(self, world, number, variant)


class LeavesNoHeir(Model):
    """Abandons an attempt without giving its leases to the reaper."""

    def do_abandon(self, world: World, number: int, variant: int) -> None:
        world.requests[number].phase = "over"


class RemovesInUse(Model):
    """Lets an operator take a place away that is in use."""

    def _is_idle(self, world: World, number: int) -> bool:
        return True


class TrustsClosing(Model):
    """Takes the end of the prefill leg for the end of its writes."""

    def do_abandon(self, world: World, number: int, variant: int) -> None:
        lease = world.requests[number].leases[0]
        super().do_abandon(world, number, variant)
        if lease is not None and not lease.is_returned:
            world.kernel.free(lease, Evidence.ENGINE_SAID, NOW)


class FreesByTheClock(Model):
    """Takes a lease for over when its time has come, whether or not the engine was heard since."""

    def do_reap(self, world: World, number: int, variant: int) -> None:
        for lease in list(world.kernel.orphans):
            if lease.over_at <= NOW:
                world.kernel.free(lease, Evidence.LEASE_OVER, NOW)
        super().do_reap(world, number, variant)


class NeverLooks(Model):
    """Does errands, and asks nobody whether a lease is over."""

    def do_reap(self, world: World, number: int, variant: int) -> None:
        world.kernel.orphans.take_due(NOW)
        for lease in world.kernel.orphans:
            if lease.over_at < NOW:
                lease.look_at = NOW


def _kernel(name: str, wrong: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    return Kernel, name, wrong(getattr(Kernel, name))


FAULTS = (
    Fault("a refused connection is taken as proof", _with(ONE, "down"), ((Kernel, "lost", _lost_is_proof),)),
    Fault(
        "the reaper drops orphans of a place that is down", _with(ONE, "down"), ((Kernel, "lost", _lost_drops_orphans),)
    ),
    Fault("the second account is forgotten on cancel", BOTH, model=ForgetsThePeer),
    Fault("pages come back twice", ONE, ((Account, "take_back", _take_back_always),)),
    Fault("nobody is woken when pages come back", ONE, (_kernel("free", _no_wake),)),
    Fault("nobody is woken when a place opens", _with(ONE, "drain"), (_kernel("open", _no_wake),)),
    Fault("nobody is woken when the one saved up for is cancelled", LINE, ((Kernel, "_leave", _leave_without_saving),)),
    Fault(
        "nobody is woken when the one saved up for has waited too long",
        LINE,
        (_kernel("expire", _no_wake),),
    ),
    Fault(
        "nobody is woken when a lease shrinks",
        Plan(**{**vars(ONE), "asks": (Ask(2),), "shrinks": True}),
        (_kernel("shrink", _no_wake),),
    ),
    Fault("half of two accounts is leased", BOTH, (_kernel("_issue", _issue_half),)),
    Fault("a closed place is given requests", _with(ONE, "drain"), ((Kernel, "open_places", _open_includes_closed),)),
    Fault(
        "the places that are open are remembered too long",
        _with(ONE, "drain"),
        ((Kernel, "_forget_open", _forget_nothing),),
    ),
    Fault("nobody counts how often somebody is passed", LINE, ((Kernel, "_count_passing", lambda *_: None),)),
    Fault("nothing is saved up", LINE, ((Kernel, "_save_up", lambda _: None),)),
    Fault("more is leased than there is", ONE, ((Account, "fits", _fits_too_much),)),
    Fault("a lease ends by the clock alone", _with(ONE, "freeze"), model=FreesByTheClock),
    Fault("an answer counts by when it came", _with(ONE, "freeze"), (_kernel("_expire_orphans", _expire_by_answer),)),
    Fault("an errand that failed is taken as done", ONE, (_kernel("errand_ended", _errand_always_done),)),
    Fault(
        "an errand that failed is never tried again",
        Plan(**{**vars(ONE), "events": ONE.events - {"over", "stale", "said"}}),
        (_kernel("errand_ended", _errand_stays_busy),),
    ),
    Fault("the old process's pages stay leased", _with(ONE, "restart"), (_kernel("heard", _heard_of_any_process),)),
    Fault("a new process inherits the leases", _with(ONE, "restart"), (_kernel("heard", _heard_inherits),)),
    Fault("trials are not counted", _with(ONE, "trip"), (_kernel("_bind", _bind_counts_no_trials),)),
    Fault("only one is woken when there is room for two", LINE, ((Kernel, "_pump", _pump_once),)),
    Fault("never sent is said of what was sent", ONE, ((Lease, "check_proof", _free_anything),), SaysNeverSent),
    Fault("never sent is said of KV that is there, and is refused", ONE, (), SaysNeverSentOfReady),
    Fault("a request ends and leaves its pages to nobody", ONE, model=LeavesNoHeir),
    Fault("a place is removed while it is in use", _with(ONE, "drain"), model=RemovesInUse),
    Fault("a closed leg is taken for one that writes no more", ONE, model=TrustsClosing),
    Fault("nobody asks whether a lease is over", Plan(**{**vars(ONE), "ways": ("lease",)}), model=NeverLooks),
)
