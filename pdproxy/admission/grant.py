"""The module holds the kernel's answers: which two places serve a demand, with which leases, and what must follow.

`Chooser` is what the kernel asks of a policy, and `Forecaster` what it asks of who knows how fast places are.
`OpenPlaces` is what the kernel and the chooser remember of a model's places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.line import Demand
from pdproxy.admission.revision import Revision
from pdproxy.errors import ProxyError


class Chooser(Protocol):
    """A `Chooser` picks among places. What it keeps of a `lineup` lasts until `end`."""

    def line_up(self, places: Sequence[Any], *, is_lasting: bool) -> Any:
        """Returns `places` in the form that `pick` wants. There is at least one, and all are on the same side."""

    def pick(self, lineup: Any, demand: Demand) -> Any: ...

    def home(self, lineup: Any, demand: Demand) -> Any:
        """Returns the place that `demand` is tied to; None where it is tied to none."""

    def end(self, lineup: Any) -> None:
        """Forgets everything kept for `lineup`, which is out of date."""


class Forecast(NamedTuple):
    """A `Forecast` is a guess about a demand that goes to an owner and a peer at this instant."""

    wait_s: float
    """The seconds from the grant to the first token, on the way that is advised."""
    is_alone: bool
    """Tells that one place would be clearly sooner alone: the one that writes the answer, or one of the other side
    while none of those that write answers has room."""


class Forecaster(Protocol):
    """A `Forecaster` guesses which way of a demand is the shorter one."""

    def foresee(self, demand: Demand, owner: Any, peer: Any, now: float) -> Forecast | None:
        """Returns the forecast for `demand`, which may go to both places, or to that which writes answers alone; None
        where too little is known. `now` is in seconds on the kernel's clock."""

    def relieve(
        self, demand: Demand, num_behind: int, readers: Sequence[Any], writers: Sequence[Any], now: float
    ) -> tuple[Any, Forecast] | None:
        """Returns the one of `readers`, which usually write no answers, that should serve `demand` alone, because it
        would be clearly sooner than any of `writers` has room for it and for the `num_behind` who wait behind it; with
        the forecast. Returns None where there is none, or too little is known."""


Side = tuple[list[Place], list[Place]]
"""Owners and peers of which each owner fits each peer."""


def sides_of(places: Iterable[Place]) -> list[Side]:
    """Returns `places` as owners and their peers: all together where all fit, else for each revision of an owner those
    that fit it. Either of the two lists may be empty."""
    owners: list[Place] = []
    peers: list[Place] = []
    for place in places:
        (owners if place.is_owner else peers).append(place)
    theirs = dict.fromkeys(place.revision for place in peers)
    ours = dict.fromkeys(place.revision for place in owners)
    if all(one.fits(other) for one in ours for other in theirs):
        return [(owners, peers)]
    return [
        ([place for place in owners if place.revision == one], [place for place in peers if place.revision.fits(one)])
        for one in ours
    ]


def _of_one_side(places: list[Place]) -> list[Place]:
    return [place for place in places if place.is_owner is places[0].is_owner]


