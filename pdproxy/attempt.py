"""What one disaggregated attempt holds, and the one place where it is given back.

The orchestrator's coroutine owns it from the lease to the last byte. Its pages may outlive that coroutine: then the
reaper owns it, until they are known to be free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdproxy.admission.base import Lease
from pdproxy.engines.base import Abandoned, Errand, Facts, Freed, Passage, PrefillReply
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.routing import Route
from pdproxy.flight import Custody, Flight, Phase
from pdproxy.request.openai import GenerationRequest
from pdproxy.signals.board import Expectation


class Attempt:
    """One try at serving a request by the pair of `route`. Its pages are in the memory of one of them, the `keeper`.

    Mutable state: the lease and the expectation, once there; both end exactly once, through `settle`, `taken`, the
    decoder's word or `give_up`. How far its legs have come, which says how its pages become free if it ends early.
    """

    __slots__ = (
        "_expectation",
        "_has_decode_failed",
        "_headers",
        "_is_decode_sent",
        "_lease",
        "_passage",
        "_reply",
        "_request",
        "epoch",
        "flight",
        "keeper",
        "manner",
        "route",
    )

    def __init__(self, flight: Flight, route: Route, request: GenerationRequest, headers: Mapping[str, str]) -> None:
        """`headers` go with all of its calls."""
        self.flight = flight
        self.route = route
        self.keeper = route.keeper
        self.manner = route.prefiller.adapter.manner
        self.epoch = self.keeper.epoch
        self._request = request
        self._headers = headers
        self._lease: Lease | None = None
        self._expectation: Expectation | None = None
        self._passage: Passage | None = None
        self._reply: PrefillReply | None = None
        self._is_decode_sent = False
        self._has_decode_failed = False

    @property
    def facts(self) -> Facts:
        """The keeper's: what pages are counted by."""
        return self.keeper.known_facts

    @property
    def expectation(self) -> Expectation | None:
        """Where signals tell what becomes of the KV."""
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
        """The keeper's process has gone, and its memory with it. (One that was merely removed lives.)"""
        has_ended = self.keeper.gone.is_set() and not self.keeper.is_draining
        return has_ended or self.keeper.epoch != self.epoch

    @property
    def is_decoded(self) -> bool:
        """The whole answer was seen, so that the decoder must have taken the KV, and is about to say so."""
        if self.manner.freed is not Freed.SIGNALS or self._expectation is None:
            return False
        return self.flight.phase is Phase.DONE and self._expectation.is_ready

    @property
    def passage(self) -> Passage:
        """What its legs have to know of it, once the first of them was sent."""
        if self._passage is None:
            raise RuntimeError(f"nothing was sent for {self.flight!r}")
        return self._passage

    def reserved(self, lease: Lease) -> None:
        """From here this attempt answers for the lease."""
        self._lease = lease
        self.flight.num_pages = lease.pages
        self.flight.custody_to(Custody.RESERVED)

    def expect(self, expectation: Expectation) -> None:
        """The decoder's word that the pages are free gives the lease back, whoever owns this attempt then."""
        self._expectation = expectation
        if self.manner.freed is Freed.SIGNALS:
            expectation.on_released(self._on_released)

    def sent(self, passage: Passage) -> None:
        """The prefill leg is on its way: pages may be filled from now on."""
        self._passage = passage
        self.flight.custody_to(Custody.FILLING)

    def replied(self, reply: PrefillReply) -> None:
        """The prefill leg is over."""
        self._reply = reply

    def decode_sent(self) -> None:
        """The decode leg is on its way: pages may be emptied from now on."""
        self._is_decode_sent = True

    def decode_failed(self) -> None:
        """The decode leg came to a bad end: whether the decoder has done anything about the KV is not known."""
        self._has_decode_failed = True

    def ready(self) -> None:
        """Every rank has the KV. (It may even have been consumed by now.)"""
        if self.flight.custody is Custody.FILLING:
            self.flight.custody_to(Custody.READY)

    def taken(self) -> None:
        """The decoder has begun its answer. Where that is the proof that it has taken the KV, the lease goes back."""
        if self.manner.freed is not Freed.FIRST_EVENT or self.is_settled:
            return
        self.ready()
        if self.flight.custody is Custody.READY:
            self.flight.custody_to(Custody.CONSUMED)
            self.give_up()

    def abandon(self) -> Errand | Abandoned:
        """How its pages become free, now that nobody will finish it."""
        if self._passage is None:
            return Abandoned.FREE
        way = self._abandon(is_decode_sent=self._is_decode_sent)
        if way is Abandoned.FREE and self._has_decode_failed:  # closing the leg may have told nobody anything
            way = self._abandon(is_decode_sent=False)
        return way

    def _abandon(self, *, is_decode_sent: bool) -> Errand | Abandoned:
        adapter = self.route.prefiller.adapter
        return adapter.abandon(self._request, self.passage, self._reply, is_decode_sent=is_decode_sent)

    def headers(self, instance: Instance) -> Mapping[str, str]:
        """What goes with its calls to `instance`."""
        return {**self._headers, **instance.adapter.leg_headers(self.flight.request_id, self.flight.attempt)}

    def instance(self, role: str) -> Instance:
        return self.route.prefiller if role == "prefill" else self.route.decoder

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
            is_ready = self._expectation is not None and self._expectation.is_ready
            flight.custody_to(Custody.READY if is_ready else Custody.ORPHANED)
        if flight.custody is Custody.READY:
            flight.custody_to(Custody.CONSUMED)
        self.give_up()

    def _drop(self) -> None:
        if self._expectation is not None:
            self._expectation.drop()

    def __repr__(self) -> str:
        return f"<Attempt {self.flight!r}: {self.pages} pages on {self.keeper.name}>"
