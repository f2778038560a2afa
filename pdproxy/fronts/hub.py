"""The leader's end of its connections to fronts.

What must hold: whatever becomes of a front, all that it held is answered for: its demands leave the line, its legs are
over, and its leases go to the reaper, unless they came back before. A violation would be seen as a place in line that
nobody waits at, an instance that never becomes idle, or pages that are held while no front has them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, Final

import msgspec

from pdproxy.admission.account import Lease
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import PROOFS, STEPS_TO, Custody, Evidence, Way
from pdproxy.admission.grant import Grant
from pdproxy.admission.line import Demand
from pdproxy.admission.room import Room
from pdproxy.engines.adapter import Call, ReleaseCall
from pdproxy.engines.traits import EngineTraits
from pdproxy.errors import NeverFits, NotReady, ProxyError, QueueFull, QueueTimeout
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.page_count import Shape
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.routing.candidate import NO_HINTS, RoutingHints
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fronts import messages
from pdproxy.fronts.channel import Handlers
from pdproxy.orchestrator.reaper import Reaper
from transfer import wire

log = logging.getLogger(__name__)

_ORPHANED: Final = Custody.ORPHANED
_FILLING: Final = Custody.FILLING
_RETURNED: Final = Custody.RETURNED
_NOBODY: Final[frozenset[str]] = frozenset()

# An enum's class looks for a member by its value in Python.
_CUSTODIES: Final = {str(one): one for one in Custody}
_EVIDENCES: Final = {str(one): one for one in Evidence}

ERRORS: Final[Mapping[str, type[ProxyError]]] = {kind.__name__: kind for kind in (NotReady, QueueFull, QueueTimeout)}
"""The errors with which a demand is refused, by name. `NeverFits` has numbers of its own."""

Send = Callable[[Any], None]


def _room(fields: messages.RoomFields) -> Room:
    prompt, growth, most, num = fields
    return Room(prompt, growth, inf if most is None else most, num)


def refusal(attempt: str, error: ProxyError) -> messages.Refused:
    """Returns the message for an error of the kernel's."""
    if isinstance(error, NeverFits):
        return messages.Refused(attempt, "NeverFits", error.message, None, error.pages, error.capacity)
    kind = type(error).__name__
    return messages.Refused(attempt, kind if kind in ERRORS else "NotReady", error.message, error.retry_after_s)


def refused_by(message: messages.Refused) -> ProxyError:
    """Returns the error that the message stands for."""
    if message.kind == "NeverFits":
        return NeverFits(message.pages, message.capacity)
    return ERRORS.get(message.kind, NotReady)(message.message, retry_after_s=message.retry_after_s)


class FrontAttempt:
    """`FrontAttempt` is one attempt of a front: what it waits for, or what it holds. Implements `reaper.Orphan`.

    Mutable state: its grant, once there is one; to which of its two places it is still bound; the errand that frees its
    pages whatever its front has done; how they become free, once it was abandoned.
    """

    __slots__ = (
        "_on_settled",
        "_way",
        "demand",
        "expectation",
        "grant",
        "guard",
        "id",
        "is_at_owner",
        "is_at_peer",
    )

    def __init__(self, demand: Demand, on_settled: Callable[[FrontAttempt], None]) -> None:
        self.id = demand.attempt
        self.demand = demand
        self.grant: Grant | None = None
        self.is_at_owner = self.is_at_peer = False
        self.guard: ReleaseCall | None = None
        self.expectation = None
        self._way: Way | None = None
        self._on_settled = on_settled

    @property
    def lease(self) -> Lease:
        """Returns the lease. Raises `RuntimeError` where nothing is held."""
        if self.grant is None or not self.grant.leases:
            raise RuntimeError(f"attempt {self.id} has no pages")
        lease: Lease = self.grant.leases[0]
        return lease

    @property
    def has_lease(self) -> bool:
        return self.grant is not None and bool(self.grant.leases)

    @property
    def traits(self) -> EngineTraits:
        assert self.grant is not None
        owner: Instance = self.grant.owner
        return owner.adapter.traits

    @property
    def is_over(self) -> bool:
        """Tells whether nothing is left that this attempt holds."""
        if self.is_at_owner or self.is_at_peer:
            return False
        return self.grant is None or not self.grant.leases or self.lease.custody is _RETURNED

    def instance(self, role: str) -> Instance:
        """Returns the one of its two instances that plays this role."""
        assert self.grant is not None
        owner: Instance = self.grant.owner
        peer: Instance = self.grant.peer
        return owner if owner.role == role else peer

    def goes(self, way: Way) -> None:
        """Notes how the pages become free."""
        self._way = way

    def way(self) -> Way:
        """Returns how the pages become free. Raises `RuntimeError` where that was not noted."""
        if self._way is None:
            raise RuntimeError(f"attempt {self.id} was not abandoned")
        return self._way

    def orphan_facts(self, now: float) -> dict[str, Any]:
        lease = self.lease
        return {
            "orphan": True,
            "attempt": self.id,
            "model": self.demand.model,
            "owner": lease.account.place.name,
            "pages": lease.pages,
            "orphaned_s": round(max(0.0, now - lease.since), 3),
            "awaits": lease.awaits,
        }

    def settled(self) -> None:
        self._on_settled(self)

    def __repr__(self) -> str:
        return f"<FrontAttempt {self.id}>"


