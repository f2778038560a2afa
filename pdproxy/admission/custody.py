"""The module says who answers for leased pages, and what counts as proof that they are free.

A lease's pages come back by `Account.take_back` alone, which needs an `Evidence`. `PROOFS` says which evidence counts
in which state. Any other evidence raises an error and changes nothing. This table prevents two mistakes: to take
silence or a refused connection for proof, and to give the same pages back twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, Final


class Custody(StrEnum):
    """A `Custody` is the state of a lease's pages. Until ``ORPHANED`` the request's coroutine answers for them, then
    the reaper.
    """

    NONE = "none"
    """There is no lease."""
    RESERVED = "reserved"
    """A lease is held; nothing has been sent."""
    FILLING = "filling"
    """The prefill leg was sent: writes may land from now on."""
    READY = "ready"
    """All KV is there and has not been taken."""
    ORPHANED = "orphaned"
    """The request is over, but the pages may still be filling, or lie unread."""
    RETURNED = "returned"


class Evidence(StrEnum):
    """An `Evidence` is a reason why pages are known to be free, or to become free without anything from outside."""

    NEVER_SENT = "never_sent"
    """No engine has seen the attempt."""
    ENGINE_SAID = "engine_said"
    """The engine said of this attempt that it has let go of the pages."""
    FIRST_EVENT = "first_event"
    """The answer has begun, which is possible only after the KV was taken."""
    ERRAND_DONE = "errand_done"
    """The errand which makes the engine drop the pages was done, and the engine answered after that."""
    INCARNATION_ENDED = "incarnation_ended"
    """The process that held the pages has ended."""
    LEASE_OVER = "lease_over"
    """The engine was heard after the time at which it drops such pages by itself."""


_RESERVED, _FILLING, _READY, _ORPHANED, _RETURNED = list(Custody)[1:]

PROOFS: Final[Mapping[Custody, frozenset[Evidence]]] = {
    Custody.NONE: frozenset(),
    _RESERVED: frozenset({Evidence.NEVER_SENT, Evidence.INCARNATION_ENDED}),
    _FILLING: frozenset({Evidence.NEVER_SENT, Evidence.ENGINE_SAID, Evidence.INCARNATION_ENDED}),
    _READY: frozenset({Evidence.ENGINE_SAID, Evidence.FIRST_EVENT, Evidence.INCARNATION_ENDED}),
    _ORPHANED: frozenset({Evidence.ENGINE_SAID, Evidence.ERRAND_DONE, Evidence.LEASE_OVER, Evidence.INCARNATION_ENDED}),
    _RETURNED: frozenset(),
}
"""The evidence that brings pages back, for each state of theirs."""

CUSTODY_STEPS: Final[Mapping[Custody, frozenset[Custody]]] = {
    Custody.NONE: frozenset({_RESERVED}),
    _RESERVED: frozenset({_FILLING, _RETURNED}),
    _FILLING: frozenset({_READY, _ORPHANED, _RETURNED}),
    _READY: frozenset({_ORPHANED, _RETURNED}),
    _ORPHANED: frozenset({_RETURNED}),
    _RETURNED: frozenset(),
}
"""The states to which each state may lead. The steps to ``RETURNED`` need evidence."""


STEPS_TO: Final[Mapping[Custody, tuple[Custody, ...]]] = {
    _RESERVED: (),
    _FILLING: (_FILLING,),
    _READY: (_FILLING, _READY),
}
"""The steps that lead from ``RESERVED`` to each state of pages that a request answers for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A `Way` says how an orphan's pages become free. `errand` is a call that makes the engine drop them, or None; this
    package does not look into it.

    Times are in seconds from the end of the request.
    """

    errand: Any = None
    target: Any = None
    """The place at which the errand is done."""
    not_before_s: float = 0.0
    """The time before which the errand may not be done."""
    over_after_s: float = inf
    """The time at which the engine drops the pages by itself."""
    settles_after_s: float = 0.0
    """The seconds that an errand which is done at another place than the one with the pages takes to reach the engine
    with the pages.
    """
    is_told: bool = False
    """Says that an errand was done at another place than the one with the pages."""
    is_closing: bool = False
    """Says that the closed leg makes the engine drop the pages, which takes until `over_after_s`."""
