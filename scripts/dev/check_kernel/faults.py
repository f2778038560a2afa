"""Faults that are planted one at a time, each in the smallest world that shows it: a search must find every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from pdproxy.admission import kernel
from pdproxy.admission.account import Account, Lease, Place
from pdproxy.admission.custody import Custody, Evidence
from pdproxy.admission.grant import Grant, OpenPlaces, Side
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand, Line
from pdproxy.admission.residency import Residency
from pdproxy.admission.revision import Revision
from scripts.dev.check_kernel.model import Model
from scripts.dev.check_kernel.world import FINISHES, NOW, REQUESTS, Ask, Plan, Request, World

ONE = Plan("one pair", (Ask(2),), num_owners=1, num_peers=1, num_faults=0, faults=frozenset())
LINE = Plan(
    "a line", (Ask(3), Ask(1)), num_owners=1, num_peers=1, num_requests=3, num_faults=0, events=REQUESTS | FINISHES
)
CACHE = Plan(
    "a KV cache",
    (Ask(1, tokens=2), Ask(1, tokens=1), Ask(1, tokens=3)),
    num_owners=1,
    num_peers=1,
    num_requests=3,
    cache=3,
    num_faults=0,
    events=REQUESTS | FINISHES,
)
ALONE = Plan(
    "one side is left",
    (Ask(3), Ask(1)),
    num_owners=1,
    num_peers=1,
    serves_alone=True,
    num_faults=1,
    faults=frozenset({"drain"}),
    events=REQUESTS | FINISHES,
)
GUESSED = Plan(**{**vars(CACHE), "serves_alone": True, "forecasts": True})
REVISIONS = Plan(
    "two revisions",
    (Ask(3, 1), Ask(1, 3), Ask(2, 2)),
    num_requests=3,
    peer_capacity=3,
    revisions="ABAB",
    num_faults=0,
    events=REQUESTS | FINISHES,
)
SMALL_OWNER = Plan(
    "a small owner",
    (Ask(2), Ask(2, small_pages=0), Ask(3, small_pages=0, avoids=(1,), home=0)),
    num_peers=1,
    num_requests=3,
    small=(0,),
    num_faults=1,
    faults=frozenset({"drain", "trip"}),
    events=LINE.events,
)
CONTINUED = Plan(**{**vars(REVISIONS), "peer_capacity": 0, "asks": (Ask(3), Ask(1, goes_on="A"))})
UPGRADE = Plan(**{**vars(REVISIONS), "revisions": "AAAA", "faults": frozenset({"upgrade"}), "num_faults": 1})
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


def _smaller_by_pages(one: Demand, other: Demand, shapes: Any) -> bool:
    return one.is_plain and all((one.pages_at(shape) or 0) <= (other.pages_at(shape) or 0) for shape in shapes)


def _room_for_anything(self: Residency, tokens: int, others: int = 0) -> bool:
    return True


def _alone_always(self: Kernel, demand: Demand) -> Any:
    return self.open_places(demand.model).owners[:1]


def _guess_for_anybody(forecaster: Any, demand: Demand, owner: Place, peer: Place, now: float) -> Any:
    return forecaster.foresee(demand, owner, peer, now)


def _alone_takes_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, demand, place, is_alone=False: not is_alone and original(self, demand, place)


def _goes_alone_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the forecaster decide before anybody has asked for room."""

    def pair(self: Kernel, demand: Demand, at: Place | None, now: float) -> Any:
        found = self.open_places(demand.model)
        return original(self, demand, at, now) or (found.has_pair and (found.owners[0], found.peers[0])) or None

    return pair


def _pairs_writer(self: Grant) -> Place | None:
    return None if self.owner is self.peer and self.owner.is_owner else self.peer


def _lasts_first(self: Line) -> Demand:
    return max(self, key=lambda one: one.order)


def _if_scarce(self: Kernel, place: Place) -> bool:
    return place.is_scarce


def _waits_for_pages(self: Kernel, demand: Demand, place: Place) -> bool:
    pages = demand.pages_at(place.shape) if place.account is not None else 0
    return not place.is_owner if place.account is None else pages is not None and place.account.fits(pages)


def _forget_nothing(self: Kernel) -> None:
    return


def _free_anything(self: Lease, evidence: Evidence) -> None:
    return


def _save_each_side(self: Kernel, demand: Demand) -> tuple[Place, ...]:
    """Saves up an owner and a peer, whether or not they fit each other."""
    sides = self._sides(demand, float("-inf"))
    halves = [[place for side in sides for place in side[half]] for half in (0, 1)]
    found = [self._place_to_save(demand, half) for half in (halves[0], halves[1][::-1])]
    return () if None in found else tuple(place for place in found if place is not None)


