"""What routing works on: a snapshot of who could be asked, and what is known of the request. No instance, no I/O.

A policy sees values only, so it can be tested with values, and a decision can be told again from what it was made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

RoutingPolicy = Literal[
    "round_robin", "least_slots", "least_queued_tokens", "power_of_two", "session_affinity", "prefix_affinity"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One instance at one moment. All candidates of a pick have the same role."""

    name: str
    held: int = 0
    """Pages held by leases."""
    capacity: int = 0
    """Pages of the PD buffer; 0 for a prefiller, which has none."""
    queued_pages: int = 0
    """Pages that are waited for."""
    queued_tokens: int = 0
    """Prompt tokens that were given to it and are not prefilled yet."""
    num_legs: int = 0
    """Legs under way."""
    weight: float = 1.0
    """0 to 1: how much of a full share it should get."""
    epoch: str | None = None
    """Which process of this name was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHints:
    """What a request brings along that can tie it to an instance."""

    session: str | None = None
    """Equal for all requests of one conversation or user."""
    prompt: Sequence[int] | str | bytes | None = None
    """Its ids; where there are none its text, or the raw JSON of its messages."""


NO_HINTS = RoutingHints()


class Policy(Protocol):
    """Picks instances for one role. Make one per role: it may remember whose turn it was."""

    def pick(self, candidates: Sequence[Candidate], hints: RoutingHints) -> Candidate:
        """One of `candidates`, of which there is at least one; O(n)."""