class OpenPlaces:
    """`OpenPlaces` holds the owners and peers that can be asked for one model now, with the chooser's lineups of
    them.

    While there are several revisions, a place counts only if there is a counterpart that fits it.
    """

    __slots__ = (
        "_beside",
        "_chooser",
        "_lineups",
        "alone",
        "is_checked",
        "is_guarded",
        "is_mixed",
        "owners",
        "peers",
        "shapes",
        "sides",
    )

    def __init__(self, places: Iterable[Place], chooser: Chooser, *, is_all: bool = False) -> None:
        """Takes `is_all` as true where no other place may open in a moment."""
        found = list(places)
        self.sides = sides_of(found)
        self.is_mixed = len(self.sides) != 1 or sum(map(len, self.sides[0])) < len(found)
        """True where not every owner fits every peer, or not every place counts."""
        if self.is_mixed:
            self.sides = [side for side in self.sides if all(side)]
        self.alone: list[Place] = []
        """The places that answer requests by themselves, because no two fit each other. Each of them is owner and peer
        then, and no pages are leased."""
        if is_all and not any(map(all, self.sides)) and all(place.serves_alone for place in found):
            self.alone = _of_one_side([place for place in found if place.is_writer] or found)
            self.is_mixed = len(self.alone) < len(found)
            self.sides = [(self.alone, self.alone)]
        if self.is_mixed:
            counting = {place for side in self.sides for half in side for place in half}
            found = [place for place in found if place in counting]
        self.owners = [place for place in found if place.is_owner]
        self.peers = [place for place in found if not place.is_owner]
        self.shapes = {place.shape for place in self.owners}
        self.is_guarded = any(place.is_guarded for place in found)
        """True where demands may have to wait for room in a KV cache."""
        self._chooser = chooser
        self._beside: dict[tuple[bool, Revision], list[Place]] = {}
        self._lineups: dict[tuple[bool, Revision | None], Any] = {}
        self.is_checked = False
        """True where a caller has noted that requests for this model are in order."""

    @property
    def has_pair(self) -> bool:
        """Tells whether there are two that fit each other."""
        return bool(self.owners and self.peers) and not self.alone

    def of(self, is_owner: bool, beside: Place | None = None) -> list[Place]:
        """Returns the owners or the peers: those that fit the place `beside`, where it is given."""
        places = self.owners if is_owner else self.peers
        if beside is None or not self.is_mixed:
            return places
        key = is_owner, beside.revision
        found = self._beside.get(key)
        if found is None:
            found = self._beside[key] = [place for place in places if place.revision.fits(beside.revision)]
        return found

    def lineup(self, is_owner: bool, beside: Place | None = None) -> Any:
        """Returns `of` the same, of which there must be one at least, as the chooser's lineup."""
        key = is_owner, None if beside is None or not self.is_mixed else beside.revision
        lineup = self._lineups.get(key)
        if lineup is None:
            lineup = self._lineups[key] = self._chooser.line_up(self.of(is_owner, beside), is_lasting=True)
        return lineup

    def end(self) -> None:
        for lineup in self._lineups.values():
            self._chooser.end(lineup)


@dataclass(frozen=True, slots=True)
class Holders:
    """`Holders` holds the places that have an account and serve one model, open or not, each with its number. It also
    holds the shapes of the owners.
    """

    places: dict[Place, int]
    owner_shapes: frozenset[Hashable]


class Grant:
    """A `Grant` names the two places that serve an attempt, and holds one lease per account that the attempt takes
    pages of. Where one place serves it alone, that place is owner and peer.

    `shape` is the owner's. It and the two incarnations are those at the moment of the grant. `forecast` is the guess by
    which the way was chosen, or to which it did not matter; None where there was none.
    """

    __slots__ = ("demand", "forecast", "leases", "owner", "owner_incarnation", "peer", "peer_incarnation", "shape")

    def __init__(
        self, demand: Demand, owner: Any, peer: Any, leases: tuple[Lease, ...], forecast: Forecast | None = None
    ) -> None:
        self.demand = demand
        self.forecast = forecast
        self.owner = owner
        self.peer = peer
        self.leases = leases
        self.shape: Any = owner.shape
        self.owner_incarnation: str | None = owner.incarnation
        self.peer_incarnation: str | None = peer.incarnation

    @property
    def places(self) -> tuple[Any, ...]:
        """Returns the places that the attempt is bound to."""
        return (self.owner,) if self.owner is self.peer else (self.owner, self.peer)

    @property
    def writer(self) -> Any:
        """Returns the place in whose KV cache the answer is written."""
        return self.owner if self.owner.is_writer else self.peer


@dataclass(slots=True)
class Granted:
    """The effect says: the waiter with this grant's demand may go."""

    grant: Grant


@dataclass(slots=True)
class Refused:
    """The effect says: the waiter with this demand gets `error`."""

    demand: Demand
    error: ProxyError


@dataclass(slots=True)
class Settled:
    """The effect says: the pages of this orphan have come back."""

    lease: Lease


Effect = Granted | Refused | Settled
