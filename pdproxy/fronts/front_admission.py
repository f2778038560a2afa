"""The admission of a front, whose requests are admitted by the leader.

What must hold: every page that the leader has granted to this front is held by a lease here, or its return is on its
way; and a lease comes back here by the same evidence as there. A violation would be seen as pages that the leader holds
for ever, or as a lease that is freed twice.

A front keeps a ledger of its own, of what it holds itself, by the same kernel: so the custody of a lease, and what
counts as proof, are the same everywhere. It decides nothing about whose turn it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from math import inf
from typing import Any

from pdproxy.admission.account import Lease, Place
from pdproxy.admission.admission import Admission, Waiter, note_bound
from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.admission.grant import Grant
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.orphans import Job
from pdproxy.engines.adapter import ReleaseCall
from pdproxy.errors import NotReady, ProxyError, QueueTimeout
from pdproxy.fleet.routing.candidate import NO_HINTS
from pdproxy.fleet.routing.router import Router
from pdproxy.fronts import messages

RETRY_AFTER_S = 1.0
SILENCE_S = 1.0
"""Seconds beyond a demand's own deadline after which a front refuses it by itself: the leader has not."""

MAX_UNSENT_BYTES = 16 << 20
"""The bytes that may wait for a leader which stands still, before new requests are refused."""

Send = Callable[[Any], None]


