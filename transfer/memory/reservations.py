"""Who holds which page of the PD buffer: the decoder's own defence against being half filled by everyone.

One table of attempts over one `PagePool`, first come first served, all pages of a request or none. Pure state: no
clock, no sockets; the receiver calls in and then does the I/O that the return values ask for.

    QUEUED ──grant──► RESERVED ──ready──► READY ──take──► TAKEN ──consume──► (gone, pages free)
       │                 │                  │
    withdraw          withdraw           withdraw
       ▼                 ▼                  ▼
     (gone)          QUARANTINED          (gone, pages free)
                         └──writes ended, or the writer is gone──► (gone, pages free)

A write under way cannot be called back. So a withdrawn attempt whose writer has not said that it is done keeps its
pages in QUARANTINED: nobody may have them, and nobody may read them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from transfer.errors import AttemptLost, IllegalTransition, IntegrityError, ReservationRefused
from transfer.memory.pages import PagePool


class Holding(Enum):
    """How an attempt holds its pages."""

    QUEUED = "queued"
    RESERVED = "reserved"
    READY = "ready"
    TAKEN = "taken"
    QUARANTINED = "quarantined"


_ALLOWED: dict[Holding, frozenset[Holding]] = {
    Holding.QUEUED: frozenset({Holding.RESERVED}),
    Holding.RESERVED: frozenset({Holding.READY, Holding.QUARANTINED, Holding.QUEUED}),
    Holding.READY: frozenset({Holding.TAKEN}),
    Holding.TAKEN: frozenset(),
    Holding.QUARANTINED: frozenset(),
}


@dataclass(slots=True)
class Reservation:
    """One attempt at this receiver. `num_now` pages are still asked for while it is QUEUED."""

    attempt: str
    writer: bytes
    """Identity of the sender's connection: the only one that may write, or speak for, this attempt."""
    num_pages: int
    num_tokens: int
    expires_at: float
    notify: str | None
    num_now: int
    holding: Holding = Holding.QUEUED
    pages: list[int] = field(default_factory=list)
    reason: str = ""
    """Why it was withdrawn; empty while it was not."""

    def move_to(self, holding: Holding) -> None:
        if holding not in _ALLOWED[self.holding]:
            raise IllegalTransition(f"attempt {self.attempt}: {self.holding.name} → {holding.name}")
        self.holding = holding


