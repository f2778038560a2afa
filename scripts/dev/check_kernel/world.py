"""A small world consists of engine processes that really occupy pages, requests, and the kernel between them.

Everything here is plain data, so that a state can be stored and taken up again. Time stands still at `NOW`; whatever
waits for a time is an event of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.drain import DrainRate
from pdproxy.admission.grant import Forecast, Grant
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.revision import ANY, Revision
from pdproxy.admission.room import KvCache

NOW = 0.0
PAST = -1.0
LONG_PAST = -2.0
OWNER, SMALL, PEER = "owner", "small owner", "peer"
SHAPES = (OWNER, SMALL, PEER)
TERM = "dtype"
"""The term in which revisions differ."""

REQUESTS = frozenset({"arrive", "cancel", "expire", "untie"})
FINISHES = frozenset({"finish"})
LEGS = frozenset({"send", "refused", "reply", "abandon", "ready", "first", "said", "echo"})
ENGINES = frozenset({"write", "take", "over", "over_peer", "stale", "letgo", "errand", "reap", "look"})
PLACES = frozenset({"down", "restart", "freeze", "drain", "trip"})


@dataclass(frozen=True)
class Ask:
    """An `Ask` is a request that may come: the pages that it takes of an owner and of a peer, the tokens of its answer
    in the peer's KV cache, and how it stands in line.

    Small owners take `small_pages`, where that is given. `avoids` and `home` are numbers of places. `is_retry`: it is
    older than everybody who waits. `goes_on`: the letter of the revision that has begun its answer.
    """

    pages: int
    peer_pages: int = 0
    tokens: int = 0
    small_pages: int | None = None
    priority: int = 0
    is_retry: bool = False
    avoids: tuple[int, ...] = ()
    home: int | None = None
    goes_on: str = ""


@dataclass(frozen=True)
class Plan:
    """A `Plan` describes a world: how many there are of each thing, what may be asked for, and which events there are.
    Peers write answers in a KV cache of `cache` tokens, where that is given. With `serves_alone` places serve demands
    alone while there is nobody on the other side; with `forecasts` a guess may have them do so at any time.

    `revisions` has a letter for each place; ``*`` stands for a place that fits every other. Where it is empty, all fit
    all. A place that is upgraded becomes one of ``B``. `small` has the numbers of the small owners.

    `num_faults` bounds how often places are disturbed. With `is_reporting` engines say how many pages are in use, and
    take a moment to let go of them.
    """

    name: str
    asks: tuple[Ask, ...]
    num_owners: int = 2
    num_peers: int = 2
    num_requests: int = 2
    capacity: int = 3
    peer_capacity: int = 0
    cache: int | None = None
    serves_alone: bool = False
    forecasts: bool = False
    revisions: str = ""
    small: tuple[int, ...] = ()
    num_faults: int = 2
    faults: frozenset[str] = PLACES
    events: frozenset[str] = REQUESTS | LEGS | ENGINES
    ways: tuple[str, ...] = ("errand",)
    shrinks: bool = False
    is_reporting: bool = False
    max_overtakes: int = 1
    max_passes: int = 1


@dataclass(frozen=True, slots=True)
class Size:
    """A `Size` tells the pages of a demand by the shape of the place."""

    pages: int
    peer_pages: int
    small_pages: int | None

    def __call__(self, shape: Hashable) -> int:
        if shape == SMALL and self.small_pages is not None:
            return self.small_pages
        return self.peer_pages if shape == PEER else self.pages


class Picker:
    """A `Picker` picks and guesses as the script says: the search tries all scripts.

    Mutable state: the script of this event, and among how many places each pick has been made so far.
    """

    def __init__(self) -> None:
        self.script: tuple[int, ...] = ()
        self.widths: list[int] = []

    def line_up(self, places: Sequence[Place], *, is_lasting: bool) -> list[Place]:
        return list(places)

    def pick(self, lineup: list[Place], demand: Demand) -> Place:
        if demand.tied_until > NOW and (home := self.home(lineup, demand)) is not None:
            return home
        return lineup[0] if len(lineup) == 1 else lineup[self._draw(len(lineup))]

    def foresee(self, demand: Demand, owner: Place, peer: Place, now: float) -> Forecast:
        return Forecast(0.0, bool(self._draw(2)))

    def relieve(
        self, demand: Demand, num_behind: int, readers: Sequence[Place], writers: Sequence[Place], now: float
    ) -> tuple[Place, Forecast] | None:
        number = self._draw(1 + len(readers))
        return (readers[number - 1], Forecast(0.0, True)) if number else None

    def _draw(self, width: int) -> int:
        number = len(self.widths)
        self.widths.append(width)
        return self.script[number] if number < len(self.script) else 0

    def home(self, lineup: list[Place], demand: Demand) -> Place | None:
        return next((place for place in lineup if place.name == demand.hints.home), None)

    def end(self, lineup: list[Place]) -> None:
        """Does nothing, because nothing is kept."""


class Timeless(DrainRate):
    """A drain rate that measures nothing: time stands still."""

    def measure(self, held: int, now: float) -> None:
        pass

    def count(self, pages: int) -> None:
        pass

    def __reduce__(self) -> Any:
        return _timeless, ()


_TIMELESS = Timeless(NOW)


def _timeless() -> Timeless:
    return _TIMELESS


@dataclass(slots=True)
class Hints:
    """The facts that the search keeps with a demand: who asked, its home, the revision that it goes on with, and how
    often it was passed as the oldest."""

    number: int
    home: str | None
    goes_on: str = ""
    passed: int = 0


class Watched(Kernel):
    """A kernel that reports every grant in the instant in which it is made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bound: list[tuple[Grant, bool, bool, bool, list[Place]]] = []

    def _bind(self, demand: Demand, at: Place | None, now: float) -> Grant | None:
        waiting = [one for line in self._lines.values() for one in line if one is not demand]
        unsaved = [one for one in waiting if not one.saves]
        saved = dict(self._saved)
        open_before = {place for place in self.places if place.is_open}
        is_alone = bool(serve_alone(self))
        meant = pairs(self, demand)
        had_pair = self._forecaster is not None and self._has_pair(demand)
        grant = super()._bind(demand, at, now)
        if grant is not None:
            is_open = grant.owner in open_before and grant.peer in open_before
            eldest = self._passed(grant, waiting)
            if eldest is not None and eldest in unsaved:
                eldest.hints.passed += 1
            robbed = [
                place
                for place in self._taken_of(grant)
                if saved.get(place, demand) is not demand and not self._could_go(saved[place], place)
            ]
            is_complete = (grant.owner is grant.peer) is is_alone
            is_meant = (grant.owner, grant.peer) in meant
            if grant.forecast is not None and grant.forecast.is_alone:
                one = grant.peer
                is_complete = had_pair and grant.owner is one and one.is_writer and one.serves_alone
                is_meant = any(one in pair for pair in meant)
            self.bound.append((grant, is_open, is_complete, is_meant, robbed))
        return grant

    def _take(self, demand: Demand, owner: Place, peer: Place, forecast: Forecast | None, now: float) -> Grant:
        if owner is not peer or owner.is_writer or serve_alone(self):
            return super()._take(demand, owner, peer, forecast, now)
        # One that usually writes no answers serves the demand alone, because those that do have no room.
        is_open = owner.is_open and owner.trials is None and owner.serves_alone
        is_next = demand is min(self._lines[demand.model], key=lambda one: one.order)
        there = [place for place in self.places if place.is_open and place.is_writer]
        is_full = bool(there) and not any(self._has_tokens(demand, place) for place in there)
        is_complete = is_next and is_full and self._has_tokens(demand, owner)
        is_meant = owner.name not in demand.avoid and not demand.hints.goes_on and demand.tied_until <= NOW
        grant = super()._take(demand, owner, peer, forecast, now)
        self.bound.append((grant, is_open, is_complete, is_meant, []))
        return grant

    @staticmethod
    def _has_tokens(demand: Demand, place: Place) -> bool:
        """Tells whether `place` has room in its KV cache for the answer of `demand`."""
        stays, tokens = place.residency.stays, demand.room.tokens
        return not stays or sum(stay.tokens for stay in stays.values()) + tokens <= place.residency.limit

    def _has_pair(self, demand: Demand) -> bool:
        """Tells whether an owner and a peer have room for `demand` now, whoever anything is saved up for."""
        return any(
            one is not other and self._had_room(demand, one) and self._had_room(demand, other)
            for one, other in pairs(self, demand)
        )

    @staticmethod
    def _had_room(demand: Demand, place: Place) -> bool:
        residency, account = place.residency, place.account
        tokens = sum(stay.tokens for stay in residency.stays.values()) + demand.room.tokens
        if place.is_writer and residency.stays and tokens > residency.limit:
            return False
        pages = 0 if account is None else sum(lease.pages for lease in account.leases) + account.foreign
        return account is None or pages + (demand.pages_at(place.shape) or 0) <= account.capacity

    def _could_go(self, demand: Demand, place: Place) -> bool:
        """Tells whether what is free at `place` now is enough for `demand`."""
        residency, account = place.residency, place.account
        tokens = demand.room.tokens if place.is_writer else 0
        if tokens and sum(stay.tokens for stay in residency.stays.values()) + tokens > residency.limit:
            return False
        pages = 0 if account is None or serve_alone(self) else demand.pages_at(place.shape) or 0
        if not pages or account is None:
            return True
        return sum(lease.pages for lease in account.leases) + account.foreign + pages <= account.capacity

    @staticmethod
    def _taken_of(grant: Grant) -> list[Place]:
        """Returns the places of which `grant` takes anything that may be scarce."""
        places = [lease.account.place for lease in grant.leases]
        if grant.demand.room.tokens and grant.peer.is_guarded and grant.peer not in places:
            places.append(grant.peer)
        return places

    def _passed(self, grant: Grant, waiting: list[Demand]) -> Demand | None:
        """Returns the oldest of those who wait and could use a place that this grant takes room of, if it is older
        than the one that goes.
        """
        places = self._taken_of(grant)
        usable = [one for one in waiting if any(can_use(self, one, place) for place in places)]
        eldest = min(usable, key=lambda one: (one.age, one.serial), default=None)
        going = grant.demand
        return None if eldest is None or (going.age, going.serial) < (eldest.age, eldest.serial) else eldest


