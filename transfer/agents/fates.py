"""The fates that a write can have in a test. A mock agent's script is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import TransferError


@dataclass(frozen=True, slots=True)
class Land:
    """`Land`: all bytes land, `delay_s` seconds after they were posted. Where that is 0 they land at once, within the
    call."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drop:
    """`Drop`: nothing lands and the future is never done. The peer answers no more, and nobody says so."""


@dataclass(frozen=True, slots=True)
class Hold:
    """`Hold`: the write waits until the test calls its `land` or `fail`. `MockAgent.next_held` hands it over."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """`Duplicate`: the bytes land at once, and the same bytes land again `again_after_s` seconds later. To the
    peer that looks like a late write."""

    again_after_s: float


@dataclass(frozen=True, slots=True)
class Overtaken:
    """`Overtaken`: the write lands right after `by` writes that the same agent posted later to the same peer."""

    by: int = 1


@dataclass(frozen=True, slots=True)
class Fail:
    """`Fail`: the future raises `error`, `delay_s` seconds after the write was posted. `landed` (0 to 1) is the share
    of its bytes, from the first on, that lands.

    A `PeerLost` loses the connection, as it does with NIXL: the next write needs a new `connect`.
    """

    error: TransferError
    landed: float = 0.0
    delay_s: float = 0.0


Fate = Land | Drop | Hold | Duplicate | Overtaken | Fail
