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
from pdproxy.admission.grant import Grant
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand

NOW = 0.0
PAST = -1.0
LONG_PAST = -2.0
OWNER, PEER = "owner", "peer"

REQUESTS = frozenset({"arrive", "cancel", "expire", "untie"})
FINISHES = frozenset({"finish"})
LEGS = frozenset({"send", "refused", "reply", "abandon", "ready", "first", "said", "echo"})
ENGINES = frozenset({"write", "take", "over", "over_peer", "stale", "letgo", "errand", "reap", "look"})
PLACES = frozenset({"down", "restart", "freeze", "drain", "trip"})


@dataclass(frozen=True)
class Ask:
    """An `Ask` is a request that may come: the pages that it takes of an owner and of a peer, and how it stands in
    line.

    `avoids` and `home` are numbers of places. `is_retry`: it is older than everybody who waits.
    """

    pages: int
    peer_pages: int = 0
    priority: int = 0
    is_retry: bool = False
    avoids: tuple[int, ...] = ()
    home: int | None = None


@dataclass(frozen=True)
class Plan:
    """A `Plan` describes a world: how many there are of each thing, what may be asked for, and which events there are.

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
    """A `Size` tells the pages of a demand by the role of the place."""

    pages: int
    peer_pages: int

    def __call__(self, shape: Hashable) -> int:
        return self.pages if shape == OWNER else self.peer_pages


class Picker:
    """A `Picker` picks as the script says: the search tries all scripts.

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
        if len(lineup) == 1:
            return lineup[0]
        number = len(self.widths)
        self.widths.append(len(lineup))
        return lineup[self.script[number] if number < len(self.script) else 0]

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
    """The facts that the search keeps with a demand: who asked, its home, and how often it was passed as the oldest."""

    number: int
    home: str | None
    passed: int = 0


class Watched(Kernel):
    """A kernel that reports every grant in the instant in which it is made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bound: list[tuple[Grant, list[Demand], bool]] = []

    def _bind(self, demand: Demand, at: Place | None, now: float) -> Grant | None:
        waiting = [one for line in self._lines.values() for one in line if one is not demand]
        unsaved = [one for one in waiting if not one.saves]
        open_before = {place for place in self.places if place.is_open}
        grant = super()._bind(demand, at, now)
        if grant is not None:
            is_open = grant.owner in open_before and grant.peer in open_before
            eldest = self._passed(grant, waiting)
            if eldest is not None and eldest in unsaved:
                eldest.hints.passed += 1
            self.bound.append((grant, waiting, is_open))
        return grant

    def _passed(self, grant: Grant, waiting: list[Demand]) -> Demand | None:
        """Returns the oldest of those who wait and could use an account that this grant takes pages of, if it is older
        than the one that goes.
        """
        places = [lease.account.place for lease in grant.leases]
        usable = [one for one in waiting if any(can_use(self, one, place) for place in places)]
        eldest = min(usable, key=lambda one: (one.age, one.serial), default=None)
        going = grant.demand
        return None if eldest is None or (going.age, going.serial) < (eldest.age, eldest.serial) else eldest


def can_use(kernel: Kernel, demand: Demand, place: Place) -> bool:
    """Tells whether `demand` may go to `place`, straight from what its fields mean."""
    if not place.is_open or place not in kernel.places:
        return False
    others = [one for one in kernel.places if one.is_open and one.is_owner is place.is_owner]
    if place.name in demand.avoid and any(one.name not in demand.avoid for one in others):
        return False
    homes = [one for one in others if one.name == demand.hints.home]
    return demand.tied_until <= NOW or not homes or place in homes


class Process:
    """A `Process` is an engine, and what the proxy has made of its place.

    `mode`: open, drained, down, tripped (breaker open), half (one trial may go), tried (it has gone), gone.
    """

    __slots__ = ("epoch", "is_frozen", "mode", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
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
        self.kernel = Watched(Picker(), max_overtakes=plan.max_overtakes, max_passes=plan.max_passes)
        self.faults_left = plan.num_faults
        self.arrivals = 0
        self.requests = [Request() for _ in range(plan.num_requests)]
        self.processes: list[Process] = []
        for number in range(plan.num_owners + plan.num_peers):
            is_owner = number < plan.num_owners
            name = f"o{number + 1}" if is_owner else f"p{number + 1 - plan.num_owners}"
            process = Process(Place(name, is_owner=is_owner))
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
                used += occupied(request, True)
            if request.peer == number and request.peer_page != "-":
                used += occupied(request, False)
        return used


def occupied(request: Request, is_owner: bool) -> int:
    demand = request.demand
    if demand is None:
        return 0
    lease = request.leases[not is_owner]
    asked = demand.pages_at(OWNER if is_owner else PEER) or 0
    return min(asked, lease.pages) if lease is not None and not lease.is_returned else asked


def hear(world: World, plan: Plan, process: Process, asked_at: float = NOW) -> None:
    """Lets the process answer a look."""
    place = process.place
    capacity = plan.capacity if place.is_owner else plan.peer_capacity
    number = world.processes.index(process)
    world.kernel.heard(
        place,
        str(process.epoch),
        shape=OWNER if place.is_owner else PEER,
        capacity=capacity,
        occupied=world.in_use(number) if plan.is_reporting and capacity else None,
        asked_at=asked_at,
        now=NOW,
    )
    if place.account is not None:
        place.account.drain = _TIMELESS
