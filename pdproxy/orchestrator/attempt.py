"""Attempt is one try at serving a request: all that it holds, and the one place where that is given back.

The orchestrator's coroutine owns the attempt until the last byte. The attempt's pages may outlive that coroutine: then
the reaper owns the attempt, until the pages are known to be free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

from pdproxy.admission.account import Lease
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.admission.grant import Grant
from pdproxy.engines.adapter import AttemptInfo, PrefillReply, ReleaseCall, ReleaseMode
from pdproxy.engines.traits import EngineTraits, ReleaseSignal
from pdproxy.errors import KvFailed, LegUnreachable
from pdproxy.fleet.instance import Instance, Prefilling
from pdproxy.kv_events.index import PromptBlocks
from pdproxy.kv_signals.board import Expectation
from pdproxy.orchestrator.context import RequestContext
from pdproxy.telemetry.attempt_record import Path, Phase
from pdproxy.tokens.prompt_size import PromptSize
from transfer.wire import TERM_HEADER

log = logging.getLogger(__name__)

# Read once: in Python 3.11 an enum's class looks for each member by way of a hook.
_LOCAL: Final = Path.LOCAL
_PREFILL_ONLY: Final = Path.PREFILL_ONLY
_PREFILL: Final = Phase.PREFILL
_KV_WAIT: Final = Phase.KV_WAIT
_DECODE: Final = Phase.DECODE
_DONE: Final = Phase.DONE
_FAILED: Final = Phase.FAILED
_CANCELLED: Final = Phase.CANCELLED
_RESERVED: Final = Custody.RESERVED
_FILLING: Final = Custody.FILLING
_READY: Final = Custody.READY
_FREED_BY_SIGNALS: Final = ReleaseSignal.SIGNALS
_FREED_BY_FIRST_EVENT: Final = ReleaseSignal.FIRST_EVENT
_FIRST_EVENT: Final = Evidence.FIRST_EVENT

GRACE_S = 0.3
"""Least seconds before an engine is asked to release the pages of an answer that is complete: the decoder is just about
to say that they are free."""


class Attempt:
    """Attempt is one try at serving a request, from its demand for a turn until its pages have come back.

    ``with attempt:`` spans everything that is done for the request. In that block the attempt is bound to instances,
    and gets the lease of the pages that it needs, if it needs any. At the block's end its phases are over, the lease
    goes back, or to `adopt` where pages may be filling or lie unread, and the instances are unbound, the prefiller
    before that: as soon as the KV is at the decoder and nothing of it is held at the prefiller.

    Mutable state: what it is bound to; the expectation, once there; the prompt, while the decoder itself has to read
    it; how far its legs have come, which says how its pages become free if it ends early. The custody of the pages is
    the lease's.
    """

    __slots__ = (
        "_admission",
        "_adopt",
        "_bound",
        "_forwarded",
        "_info",
        "_is_decode_seen",
        "_is_decode_sent",
        "_lease",
        "_reading",
        "_reply",
        "_request",
        "blocks",
        "context",
        "decoder",
        "expectation",
        "id",
        "owner",
        "prefiller",
        "record",
        "size",
        "traits",
    )

    __deletable__ = ("context",)  # mypyc refuses to delete what is not named here
    context: RequestContext
    """The request's context. It is let go when the reaper takes over: it has the client's connection, and all that the
    client was shown."""
    prefiller: Instance
    """The prefiller that the attempt is bound to. Set by `bind`, as are the following. One instance that serves alone
    stands for both."""
    decoder: Instance
    owner: Instance
    """The one of the two whose pages the lease is for."""
    traits: EngineTraits
    """The way in which the engines of this pair hand KV over."""

    def __init__(
        self,
        context: RequestContext,
        size: PromptSize,
        admission: Admission,
        adopt: Callable[[Attempt], None],
        blocks: PromptBlocks | None = None,
    ) -> None:
        """Takes `size`, the size of what this attempt has to read. Begins the attempt's record."""
        self.context = context
        self.size = size
        self.record = context.begin_attempt(size.tokens)
        self.id = self.record.id
        """The id by which everybody but the engines knows the attempt."""
        self.blocks = blocks
        """The prompt, as instances' caches are asked for it; None where they are not."""
        self.expectation: Expectation | None = None
        """The place on the board where signals tell what becomes of the KV; None until there is one."""
        self._admission = admission
        self._adopt = adopt
        self._request = context.request
        self._forwarded = context.client.forwarded
        self._bound: list[Instance] = []
        self._lease: Lease | None = None
        self._reading: Prefilling | None = None
        self._info: AttemptInfo | None = None
        self._reply: PrefillReply | None = None
        self._is_decode_sent = False
        self._is_decode_seen = False

    @property
    def lease(self) -> Lease:
        """Returns the lease of the owner's pages. Raises `RuntimeError` where none were granted."""
        if self._lease is None:
            raise RuntimeError(f"{self!r} has no pages")
        return self._lease

    @property
    def info(self) -> AttemptInfo:
        """Returns what adapters are told of the attempt. Raises `RuntimeError` before its first leg was sent."""
        if self._info is None:
            raise RuntimeError(f"nothing was sent for {self!r}")
        return self._info

    # ── whom it is bound to ─────────────────────────────────────────────────────────────────────────────────────────

    def bind(self, grant: Grant) -> None:
        """Takes the instances that were granted, and the lease. Raises `RuntimeError` for more than one lease."""
        self.owner, peer = grant.owner, grant.peer
        self._bound = [peer] if peer is self.owner else [self.owner, peer]
        self.record.waited_for = grant.demand.lacks or None
        if grant.forecast is not None:
            self.record.predicted_s = grant.forecast.wait_s
        if grant.leases:
            self._lease = grant.leases[0]
            self.record.hold(self._lease)
        self.prefiller, self.decoder = (self.owner, peer) if peer.role == "decode" else (peer, self.owner)
        self.traits = self.prefiller.adapter.traits
        self.context.text_terms = self.decoder.revision.text_terms
        if len(grant.leases) > 1:
            raise RuntimeError(f"nobody answers for the second account of {grant.demand!r}")

    def take_path(self, path: Path) -> None:
        """Notes which way the request goes. An instance that this way does without is unbound."""
        needs_prefiller, needs_decoder = path is not _LOCAL, path is not _PREFILL_ONLY
        self.record.bind(
            path, self.prefiller.name if needs_prefiller else None, self.decoder.name if needs_decoder else None
        )
        if needs_decoder:
            self.decoder.residency.follow(self.id, self.context.record.tokens)
        if self.prefiller is self.decoder:
            return
        if not needs_prefiller:
            self._let_go(self.prefiller)
            if self._lease is not None and not self._lease.is_returned:  # the pages turned out not to be needed
                self._free(Evidence.NEVER_SENT)
        elif not needs_decoder:
            self._let_go(self.decoder)

    def _needs_no_prefiller(self) -> None:
        """Lets go of the prefiller: the decoder has the KV, and the pages that it came from are free. Idempotent."""
        if len(self._bound) > 1:
            self._let_go(self.prefiller)

    def _let_go(self, instance: Instance) -> None:
        self._bound.remove(instance)
        instance.unbound(self.id)

    def headers(self, instance: Instance) -> Mapping[str, str]:
        """Returns the headers that go with the attempt's legs to `instance`. The term is that of the leader of this
        instant, who knows of the attempt by now, whoever it was that granted it."""
        term, headers = self._admission.term, self._headers(instance)
        if term is not None and instance.adapter.traits.stale_term_code is not None:
            headers[TERM_HEADER] = str(term)
        return headers

    def _headers(self, instance: Instance) -> dict[str, str]:
        """Returns the headers without a term. Calls that let pages go have none: they are right in any term."""
        return {
            **self._forwarded,
            **instance.adapter.leg_headers(self.record.request_id, self.id),
        }

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = _DONE if kind is None else _FAILED if issubclass(kind, Exception) else _CANCELLED
        # Only a prefiller fills pages. One that could not be reached has filled none.
        is_seen = not (isinstance(error, LegUnreachable) and error.leg == "prefill")
        if self._reading is not None:
            self._reading.drop()  # where the answer has begun, nothing is left to be dropped
        try:
            self.record.advance(end)
        finally:
            try:
                if self._lease is None:
                    self._drop()
                else:
                    self._settle(self._lease, is_seen=is_seen)
            finally:
                for instance in self._bound:
                    instance.unbound(self.id)

    # ── how far it has come ─────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, expectation: Expectation) -> None:
        """Takes the attempt's place on the board. The decoder's signal that the pages are free then gives the lease
        back, whoever owns this attempt by then."""
        self.expectation = expectation
        expectation.on_granted(self.needs)
        if self.traits.freed is _FREED_BY_SIGNALS:
            expectation.on_released(self._on_released)

    def prefill_sent(self, info: AttemptInfo) -> None:
        """Begins the prefill phase: the prefill leg is on its way, and pages may be filled from now on. Raises
        `KvFailed` where the pages are gone, with their process or with the leader that granted them, and `NotReady`
        where nobody answers for them: then nothing must be sent."""
        lease = self.lease
        if lease.is_returned:  # the process ended just after the grant, or another leader was followed
            raise KvFailed(f"the pages that were granted at {self.owner.name!r} were taken back just now")
        self.record.advance(_PREFILL)
        self._info = info
        if self._admission.is_remote or self._admission.may_send is not None:
            self._admission.sent(lease, self._guard)
        lease.step(_FILLING)

    def replied(self, reply: PrefillReply) -> None:
        """Notes that the prefill leg is over, and what its reply tells of the prompt."""
        self._reply = reply
        self.context.prefilled(reply, self.prefiller.adapter)

    def reads(self, prefilling: Prefilling) -> None:
        """Begins what counts the prompt as queued at the decoder, which reads it by itself until its answer begins."""
        self._reading = prefilling.__enter__()

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
        lease = self.lease
        if lease.custody is _FILLING:
            lease.step(_READY)
        if self.owner is self.decoder:
            self._needs_no_prefiller()

    def begun(self) -> None:
        """Notes that the decoder has begun its answer. Where that proves that it has taken the KV, the lease goes
        back."""
        record = self.record
        if record.phase is _PREFILL:
            record.advance(_KV_WAIT)
        if record.phase is _KV_WAIT:
            record.advance(_DECODE)
        record.mark_first_byte()
        if self._reading is not None:
            self._reading()
        elif record.predicted_s is not None and (handoff_s := record.handoff_s) is not None:
            self.decoder.handed_over(1, handoff_s)
        if self._lease is not None and self.traits.freed is _FREED_BY_FIRST_EVENT:
            self.ready()
            self._free(_FIRST_EVENT)
            self._drop()
        self._needs_no_prefiller()

    def needs(self, pages: int) -> None:
        """Notes how many pages the prompt really has, where known. There may be fewer than the lease is for, or more,
        which pass through the leased pages one after the other."""
        if pages >= 1:
            self.record.num_pages = pages
            self._admission.shrink(self.lease, pages)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self, lease: Lease, *, is_seen: bool) -> None:
        """Gives the lease back, or hands it to the reaper if pages may be filling or lie unread. `is_seen` False: the
        prefiller has not seen the attempt, so that nobody can be writing."""
        if lease.is_at_risk and is_seen:
            del self.context  # an orphan may live for minutes, and must not hold a request that is over
            self._adopt(self)
            return
        if not lease.is_returned:
            if lease.custody is _READY:
                raise RuntimeError(f"{self!r} has KV that no engine has seen")
            self._free(Evidence.NEVER_SENT)
        self._drop()

    def way(self) -> Way:
        """Returns how the pages become free, now that nobody will finish the attempt."""
        lease_s = self.traits.lease_s
        try:
            how = self._abandon(is_decode_sent=self._is_decode_sent)
            if how is ReleaseMode.FREE and not self._knows_decoder:
                # A decoder that has not seen its leg, or is down, does not notice that the leg was closed.
                how = self._abandon(is_decode_sent=False)
        except Exception:  # of an adapter: it must not harm other attempts' pages
            log.exception("abandoning %r met a bug; its pages are waited for", self)
            how = ReleaseMode.LEASE
        if isinstance(how, ReleaseCall):
            delay_s = max(how.delay_s, GRACE_S) if self._is_decoded else how.delay_s
            return Way(
                errand=replace(how, headers=self._headers(self.instance(how.role))),
                target=self.instance(how.role),
                not_before_s=min(delay_s, lease_s / 2),
                over_after_s=lease_s,
                settles_after_s=self.traits.closing_s,
            )
        if how is ReleaseMode.FREE:
            return Way(over_after_s=self.traits.closing_s, is_closing=True)
        return Way(over_after_s=lease_s)

    def _guard(self) -> ReleaseCall | None:
        """Returns the call that frees the pages however far the legs have come; None where the engines have none."""
        if self.traits.freed is not _FREED_BY_SIGNALS:
            return None
        try:
            how = self._abandon(is_decode_sent=False)
        except Exception:  # of an adapter
            log.exception("%r has no guard", self)
            return None
        if not isinstance(how, ReleaseCall) or how.or_ready:
            return None
        return replace(how, headers=self._headers(self.instance(how.role)))

    @property
    def _knows_decoder(self) -> bool:
        """Tells whether the decoder has seen the decode leg and is well, as far as is known: then it notices that the
        leg is closed."""
        return self._is_decode_seen and self.decoder.is_up

    def _abandon(self, *, is_decode_sent: bool) -> ReleaseCall | ReleaseMode:
        adapter = self.prefiller.adapter
        return adapter.abandon(self._request, self.info, self._reply, is_decode_sent=is_decode_sent)

    @property
    def _is_decoded(self) -> bool:
        """Tells whether the whole answer was seen, so that the decoder must have taken the KV, and is about to say
        so."""
        if self.traits.freed is not _FREED_BY_SIGNALS or self.expectation is None or not self._is_decode_sent:
            return False
        return self.record.phase is _DONE and self.expectation.is_ready

    def instance(self, role: str) -> Instance:
        return self.prefiller if role == "prefill" else self.decoder

    def orphan_facts(self, now: float) -> dict[str, Any]:
        """Returns what the status page shows: whose the pages are, for how many seconds they have been orphaned, and
        the evidence that is waited for."""
        return {
            "orphan": True,
            **self.record.facts(),
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
        pages = "no pages" if self._lease is None else f"{self._lease.pages} pages on {self.owner.name}"
        return f"<Attempt {self.record!r}: {pages}>"
