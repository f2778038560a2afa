"""The table of who holds which page of the PD buffer. It is the decoder's own defence against a buffer that everyone
has half filled.

It is one table of attempts over one `PagePool`. It serves first come first served, and grants all pages of a request or
none. A decoder with several ranks has one table for all of them: a page is granted on every rank or on none. It is pure
state, without clock or sockets: the receiver calls in and then does the I/O that the return values ask for. The life of
an attempt, and of each of its writers, is drawn in `transfer.memory.reservation`.

* An attempt is written by the ranks it expects, and READY when all of them are done. It exists from the first rank's
  request; the others join it.
* Chunks that are READY are shared: what is found under a key when an attempt is granted is neither allocated nor
  written again. A chunk still being written is not shared, so a write that fails takes nobody else with it.
* Chunks at the front of a prompt that the engine has in its own cache take no page at all: the engine is asked when the
  attempt is granted, and keeps them until the attempt is taken or fails. Where pages are granted one by one, or pass
  through a window, it is not asked, and the last page of a prompt always travels.
* A request larger than the buffer, where the caller allows it, gets the whole buffer as a ring once every page is free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from transfer.errors import AttemptLost, IllegalTransition, IntegrityError
from transfer.memory.deadlines import Deadlines
from transfer.memory.engine_cache import EngineCache
from transfer.memory.pages import PagePool
from transfer.memory.reservation import (
    GRANTED,
    MAY_EXPIRE,
    Change,
    Credit,
    Grant,
    Holding,
    Reservation,
    Writer,
    WriterState,
)
from transfer.memory.terms import check_can_be_done, check_extends, check_joins, check_possible

__all__ = ["Change", "Credit", "Grant", "Holding", "Reservation", "Reservations", "Writer", "WriterState"]

_ARRIVING = frozenset({Holding.QUEUED, Holding.RESERVED})
"""The states of an attempt whose KV is still arriving. A QUEUED attempt has pages only where they are granted one by
one."""
_PINNING = frozenset({Holding.RESERVED, Holding.READY})
"""The states of an attempt for which the engine's cache may keep chunks."""


