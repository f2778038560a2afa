"""The admission of a front, whose requests are admitted by the leader.

What must hold: every page that the leader has granted to this front is held by a lease here, or its return is on its
way; and a lease comes back here by the same evidence as there. Nothing is sent to an engine for a lease unless a leader
answers for it at that moment. A violation would be seen as pages that the leader holds for ever, as a lease that is
freed twice, or as a page that two attempts fill.

A front keeps a ledger of its own, of what it holds itself, by the same kernel: so the custody of a lease, and what
counts as proof, are the same everywhere. It decides nothing about whose turn it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from math import inf
from typing import Any, Final

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.admission import Admission, Waiter
from pdproxy.admission.custody import PROOFS, Custody, Evidence, Way
from pdproxy.admission.grant import Forecast, Grant
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.orphans import Job
from pdproxy.admission.room import Room
from pdproxy.aio.coarse_timer import MIN_S, alarms_of
from pdproxy.engines.adapter import ReleaseCall
from pdproxy.errors import NotReady, ProxyError, QueueFull, QueueTimeout
from pdproxy.fleet.routing.candidate import NO_HINTS
from pdproxy.fleet.routing.router import Router
from pdproxy.fronts import messages
from pdproxy.fronts.channel import Line

RETRY_AFTER_S: Final = 1.0
SILENCE_S = MIN_S
"""Seconds beyond a demand's own deadline after which a front refuses it by itself: the leader has not."""

MAX_UNSENT_BYTES: Final = 8 << 20
"""The bytes that may wait for a leader which stands still, before new requests are refused."""


class Held:
    """`Held` is what an attempt holds and uses that was granted: as much as a leader must know that has not granted it.

    Mutable state: the lease, if there is one; for which of its two places it still has a use; what was last said of its
    end, and in which frame; the errand that frees its pages if this front ends; how it was abandoned, and when.
    """

    __slots__ = (
        "abandoned",
        "abandoned_at",
        "ending",
        "guard",
        "lease",
        "model",
        "owner",
        "peer",
        "room",
        "uses_owner",
        "uses_peer",
    )

    def __init__(self, demand: Demand, owner: Any, peer: Any, lease: Lease | None) -> None:
        self.model = demand.model
        self.room = demand.room
        self.owner = owner
        self.peer = peer  # the owner itself, where one place serves the attempt alone
        self.lease = lease
        self.uses_owner, self.uses_peer = owner.is_owner, not peer.is_owner
        self.guard: messages.Errand | None = None
        self.ending: tuple[object, messages.Free | messages.Unbound] | None = None
        self.abandoned: messages.Abandon | None = None
        self.abandoned_at = 0.0

    @property
    def is_over(self) -> bool:
        return not (self.uses_owner or self.uses_peer) and (self.lease is None or self.lease.is_returned)

    @property
    def is_there(self) -> bool:
        """Tells whether the present leader knows each place that the attempt still uses, or has pages at. One that it
        needs no more may have left, or have another role."""
        has_pages = self.lease is not None and not self.lease.is_returned
        is_owner_there = self.owner.number != 0 or not (self.uses_owner or has_pages)
        return is_owner_there and (self.peer.number != 0 or not self.uses_peer)


class _Silence:
    """A `_Silence` refuses a demand that the leader has not answered long after its time. Implements
    `coarse_timer.Alarm`, because hardly any of them ever rings."""

    __slots__ = ("_alarms", "_demand", "_give_up", "due_at")

    def __init__(self, demand: Demand, left_s: float, give_up: Callable[[Demand], None]) -> None:
        """Takes the seconds until the demand's deadline, and the function that refuses it."""
        self._alarms = alarms_of(asyncio.get_running_loop())
        self._demand = demand
        self._give_up = give_up
        self.due_at = self._alarms.loop.time() + max(0.0, left_s) + SILENCE_S
        self._alarms.set(self)

    def ring(self) -> None:
        self._give_up(self._demand)

    def cancel(self) -> None:
        self._alarms.take_back(self)