def serve_alone(kernel: Kernel) -> list[Place]:
    """Returns the open places that serve demands alone, because no two of them fit each other: those that write answers
    where there are any."""
    there = [place for place in kernel.places if place.is_open]
    if any(one.is_owner and not other.is_owner and fit(one, other) for one in there for other in there):
        return []
    found = [place for place in there if not place.is_owner] or there
    return found if all(place.serves_alone for place in there) else []


def fit(one: Place, other: Place) -> bool:
    """Tells whether the letters of the two places are equal, as far as both have one."""
    ours, theirs = letter(one), letter(other)
    return ours == theirs or not ours or not theirs


def letter(place: Place) -> str:
    return place.revision.terms.get(TERM, "")


def revision(letter: str) -> Revision:
    return Revision({TERM: letter}) if letter not in ("", "*") else ANY


def pairs(kernel: Kernel, demand: Demand) -> list[tuple[Place, Place]]:
    """Returns the owners and peers that `demand` may go to, straight from what its fields mean."""
    there = [place for place in kernel.places if place.is_open]
    found = [
        (one, other) for one in there for other in there if one.is_owner and not other.is_owner and fit(one, other)
    ]
    found = found or [(place, place) for place in serve_alone(kernel)]
    homes = [place for place in there if place.name == demand.hints.home and any(place in pair for pair in found)]
    if demand.hints.goes_on:
        found = [pair for pair in found if all(letter(place) == demand.hints.goes_on for place in pair)]
    num_avoided = [sum(place.name in demand.avoid for place in pair) for pair in found]
    found = [pair for pair, number in zip(found, num_avoided, strict=True) if number == min(num_avoided)]
    if not serve_alone(kernel):
        found = [pair for pair in found if demand.pages_at(pair[0].shape)] or found
    for one in homes if demand.tied_until > NOW else ():
        found = [pair for pair in found if one in pair] or found
    return found