class Reservations:
    """`Reservations` holds all attempts of one receiver.

    Mutable state: `_pool` (pages; their owners are attempt ids), `_attempts` (all that are known), `_queue` (the QUEUED
    ones, in order), `_writing` (connection → attempts that it has joined and not ended), `_deadlines`, `_num_shared`
    (pages not written because they were there), `_num_cached` (pages not written because the engine had them),
    `_num_waited` (attempts that had to wait in the queue), `_pinned` (attempts for which `_cache`, the engine's, keeps
    chunks). Invariants: a page that may be written has exactly one owner; an attempt in `_pinned` is RESERVED or READY.
    """

    def __init__(self, num_pages: int, cache: EngineCache | None = None) -> None:
        self._pool = PagePool(num_pages)
        self._cache = cache
        self._pinned: set[str] = set()
        self._attempts: dict[str, Reservation] = {}
        self._queue: OrderedDict[str, None] = OrderedDict()
        self._writing: dict[bytes, dict[str, None]] = {}
        self._deadlines: Deadlines[Reservation] = Deadlines(lambda reservation: reservation.holding in MAY_EXPIRE)
        self._num_shared = 0
        self._num_cached = 0
        self._num_waited = 0

    def __repr__(self) -> str:
        return (
            f"<Reservations {self._pool.num_held}/{self.num_pages} pages, {len(self._attempts)} attempts, "
            f"{self.num_queued} queued, {self.num_quarantined} pages in quarantine>"
        )

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
        """The number of pages in quarantine: not every one of their writers is known to have ended."""
        return sum(len(r.own_pages) for r in self._attempts.values() if r.holding is Holding.QUARANTINED)

    @property
    def num_reserved(self) -> int:
        """The number of pages granted to attempts whose KV is still arriving. Each page counts once; shared pages are
        not among them."""
        return sum(len(r.own_pages) for r in self._attempts.values() if r.holding in _ARRIVING)

    @property
    def num_waited(self) -> int:
        """Counts the attempts, since the start, that had to wait in the queue. It stays zero where admission never
        grants more pages than are free here."""
        return self._num_waited

    @property
    def num_cached(self) -> int:
        """Counts the pages, since the start, that were not sent because the engine's own cache had their chunks."""
        return self._num_cached

    def statistics(self) -> dict[str, int]:
        """Returns the pool's counts of pages, attempts by state, and how many page writes sharing and the engine's
        cache have saved so far."""
        states = Counter(r.holding for r in self._attempts.values())
        return {
            **self._pool.statistics(),
            **{f"attempts_{holding.value}": states[holding] for holding in Holding if holding is not Holding.GONE},
            "quarantined": self.num_quarantined,
            "reserved": self.num_reserved,
            "writes_saved": self._num_shared,
            "cached": self._num_cached,
            "waited": self._num_waited,
        }

    def get(self, attempt: str) -> Reservation | None:
        return self._attempts.get(attempt)

    def all(self) -> list[Reservation]:
        return list(self._attempts.values())

    @property
    def writers(self) -> list[bytes]:
        """Returns the connections through which somebody may still be writing an attempt."""
        return list(self._writing)

    def of_writer(self, identity: bytes) -> list[Reservation]:
        """Returns the attempts that this connection may still be writing."""
        return [self._attempts[attempt] for attempt in self._writing.get(identity, ())]

    def expired(self, now: float) -> list[Reservation]:
        """Returns the attempts past their time that have not been withdrawn yet (and are not being read this
        instant)."""
        return self._deadlines.due(now)

    def next_expiry(self) -> float | None:
        return self._deadlines.next()

    # ── asking and granting ─────────────────────────────────────────────────────────────────────────────────────────

    def request(
        self, wanted: Reservation, rank: int = 0, identity: bytes = b"", *, windowed: bool = False
    ) -> Grant | None:
        """Takes the request of sender rank `rank` for `wanted`, through connection `identity`. Returns the grant where
        there is one for it.

        The first rank to ask puts the attempt into the queue, and `pump` grants it. The others join it, and get the
        grant at once where it was given before. Where pages are granted one by one, its writer asks again for `num_now`
        more. With `windowed`, a request may be larger than the buffer. Raises `ReservationRefused`, and changes
        nothing, when the request can never fit or is not this connection's to ask for.
        """
        check_possible(wanted, rank, self.num_pages, windowed)
        known = self._attempts.get(wanted.attempt)
        if known is None:
            self._enter(wanted)
        else:
            check_joins(known, wanted, rank, identity)
            if rank in known.writers:
                self._extend(known, wanted)
                return None
        return self._join(known or wanted, rank, identity)

    def pump(self) -> list[Grant]:
        """Grants from the head of the queue for as long as the head fits. Chunks that are there already are shared.
        Returns the grants."""
        grants = []
        while self._queue and (grant := self._grant(self._attempts[next(iter(self._queue))])) is not None:
            grants.append(grant)
        self._note_waiting()
        return grants

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def writes_done(self, attempt: str, rank: int = 0) -> Change:
        """Notes that every byte that `rank` had to write is there. The attempt is READY when this rank was the last to
        say so.

        Raises `AttemptLost` when the attempt is unknown, and `IllegalTransition` when this rank has not joined, has
        ended, or cannot have written everything yet; nothing changes then.
        """
        reservation = self._attempts.get(attempt)
        if reservation is None:
            raise AttemptLost(f"attempt {attempt} holds no pages here")
        writer = _writer(reservation, rank)
        if reservation.holding is not Holding.QUARANTINED:
            check_can_be_done(reservation, writer)
        self._end_writer(reservation, writer, WriterState.DONE)
        if reservation.holding is Holding.QUARANTINED:
            return Change(reservation, is_released=self._settle(reservation))
        return Change(reservation, is_ready=self._ripen(reservation))

    def writes_ended(self, attempt: str, rank: int = 0, reason: str = "the writer gave up") -> Change | None:
        """Notes that `rank` will not complete its part, and that no write of it can land any more. Fails an attempt
        that was not done yet.

        Idempotent: returns None, and changes nothing, for a rank that has ended already, was done, or has never joined.
        """
        reservation = self._attempts.get(attempt)
        writer = reservation.writers.get(rank) if reservation is not None else None
        if reservation is None or writer is None or writer.state is not WriterState.JOINED:
            return None
        self._end_writer(reservation, writer, WriterState.ENDED)
        if reservation.holding is Holding.QUARANTINED:
            return Change(reservation, is_released=self._settle(reservation))
        return self._fail(reservation, reason)

    def writer_gone(self, identity: bytes, reason: str = "the writer is gone") -> list[Change]:
        """Notes that no write through this connection can land any more, because its process is dead. Does
        `writes_ended` for each of its attempts."""
        changes = []
        for reservation in self.of_writer(identity):
            rank = reservation.rank_of(identity)
            if rank is not None and (change := self.writes_ended(reservation.attempt, rank, reason)) is not None:
                changes.append(change)
        return changes

    # ── through the window ──────────────────────────────────────────────────────────────────────────────────────────

    def note_written(self, attempt: str, rank: int, count: int) -> range:
        """Notes that the first `count` ordinals of a windowed attempt are complete by `rank`. Returns the ordinals that
        are now complete by every writer.

        Raises `AttemptLost`, or `IllegalTransition` when `count` goes back or beyond what was credited.
        """
        reservation = self._in_window(attempt)
        writer = _writer(reservation, rank)
        limit = min(reservation.num_pages, reservation.num_taken + reservation.window)
        if writer.state is not WriterState.JOINED or not writer.num_written <= count <= limit:
            raise IllegalTransition(
                f"attempt {attempt}: rank {rank} ({writer.state.name}) has written {count} pages after "
                f"{writer.num_written}, and may have written {limit}"
            )
        before = reservation.num_written
        writer.num_written = count
        return range(before, reservation.num_written)

    def page_taken(self, attempt: str, count: int) -> Credit:
        """Notes that the consumer of a windowed attempt has copied the first `count` ordinals, whose pages may be
        written again.

        The copy counts only if this returns: if the attempt has failed meanwhile, the pages may have been others'.
        Raises `AttemptLost` then, and `IllegalTransition` when `count` goes back or beyond what was written.
        """
        reservation = self._in_window(attempt)
        if not reservation.num_taken <= count <= reservation.num_written:
            raise IllegalTransition(
                f"attempt {attempt}: {count} pages taken after {reservation.num_taken}, of {reservation.num_written}"
            )
        reservation.num_taken = count
        return Credit(reservation, count, tuple(reservation.joined), is_ready=self._ripen(reservation))

    # ── reading, and the end ────────────────────────────────────────────────────────────────────────────────────────

    def take(self, attempt: str) -> list[int]:
        """Returns the pages, for reading. They cannot be withdrawn until `consume`. Raises `AttemptLost`, or
        `IllegalTransition` where the attempt is not READY.

        The chunks that the engine's cache keeps for the attempt are the reader's, too, from here on: they are not
        unpinned any more.
        """
        reservation = self._known(attempt)
        reservation.move_to(Holding.TAKEN)
        self._pinned.discard(attempt)
        return list(reservation.pages)

    def distrust(self, attempt: str) -> None:
        """Lets nobody else find the pages of this attempt, because their bytes are not what they should be."""
        reservation = self._attempts.get(attempt)
        if reservation is not None:
            self._pool.forget(reservation.pages)

    def consume(self, attempt: str) -> Reservation:
        """Notes that the reader is done: the attempt leaves its pages. Raises `IllegalTransition` unless they were
        taken."""
        reservation = self._known(attempt)
        if reservation.holding is not Holding.TAKEN:
            raise IllegalTransition(f"attempt {attempt}: consume while {reservation.holding.name}")
        self._drop(reservation)
        return reservation

    def withdraw(self, attempt: str, reason: str, outcome: str = "cancelled") -> Change | None:
        """Withdraws the attempt, because nobody wants it any more. Idempotent. A TAKEN one is left to its reader; then
        the result is None.

        The attempt is gone unless writers have joined and may be writing. They have to be told to stop, and the attempt
        is QUARANTINED.
        """
        reservation = self._attempts.get(attempt)
        if reservation is None or reservation.holding not in MAY_EXPIRE:
            return None
        reservation.outcome = outcome
        return self._fail(reservation, reason)

    def close(self) -> None:
        """Gives back all chunks that the engine's cache keeps for attempts here, which nobody will take. Idempotent."""
        for attempt in list(self._pinned):
            self._unpin(attempt)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless pages, owners, pins, queue and writers are what the attempts' states say."""
        self._pool.check_integrity()
        for reservation in self._attempts.values():
            self._check(reservation)
        held = {page for r in self._attempts.values() for page in self._pool.pages_of(r.attempt)}
        if len(held) != self._pool.num_held:
            raise IntegrityError(f"attempts hold {len(held)} pages, and {self._pool.num_held} are held: {self!r}")
        pinning = {a for a, r in self._attempts.items() if r.num_cached and r.holding in _PINNING}
        if pinning != self._pinned:
            raise IntegrityError(f"attempts with cached chunks and pins differ: {pinning ^ self._pinned}")
        queued = {a for a, r in self._attempts.items() if r.holding is Holding.QUEUED}
        if queued != set(self._queue):
            raise IntegrityError(f"queue and QUEUED attempts differ: {queued ^ set(self._queue)}")
        joined = {(identity, a) for a, r in self._attempts.items() for identity in r.joined}
        indexed = {(identity, a) for identity, attempts in self._writing.items() for a in attempts}
        if joined != indexed or not all(self._writing.values()):
            raise IntegrityError(f"writers and what they write differ: {joined ^ indexed}")

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, wanted: Reservation) -> None:
        wanted.window = self.num_pages if wanted.num_pages > self.num_pages else 0
        self._attempts[wanted.attempt] = wanted
        self._queue[wanted.attempt] = None
        self._deadlines.add(wanted.expires_at, wanted)

    def _join(self, reservation: Reservation, rank: int, identity: bytes) -> Grant | None:
        """Adds a writer. A new writer is told at once what was granted before it came."""
        reservation.writers[rank] = Writer(identity)
        self._writing.setdefault(identity, {})[reservation.attempt] = None
        if reservation.holding not in GRANTED:
            return None
        return Grant(reservation, list(reservation.pages), sorted(reservation.present), (identity,))

    def _extend(self, known: Reservation, more: Reservation) -> None:
        check_extends(known, more)
        known.move_to(Holding.QUEUED)
        known.num_now = more.num_now
        self._queue[known.attempt] = None

    def _grant(self, head: Reservation) -> Grant | None:
        """Grants pages to the head of the queue. Leaves out what the engine has, shares what is here, allocates the
        rest. Returns None while that does not fit."""
        num_cached = self._pin(head)
        found = self._find_chunks(head, num_cached)
        num_granted = (head.window or head.num_now) - num_cached
        if not self._pool.can_allocate(num_granted - len(found), found.values()):
            self._unpin(head.attempt)
            return None
        self._pool.share(found.values(), head.attempt)
        pages = self._pool.allocate(num_granted - len(found), head.attempt)
        if found:
            own, ordinals = iter(pages), range(num_cached, num_cached + num_granted)
            pages = [found[ordinal] if ordinal in found else next(own) for ordinal in ordinals]
        del self._queue[head.attempt]
        head.move_to(Holding.RESERVED)
        head.pages += pages
        head.num_cached = num_cached
        head.present = frozenset(found)
        head.num_now = 0
        self._num_shared += len(found)
        self._num_cached += num_cached
        return Grant(head, pages, sorted(found), tuple(head.joined))

    def _note_waiting(self) -> None:
        """Counts the attempts that are still in the queue, each once."""
        for attempt in reversed(self._queue):
            waiting = self._attempts[attempt]
            if waiting.has_waited:
                # New attempts enter at the end, so everyone before this one was counted with it.
                return
            waiting.has_waited = True
            self._num_waited += 1

    def _pin(self, head: Reservation) -> int:
        """Returns how many of the first ordinals the engine's cache has. It keeps them from now on for this attempt."""
        if self._cache is None or head.window or not head.is_whole or not head.keys:
            return 0
        num_cached = self._cache.pin(head.attempt, head.keys[: head.num_pages - 1])
        if num_cached:
            self._pinned.add(head.attempt)
        return num_cached

    def _unpin(self, attempt: str) -> None:
        """Tells the engine's cache, once, that nobody will come for this attempt. Does nothing for one that was
        taken."""
        if self._cache is not None and attempt in self._pinned:
            self._pinned.remove(attempt)
            self._cache.unpin(attempt)

    def _find_chunks(self, head: Reservation, num_cached: int) -> dict[int, int]:
        """Returns ordinal → page, for the chunks that are READY here, without those that the engine has."""
        if head.window or not head.is_whole:
            return {}
        pages = enumerate(map(self._pool.find, head.keys[num_cached:]), num_cached)
        return {ordinal: page for ordinal, page in pages if page is not None}

    def _end_writer(self, reservation: Reservation, writer: Writer, state: WriterState) -> None:
        writer.move_to(state)
        self._stop_watching(reservation.attempt, writer.identity)

    def _stop_watching(self, attempt: str, identity: bytes) -> None:
        attempts = self._writing[identity]
        del attempts[attempt]
        if not attempts:
            del self._writing[identity]

    def _ripen(self, reservation: Reservation) -> bool:
        """Makes the attempt READY, if nothing is missing. From here on its chunks can be found. Returns whether it is
        READY."""
        if not reservation.is_complete:
            return False
        reservation.move_to(Holding.READY)
        if reservation.is_whole and not reservation.window:
            first = reservation.num_cached
            for ordinal, key in enumerate(reservation.keys[first:], first):
                if key and ordinal not in reservation.present:
                    self._pool.remember(reservation.page(ordinal), key)
        return True

    def _fail(self, reservation: Reservation, reason: str) -> Change:
        """Leaves all pages that nobody can be writing any more. The writers that may be writing have to be told."""
        reservation.reason = reason
        stop = tuple(reservation.joined)
        self._unpin(reservation.attempt)
        self._queue.pop(reservation.attempt, None)
        if reservation.holding is Holding.READY or not reservation.pages:
            self._drop(reservation)
        else:
            reservation.move_to(Holding.QUARANTINED)
            self._pool.leave(reservation.attempt, [reservation.page(ordinal) for ordinal in reservation.present])
            self._settle(reservation)
        return Change(reservation, is_failed=True, is_released=reservation.holding is Holding.GONE, stop=stop)

    def _settle(self, reservation: Reservation) -> bool:
        """Takes the attempt out of quarantine, if no write can land any more. Returns whether it is out."""
        if reservation.joined:
            return False
        self._drop(reservation)
        return True

    def _drop(self, reservation: Reservation) -> None:
        """Forgets the attempt, which leaves the pages it still holds."""
        reservation.move_to(Holding.GONE)
        del self._attempts[reservation.attempt]
        for identity in reservation.joined:
            self._stop_watching(reservation.attempt, identity)
        self._pool.leave(reservation.attempt)

    def _known(self, attempt: str) -> Reservation:
        reservation = self._attempts.get(attempt)
        if reservation is None or reservation.holding is Holding.QUARANTINED:
            reason = f": {reservation.reason}" if reservation else ""
            raise AttemptLost(f"attempt {attempt} holds no pages here{reason}")
        return reservation

    def _in_window(self, attempt: str) -> Reservation:
        reservation = self._known(attempt)
        if not reservation.window or reservation.holding is not Holding.RESERVED:
            raise IllegalTransition(f"nothing passes through a window in {reservation!r}")
        return reservation

    def _check(self, reservation: Reservation) -> None:
        """Raises `IntegrityError` unless this attempt holds what its state says."""
        holding, own = reservation.holding, reservation.own_pages
        pages = own if holding is Holding.QUARANTINED else reservation.pages
        if sorted(self._pool.pages_of(reservation.attempt)) != sorted(pages):
            raise IntegrityError(f"{reservation!r} should hold {pages}")
        is_unread = holding not in (Holding.READY, Holding.TAKEN)
        if is_unread and any(self._pool.owners(page) != {reservation.attempt} for page in own):
            raise IntegrityError(f"{reservation!r} may be written and shares {own}")
        if is_unread == (reservation.is_complete and holding is not Holding.QUARANTINED):
            raise IntegrityError(f"{reservation!r} is in the wrong state for its writers")
        if holding is Holding.QUARANTINED and not reservation.joined:
            raise IntegrityError(f"{reservation!r} waits for nobody")
        if not 0 <= reservation.num_taken <= reservation.num_written <= reservation.num_taken + reservation.window:
            raise IntegrityError(f"{reservation!r} has overrun its window")


def _writer(reservation: Reservation, rank: int) -> Writer:
    writer = reservation.writers.get(rank)
    if writer is None:
        raise IllegalTransition(f"attempt {reservation.attempt}: rank {rank} has not joined it")
    return writer
