"""The module says what replicas need of a store: who leads and under which term, who is there, and one secret.

A store is never on a request's path. What it says of leadership is true in one direction only: the time to live that it
counts never ends before the caller's own does. A store may forget everything. So each caller says which terms it has
seen, and a store that knows of no term begins at the Unix time in milliseconds. That is past every term of a fleet that
has elected less often than that; and two who begin like this, with clocks that differ, do not meet at the same number.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdproxy.aio.deadline import Deadline
from pdproxy.errors import StoreUnavailable

UNREADABLE = "the host or its port cannot be read; write / # @ : in a password as %2F %23 %40 %3A"
"""The text tells that a URL cannot be read, and has no part of it, which may be of the password."""
MAX_TERM = 2**53 - 1
"""The greatest term. Redis counts in floating point, which is exact up to here."""


class Leader(msgspec.Struct, frozen=True):
    """A `Leader` is one lead: `member` leads under `term`, and listens for fronts at `address` (``host:port``)."""

    term: int
    member: str
    address: str


class Member(msgspec.Struct, frozen=True):
    """A `Member` is one start of one replica.

    `id` is unique to that start; `address` (``host:port``) is where it listens for fronts while it leads; `name` is for
    people.
    """

    id: str
    address: str
    name: str


class Store(Protocol):
    """A `Store` is shared by all replicas of a fleet.

    Every call ends within the store's time-out, also where the server hangs. It raises `StoreUnavailable` where there
    is no answer, or one that cannot be right. A call that failed may have been carried out all the same.
    """

    async def hold(self, member: str, address: str, *, seen: int, ttl_s: float) -> Leader:
        """Returns who leads now, in one atomic step.

        Where nobody leads, that is `member` from now on, for `ttl_s` seconds, under a term that is greater than `seen`
        and than every term that the store knows. Where `member` leads already, its time begins anew and its term stays.
        Raises `ValueError` where `seen` is negative or not below `MAX_TERM`.
        """

    async def look(self) -> Leader | None:
        """Returns who leads now, or None where nobody does."""

    async def release(self, leader: Leader) -> None:
        """Ends this very lead, where it has not ended yet. Another lead is left alone. Terms go on growing."""

    async def enter(self, member: Member, ttl_s: float) -> None:
        """Makes `member` present for `ttl_s` seconds from now on. Repeated, its time begins anew."""

    async def leave(self, member_id: str) -> None:
        """Makes this member absent. Idempotent."""

    async def members(self) -> list[Member]:
        """Returns the members that are present, in the order of their ids."""

    async def secret(self, proposed: str) -> str:
        """Returns the fleet's secret: the first that anybody has proposed. It stays."""

    async def aclose(self) -> None:
        """Closes the connections. Raises nothing."""


def bounded(timeout_s: float, where: str) -> Deadline:
    """Returns a deadline for one call: it raises `StoreUnavailable` after `timeout_s` seconds."""
    return Deadline(timeout_s, lambda: unavailable(where, f"no answer within {timeout_s:g} s"))


def unavailable(where: str, what: str) -> StoreUnavailable:
    return StoreUnavailable(f"the coordinator {where} cannot be used: {what}")


def foreign(where: str, key: str) -> StoreUnavailable:
    return unavailable(
        where, f"{key!r} holds something that no pdproxy of this release wrote; remove it, or name another fleet_name"
    )


def check_seen(seen: int) -> None:
    """Raises `ValueError` where no term can follow `seen`."""
    if not 0 <= seen < MAX_TERM:
        raise ValueError(f"no term can follow {seen}: terms are from 1 to {MAX_TERM}")