class Session:
    """`Session` is one front, as the leader knows it. `send` reaches it.

    Mutable state: its attempts by id; what was said of attempts whose pages it claims, as long as their owner has not
    been heard of; its legs under way, and its prompt tokens that wait for their prefill, by instance; the breaker's
    eras of its trials, by place and number; what it was told last of each instance.
    """

    def __init__(self, hub: Hub, send: Send) -> None:
        self._hub = hub
        self._send = send
        self._early: dict[str, list[Any]] = {}
        self._attempts: dict[str, FrontAttempt] = {}
        self._num_legs: dict[Instance, int] = {}
        self._num_tokens: dict[Instance, int] = {}
        self._trials: dict[tuple[int, int], int] = {}
        self._told: dict[int, tuple[Any, Any, Any]] = {}
        self.handlers: Handlers = {
            messages.Ask: self.ask,
            messages.Cancel: self.cancel,
            messages.Resize: self.resize,
            messages.Sent: self.sent,
            messages.Shrink: self.shrink,
            messages.Free: self.free,
            messages.Abandon: self.abandon,
            messages.Hurry: self.hurry,
            messages.Unbound: self.unbound,
            messages.Load: self.load,
            messages.Trial: self.trial,
            messages.LegFinished: self.leg_finished,
            messages.Suspect: self.suspect,
            messages.Blame: self.blame,
            messages.Wanted: self.wanted,
            messages.Claim: self.claim,
            messages.Written: self.written,
            messages.Proven: self.proven,
            messages.Heard: lambda message: hub.tell_signal(message.frame),
        }
        """The functions that take what the front says."""

    # ── what it is told ─────────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, place: int, instance: Instance) -> None:
        """Tells of an instance what the front does not know yet."""
        facts, state, report = self._told.get(place, (None, None, None))
        if place not in self._told:
            if self._hub.has_left(place):
                return  # before this front had heard of it
            self._send(messages.Joined(place, instance.settings.model_dump_json(exclude_unset=True)))
        if instance.facts is not None and instance.facts is not facts:
            self._send(messages.Facts(place, instance.facts, self._hub.number_of(instance.shape)))
        now = self._hub.state_of(place, instance)
        if state is None or now[1] != state or instance.health is Health.DOWN:
            self._send(now[0])
        seen = self._hub.counts.report_of(instance)
        if seen is not None and seen is not report:
            self._send(messages.Tokenizer(place, seen.epoch, seen.agrees, seen.why, seen.frame))
        self._told[place] = (instance.facts, now[1], seen)

    def left(self, place: int) -> None:
        """Tells that an instance has left the fleet."""
        if place in self._told:
            self._send(messages.Left(place))

    def forget(self, place: int) -> None:
        """Notes that an instance has been let go."""
        self._told.pop(place, None)

    def tell_scarcity(self) -> None:
        """Tells that somebody waits."""
        self._send(messages.Scarce())

    def tell_signal(self, frame: bytes) -> None:
        """Tells a KV signal, which may be for this front."""
        self._send(messages.Signal(frame))

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, message: messages.Ask) -> None:
        """Puts an attempt in line, or grants it its turn at once."""
        hub, now = self._hub, self._hub.admission.now()
        sizes = message.sizes
        hints = NO_HINTS
        if message.session is not None or message.key is not None:
            hints = RoutingHints(session=message.session, key=message.key)
        demand = Demand(
            message.attempt,
            message.model,
            lambda shape: _pages(sizes, hub.numbers, shape),
            age=now - message.waited_s,
            deadline=inf if message.left_s is None else now + message.left_s,
            priority=message.priority,
            avoid=frozenset(message.avoid) if message.avoid else _NOBODY,
            tied_until=-inf if message.tied_s is None else now + message.tied_s,
            is_again=message.is_again,
            hints=hints,
            num_tokens=message.num_tokens,
            room=_room(message.room),
            text_terms=message.text_terms,
        )
        attempt = self._attempts[message.attempt] = FrontAttempt(demand, self._settled)
        try:
            grant = hub.admission.ask(demand, lambda grant, error: self._answer(attempt, grant, error))
        except ProxyError as error:
            self._answer(attempt, None, error)
            return
        if grant is not None:
            self._granted(attempt, grant)
        else:
            hub.sizes[demand] = sizes
            hub.pool.wanted.note(message.model)
            if hub.admission.num_waiting == 1:
                hub.tell_scarcity()

    def _answer(self, attempt: FrontAttempt, grant: Grant | None, error: ProxyError | None) -> None:
        """Tells the front what has become of an attempt that has waited, or was refused at once."""
        self._hub.sizes.pop(attempt.demand, None)
        if grant is None:
            assert error is not None
            del self._attempts[attempt.id]
            self._send(refusal(attempt.id, error))
        else:
            self._granted(attempt, grant)

    def _granted(self, attempt: FrontAttempt, grant: Grant) -> None:
        """Tells the front where an attempt goes."""
        hub = self._hub
        attempt.grant = grant
        attempt.is_at_owner, attempt.is_at_peer = grant.owner.is_owner, not grant.peer.is_owner
        if not hub.may_grant():
            return  # this process stood still for long: another may lead by now, and knows nothing of this grant
        hub.tell_news()  # so that the front knows the two as the kernel did
        owner: Instance = grant.owner
        peer: Instance = grant.peer
        prefiller = owner if owner.role == "prefill" else peer
        if num_tokens := prefiller.hand_over(attempt.id):
            _add(self._num_tokens, prefiller, num_tokens)
        self._send(
            messages.Granted(
                attempt.id,
                hub.place_of(owner),
                hub.place_of(peer),
                grant.leases[0].pages if grant.leases else 0,
                hub.admission.num_waiting > 0,
                num_tokens,
                grant.demand.lacks,
                grant.forecast,
            )
        )

    def cancel(self, message: messages.Cancel) -> None:
        """Takes an attempt out of the line. One that was granted meanwhile comes back from the front."""
        attempt = self._attempts.get(message.attempt)
        if attempt is not None and attempt.grant is None:
            self._hub.sizes.pop(attempt.demand, None)
            del self._attempts[attempt.id]
            self._hub.admission.leave(attempt.demand)

    def resize(self, message: messages.Resize) -> None:
        """Notes the pages that a waiting attempt takes at further shapes."""
        attempt = self._attempts.get(message.attempt)
        if attempt is not None and (sizes := self._hub.sizes.get(attempt.demand)) is not None:
            sizes |= message.sizes
            self._hub.admission.resize(attempt.demand)

    # ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, message: messages.Claim) -> None:
        """Takes in an attempt that another leader has granted, or of which this one has not heard because the session
        broke off. Pages of a session that has ended are this front's no longer: it was taken for gone in between."""
        owner, peer = self._hub.at(message.owner), self._hub.at(message.peer)
        # One that the attempt needs no more may have left since, or have another role.
        if owner is None and not (message.uses_owner or message.pages):
            owner = peer
        if peer is None and not message.uses_peer:
            peer = owner
        if owner is None or peer is None:
            return
        demand = Demand(message.attempt, message.model, lambda shape: None, age=self._hub.admission.now(), deadline=inf)
        attempt = self._attempts[message.attempt] = FrontAttempt(demand, self._settled)
        attempt.grant = Grant(demand, owner, peer, ())
        for is_owner, place, is_used in ((True, owner, message.uses_owner), (False, peer, message.uses_peer)):
            if is_used:
                place.bound(attempt.id, 0)
                if place is attempt.grant.writer:
                    self._hub.admission.reside(place, attempt.id, _room(message.room))
                if is_owner:
                    attempt.is_at_owner = True
                else:
                    attempt.is_at_peer = True
        if not message.pages:
            self._forget_if_over(attempt)
        elif message.attempt in self._hub.taken:
            self._take(attempt)
        elif owner.account is None:  # it is not known yet which process is there
            self._early[message.attempt] = [message]
            self._hub.await_owner(owner, self)
        else:
            self._claim_pages(attempt, message)

    def _claim_pages(self, attempt: FrontAttempt, message: messages.Claim) -> None:
        assert attempt.grant is not None
        owner: Instance = attempt.grant.owner
        if owner.is_another(owner.epoch, message.epoch):
            self._take(attempt)  # with that process the pages have gone
            return
        if message.guard is not None:
            attempt.guard = _release_call(message.guard)
        lease = self._hub.admission.claim(owner, attempt.id, message.pages, _CUSTODIES[message.custody])
        attempt.grant.leases = (lease,)

    def _take(self, attempt: FrontAttempt) -> None:
        """Tells the front that an attempt has no pages any more."""
        self._send(messages.Settled(attempt.id, Evidence.INCARNATION_ENDED))
        self._forget_if_over(attempt)

    def owner_heard(self, owner: Instance) -> None:
        """Takes up what was said of attempts whose pages are in a process that is known from now on."""
        for name, early in list(self._early.items()):
            attempt = self._attempts.get(name)
            if attempt is None or attempt.grant is None:
                del self._early[name]
            elif attempt.grant.owner is owner:
                del self._early[name]
                self._claim_pages(attempt, early[0])
                for message in early[1:]:
                    self.handlers[type(message)](message)
                self._forget_if_over(attempt)

    def owner_gone(self, owner: Instance) -> None:
        """Tells the front that pages are lost which it has claimed of an owner that was let go before it was heard."""
        for name in list(self._early):
            attempt = self._attempts.get(name)
            if attempt is not None and attempt.grant is not None and attempt.grant.owner is owner:
                del self._early[name]
                self._take(attempt)

    def _is_early(self, message: Any) -> bool:
        """Keeps a message on pages that cannot be claimed yet. Returns whether it did."""
        if not self._early or message.attempt not in self._early:
            return False
        self._early[message.attempt].append(message)
        return True

    def sent(self, message: messages.Sent) -> None:
        """Notes that an attempt's pages may be filled from now on."""
        attempt = self._attempts.get(message.attempt)
        if self._is_early(message) or attempt is None or not attempt.has_lease:
            return
        attempt.guard = _release_call(message.guard)
        _advance(attempt.lease, _FILLING)

    def shrink(self, message: messages.Shrink) -> None:
        """Notes that an attempt takes fewer pages than were granted."""
        attempt = self._attempts.get(message.attempt)
        if not self._is_early(message) and attempt is not None and attempt.has_lease:
            self._hub.admission.shrink(attempt.lease, max(0, message.pages))

    def free(self, message: messages.Free) -> None:
        """Frees an attempt's pages by what the front has seen."""
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            return
        # Whom an attempt has a use for does not depend on whose its pages are.
        if not self._is_early(message) and attempt.has_lease and (lease := attempt.lease).custody is not _RETURNED:
            _advance(lease, _CUSTODIES[message.custody])
            evidence = _EVIDENCES[message.evidence]
            if lease.custody is not _ORPHANED or evidence in PROOFS[_ORPHANED]:
                self._hub.admission.free(lease, evidence)
        self._unbind(attempt, message.owner, message.peer)

    def abandon(self, message: messages.Abandon) -> None:
        """Hands an attempt's pages to the reaper."""
        attempt = self._attempts.get(message.attempt)
        if self._is_early(message):
            return
        if attempt is None or not attempt.has_lease:  # this leader knows nothing of it, and can do nothing about it
            self._send(messages.Settled(message.attempt, Evidence.INCARNATION_ENDED))
            return
        if attempt.lease.is_returned:
            return
        errand = None if message.errand is None else _release_call(message.errand)
        way = Way(
            errand=errand,
            target=None if errand is None else attempt.instance(errand.role),
            not_before_s=message.not_before_s,
            over_after_s=message.over_after_s,
            settles_after_s=message.settles_after_s,
            is_closing=message.is_closing,
        )
        self._abandon(attempt, _CUSTODIES[message.custody], way)

    def _abandon(self, attempt: FrontAttempt, custody: Custody, way: Way) -> None:
        _advance(attempt.lease, custody)
        attempt.goes(way)
        self._hub.reaper.adopt(attempt)

    def hurry(self, message: messages.Hurry) -> None:
        """Lets an abandoned attempt's errand begin at once."""
        attempt = self._attempts.get(message.attempt)
        if self._is_early(message) or attempt is None or not attempt.has_lease:
            return
        if attempt.lease.custody is _ORPHANED:
            self._hub.admission.hurry(attempt.lease)

    def _settled(self, attempt: FrontAttempt) -> None:
        """Tells the front that the pages of an abandoned attempt have come back."""
        evidence = attempt.lease.freed_by or Evidence.LEASE_OVER
        if attempt.id in self._attempts:
            self._send(messages.Settled(attempt.id, evidence))
            self._forget_if_over(attempt)

    def unbound(self, message: messages.Unbound) -> None:
        """Notes for which of its places an attempt has no use any more."""
        attempt = self._attempts.get(message.attempt)
        if attempt is not None:
            self._unbind(attempt, message.owner, message.peer)

    def _unbind(self, attempt: FrontAttempt, owner: bool, peer: bool) -> None:
        """Lets go of the owner of an attempt's pages, its peer or both, where the attempt is bound to them."""
        grant = attempt.grant
        if grant is not None:
            if owner and attempt.is_at_owner:
                attempt.is_at_owner = False
                grant.owner.unbound(attempt.id)
            if peer and attempt.is_at_peer:
                attempt.is_at_peer = False
                grant.peer.unbound(attempt.id)
        self._forget_if_over(attempt)

    def _forget_if_over(self, attempt: FrontAttempt) -> None:
        if attempt.is_over and attempt.id not in self._early:
            self._attempts.pop(attempt.id, None)

    def written(self, message: messages.Written) -> None:
        """Notes how long answers are by now."""
        instance = self._hub.at(message.place)
        if instance is not None:
            instance.residency.told(message.num_tokens)

    # ── legs ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, message: messages.Load) -> None:
        """Notes what has changed of an instance's load."""
        if (instance := self._hub.at(message.place)) is not None:
            num_legs = message.num_sent - message.num_ok
            if num_legs:
                instance.loaded(num_legs, 0)
                _add(self._num_legs, instance, num_legs)
            if message.num_tokens or message.num_read:
                instance.loaded(0, message.num_tokens, message.num_read)
                _add(self._num_tokens, instance, message.num_tokens)
            if message.num_handed:
                instance.handed_over(message.num_handed, message.handed_s)
            if message.num_ok:
                instance.breaker.succeeded(message.era, message.num_ok)

    def trial(self, message: messages.Trial) -> None:
        """Notes a leg that probes an instance."""
        if (instance := self._hub.at(message.place)) is not None:
            self._trials[message.place, message.leg] = instance.leg_started(message.attempt)
            _add(self._num_legs, instance, 1)

    def leg_finished(self, message: messages.LegFinished) -> None:
        """Notes how a leg has ended."""
        if (instance := self._hub.at(message.place)) is not None:
            # A trial of which this leader has not heard was begun under another one: it votes in no era.
            era = self._trials.pop((message.place, message.leg), -1) if message.leg else message.era
            instance.leg_finished(era, message.outcome)
            _add(self._num_legs, instance, -1)

    def suspect(self, message: messages.Suspect) -> None:
        """Has an instance looked at, with or without a fault that speaks against it."""
        instance = self._hub.at(message.place)
        if instance is None or instance.epoch != message.epoch:
            return  # the process of which that is said has ended
        if message.why is None:
            instance.look_soon()
        else:
            instance.suspect(message.why, is_lost=message.is_lost)

    def blame(self, message: messages.Blame) -> None:
        """Notes a fault of an instance that showed at its peer."""
        if (instance := self._hub.at(message.place)) is not None:
            instance.blame(message.epoch, message.era, message.attempt, message.why)

    def proven(self, message: messages.Proven) -> None:
        """Notes that another leader has proven an instance."""
        if (instance := self._hub.at(message.place)) is not None:
            instance.proven_before(message.epoch, is_alone=message.is_alone)

    def wanted(self, message: messages.Wanted) -> None:
        """Notes that a request found too few instances of a model."""
        self._hub.pool.wanted.note(message.model)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def close(self) -> None:
        """Answers for all that the front has left behind. Its connections to engines are closed. Idempotent. Does
        nothing where this process leads no longer: who does is told of the front's attempts, which go on."""
        if not self._hub.remove(self) or not self._hub.may_grant():
            return
        self._early.clear()
        attempts = list(self._attempts.values())
        waiting = [attempt for attempt in attempts if attempt.grant is None]
        for attempt in waiting:
            self._hub.sizes.pop(attempt.demand, None)
            self._hub.admission.leave(attempt.demand)
            if attempt.grant is not None:  # because another of them has left the line: its front never hears of it
                self._hub.admission.give_back(attempt.grant)
        self._attempts.clear()
        for attempt in attempts:
            if attempt in waiting:
                continue
            if attempt.has_lease:
                self._hub.taken[attempt.id] = None
            if attempt.has_lease and attempt.lease.custody not in (_ORPHANED, _RETURNED):
                self._abandon(attempt, _FILLING, _last_way(attempt))
            self._unbind(attempt, True, True)
        # Last, because one of them that left the line may have let another one go, whose tokens were counted.
        for instance, num_legs in self._num_legs.items():
            instance.loaded(-num_legs, 0)
        for instance, num_tokens in self._num_tokens.items():
            instance.loaded(0, -num_tokens)
        for loads in (self._num_legs, self._num_tokens, self._trials):
            loads.clear()


