"""What routing works on: who could be asked, as far as it may know of them, and what is known of the request. No I/O.

A policy sees a few numbers only, so it can be tested with values, and a decision can be told again from what it was
made of. It reads them of the living instances, for to copy them for each pick would cost more than the pick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


class Candidate(Protocol):
    """An instance as routing knows it. All candidates of a pick have the same role, and each its own name."""

    @property
    def name(self) -> str: ...

    @property
    def held(self) -> int:
        """Pages held by leases."""

    @property
    def capacity(self) -> int:
        """Pages of the memory that slots guard; 0 where they guard another instance's."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that were given to it and are not prefilled yet."""

    @property
    def num_legs(self) -> int:
        """Legs under way."""

    @property
    def weight(self) -> float:
        """0 to 1: how much of a full share it should get."""

    def watch(self, touched: dict[Any, None]) -> None:
        """From now on it puts itself into `touched` whenever its load changes: anything above but name and weight."""

    def unwatch(self, touched: dict[Any, None]) -> None:
        """Not any more."""


C = TypeVar("C", bound=Candidate)
Load = Callable[[Candidate], float]
"""How much an instance has to do; less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One instance at one moment. Implements `Candidate`."""

    name: str
    held: int = 0
    capacity: int = 0
    queued_tokens: int = 0
    num_legs: int = 0
    weight: float = 1.0

    def watch(self, touched: dict[Any, None]) -> None:
        """Nothing of it ever changes."""

    def unwatch(self, touched: dict[Any, None]) -> None:
        """Nothing of it ever changes."""


@dataclass(slots=True, kw_only=True)
class RoutingHints:
    """What a request brings along that can tie it to an instance."""

    session: str | None = None
    """Equal for all requests of one conversation or user."""
    prompt: Sequence[int] | str | bytes | memoryview | None = None
    """Its ids; where there are none its text, or the raw JSON of its messages."""


NO_HINTS = RoutingHints()