class Reservations:
    """All attempts of one receiver.

    Mutable state: `_pool` (free pages) and `_attempts` (everyone known, in order of arrival). The queue is the QUEUED
    ones among them, in `_queue`'s order. Invariant: every page that is not free is in exactly one reservation.
    """

    def __init__(self, num_pages: int) -> None:
        self._pool = PagePool(num_pages)
        self._attempts: dict[str, Reservation] = {}
        self._queue: OrderedDict[str, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Reservations {self._pool.num_held}/{self.num_pages} pages, {len(self._queue)} queued>"

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_quarantined(self) -> int:
        """Pages whose writer has not yet said that it is done."""
        return sum(len(r.pages) for r in self._attempts.values() if r.holding is Holding.QUARANTINED)

    def get(self, attempt: str) -> Reservation | None:
        return self._attempts.get(attempt)

    def of_writer(self, writer: bytes) -> list[Reservation]:
        return [r for r in self._attempts.values() if r.writer == writer]

    def expired(self, now: float) -> list[Reservation]:
        """Attempts past their time that have not been withdrawn yet (and are not being read this instant)."""
        settled = (Holding.QUARANTINED, Holding.TAKEN)
        return [r for r in self._attempts.values() if r.expires_at <= now and r.holding not in settled]

    def next_expiry(self) -> float | None:
        settled = (Holding.QUARANTINED, Holding.TAKEN)
        return min((r.expires_at for r in self._attempts.values() if r.holding not in settled), default=None)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, reservation: Reservation) -> None:
        """Join the queue; `pump` then grants. A second request of a RESERVED attempt asks for `num_now` pages more.

        Raises `ReservationRefused`, and changes nothing, when it can never fit or is not this writer's to extend.
        """
        if reservation.num_pages > self.num_pages:
            raise ReservationRefused(
                f"the request needs {reservation.num_pages} pages and this PD buffer has {self.num_pages}"
            )
        if not 0 < reservation.num_now <= reservation.num_pages:
            raise ReservationRefused(f"cannot grant {reservation.num_now} pages of {reservation.num_pages}")
        known = self._attempts.get(reservation.attempt)
        if known is None:
            self._attempts[reservation.attempt] = reservation
        else:
            self._extend(known, reservation)
        self._queue[reservation.attempt] = None

    def _extend(self, known: Reservation, more: Reservation) -> None:
        if known.writer != more.writer or known.holding is not Holding.RESERVED:
            raise ReservationRefused(f"attempt {known.attempt} is {known.holding.name} and cannot get more pages")
        if len(known.pages) + more.num_now > known.num_pages:
            raise ReservationRefused(f"attempt {known.attempt} asks for more than its {known.num_pages} pages")
        known.move_to(Holding.QUEUED)
        known.num_now = more.num_now

    def pump(self) -> list[tuple[Reservation, list[int]]]:
        """Grant from the head of the queue for as long as the head fits; each with the pages granted just now."""
        granted = []
        while self._queue:
            head = self._attempts[next(iter(self._queue))]
            if not self._pool.can_allocate(head.num_now):
                break
            self._queue.popitem(last=False)
            pages = self._pool.allocate(head.num_now)
            head.pages += pages
            head.num_now = 0
            head.move_to(Holding.RESERVED)
            granted.append((head, pages))
        return granted

    def ready(self, attempt: str) -> Reservation:
        """Every byte is there. Raises `AttemptLost` when the attempt is unknown or was withdrawn meanwhile.

        Raises `IllegalTransition` when not all of its pages were granted: then they cannot all have been written.
        """
        reservation = self._known(attempt)
        if (granted := len(reservation.pages)) != reservation.num_pages:
            raise IllegalTransition(f"attempt {attempt}: ready with {granted} of {reservation.num_pages} pages")
        reservation.move_to(Holding.READY)
        return reservation

    def take(self, attempt: str) -> list[int]:
        """The pages, for reading; they cannot be withdrawn until `consume`. Raises `AttemptLost`."""
        reservation = self._known(attempt)
        reservation.move_to(Holding.TAKEN)
        return list(reservation.pages)

    def consume(self, attempt: str) -> Reservation:
        """The reader is done: pages are free. Raises `IllegalTransition` unless they were taken."""
        reservation = self._known(attempt)
        if reservation.holding is not Holding.TAKEN:
            raise IllegalTransition(f"attempt {attempt}: consume while {reservation.holding.name}")
        return self._drop(reservation)

    def withdraw(self, attempt: str, reason: str) -> Reservation | None:
        """Nobody wants this attempt any more. Idempotent; a TAKEN one is left to its reader.

        Returns the reservation when this call changed something: it is gone with its pages free unless it is now
        QUARANTINED, in which case its writer has to be told to stop.
        """
        reservation = self._attempts.get(attempt)
        if reservation is None or reservation.holding in (Holding.QUARANTINED, Holding.TAKEN):
            return None
        reservation.reason = reason
        if reservation.holding is Holding.READY:
            return self._drop(reservation)
        if reservation.holding is Holding.QUEUED:
            self._queue.pop(attempt, None)
            if not reservation.pages:
                return self._drop(reservation)
            reservation.move_to(Holding.RESERVED)
        reservation.move_to(Holding.QUARANTINED)
        return reservation

    def writes_ended(self, attempt: str) -> Reservation | None:
        """The writer has stopped (or is dead): nothing can land in these pages any more. Frees them; idempotent."""
        reservation = self._attempts.get(attempt)
        if reservation is None or reservation.holding in (Holding.READY, Holding.TAKEN):
            return None
        self._queue.pop(attempt, None)
        return self._drop(reservation)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless free + held = all, no page is held twice, and the queue is the QUEUED ones."""
        held = [page for r in self._attempts.values() for page in r.pages]
        if len(held) != len(set(held)) or len(held) + self._pool.num_free != self.num_pages:
            raise IntegrityError(f"{len(held)} pages held, {self._pool.num_free} free, of {self.num_pages}: {self!r}")
        queued = {a for a, r in self._attempts.items() if r.holding is Holding.QUEUED}
        if queued != set(self._queue):
            raise IntegrityError(f"queue and QUEUED attempts differ: {queued ^ set(self._queue)}")

    def _known(self, attempt: str) -> Reservation:
        reservation = self._attempts.get(attempt)
        if reservation is None or reservation.holding is Holding.QUARANTINED:
            reason = f": {reservation.reason}" if reservation else ""
            raise AttemptLost(f"attempt {attempt} holds no pages here{reason}")
        return reservation

    def _drop(self, reservation: Reservation) -> Reservation:
        """Forget the attempt and free its pages; the record keeps the list for whoever reports it."""
        del self._attempts[reservation.attempt]
        self._pool.free(reservation.pages)
        return reservation