class Hub:
    """`Hub` serves fronts: it asks the admission for them, and tells them of the fleet.

    Mutable state: the fronts; the places, and the instances there; the numbers of shapes; the instances of which
    there is news; the sizes of demands in line, to which fronts add; the fronts that claim pages of an instance which
    has not been heard of.
    """

    def __init__(
        self,
        pool: Pool,
        admission: Admission,
        reaper: Reaper,
        counts: TokenCounts,
        *,
        term: int | None = None,
        may_grant: Callable[[], bool] = lambda: True,
        on_newer_term: Callable[[int], object] = lambda term: None,
    ) -> None:
        """Takes the term in which it leads; `may_grant`, which tells whether it leads at this moment; and
        `on_newer_term`, which is called with a higher term of which an engine has heard."""
        self.term = term
        self.may_grant = may_grant
        self._on_newer_term = on_newer_term
        self.taken: dict[str, None] = {}
        """The attempts whose pages the reaper has, or had, because their front was taken for gone."""
        self.pool = pool
        self.admission = admission
        self.reaper = reaper
        self.counts = counts
        self.numbers: dict[Any, int] = {}
        self.sizes: dict[Demand, dict[int, int | None]] = {}
        self._sessions: dict[Session, None] = {}
        self._instances: dict[int, Instance] = {}
        self._places: dict[Instance, int] = {}
        self._next_place = itertools.count(1)
        self._next_shape = itertools.count(1)
        self._news: dict[Instance, None] = {}
        self._has_left: set[int] = set()
        self._is_due = False
        self._awaited: dict[Instance, dict[Session, None]] = {}

    def open(self, send: Send) -> Session:
        """Returns a session for a front, which is told all there is to know."""
        session = Session(self, send)
        self.follow()
        self._sessions[session] = None
        for place, instance in self._instances.items():
            session.tell(place, instance)
        send(messages.Listed())
        return session

    def remove(self, session: Session) -> bool:
        """Tells a front nothing more. Returns False where it had been removed before."""
        return self._sessions.pop(session, self) is None

    # ── the fleet ───────────────────────────────────────────────────────────────────────────────────────────────────

    def follow(self) -> None:
        """Takes note of instances that came, went, or were let go."""
        present = {*self.pool.instances, *self.pool.leaving}
        for gone in [one for one in self._places if one not in present]:
            place = self._places.pop(gone)
            del self._instances[place]
            self._has_left.discard(place)
            self._news.pop(gone, None)
            gone.on_news = lambda: None
            for session in self._awaited.pop(gone, ()):
                session.owner_gone(gone)
            for session in self._sessions:
                session.forget(place)
        for instance in self.pool.instances:
            if instance not in self._places:
                place = self._places[instance] = next(self._next_place)
                self._instances[place] = instance
                instance.on_news = partial(self._note, instance)
                self._note(instance)
        for instance in self.pool.leaving:
            place = self._places.get(instance, 0)
            if place and place not in self._has_left:
                self._has_left.add(place)
                for session in self._sessions:
                    session.left(place)

    def await_owner(self, owner: Instance, session: Session) -> None:
        """Has the session told when the process of an instance is known."""
        self._awaited.setdefault(owner, {})[session] = None

    def pass_on(self, told: wire.AnySignal) -> bool:
        """Passes a KV signal on to all fronts. Returns True."""
        self.tell_signal(msgspec.msgpack.encode(told))
        return True

    def tell_scarcity(self) -> None:
        """Tells all fronts that somebody waits."""
        for session in self._sessions:
            session.tell_scarcity()

    def tell_signal(self, frame: bytes) -> None:
        """Tells all fronts a KV signal, which is for one of them."""
        for session in self._sessions:
            session.tell_signal(frame)

    def _note(self, instance: Instance) -> None:
        if self._awaited and instance.account is not None:
            for session in self._awaited.pop(instance, ()):
                session.owner_heard(instance)
        term = None if instance.facts is None else instance.facts.term
        if term is not None and self.term is not None and term > self.term:
            self._on_newer_term(term)
        self._news[instance] = None
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.tell_news)

    def tell_news(self) -> None:
        """Tells all fronts what is new of the fleet."""
        self._is_due = False
        if not self._news:
            return
        news, self._news = self._news, {}
        for instance in news:
            place = self._places.get(instance)
            if place is not None:
                for session in self._sessions:
                    session.tell(place, instance)

    def has_left(self, place: int) -> bool:
        """Tells whether the instance at a place was taken out of the fleet."""
        return place in self._has_left

    def at(self, place: int) -> Instance | None:
        """Returns the instance at a place; None where it was let go."""
        return self._instances.get(place)

    def place_of(self, instance: Instance) -> int:
        """Returns the number of an instance's place."""
        return self._places[instance]

    def number_of(self, shape: Any) -> int:
        """Returns the number of an owner's shape; 0 stands for none."""
        if shape is None:
            return 0
        if shape not in self.numbers:
            alive = {one.shape for one in self._places}
            self.numbers = {one: number for one, number in self.numbers.items() if one in alive}
            self.numbers[shape] = next(self._next_shape)
        return self.numbers[shape]

    def state_of(self, place: int, instance: Instance) -> tuple[messages.State, tuple[Any, ...]]:
        """Returns how an instance is judged, and what of it is new when it differs from before."""
        era, breaker, opened_s, num_probes, probes_s = instance.breaker.told()
        judged = (
            instance.health,
            instance.why,
            instance.is_up,
            instance.is_draining,
            instance.is_doubted,
            instance.is_suspected,
            era,
            breaker,
            instance.is_expected,
            instance.is_proven_alone,
        )
        health, why, is_up, is_draining, is_doubted, is_suspected, _, _, is_expected, is_proven_alone = judged
        state = messages.State(
            place,
            health,
            why,
            is_up,
            is_draining,
            is_doubted,
            is_suspected,
            era,
            breaker,
            opened_s,
            num_probes,
            probes_s,
            is_expected,
            is_proven_alone,
        )
        return state, (*judged, num_probes)


