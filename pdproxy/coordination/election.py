"""The module campaigns for the lead of a fleet and tells who has it.

A lead ends by the replica's own clock, and that clock is read at each question: a process that stood still does not
lead any more when it goes on, before anything else has run in it. A lead that has ended never goes on: where the store
still says that this replica leads, the replica releases that lead and campaigns for another, with a greater term.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdproxy.coordination.store import Leader, Member, Store, check_seen
from pdproxy.errors import StoreUnavailable

ASKS_PER_TTL = 3
"""The questions to the store during one time to live."""


class Election:
    """An `Election` is one replica's view of who leads. It belongs to one event loop; `run` does its work.

    The store's time-out should be at most a third of `ttl_s`, so that one call that hangs does not cost the lead.

    Mutable state: the lead that this replica has, and until when by its own clock; the one that it had and that the
    store may still tell of; the greatest terms that it has seen and that it has led under; who leads, as the store said
    last, and when that was; the last errors; the timer of the lead's end; what wakes the campaign.
    """

    __slots__ = (
        "_answered_at",
        "_asks",
        "_clock",
        "_lead",
        "_leads_until",
        "_led_term",
        "_old_lead",
        "_on_elected",
        "_on_lapsed",
        "_on_leader",
        "_seen_term",
        "_store",
        "_timer",
        "_ttl_s",
        "_why_absent",
        "_why_unanswered",
        "is_candidate",
        "leader",
        "member",
    )

    def __init__(
        self,
        store: Store,
        member: Member,
        *,
        ttl_s: float,
        on_elected: Callable[[Leader], None],
        on_lapsed: Callable[[Leader], None],
        on_leader: Callable[[Leader | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes what is called, in the event loop, when this replica begins to lead, when it no longer does, and when
        another leader is known than before, or none. None of them may raise.
        """
        self._store = store
        self.member = member
        self._ttl_s = ttl_s
        self._on_elected = on_elected
        self._on_lapsed = on_lapsed
        self._on_leader = on_leader
        self._clock = clock
        self.is_candidate = True
        """False: the replica only looks who leads, once it leads no more. One that drains sets it, and resigns."""
        self.leader: Leader | None = None
        """The leader that the store named last. None where it named nobody, or where the own lead has ended."""
        self._lead: Leader | None = None
        self._leads_until = 0.0
        self._old_lead: Leader | None = None
        self._seen_term = 0
        self._led_term = 0
        self._answered_at: float | None = None
        self._why_unanswered = ""
        self._why_absent = ""
        self._timer: asyncio.TimerHandle | None = None
        self._asks = asyncio.Event()

    @property
    def is_leading(self) -> bool:
        """Returns whether this replica leads at this moment. `on_lapsed` may come a little later."""
        return self._lead is not None and self._clock() < self._leads_until

    @property
    def seen_term(self) -> int:
        """Returns the greatest term that this replica knows of; 0 where it knows none."""
        return self._seen_term

    @property
    def last_answer_age_s(self) -> float | None:
        """Returns the seconds since the store answered the question who leads; None before the first answer."""
        return None if self._answered_at is None else self._clock() - self._answered_at

    @property
    def why(self) -> str:
        """Returns what the store failed with when it was asked last; empty where it answered."""
        return self._why_unanswered or self._why_absent

    async def run(self) -> None:
        """Campaigns and keeps the member's entry alive until it is cancelled. The lead ends then, without a word to the
        store: `resign` before that lets the next leader begin at once.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._campaign())
                group.create_task(self._stay_member())
        finally:
            self._end_lead()

    def note_term(self, term: int) -> None:
        """Takes notice of a term that another replica or an engine has seen.

        Where this replica leads under a lower one, it stops at once, and campaigns anew for a greater one. Raises
        `ValueError` where no term can follow `term`.
        """
        check_seen(term)
        if term <= self._seen_term:
            return
        self._seen_term = term
        if self._lead is not None and self._lead.term < term:
            self._end_lead()
            self._asks.set()

    async def resign(self) -> None:
        """Stops leading, and then tells the store. As a candidate, the replica may be elected again later. Where the
        store does not answer, `why` says so, and the lead ends there with its time to live.
        """
        self._end_lead()
        await self._release_old()

    # ── the campaign ────────────────────────────────────────────────────────────────────────────────────────────

    async def _campaign(self) -> None:
        while True:
            self._asks.clear()
            began = self._clock()
            await self._ask()
            await self._rest(began + self._ttl_s / ASKS_PER_TTL - self._clock())

    async def _rest(self, seconds: float) -> None:
        """Waits for so long, or until there is a reason to ask at once."""
        if seconds > 0 and not self._asks.is_set():
            waker = asyncio.get_running_loop().call_later(seconds, self._asks.set)
            try:
                await self._asks.wait()
            finally:
                waker.cancel()

    async def _ask(self) -> None:
        if not await self._release_old():
            return  # or `hold` would prolong a lead that nobody uses
        sent = self._clock()  # before the call: the store counts from a later moment on
        try:
            said = await self._hold_or_look()
        except StoreUnavailable as error:
            self._why_unanswered = error.message
            return
        self._why_unanswered = ""
        self._answered_at = self._clock()
        self._take(sent, said)

    async def _hold_or_look(self) -> Leader | None:
        if self.is_candidate or self._lead is not None:
            member = self.member
            return await self._store.hold(member.id, member.address, seen=self._seen_term, ttl_s=self._ttl_s)
        return await self._store.look()

    async def _release_old(self) -> bool:
        """Has the store forget the lead that has ended here. Returns False where it did not answer."""
        old = self._old_lead
        if old is None:
            return True
        try:
            await self._store.release(old)
        except StoreUnavailable as error:
            self._why_unanswered = error.message
            return False
        if self._old_lead == old:  # while this waited, another one may have ended
            self._old_lead = None
        return True

    def _take(self, sent: float, said: Leader | None) -> None:
        """Takes the store's answer to a call that was sent at `sent`."""
        if self._lead is not None and not self.is_leading:
            self._end_lead()  # its timer is late, and the answer must not revive it
        if said is not None and said == self._lead:
            self._leads_until = max(self._leads_until, sent + self._ttl_s)
            return
        self._end_lead()  # which the store has forgotten: another may lead by now, or at any moment
        if said is None or said.member != self.member.id:
            self._note_leader(said)
        elif said.term <= self._led_term or said.term < self._seen_term or not self.is_candidate:
            self._old_lead = said
            self._note_leader(None)
            self._asks.set()
        elif self._clock() < sent + self._ttl_s:
            self._begin_lead(sent, said)
        # Else the answer took so long that the lead is over, and it has not begun here: the next answer may begin it.
        if said is not None:
            self._seen_term = max(self._seen_term, said.term)

    def _begin_lead(self, sent: float, lead: Leader) -> None:
        self._lead, self._led_term = lead, lead.term
        self._leads_until = sent + self._ttl_s
        self._seen_term = max(self._seen_term, lead.term)
        self._set_timer()
        self._on_elected(lead)
        self._note_leader(lead)

    def _end_lead(self) -> None:
        """Ends this replica's lead and tells so, where it has one."""
        lead, self._lead = self._lead, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if lead is None:
            return
        self._old_lead = lead
        self._on_lapsed(lead)
        if self.leader == lead:
            self._note_leader(None)

    def _note_leader(self, leader: Leader | None) -> None:
        if leader != self.leader:
            self.leader = leader
            self._on_leader(leader)

    # ── the lead's end ──────────────────────────────────────────────────────────────────────────────────────────

    def _set_timer(self) -> None:
        """Sets the timer to the lead's end. Answers move that end and leave the timer as it is: it looks again."""
        left_s = max(0.001, self._leads_until - self._clock())
        self._timer = asyncio.get_running_loop().call_later(left_s, self._is_time)

    def _is_time(self) -> None:
        if self.is_leading:
            self._set_timer()
        else:
            self._end_lead()

    # ── the member's entry ──────────────────────────────────────────────────────────────────────────────────────

    async def _stay_member(self) -> None:
        while True:
            try:
                await self._store.enter(self.member, self._ttl_s)
                self._why_absent = ""
            except StoreUnavailable as error:
                self._why_absent = error.message
            await asyncio.sleep(self._ttl_s / ASKS_PER_TTL)

    def __repr__(self) -> str:
        role = "leads" if self.is_leading else "candidate" if self.is_candidate else "looks on"
        return f"<Election of {self.member.name}: {role}, {self.leader}, seen {self._seen_term}>"