def _without_of_each_half(sides: list[Side], avoid: frozenset[str]) -> list[Side]:
    """Leaves out what is avoided where there are others on the same half, of whatever revision."""
    others = [[place for side in sides for place in side[half] if place.name not in avoid] for half in (0, 1)]
    return [
        (
            [place for place in owners if place in others[0] or not others[0]],
            [place for place in peers if place in others[1] or not others[1]],
        )
        for owners, peers in sides
    ]


def _heard_of_one_revision(original: Callable[..., Any]) -> Callable[..., Any]:
    def heard(self: Kernel, place: Place, incarnation: str, **options: Any) -> None:
        if place.incarnation is not None:
            options["revision"] = place.revision
        original(self, place, incarnation, **options)

    return heard


def _is_plain_though_it_goes_on(self: Demand) -> bool:
    return not self.avoid and self.pair is None and self.tied_until == float("-inf")


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
    Fault("nobody asks for room in the KV cache", CACHE, ((Residency, "fits", _room_for_anything),)),
    Fault("nobody is woken when an answer is over", CACHE, (_kernel("vacate", _no_wake),)),
    Fault("an answer counts at nobody's", CACHE, ((Residency, "enter", lambda self, attempt, room: None),)),
    Fault(
        "what is saved up is given to others",
        Plan(**{**vars(CACHE), "max_overtakes": 0}),
        ((Residency, "fits_beside", _room_for_anything),),
    ),
    Fault(
        "who takes fewer pages but more tokens is put behind",
        CACHE,
        ((kernel, "_is_smaller", _smaller_by_pages),),
    ),
    Fault("a place serves alone beside others", ALONE, ((Kernel, "_alone", _alone_always),)),
    Fault("who is served alone waits for pages", ALONE, ((Kernel, "_has_room", _waits_for_pages),)),
    Fault(
        "a guess is made for a place that may not serve alone",
        _with(GUESSED, num_faults=0, serves_alone=False),
        ((Kernel, "_foresee", staticmethod(_guess_for_anybody)),),
    ),
    Fault("a guess lets somebody go for whom there is no room", GUESSED, (_kernel("_pair", _goes_alone_at_once),)),
    Fault("who is served alone by a guess passes nobody", GUESSED, (_kernel("_takes", _alone_takes_nothing),)),
    Fault(
        "one who writes no answers does so though others have room",
        GUESSED,
        ((Kernel, "_room_at", lambda self, model, is_owner: (-1.0, None)),),
    ),
    Fault(
        "one who writes no answers gets more than fit into its memory",
        GUESSED,
        ((Kernel, "_could_write", staticmethod(lambda demand, place, found: place.serves_alone)),),
    ),
    Fault(
        "the answer of one who usually writes none counts at nobody's",
        GUESSED,
        ((Grant, "writer", property(_pairs_writer)),),
    ),
    Fault("who came last is relieved first", GUESSED, ((Line, "head", property(_lasts_first)),)),
    Fault("nobody hears that a side has gone", ALONE, ((Kernel, "_is_waited_for", _if_scarce),)),
    Fault(
        "an owner and a peer of two revisions are bound",
        REVISIONS,
        ((Revision, "fits", lambda self, other: True),),
    ),
    Fault(
        "an owner and a peer of two revisions are saved up",
        Plan(**{**vars(REVISIONS), "num_requests": 4}),
        ((Kernel, "_places_to_save", _save_each_side),),
    ),
    Fault(
        "who avoids a place of each revision finds nobody",
        Plan(**{**vars(REVISIONS), "asks": (Ask(2, avoids=(0, 3)),)}),
        ((kernel, "_without", _without_of_each_half),),
    ),
    Fault("another revision goes on with an answer", CONTINUED, ((kernel, "_writing", lambda sides, terms: sides),)),
    Fault(
        "who may go to one revision only keeps others from both",
        CONTINUED,
        ((Demand, "is_plain", property(_is_plain_though_it_goes_on)),),
    ),
    Fault(
        "who has no room where its KV fits goes where it does not",
        SMALL_OWNER,
        ((Kernel, "_is_split", lambda self, demand, found: False),),
    ),
    Fault(
        "who waits for an owner that takes its KV keeps others from small ones",
        SMALL_OWNER,
        ((kernel, "_is_no_less", lambda pages, least: pages is None or (least is not None and least <= pages)),),
    ),
    Fault(
        "who cannot use its home waits for it",
        Plan(**{**vars(SMALL_OWNER), "asks": (Ask(2, small_pages=0, home=0),)}),
        ((Kernel, "_is_beneath", lambda self, demand, place, found: False),),
    ),
    Fault("a new process counts as one of the old revision", UPGRADE, (_kernel("heard", _heard_of_one_revision),)),
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