def _pages(sizes: Mapping[int, int | None], numbers: Mapping[Any, int], shape: Shape) -> int | None:
    """Returns the pages that an attempt takes at a shape. One that its front has not heard of yet when it asked would
    be taken as a whole, until the front has told more."""
    number = numbers.get(shape, 0)
    return sizes[number] if number in sizes else max(1, shape.facts.num_pages)


def _add(sums: dict[Instance, int], instance: Instance, number: int) -> None:
    """Adds to a sum. One that has become 0 is forgotten."""
    total = sums.get(instance, 0) + number
    if total:
        sums[instance] = total
    else:
        sums.pop(instance, None)


def _advance(lease: Lease, custody: Custody) -> None:
    """Takes the steps that the front took and did not tell by themselves."""
    if lease.custody in STEPS_TO:
        for step in STEPS_TO.get(custody, ())[len(STEPS_TO[lease.custody]) :]:
            lease.step(step)


def _last_way(attempt: FrontAttempt) -> Way:
    """Returns how the pages of an attempt become free whose front has gone. Nobody knows how far its legs had come."""
    lease_s = attempt.traits.lease_s
    guard = attempt.guard
    if guard is None:
        return Way(over_after_s=lease_s)
    target = attempt.instance(guard.role)
    return Way(errand=guard, target=target, over_after_s=lease_s, settles_after_s=attempt.traits.closing_s)


def _release_call(errand: messages.Errand) -> ReleaseCall:
    return ReleaseCall(
        "prefill" if errand.role == "prefill" else "decode",
        Call(errand.path, errand.body),
        errand.timeout_s,
        headers=errand.headers,
    )
