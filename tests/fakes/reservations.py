"""What a sender asks a receiver's table for, with what a test says nothing about filled in."""

from __future__ import annotations

from collections.abc import Iterable

from transfer.memory.reservations import Reservation
from transfer.plan.keys import CHUNK_KEY_BYTES

CHUNK = 4
"""Tokens per page."""


def named(*names: str) -> list[bytes]:
    """Returns a chunk's key for each name; the empty name is a page that has no key."""
    return [name.encode().rjust(CHUNK_KEY_BYTES, b".") if name else b"" for name in names]


def wanted(
    attempt: str,
    num_pages: int = 2,
    num_now: int | None = None,
    *,
    expected: Iterable[int] = (0,),
    keys: Iterable[bytes] = (),
    expires_at: float = 10.0,
    num_tokens: int | None = None,
) -> Reservation:
    """Returns a request for pages, which are wanted all at once and are full where the test says nothing else."""
    return Reservation(
        attempt=attempt,
        num_pages=num_pages,
        num_tokens=CHUNK * num_pages if num_tokens is None else num_tokens,
        expires_at=expires_at,
        notify=None,
        num_now=num_pages if num_now is None else num_now,
        expected=frozenset(expected),
        keys=tuple(keys),
    )