def can_use(kernel: Kernel, demand: Demand, place: Place) -> bool:
    """Tells whether `demand` may go to `place`, with some counterpart that fits it."""
    if not place.is_open or place not in kernel.places:
        return False
    return any(place in pair for pair in pairs(kernel, demand))


class Process:
    """A `Process` is an engine, and what the proxy has made of its place.

    `mode`: open, drained, down, tripped (breaker open), half (one trial may go), tried (it has gone), gone. `letter`:
    the revision of the process.
    """

    __slots__ = ("epoch", "is_frozen", "letter", "mode", "place")

    def __init__(self, place: Place, letter: str = "") -> None:
        self.place = place
        self.letter = letter
        self.epoch = 1
        self.is_frozen = False
        self.mode = "open"

    @property
    def is_known(self) -> bool:
        """Tells whether the proxy has heard of this very process."""
        return self.place.incarnation == str(self.epoch)

    @property
    def is_reachable(self) -> bool:
        return self.mode not in ("down", "gone") and not self.is_frozen


class Request:
    """A `Request` is one request and its attempt, as its coroutine and as the engines see it.

    `phase`: idle, waiting, granted, filling (prefill leg), replied, decoding, over. `owner_page` and `peer_page`:
    whether the engine's pages are unused (-), held (h) or about to be let go (d). `is_writer`: the peer may still write
    to the owner. `is_refused`: the owner takes no more writes. `is_taken`: the owner has read the KV, and will say so.
    `is_echoing`: what it said may come once more. `owner_ended`, `peer_ended`: that process is another one now.
    `is_due`: the engine's own time is over, and it was frozen. `is_asked`: an errand for it is under way.
    """

    __slots__ = (
        "demand",
        "is_asked",
        "is_due",
        "is_echoing",
        "is_refused",
        "is_taken",
        "is_writer",
        "leases",
        "owner",
        "owner_ended",
        "owner_page",
        "peer",
        "peer_ended",
        "peer_page",
        "phase",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.phase = "idle"
        self.demand: Demand | None = None
        self.owner = self.peer = -1
        self.leases: tuple[Lease | None, Lease | None] = (None, None)
        self.owner_page = self.peer_page = "-"
        self.is_asked = self.is_writer = self.is_refused = self.is_taken = self.is_echoing = False
        self.owner_ended = self.peer_ended = self.is_due = False

    @property
    def is_alive(self) -> bool:
        """True where the request's coroutine answers for its leases."""
        return self.phase in ("granted", "filling", "replied", "decoding")


class World:
    """A `World` is one state of everything. Mutable state: all of it. The first processes are owners."""

    __slots__ = ("arrivals", "faults_left", "kernel", "processes", "requests")

    def __init__(self, plan: Plan) -> None:
        picker = Picker()
        self.kernel = Watched(
            picker,
            max_overtakes=plan.max_overtakes,
            max_passes=plan.max_passes,
            forecaster=picker if plan.forecasts else None,
        )
        self.faults_left = plan.num_faults
        self.arrivals = 0
        self.requests = [Request() for _ in range(plan.num_requests)]
        self.processes: list[Process] = []
        for number in range(plan.num_owners + plan.num_peers):
            is_owner = number < plan.num_owners
            name = f"o{number + 1}" if is_owner else f"p{number + 1 - plan.num_owners}"
            letter = plan.revisions[number] if plan.revisions else ""
            process = Process(Place(name, is_owner=is_owner, is_writer=not is_owner), letter)
            process.place.serves_alone = plan.serves_alone
            self.processes.append(process)
            self.kernel.add(process.place)
            hear(self, plan, process)
            self.kernel.open(process.place, NOW)

    def leased(self) -> list[Lease]:
        return [lease for request in self.requests for lease in request.leases if lease is not None]

    def page(self, lease: Lease) -> tuple[Request, bool]:
        """Returns the request that has `lease`, and whether the lease is one at the owner."""
        for request in self.requests:
            if lease in request.leases:
                return request, request.leases[0] is lease
        raise LookupError(lease)

    def in_use(self, number: int) -> int:
        """Returns the pages that the process really has in use, those included that it is about to let go."""
        used = 0
        for request in self.requests:
            if request.demand is None:
                continue
            if request.owner == number and request.owner_page != "-":
                used += occupied(request, self.processes[number].place)
            if request.peer == number and request.peer_page != "-":
                used += occupied(request, self.processes[number].place)
        return used


def occupied(request: Request, place: Place) -> int:
    demand = request.demand
    if demand is None:
        return 0
    lease = request.leases[not place.is_owner]
    asked = demand.pages_at(place.shape) or 0
    return min(asked, lease.pages) if lease is not None and not lease.is_returned else asked


def hear(world: World, plan: Plan, process: Process, asked_at: float = NOW) -> None:
    """Lets the process answer a look."""
    place = process.place
    capacity = plan.capacity if place.is_owner else plan.peer_capacity
    number = world.processes.index(process)
    world.kernel.heard(
        place,
        str(process.epoch),
        shape=PEER if not place.is_owner else SMALL if number in plan.small else OWNER,
        capacity=capacity,
        occupied=world.in_use(number) if plan.is_reporting and capacity else None,
        asked_at=asked_at,
        now=NOW,
        cache=KvCache(plan.cache),
        revision=revision(process.letter),
    )
    if place.account is not None:
        place.account.drain = _TIMELESS
