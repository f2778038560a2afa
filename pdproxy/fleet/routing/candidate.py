"""Routing works on these few facts: which instances could be asked, and what is known of the request. No I/O.

A policy sees a few numbers only. So it can be tested with values, and a decision can be repeated from the numbers that
it was made of. It reads them from the live instances, because copying them for each pick would cost more than the pick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pdproxy.kv_events.index import PromptBlocks


class Candidate(Protocol):
    """Candidate is an instance as routing knows it. All candidates of a pick have the same role, and each its own
    name."""

    @property
    def name(self) -> str: ...

    @property
    def held(self) -> int:
        """Number of pages held by leases."""

    @property
    def capacity(self) -> int:
        """Number of pages of the memory that slots guard; 0 where they guard another instance's."""

    @property
    def resident_share(self) -> float:
        """The share of the KV cache in which it writes answers that is in use or promised; where its size is not known,
        the number of tokens."""

    @property
    def queued_tokens(self) -> int:
        """Number of prompt tokens that were given to the instance and are not prefilled yet."""

    @property
    def num_legs(self) -> int:
        """Number of legs under way."""

    @property
    def weight(self) -> float:
        """The part of a full share of requests, 0 to 1, that the instance should get."""

    def cached_tokens(self, prompt: PromptBlocks) -> int | None:
        """Returns how many tokens of `prompt` the instance has in its prefix cache; None where that is not known
        exactly."""

    def watch(self, touched: dict[Any, None]) -> None:
        """Makes the instance put itself into `touched` whenever its load changes: anything above but name and
        weight."""

    def unwatch(self, touched: dict[Any, None]) -> None:
        """Stops what `watch` began: the instance no longer puts itself into `touched`."""


C = TypeVar("C", bound=Candidate)
Load = Callable[[Candidate], float]
"""A function that returns how much an instance has to do; less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Snapshot is one instance at one moment. Implements `Candidate`."""

    name: str
    held: int = 0
    capacity: int = 0
    resident_share: float = 0.0
    queued_tokens: int = 0
    num_legs: int = 0
    weight: float = 1.0
    num_cached: int | None = None
    """The tokens that it has in its cache of whatever prompt it is asked for."""

    def cached_tokens(self, prompt: PromptBlocks) -> int | None:
        return self.num_cached

    def watch(self, touched: dict[Any, None]) -> None:
        """Does nothing, because a snapshot never changes."""

    def unwatch(self, touched: dict[Any, None]) -> None:
        """Does nothing, because a snapshot never changes."""


@dataclass(slots=True, kw_only=True)
class RoutingHints:
    """RoutingHints holds what a request brings along that can tie it to an instance."""

    session: str | None = None
    """A name that is equal for all requests of one conversation or user."""
    prompt: Sequence[int] | str | bytes | memoryview | None = None
    """The prompt's ids; where there are none its text, or the raw JSON of its messages."""
    key: bytes | None = None
    """A digest of how the prompt begins, where somebody else has the prompt."""
    blocks: PromptBlocks | None = None
    """The whole prompt as instances' caches are asked for it, where its ids are known and somebody would ask."""


NO_HINTS = RoutingHints()
