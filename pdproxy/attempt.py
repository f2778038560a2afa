"""What one disaggregated attempt holds, and the one place where it is given back.

The orchestrator's coroutine owns it from the lease to the last byte. Its pages may outlive that coroutine: then the
reaper owns it, until they are known to be free.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.admission.base import Lease
from pdproxy.fleet.instance import Instance
from pdproxy.flight import Custody, Flight, Phase
from pdproxy.signals.board import Expectation


class Attempt:
    """One try at serving a request from `decoder`'s PD buffer.

    Mutable state: the lease and the expectation, once there; both end exactly once, through `settle`, the decoder's
    word or `give_up`.
    """

    def __init__(self, flight: Flight, decoder: Instance) -> None:
        self.flight = flight
        self.decoder = decoder
        self.epoch = decoder.known_facts.epoch
        self._lease: Lease | None = None
        self._expectation: Expectation | None = None

    @property
    def expectation(self) -> Expectation:
        if self._expectation is None:
            raise RuntimeError(f"nothing is expected for {self.flight!r}")
        return self._expectation

    @property
    def pages(self) -> int:
        """Slots held now."""
        return 0 if self._lease is None else self._lease.pages

    @property
    def is_settled(self) -> bool:
        return self._lease is None or self._lease.is_released

    @property
    def is_void(self) -> bool:
        """The decoder's process has gone, and its buffer with it."""
        return self.decoder.epoch != self.epoch

    @property
    def is_decoded(self) -> bool:
        """The whole answer was seen, so that the decoder must have taken the KV."""
        return self.flight.phase is Phase.DONE and self.expectation.is_ready

    def reserved(self, lease: Lease) -> None:
        """From here this attempt answers for the lease."""
        self._lease = lease
        self.flight.num_pages = lease.pages
        self.flight.custody_to(Custody.RESERVED)

    def expect(self, expectation: Expectation) -> None:
        """The decoder's word that the pages are free gives the lease back, whoever owns this attempt then."""
        self._expectation = expectation
        expectation.on_released(self._on_released)

    def sent(self) -> None:
        """The prefill leg is on its way: writes may land from now on."""
        self.flight.custody_to(Custody.FILLING)

    def ready(self) -> None:
        """Every rank has the KV. (It may even have been consumed by now.)"""
        if self.flight.custody is Custody.FILLING:
            self.flight.custody_to(Custody.READY)

    def needs(self, pages: int) -> None:
        """So many pages the prompt really has, where known: fewer than the lease is for, or more, which pass through it
        one after the other."""
        if pages < 1:
            return
        self.flight.num_pages = pages
        if self._lease is not None and pages < self._lease.pages:
            self._lease.shrink(pages)

    def settle(self, adopt: Callable[[Attempt], None], *, is_seen: bool) -> None:
        """The request is over. Give the lease back, or to `adopt` if pages may be filling or lie unread.

        `is_seen` False: no engine has seen the attempt, so that nobody can be writing.
        """
        if self._lease is None or self._lease.is_released:
            self._drop()
        elif self.flight.is_at_risk:
            self.flight.custody_to(Custody.ORPHANED)
            if is_seen:
                adopt(self)
            else:
                self.give_up()
        else:
            self.give_up()

    def give_up(self) -> None:
        """The pages are free, or as good as: nothing is held and nothing is expected any more. Idempotent."""
        if self._lease is not None and not self._lease.is_released:
            self.flight.custody_to(Custody.RETURNED)
            self._lease.release()
        self._drop()

    def _on_released(self) -> None:
        """The decoder has said of every rank that the pages are free."""
        flight = self.flight
        if flight.custody is Custody.FILLING:
            flight.custody_to(Custody.READY if self.expectation.is_ready else Custody.ORPHANED)
        if flight.custody is Custody.READY:
            flight.custody_to(Custody.CONSUMED)
        self.give_up()

    def _drop(self) -> None:
        if self._expectation is not None:
            self._expectation.drop()

    def __repr__(self) -> str:
        return f"<Attempt {self.flight!r}: {self.pages} pages on {self.decoder.name}>"