class FrontAdmission(Admission):
    """`FrontAdmission` asks the leader for every grant, with `send`, and tells it of every lease.

    Mutable state, besides that of `Admission`: whether there is a leader; the demands that wait, by attempt; the leases
    that are held, by attempt; the numbers of owners' shapes, as the leader has told them.
    """

    def __init__(
        self,
        kernel: Kernel,
        router: Router,
        send: Send,
        *,
        num_unsent_bytes: Callable[[], int] = int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes `num_unsent_bytes`, which returns how much of what was sent the leader has not taken yet."""
        super().__init__(kernel, clock=clock)
        self._router = router
        self._send = send
        self._num_unsent_bytes = num_unsent_bytes
        self.is_remote = True
        self.has_leader = True
        self._asked: dict[str, Demand] = {}
        self._leases: dict[str, Lease] = {}
        self.shapes: dict[int, Hashable] = {}

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def bind_now(self, demand: Demand) -> Grant | None:
        """Asks the leader. Returns None: the caller must await `wait` in the same instant. Raises `NotReady` where
        there is no leader, or where it has not taken for long what it was told."""
        if not self.has_leader:
            raise no_leader()
        if self._num_unsent_bytes() > MAX_UNSENT_BYTES:
            message = "the process that admits requests does not answer; try again later"
            raise NotReady(message, retry_after_s=RETRY_AFTER_S)
        loop, now = asyncio.get_running_loop(), self._clock()
        self._ask(demand, now, is_again=demand.is_again)
        waiter = self._waiters[demand] = Waiter(loop.create_future())
        if demand.deadline < inf:
            waiter.timers.append(loop.call_later(demand.deadline - now + SILENCE_S, self._give_up, demand))
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
            )
        )

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
        if self._asked.pop(demand.attempt, None) is not None:
            self._send(messages.Cancel(demand.attempt))

    def _end(self, demand: Demand, error: ProxyError) -> None:
        waiter = self._waiters.pop(demand, None)
        if waiter is not None:
            waiter.error = error
            waiter.wake()

    # ── what the leader says ────────────────────────────────────────────────────────────────────────────────────────

    def granted(self, attempt: str, owner: Place, peer: Place, pages: int) -> None:
        """Takes a grant. One that nobody waits for any more goes back at once. So does that of an owner which cannot
        serve the attempt, because the leader did not know that; then the attempt asks once more, with its age."""
        demand = self._asked.pop(attempt, None)
        wanted = None if demand is None else demand.pages_at(owner.shape)
        if demand is None or (pages and wanted is None):
            self._send(messages.Free(attempt, Custody.RESERVED, Evidence.NEVER_SENT))
            self._send(messages.Unbound(attempt, True))
            self._send(messages.Unbound(attempt, False))
            if demand is not None:
                self._ask(demand, self._clock(), is_again=True)
            return
        leases: tuple[Lease, ...] = ()
        if pages:
            account = owner.account
            assert account is not None
            lease = self._leases[attempt] = account.issue(attempt, pages, self._clock())
            leases = (lease,)
        waiter = self._waiters.pop(demand)
        waiter.grant = grant = Grant(demand, owner, peer, leases)
        note_bound(grant)
        if leases and wanted is not None:
            self.shrink(leases[0], wanted)  # more were granted where the leader did not know how many it takes
        waiter.wake()

    def refused(self, attempt: str, error: ProxyError) -> None:
        """Takes the leader's refusal of an attempt that waits."""
        demand = self._asked.pop(attempt, None)
        if demand is not None:
            self._end(demand, error)

    def settled(self, attempt: str, evidence: Evidence) -> None:
        """Notes that the pages of an abandoned attempt have come back to the leader."""
        lease = self._leases.pop(attempt, None)
        if lease is not None:
            super().free(lease, evidence)

    def learned(self, number: int, shape: Hashable) -> None:
        """Notes that an owner has the shape of this `number`, perhaps a new one. Tells of the demands that wait how
        many pages they take there."""
        if number in self.shapes:
            return
        self.shapes[number] = shape
        for attempt, demand in self._asked.items():
            self._send(messages.Resize(attempt, {number: demand.pages_at(shape)}))

    def lose_leader(self) -> None:
        """Refuses all who wait: nobody can admit them any more. What is under way goes on. Whoever leads next answers
        for what was abandoned."""
        self.has_leader = False
        for lease in list(self.kernel.orphans):
            self._hand_over(lease)
        waiting = list(self._asked.values())
        self._asked.clear()
        for demand in waiting:
            self._end(demand, no_leader())

    def _hand_over(self, lease: Lease) -> None:
        """Forgets an orphan, because this front can neither hear of it nor do anything about it."""
        self._leases.pop(lease.attempt, None)
        super().free(lease, Evidence.INCARNATION_ENDED)

    # ── leases ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def sent(self, lease: Lease, guard: Callable[[], Any]) -> None:
        errand = guard()
        self._send(messages.Sent(lease.attempt, None if errand is None else _errand(errand)))

    def free(self, lease: Lease, evidence: Evidence) -> None:
        custody = lease.custody
        super().free(lease, evidence)
        if self._leases.pop(lease.attempt, None) is not None and custody is not Custody.RETURNED:
            self._send(messages.Free(lease.attempt, custody, evidence))

    def shrink(self, lease: Lease, pages: int) -> None:
        if pages < lease.pages:
            self._send(messages.Shrink(lease.attempt, pages))
        super().shrink(lease, pages)

    def abandon(self, lease: Lease, way: Way) -> None:
        custody = lease.custody
        super().abandon(lease, way)
        if not self.has_leader:
            self._hand_over(lease)
            return
        self._send(
            messages.Abandon(
                lease.attempt,
                custody,
                _errand(way.errand) if isinstance(way.errand, ReleaseCall) else None,
                way.not_before_s,
                way.over_after_s,
                way.settles_after_s,
                way.is_closing,
            )
        )

    def hurry(self, lease: Lease) -> None:
        self._send(messages.Hurry(lease.attempt))

    def take_due(self) -> tuple[list[Job], float]:
        """Returns nothing to do: the leader's reaper sees to orphans."""
        return [], inf

    def forget(self, attempt: str) -> None:
        """Forgets the attempt, whose request is over, where its pages came back by themselves with their process."""
        lease = self._leases.get(attempt)
        if lease is not None and lease.is_returned:
            del self._leases[attempt]

    @property
    def num_waiting(self) -> int:
        return len(self._asked)

    @property
    def num_leases(self) -> int:
        return len(self._leases)


def no_leader() -> NotReady:
    return NotReady("the process that admits requests has gone; try again later", retry_after_s=RETRY_AFTER_S)


def _errand(call: ReleaseCall) -> messages.Errand:
    return messages.Errand(call.role, call.call.path, call.call.body, dict(call.headers), call.timeout_s)
