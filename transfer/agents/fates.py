"""What can become of a write in a test: the words of which a mock agent's script is made."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import TransferError


@dataclass(frozen=True, slots=True)
class Land:
    """All bytes land, `delay_s` after they were posted; at once, within the call, where that is 0."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing lands and the future is never done: the peer answers no more, and nobody says so."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Waits until the test calls the write's `land` or `fail`; `MockAgent.next_held` hands it over."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Lands at once, and the same bytes land again `again_after_s` later: what a late write looks like."""

    again_after_s: float


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Lands right after `by` writes that were posted later, by the same agent to the same peer."""

    by: int = 1


@dataclass(frozen=True, slots=True)
class Fail:
    """The future raises `error`, `delay_s` after the write was posted; the first `landed` (0 to 1) of its bytes landed.

    A `PeerLost` loses the connection, as it does with NIXL: the next write needs a new `connect`.
    """

    error: TransferError
    landed: float = 0.0
    delay_s: float = 0.0


Fate = Land | Drop | Hold | Duplicate | Overtaken | Fail
