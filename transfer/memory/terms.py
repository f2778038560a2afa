"""The terms on which a receiver takes a request, lets a rank join it, and believes that one is done. It changes
nothing."""

from __future__ import annotations

from transfer.errors import IllegalTransition, ReservationRefused
from transfer.memory.reservation import Holding, Reservation, Writer

_SAME = ("num_pages", "num_tokens", "keys", "expected", "num_senders")
"""The fields that every rank of one attempt must ask for alike."""


def check_possible(wanted: Reservation, rank: int, num_pages: int, windowed: bool) -> None:
    """Raises `ReservationRefused` for a request that a buffer of `num_pages` could never grant, whatever else is in
    it."""
    is_larger = wanted.num_pages > num_pages
    if is_larger and not (windowed and num_pages):
        raise ReservationRefused(f"the request needs {wanted.num_pages} pages and this PD buffer has {num_pages}")
    if not 0 < wanted.num_now <= wanted.num_pages:
        raise ReservationRefused(f"cannot grant {wanted.num_now} pages of {wanted.num_pages}")
    if not wanted.expected:
        raise ReservationRefused("an attempt that no rank writes can never be ready")
    if rank not in wanted.expected:
        raise ReservationRefused(f"rank {rank} writes nothing here and has nothing to ask for")
    if len(wanted.keys) > wanted.num_pages:
        raise ReservationRefused(f"{len(wanted.keys)} keys for {wanted.num_pages} pages")
    named = [key for key in wanted.keys if key]
    if len(set(named)) != len(named):
        raise ReservationRefused("two pages of one attempt have the same key")
    if not wanted.is_whole and (is_larger or wanted.expected != {rank}):
        raise ReservationRefused("pages are granted one by one only to a single writer, of what fits into the buffer")


def check_joins(known: Reservation, wanted: Reservation, rank: int, identity: bytes) -> None:
    """Raises `ReservationRefused` unless both are the same attempt, it is not over, and this connection speaks for
    `rank`."""
    attempt = known.attempt
    if known.holding is Holding.QUARANTINED:
        raise ReservationRefused(f"attempt {attempt} is over: {known.reason}")
    for name in _SAME:
        if getattr(known, name) != getattr(wanted, name):
            raise ReservationRefused(f"attempt {attempt}: rank {rank} asks with another {name} than the first rank did")
    speakers = {r: writer.identity for r, writer in known.writers.items()}
    if speakers.get(rank, identity) != identity:
        raise ReservationRefused(f"rank {rank} of attempt {attempt} has another connection")
    if any(speaker == identity and r != rank for r, speaker in speakers.items()):
        raise ReservationRefused(f"one connection speaks for two ranks of attempt {attempt}")


def check_extends(known: Reservation, more: Reservation) -> None:
    """Raises `ReservationRefused` unless `known` is granted page by page and still lacks as many pages as are asked
    for."""
    if known.holding is not Holding.RESERVED:
        raise ReservationRefused(f"attempt {known.attempt} is {known.holding.name} and cannot get more pages")
    if len(known.pages) + more.num_now > known.num_pages or known.window:
        raise ReservationRefused(f"attempt {known.attempt} asks for more than its {known.num_pages} pages")


def check_can_be_done(reservation: Reservation, writer: Writer) -> None:
    """Raises `IllegalTransition` unless this writer can have written everything."""
    attempt, num_pages = reservation.attempt, reservation.num_pages
    if not reservation.is_granted:
        granted, state = len(reservation.pages), reservation.holding.name
        raise IllegalTransition(f"attempt {attempt}: done with {granted} of {num_pages} pages while {state}")
    if reservation.window and writer.num_written != num_pages:
        raise IllegalTransition(f"attempt {attempt}: done with {writer.num_written} of {num_pages} pages written")
