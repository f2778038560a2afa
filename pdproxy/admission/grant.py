"""The module holds the kernel's answers: which two places serve a demand, with which leases, and what must follow.

`Chooser` is what the kernel asks of a policy. `OpenPlaces` is what the kernel and the chooser remember of a model's
places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.line import Demand
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


class OpenPlaces:
    """`OpenPlaces` holds the owners and peers that can be asked for one model now, with the chooser's lineups of
    them.
    """

    __slots__ = ("_chooser", "_lineups", "is_checked", "owners", "peers", "shapes")

    def __init__(self, places: Iterable[Place], chooser: Chooser) -> None:
        self.owners: list[Place] = []
        self.peers: list[Place] = []
        for place in places:
            (self.owners if place.is_owner else self.peers).append(place)
        self.shapes = {place.shape for place in self.owners}
        self._chooser = chooser
        self._lineups: dict[bool, Any] = {}
        self.is_checked = False
        """True where a caller has noted that requests for this model are in order."""

    def of(self, is_owner: bool) -> list[Place]:
        return self.owners if is_owner else self.peers

    def lineup(self, is_owner: bool) -> Any:
        if is_owner not in self._lineups:
            self._lineups[is_owner] = self._chooser.line_up(self.of(is_owner), is_lasting=True)
        return self._lineups[is_owner]

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
    pages of.

    `shape` is the owner's. It and the two incarnations are those at the moment of the grant.
    """

    __slots__ = ("demand", "leases", "owner", "owner_incarnation", "peer", "peer_incarnation", "shape")

    def __init__(self, demand: Demand, owner: Any, peer: Any, leases: tuple[Lease, ...]) -> None:
        self.demand = demand
        self.owner = owner
        self.peer = peer
        self.leases = leases
        self.shape: Any = owner.shape
        self.owner_incarnation: str | None = owner.incarnation
        self.peer_incarnation: str | None = peer.incarnation


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
