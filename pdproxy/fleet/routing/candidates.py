"""Who may be picked at the moment, and what picks among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol

from pdproxy.fleet.routing.candidate import C, RoutingHints
from pdproxy.fleet.routing.load_index import LoadIndex


class CandidateSet(Generic[C]):
    """The candidates of a pick: at least one.

    One that `is_lasting` serves many picks, until somebody comes or goes and whoever made it calls `end`. So a policy
    need not look at everybody each time: it keeps here what it made of them, and lets itself be told what changed.

    Mutable state: those who have less than a full weight yet (weights only grow); what its one policy has made of it.
    """

    __slots__ = ("homes", "is_lasting", "members", "ranking", "rising")

    def __init__(self, members: Sequence[C], *, is_lasting: bool = False) -> None:
        self.members = members
        self.is_lasting = is_lasting
        self.rising = [member for member in members if member.weight < 1.0]
        self.ranking: LoadIndex[C] | None = None
        """By load and turns; watched over where the lineup lasts."""
        self.homes: dict[bytes, C] = {}
        """Who has a key, while all weights are equal."""

    def weights(self) -> dict[str, float]:
        """Of those who have less than a full weight still."""
        self.rising = [member for member in self.rising if member.weight < 1.0]
        return {member.name: member.weight for member in self.rising}

    @property
    def total_weight(self) -> float:
        return len(self.members) - len(self.rising) + sum((member.weight for member in self.rising), 0.0)

    def without(self, names: frozenset[str]) -> CandidateSet[C]:
        """The others, for one pick; everybody where there are no others."""
        others = [member for member in self.members if member.name not in names]
        return self if len(others) in (0, len(self.members)) else CandidateSet(others)

    def end(self) -> None:
        """It is out of date."""
        if self.ranking is not None:
            self.ranking.unwatch()

    def __repr__(self) -> str:
        return f"<Lineup of {len(self.members)}, {len(self.rising)} of them rising>"


class Policy(Protocol):
    """Picks instances for one role. Make one per role: it may remember whose turn it was."""

    @property
    def uses_hints(self) -> bool:
        """Else it need not be given any."""

    @property
    def ties(self) -> bool:
        """Whether it has homes that are worth waiting for."""

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        """One of `lineup`."""

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """The one that is worth waiting for; None where any will do."""
