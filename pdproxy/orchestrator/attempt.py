"""Attempt keeps what one disaggregated attempt holds, and is the one place where it is given back.

The orchestrator's coroutine owns the attempt from the grant to the last byte. The attempt's pages may outlive that
coroutine: then the reaper owns the attempt, until the pages are known to be free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pdproxy.admission.account import Lease
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.engines.base import EngineInfo, Passage, PrefillReply, ReleaseCall, ReleaseMode, ReleaseSignal
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.routing.router import Route
from pdproxy.kv_signals.board import Expectation
from pdproxy.openai.request import GenerationRequest
from pdproxy.telemetry.flight import Flight, Phase

log = logging.getLogger(__name__)

# Read once: in Python 3.11 an enum's class looks for each member by way of a hook.
_RESERVED, _FILLING, _READY = Custody.RESERVED, Custody.FILLING, Custody.READY
_FREED_BY_SIGNALS, _FREED_BY_FIRST_EVENT = ReleaseSignal.SIGNALS, ReleaseSignal.FIRST_EVENT
_FIRST_EVENT = Evidence.FIRST_EVENT

GRACE_S = 1.0
"""Least seconds before an engine is asked to release the pages of an answer that is complete: the decoder is just about
to say that they are free."""


class Attempt:
    """Attempt is one try at serving a request by the pair of `route`, with the lease that was granted for it.

    Mutable state: the expectation, once there; how far its legs have come, which says how its pages become free if it
    ends early. The custody of the pages is the lease's.
    """

    __slots__ = (
        "_admission",
        "_headers",
        "_is_decode_seen",
        "_is_decode_sent",
        "_passage",
        "_reply",
        "_request",
        "expectation",
        "flight",
        "lease",
        "manner",
        "owner",
        "route",
    )

    def __init__(
        self,
        flight: Flight,
        route: Route,
        lease: Lease,
        request: GenerationRequest,
        headers: Mapping[str, str],
        admission: Admission,
    ) -> None:
        """Takes `headers`, which go with all of the attempt's calls."""
        self.flight = flight
        self.route = route
        self.owner = route.owner
        self.manner = route.prefiller.adapter.manner
        self.lease = lease
        self.expectation: Expectation | None = None
        """The place on the board where signals tell what becomes of the KV; None until there is one."""
        flight.hold(lease)
        self._admission = admission
        self._request = request
        self._headers = headers
        self._passage: Passage | None = None
        self._reply: PrefillReply | None = None
        self._is_decode_sent = False
        self._is_decode_seen = False

    @property
    def facts(self) -> EngineInfo:
        """The facts of the page owner, by which pages are counted."""
        return self.owner.known_facts

    @property
    def passage(self) -> Passage:
        """The passage that the attempt's legs are made of. Raises `RuntimeError` before the first of them was sent."""
        if self._passage is None:
            raise RuntimeError(f"nothing was sent for {self.flight!r}")
        return self._passage

    # ── how far it has come ─────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, expectation: Expectation) -> None:
        """Takes the attempt's place on the board. The decoder's signal that the pages are free then gives the lease
        back, whoever owns this attempt by then."""
        self.expectation = expectation
        expectation.on_granted(self.needs)
        if self.manner.freed is _FREED_BY_SIGNALS:
            expectation.on_released(self._on_released)

    def sent(self, passage: Passage) -> None:
        """Notes that the prefill leg is on its way: pages may be filled from now on."""
        self._passage = passage
        self.lease.step(_FILLING)

    def replied(self, reply: PrefillReply) -> None:
        """Notes that the prefill leg is over."""
        self._reply = reply

    def decode_sent(self) -> None:
        """Notes that the decode leg is on its way: pages may be emptied from now on."""
        self._is_decode_sent = True

    def decode_seen(self) -> None:
        """Notes that the decoder has answered the decode leg, so that it knows of the KV, and notices when the leg is
        closed."""
        self._is_decode_seen = True

    def decode_failed(self) -> None:
        """Notes that the decode leg failed: whether the decoder has done anything about the KV is not known."""
        self._is_decode_seen = False

    def ready(self) -> None:
        """Notes that every rank has the KV. (It may even have been consumed by now.)"""
        if self.lease.custody is _FILLING:
            self.lease.step(_READY)

    def taken(self) -> None:
        """Notes that the decoder has begun its answer. Where that proves that it has taken the KV, the lease goes
        back."""
        if self.manner.freed is _FREED_BY_FIRST_EVENT:
            self.ready()
            self._free(_FIRST_EVENT)
            self._drop()

    def needs(self, pages: int) -> None:
        """Notes how many pages the prompt really has, where known. There may be fewer than the lease is for, or more,
        which pass through the leased pages one after the other."""
        if pages >= 1:
            self.flight.num_pages = pages
            self._admission.shrink(self.lease, pages)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, adopt: Callable[[Attempt], None], *, is_seen: bool) -> None:
        """Ends the attempt with its request. Gives the lease back, or to `adopt` if pages may be filling or lie unread.

        `is_seen` False: no engine has seen the attempt, so that nobody can be writing.
        """
        if self.lease.is_at_risk and is_seen:
            adopt(self)
            return
        if not self.lease.is_returned:
            if self.lease.custody is _READY:
                raise RuntimeError(f"{self!r} has KV that no engine has seen")
            self._free(Evidence.NEVER_SENT)
        self._drop()

    def way(self) -> Way:
        """Returns how the pages become free, now that nobody will finish the attempt."""
        lease_s = self.manner.lease_s
        try:
            how = self._abandon(is_decode_sent=self._is_decode_sent)
            if how is ReleaseMode.FREE and not self._knows_decoder:  # the engine has not seen the leg
                how = self._abandon(is_decode_sent=False)
        except Exception:  # of an adapter: it must not harm other attempts' pages
            log.exception("abandoning %r met a bug; its pages are waited for", self)
            how = ReleaseMode.LEASE
        if isinstance(how, ReleaseCall):
            delay_s = min(how.delay_s, lease_s / 2)
            return Way(
                errand=how,
                target=self.instance(how.role),
                not_before_s=max(delay_s, GRACE_S) if self._is_decoded else delay_s,
                over_after_s=lease_s,
                settles_after_s=self.manner.closing_s,
            )
        if how is ReleaseMode.FREE:
            return Way(over_after_s=self.manner.closing_s, is_closing=True)
        return Way(over_after_s=lease_s)

    @property
    def _knows_decoder(self) -> bool:
        """Tells whether the decoder has seen the decode leg and is well, as far as is known: then it notices that the
        leg is closed."""
        return self._is_decode_seen and self.route.decoder.is_up

    def _abandon(self, *, is_decode_sent: bool) -> ReleaseCall | ReleaseMode:
        adapter = self.route.prefiller.adapter
        return adapter.abandon(self._request, self.passage, self._reply, is_decode_sent=is_decode_sent)

    @property
    def _is_decoded(self) -> bool:
        """Tells whether the whole answer was seen, so that the decoder must have taken the KV, and is about to say
        so."""
        if self.manner.freed is not _FREED_BY_SIGNALS or self.expectation is None:
            return False
        return self.flight.phase is Phase.DONE and self.expectation.is_ready

    def headers(self, instance: Instance) -> Mapping[str, str]:
        """Returns the headers that go with the attempt's calls to `instance`."""
        return {**self._headers, **instance.adapter.leg_headers(self.flight.request_id, self.flight.attempt)}

    def instance(self, role: str) -> Instance:
        return self.route.prefiller if role == "prefill" else self.route.decoder

    def orphan_facts(self, now: float) -> dict[str, Any]:
        """Returns what the status page shows: whose the pages are, for how many seconds they have been orphaned, and
        the evidence that is waited for."""
        return {
            "orphan": True,
            **self.flight.facts(),
            "owner": self.owner.name,
            "pages": self.lease.pages,
            "orphaned_s": round(max(0.0, now - self.lease.since), 3),
            "awaits": self.lease.awaits,
        }

    def settled(self) -> None:
        """Notes that the attempt's pages have come back, so that nothing more is expected. Idempotent."""
        self._drop()

    def _on_released(self) -> None:
        """Frees the lease: the decoder has said of every rank that the pages are free."""
        if self.lease.custody is not _RESERVED:  # else nothing was sent: this is no signal of the attempt
            self._free(Evidence.ENGINE_SAID)
        self._drop()

    def _free(self, evidence: Evidence) -> None:
        self._admission.free(self.lease, evidence)

    def _drop(self) -> None:
        if self.expectation is not None:
            self.expectation.drop()

    def __repr__(self) -> str:
        return f"<Attempt {self.flight!r}: {self.lease.pages} pages on {self.owner.name}>"
