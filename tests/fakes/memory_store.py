"""A store in memory that a test can take down, slow down, or make forget: what `Store` promises, without a server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

from pdproxy.coordination.store import Leader, Member, check_seen
from pdproxy.errors import StoreUnavailable

T = TypeVar("T")


class MemoryStore:
    """Implements `store.Store`; several may share one `Shelf`. Mutable state: whether it is down, by how much its
    answers are late, and on whose way: a call that is slow may have been carried out when it fails."""

    def __init__(
        self, shelf: Shelf | None = None, *, timeout_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shelf = shelf or Shelf(clock)
        self.timeout_s = timeout_s
        self.is_down = False
        self.late_before_s = 0.0
        """How long a question is on its way; infinite: it never arrives."""
        self.late_after_s = 0.0
        """How long an answer is on its way; infinite: it never arrives, and what was asked has been done."""
        self.num_calls = 0

    async def hold(self, member: str, address: str, *, seen: int, ttl_s: float) -> Leader:
        check_seen(seen)
        return await self._call(lambda: self.shelf.hold(member, address, seen, ttl_s))

    async def look(self) -> Leader | None:
        return await self._call(self.shelf.who_leads)

    async def release(self, leader: Leader) -> None:
        await self._call(lambda: self.shelf.release(leader))

    async def enter(self, member: Member, ttl_s: float) -> None:
        await self._call(lambda: self.shelf.enter(member, ttl_s))

    async def leave(self, member_id: str) -> None:
        await self._call(lambda: self.shelf.present.pop(member_id, None))

    async def members(self) -> list[Member]:
        return await self._call(self.shelf.members)

    async def secret(self, proposed: str) -> str:
        return await self._call(lambda: self.shelf.keep_secret(proposed))

    async def aclose(self) -> None:
        pass

    async def _call(self, act: Callable[[], T]) -> T:
        self.num_calls += 1
        if self.is_down:
            raise StoreUnavailable("the store is down")
        await self._pass(self.late_before_s)
        done = act()
        await self._pass(self.late_after_s)
        return done

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, self.timeout_s))
        if seconds >= self.timeout_s:
            raise StoreUnavailable(f"no answer within {self.timeout_s:g} s")


class Shelf:
    """What all the stores of one fleet share. Mutable state: the counter; who leads and until when; who is present and
    until when; the secret."""

    def __init__(self, clock: Callable[[], float], unix_clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.unix_clock = unix_clock
        self.forget()

    def forget(self) -> None:
        self.term = 0
        self.leader: Leader | None = None
        self.leads_until = -math.inf
        self.present: dict[str, tuple[Member, float]] = {}
        self.secret: str | None = None

    def who_leads(self) -> Leader | None:
        return self.leader if self.clock() < self.leads_until else None

    def hold(self, member: str, address: str, seen: int, ttl_s: float) -> Leader:
        leader = self.who_leads()
        if leader is None:
            self.term = max(self.term or int(self.unix_clock() * 1000), seen) + 1
            self.leader = leader = Leader(self.term, member, address)
        if leader.member == member:
            self.leads_until = self.clock() + ttl_s
        return leader

    def release(self, leader: Leader) -> None:
        if self.who_leads() == leader:
            self.leader = None
            self.leads_until = -math.inf

    def enter(self, member: Member, ttl_s: float) -> None:
        self.present[member.id] = (member, self.clock() + ttl_s)

    def members(self) -> list[Member]:
        return [member for _, (member, until) in sorted(self.present.items()) if self.clock() < until]

    def keep_secret(self, proposed: str) -> str:
        self.secret = self.secret or proposed
        return self.secret