class FrontAdmission(Admission):
    """`FrontAdmission` asks the leader for every grant, over `line`, and tells it of every lease.

    Mutable state, besides that of `Admission`: whether there is a leader that knows this front, and whether anybody
    waits there; the demands that wait, by attempt, and those of them that no leader has heard of; what was granted and
    is not over, by attempt; the numbers of owners' shapes, as the leader has told them.
    """

    def __init__(
        self,
        kernel: Kernel,
        router: Router,
        line: Line,
        *,
        is_held: Callable[[], bool] = lambda: True,
        patience_s: float | None = None,
        max_waiting: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes `is_held`, which tells whether a leader answers for this front's leases at this moment. Where a leader
        may follow another, demands wait for the next one for `patience_s` seconds, and at most `max_waiting` of
        them."""
        super().__init__(kernel, clock=clock)
        self._router = router
        self.line = line
        self._send, self._send_soon = line.send, line.send_soon
        self._is_held = is_held
        self._patience_s = patience_s
        self._max_waiting = max_waiting
        self._is_known = patience_s is None
        self.is_remote = True
        self._is_scarce = True
        self._asked: dict[str, Demand] = {}
        self._unasked: set[Demand] = set()
        self._held: dict[str, Held] = {}
        self.shapes: dict[int, Hashable] = {}

    @property
    def has_leader(self) -> bool:
        """Tells whether there is a leader that knows of this front, and has answered in time."""
        return self._is_known and self._is_held()

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def bind_now(self, demand: Demand) -> Grant | None:
        """Asks the leader. Returns None: the caller must await `wait` in the same instant. Raises `NotReady` where
        there will be no leader any more, or where it has not taken for long what it was told."""
        has_leader = self.has_leader
        if not has_leader and self._patience_s is None:
            raise no_leader()
        if self.line.num_unsent_bytes > MAX_UNSENT_BYTES:
            message = "the process that admits requests does not answer; try again later"
            raise NotReady(message, retry_after_s=RETRY_AFTER_S)
        if not self._is_known and len(self._asked) >= self._max_waiting:
            message = f"{len(self._asked)} requests already wait for somebody who admits them; try again later"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)
        loop, now = asyncio.get_running_loop(), self._clock()
        waiter = self._waiters[demand] = Waiter(loop.create_future())
        if self._is_known:  # also one that does not answer in time: it may go on as if nothing had happened
            self._ask(demand, now, is_again=demand.is_again)
        else:
            self._asked[demand.attempt] = demand  # and asks the next one
            self._unasked.add(demand)
        if not has_leader:
            self._await_leader(demand, waiter)
        if demand.deadline < inf:
            waiter.timers.append(_Silence(demand, demand.deadline - now, self._give_up))
        return None

    def _ask(self, demand: Demand, now: float, *, is_again: bool) -> None:
        self._asked[demand.attempt] = demand
        hints = self._router.condensed(demand.hints or NO_HINTS)
        self._send(
            messages.Ask(
                demand.attempt,
                demand.model,
                {number: demand.pages_at(shape) for number, shape in self.shapes.items()},
                max(0.0, now - demand.age),
                None if demand.deadline == inf else demand.deadline - now,
                demand.priority,
                tuple(demand.avoid),
                None if demand.tied_until == -inf else demand.tied_until - now,
                is_again,
                hints.session,
                hints.key,
                demand.num_tokens,
                _fields(demand.room),
                demand.text_terms,
            )
        )

    def _await_leader(self, demand: Demand, waiter: Waiter) -> None:
        assert self._patience_s is not None
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience, demand)
        waiter.timers.append(timer)

    def _lose_patience(self, demand: Demand) -> None:
        """Refuses a demand that no leader has heard of in time."""
        if not self.has_leader and demand in self._waiters:
            self._cancel(demand)
            self._end(demand, no_leader())

    def _give_up(self, demand: Demand) -> None:
        """Refuses a demand whose time is long over, because the leader does not answer."""
        self._cancel(demand)
        message = "the process that admits requests did not answer in time; try again later"
        self._end(demand, QueueTimeout(message, retry_after_s=RETRY_AFTER_S))

    def _abandon(self, demand: Demand, waiter: Waiter) -> None:
        waiter.wake()
        self._waiters.pop(demand, None)
        if waiter.grant is not None:
            self.give_back(waiter.grant)
        else:
            self._cancel(demand)

    def _cancel(self, demand: Demand) -> None:
        self._unasked.discard(demand)
        if self._asked.pop(demand.attempt, None) is not None:
            self._send(messages.Cancel(demand.attempt))

    def _end(self, demand: Demand, error: ProxyError) -> None:
        waiter = self._waiters.pop(demand, None)
        if waiter is not None:
            waiter.error = error
            waiter.wake()

    # ── what the leader says ────────────────────────────────────────────────────────────────────────────────────────

    def scarce(self) -> None:
        """Takes note that somebody waits somewhere."""
        self._is_scarce = True

    def granted(
        self,
        attempt: str,
        owner: Place,
        peer: Place,
        pages: int,
        is_scarce: bool = True,
        lacked: str = "",
        forecast: Forecast | None = None,
    ) -> bool:
        """Takes a grant, and returns whether it is made use of. One that nobody waits for any more goes back at once.
        So does that of an owner which cannot serve the attempt, because the leader did not know that; then the attempt
        asks once more, with its age."""
        self._is_scarce = is_scarce
        demand = self._asked.pop(attempt, None)
        wanted = None if demand is None else demand.pages_at(owner.shape)
        if demand is None or (pages and wanted is None):
            self._send(messages.Free(attempt, Custody.RESERVED, Evidence.NEVER_SENT, owner=True, peer=True))
            if demand is not None:
                self._ask(demand, self._clock(), is_again=True)
            return False
        lease: Lease | None = None
        if pages:
            account = owner.account
            assert account is not None
            lease = account.issue(attempt, pages, self._clock())
        demand.lacks = lacked
        self._held[attempt] = Held(demand, owner, peer, lease)
        waiter = self._waiters.pop(demand)
        grant = waiter.grant = Grant(demand, owner, peer, () if lease is None else (lease,), forecast)
        for place in grant.places:
            place.bound(attempt, demand.num_tokens if owner is peer or not place.is_writer else 0)
            if place is grant.writer:
                self.reside(place, attempt, demand.room)
        if lease is not None and wanted is not None:
            self.shrink(lease, wanted)  # more were granted where the leader did not know how many it takes
        waiter.wake()
        return True

    def refused(self, attempt: str, error: ProxyError) -> None:
        """Takes the leader's refusal of an attempt that waits."""
        demand = self._asked.pop(attempt, None)
        if demand is not None:
            self._end(demand, error)

    def settled(self, attempt: str, evidence: Evidence) -> None:
        """Notes that the pages of an attempt have come back to the leader: by this evidence where it was abandoned.
        Else the leader took this front for gone, and the pages are no longer this attempt's."""
        held = self._held.get(attempt)
        if held is None:
            return
        lease = held.lease
        if lease is not None and not lease.is_returned:
            is_proof = evidence in PROOFS[lease.custody]
            super().free(lease, evidence if is_proof else Evidence.INCARNATION_ENDED)
        self._forget_if_over(attempt, held)

    def learned(self, number: int, shape: Hashable) -> None:
        """Notes that an owner has the shape of this `number`, perhaps a new one. Tells of the demands that wait how
        many pages they take there."""
        if number in self.shapes:
            return
        self.shapes[number] = shape
        for attempt, demand in self._asked.items():
            self._send(messages.Resize(attempt, {number: demand.pages_at(shape)}))

    # ── another leader ──────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, term: int) -> None:
        """Notes that a leader is reached which knows nothing of this front. It tells of the fleet first.

        Pages for which nothing was sent yet are given up. This leader has not heard of them, and may grant them to
        others before it does; what was sent it finds at the engines."""
        self.term = term
        self._is_known = False
        self.shapes.clear()
        for held in self._held.values():
            if held.lease is not None and held.lease.custody is Custody.RESERVED:
                super().free(held.lease, Evidence.NEVER_SENT)

    def listed(self) -> None:
        """Tells the leader, which has told of the whole fleet, what this front holds and who waits."""
        self._is_known = True
        now = self._clock()
        for attempt, held in list(self._held.items()):
            self._claim(attempt, held, now)
        for demand in self._asked.values():
            self._ask(demand, now, is_again=demand.is_again or demand not in self._unasked)
        self._unasked.clear()

    def _claim(self, attempt: str, held: Held, now: float) -> None:
        lease, abandoned = held.lease, held.abandoned
        held.ending = None  # what was said of it before, this leader does not take for its own
        if lease is not None and lease.is_returned:
            lease = None
        if not held.is_there:
            # This leader has another fleet. It can do nothing about what lies there, and neither can this front.
            if lease is not None and abandoned is not None:
                self._hand_over(lease)
            return
        custody = Custody.RESERVED if lease is None else lease.custody
        self._send(
            messages.Claim(
                attempt,
                held.model,
                held.owner.number,
                held.peer.number,
                held.uses_owner,
                held.uses_peer,
                held.owner.epoch,
                0 if lease is None else lease.pages,
                custody if abandoned is None else abandoned.custody,
                held.guard,
                _fields(held.room),
            )
        )
        if lease is not None and abandoned is not None:
            passed_s = now - held.abandoned_at
            abandoned.not_before_s = max(0.0, abandoned.not_before_s - passed_s)
            abandoned.over_after_s = max(0.0, abandoned.over_after_s - passed_s)
            held.abandoned_at = now
            self._send(abandoned)

    def lapse(self) -> None:
        """Takes note that no leader has answered for so long that this front may be taken for gone. Those who wait do
        so for the next leader."""
        for demand in self._asked.values():
            self._await_leader(demand, self._waiters[demand])

    def lose_leader(self) -> None:
        """Refuses all who wait: nobody will admit them any more. What is under way goes on. Whoever leads next answers
        for what was abandoned."""
        self._is_known, self._patience_s = False, None
        for lease in list(self.kernel.orphans):
            self._hand_over(lease)
        waiting = list(self._asked.values())
        self._asked.clear()
        for demand in waiting:
            self._end(demand, no_leader())

    def _hand_over(self, lease: Lease) -> None:
        """Forgets an orphan, because this front can neither hear of it nor do anything about it."""
        self._held.pop(lease.attempt, None)
        super().free(lease, Evidence.INCARNATION_ENDED)

    # ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def sent(self, lease: Lease, guard: Callable[[], Any]) -> None:
        """Tells the leader. Raises `NotReady` where none has answered for so long that the pages may be another's."""
        if not self._is_held():
            raise no_leader()
        call = guard()
        if call is not None:
            errand = _errand(call)
            if (held := self._held.get(lease.attempt)) is not None:
                held.guard = errand
            self._send(messages.Sent(lease.attempt, errand))

    def free(self, lease: Lease, evidence: Evidence) -> None:
        custody = lease.custody
        super().free(lease, evidence)
        held = self._held.get(lease.attempt)
        if held is not None and custody is not Custody.RETURNED:
            message = messages.Free(lease.attempt, custody, evidence)
            self._send_pages(message)
            held.ending = (self.line.frame, message)
            self._forget_if_over(lease.attempt, held)

    def shrink(self, lease: Lease, pages: int) -> None:
        if pages < lease.pages:  # as a rule it takes what was granted
            self._send_pages(messages.Shrink(lease.attempt, pages))
            super().shrink(lease, pages)

    def _send_pages(self, message: Any) -> None:
        """Tells of pages that are free: at once where somebody waits for pages."""
        if self._is_scarce:
            self._send(message)
        else:
            self._send_soon(message)

    def abandon(self, lease: Lease, way: Way) -> None:
        custody = lease.custody
        super().abandon(lease, way)
        held = self._held.get(lease.attempt)
        # While there is no leader, the next one will be told, where there may be one.
        is_told = (held is None or held.is_there) if self._is_known else self._patience_s is not None
        if not is_told:
            self._hand_over(lease)  # nobody can do anything about what lies there
            return
        message = messages.Abandon(
            lease.attempt,
            custody,
            _errand(way.errand) if isinstance(way.errand, ReleaseCall) else None,
            way.not_before_s,
            way.over_after_s,
            way.settles_after_s,
            way.is_closing,
        )
        if held is not None:
            held.abandoned, held.abandoned_at = message, self._clock()
        if self._is_known:  # else the next leader is told with the claim: before, it would know of no such attempt
            self._send(message)

    def hurry(self, lease: Lease) -> None:
        held = self._held.get(lease.attempt)
        if held is not None and held.abandoned is not None:
            held.abandoned.not_before_s = 0.0
        self._send(messages.Hurry(lease.attempt))

    def unbound(self, attempt: str, *, is_owner: bool) -> None:
        """Takes note that the attempt has no use any more for one of its two places."""
        held = self._held.get(attempt)
        if held is None:
            self._send_soon(messages.Unbound(attempt, owner=is_owner, peer=not is_owner))
            return
        frame, ending = self.line.frame, held.ending
        if ending is not None and ending[0] == frame:  # what was said of its end has not been sent yet
            message = ending[1]
        else:
            message = messages.Unbound(attempt, owner=False, peer=False)
            self._send_soon(message)
            held.ending = (frame, message)
        if is_owner:
            message.owner, held.uses_owner = True, False
        else:
            message.peer, held.uses_peer = True, False
        self._forget_if_over(attempt, held)

    def part(self, attempt: str) -> None:
        """Has what is said of the attempt's end from now on come after what was said until now."""
        if (held := self._held.get(attempt)) is not None:
            held.ending = None

    def _forget_if_over(self, attempt: str, held: Held) -> None:
        if held.is_over:
            self._held.pop(attempt, None)

    def forget_ended(self) -> None:
        """Forgets what was abandoned and has come back, because the process that had it has ended."""
        for attempt, held in list(self._held.items()):
            self._forget_if_over(attempt, held)

    def discard(self, place: Place) -> None:
        super().discard(place)
        self.forget_ended()

    def take_due(self) -> tuple[list[Job], float]:
        """Returns nothing to do: the leader's reaper sees to orphans."""
        return [], inf

    @property
    def num_waiting(self) -> int:
        return len(self._asked)

    @property
    def num_held(self) -> int:
        return len(self._held)


def no_leader() -> NotReady:
    return NotReady("the process that admits requests has gone; try again later", retry_after_s=RETRY_AFTER_S)


def _fields(room: Room) -> messages.RoomFields:
    return room.prompt, room.growth, None if room.most == inf else int(room.most), room.num


def _errand(call: ReleaseCall) -> messages.Errand:
    return messages.Errand(call.role, call.call.path, call.call.body, dict(call.headers), call.timeout_s)
