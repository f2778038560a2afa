"""CandidateSet holds the instances that can be picked at the moment, and Policy is what picks among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol

from pdproxy.fleet.routing.candidate import C, RoutingHints
from pdproxy.fleet.routing.load_index import LoadIndex


class CandidateSet(Generic[C]):
    """CandidateSet holds the candidates of a pick: at least one.

    A set that `is_lasting` serves many picks, until an instance comes or goes and the set's maker calls `end`. So a
    policy need not look at every candidate each time: it keeps here what it made of them, and is told what changed.

    Mutable state: those that have less than a full weight yet (weights only grow); what its one policy has made of it.
    """

    __slots__ = ("homes", "is_lasting", "members", "ranking", "rising")

    def __init__(self, members: Sequence[C], *, is_lasting: bool = False) -> None:
        self.members = members
        self.is_lasting = is_lasting
        self.rising = [member for member in members if member.weight < 1.0]
        self.ranking: LoadIndex[C] | None = None
        """The candidates by load and turns; it watches their load where the set lasts."""
        self.homes: dict[bytes, C] = {}
        """The candidate that has each key, while all weights are full."""

    def weights(self) -> dict[str, float]:
        """Returns the weights of those that still have less than a full weight, by name."""
        self.rising = [member for member in self.rising if member.weight < 1.0]
        return {member.name: member.weight for member in self.rising}

    @property
    def total_weight(self) -> float:
        return len(self.members) - len(self.rising) + sum((member.weight for member in self.rising), 0.0)

    def without(self, names: frozenset[str]) -> CandidateSet[C]:
        """Returns the other candidates, for one pick; the set itself where there are no others."""
        others = [member for member in self.members if member.name not in names]
        return self if len(others) in (0, len(self.members)) else CandidateSet(others)

    def end(self) -> None:
        """Stops watching the candidates, because the set is out of date."""
        if self.ranking is not None:
            self.ranking.unwatch()

    def __repr__(self) -> str:
        return f"<CandidateSet of {len(self.members)}, {len(self.rising)} of them rising>"


class Policy(Protocol):
    """Policy picks instances for one role. Make one per role: it may remember whose turn it was."""

    @property
    def uses_hints(self) -> bool:
        """Tells whether the policy goes by hints; where it does not, it need not be given any."""

    @property
    def ties(self) -> bool:
        """Tells whether the policy has homes that are worth waiting for."""

    def key(self, prompt: Any) -> bytes | None:
        """Returns what the policy goes by of a prompt (as in `RoutingHints`); None where it goes by nothing of it."""

    def pick(self, lineup: CandidateSet[C], hints: RoutingHints) -> C:
        """Returns one of `lineup`."""

    def home(self, lineup: CandidateSet[C], hints: RoutingHints) -> C | None:
        """Returns the candidate that is worth waiting for; None where any will do."""
