"""One attempt at a receiver: how it holds its pages, who writes them, and what a step tells others. Plain records.

    QUEUED ──grant──► RESERVED ──every writer done──► READY ──take──► TAKEN ──consume──► GONE
       │                 │                              │
       │    withdrawn, or a writer ended too early   withdrawn
       ▼                 ▼                              ▼
     GONE           QUARANTINED                        GONE
                         └──every writer that joined has ended──► GONE

    JOINED ──its last byte is there──► DONE
       └──it stopped before, or is dead──► ENDED

A write under way cannot be called back. So an attempt that fails while it is written keeps the pages of its own in
QUARANTINED until each writer that joined has ended: nobody may have them, and nobody may read them. Pages that it only
shared are not written by anybody and are left at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from transfer.errors import IllegalTransition


class Holding(Enum):
    """How an attempt holds its pages."""

    QUEUED = "queued"
    RESERVED = "reserved"
    READY = "ready"
    TAKEN = "taken"
    QUARANTINED = "quarantined"
    GONE = "gone"


_ALLOWED: dict[Holding, frozenset[Holding]] = {
    Holding.QUEUED: frozenset({Holding.RESERVED, Holding.QUARANTINED, Holding.GONE}),
    Holding.RESERVED: frozenset({Holding.READY, Holding.QUARANTINED, Holding.QUEUED}),
    Holding.READY: frozenset({Holding.TAKEN, Holding.GONE}),
    Holding.TAKEN: frozenset({Holding.GONE}),
    Holding.QUARANTINED: frozenset({Holding.GONE}),
    Holding.GONE: frozenset(),
}
"""QUEUED to QUARANTINED, and RESERVED to QUEUED: only one that is granted page by page."""

MAY_EXPIRE = frozenset({Holding.QUEUED, Holding.RESERVED, Holding.READY})
"""A TAKEN attempt is being read; a QUARANTINED one has expired already, or as good as."""
GRANTED = frozenset({Holding.RESERVED, Holding.READY, Holding.TAKEN})


class WriterState(Enum):
    """How far a sender's rank is with the attempt's pages."""

    JOINED = "joined"
    DONE = "done"
    ENDED = "ended"


@dataclass(slots=True)
class Writer:
    """One sender rank that writes an attempt. `identity` is its connection, the only one that speaks for it."""

    identity: bytes
    state: WriterState = WriterState.JOINED
    num_written: int = 0
    """Windowed attempts: the first so many ordinals are complete by this writer."""

    def move_to(self, state: WriterState) -> None:
        if self.state is not WriterState.JOINED or state is WriterState.JOINED:
            raise IllegalTransition(f"writer {self.identity!r}: {self.state.name} → {state.name}")
        self.state = state


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """One attempt. Up to `keys`: what its senders ask for, each of them the same; below: what became of it.

    `Reservations` changes it; everybody else only reads.
    """

    attempt: str
    num_pages: int
    num_tokens: int
    expires_at: float
    notify: str | None
    num_now: int
    """Pages still asked for while it is QUEUED: all of them, or less where they are granted page by page."""
    expected: frozenset[int] = frozenset({0})
    """The sender's tensor-parallel ranks that must write, to whichever ranks of the decoder."""
    num_senders: int = 1
    """How many tensor-parallel ranks the sender has, those that write nothing included."""
    keys: tuple[bytes, ...] = ()
    """Per ordinal the chunk that will be there; ``b""`` for a private one. None at all: all are private."""
    holding: Holding = Holding.QUEUED
    writers: dict[int, Writer] = field(default_factory=dict)
    """By rank; those of `expected` that have joined."""
    pages: list[int] = field(default_factory=list)
    """Page numbers by ordinal, from `num_cached` on; the ring, in a windowed attempt. They stay when it is GONE, for
    whoever reports it."""
    num_cached: int = 0
    """The first so many ordinals were in the engine's own cache when it was granted. They take no page here."""
    present: frozenset[int] = frozenset()
    """Ordinals whose page here held their bytes already when it was granted: shared, and written by nobody."""
    window: int = 0
    """Length of the ring in which ordinal i lives in ``pages[i % window]``; 0: every ordinal has its page."""
    num_taken: int = 0
    """Windowed attempts: the first so many ordinals have been read, and their pages may be written again."""
    reason: str = ""
    """Why it failed or was withdrawn; empty while it was not."""
    outcome: str = "failed"
    """The same in the one word that `wire.KvReleased` has for it."""
    has_waited: bool = False
    """True once it had to stay in the queue because the pages that it asked for were not free."""
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_whole = self.num_now == self.num_pages

    def __repr__(self) -> str:
        done = sum(w.state is WriterState.DONE for w in self.writers.values())
        shared = f", {len(self.present)} shared" if self.present else ""
        cached = f", {self.num_cached} in the engine's cache" if self.num_cached else ""
        ring = f", {self.num_taken}/{self.num_written} taken through {self.window}" if self.window else ""
        pages = f"{len(self.pages)}/{self.num_pages} pages{shared}{cached}{ring}"
        writers = f"{done}/{len(self.expected)} writers done"
        return f"<Reservation {self.attempt[:8]} {self.holding.value}, {pages}, {writers}>"

    def move_to(self, holding: Holding) -> None:
        if holding not in _ALLOWED[self.holding]:
            raise IllegalTransition(f"attempt {self.attempt}: {self.holding.name} → {holding.name}")
        self.holding = holding

    @property
    def own_pages(self) -> list[int]:
        """Pages granted for this attempt to write. Nobody else has them before it is READY."""
        if not self.present:
            return list(self.pages)
        return [page for ordinal, page in enumerate(self.pages, self.num_cached) if ordinal not in self.present]

    def page(self, ordinal: int) -> int:
        """The page here of an ordinal that has one of its own: not in a windowed attempt, and not a cached one."""
        return self.pages[ordinal - self.num_cached]

    @property
    def num_needed(self) -> int:
        """Pages that it has here when everything is granted."""
        return self.window or self.num_pages - self.num_cached

    @property
    def is_granted(self) -> bool:
        """Every page it asked for is there (and not in quarantine)."""
        return self.holding in GRANTED and len(self.pages) == self.num_needed

    @property
    def num_written(self) -> int:
        """Windowed attempts: the first so many ordinals are complete by every writer."""
        return min((self.writers[r].num_written if r in self.writers else 0 for r in self.expected), default=0)

    @property
    def is_complete(self) -> bool:
        """Every expected writer is done; and in a windowed attempt, everything has been read."""
        done = {rank for rank, writer in self.writers.items() if writer.state is WriterState.DONE}
        return done == self.expected and (not self.window or self.num_taken == self.num_pages)

    @property
    def joined(self) -> list[bytes]:
        """Connections of those whose writes may still land."""
        return [w.identity for w in self.writers.values() if w.state is WriterState.JOINED]

    def rank_of(self, identity: bytes) -> int | None:
        """The rank that this connection writes for; None for a stranger, who can say nothing of it."""
        return next((rank for rank, writer in self.writers.items() if writer.identity == identity), None)


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages to be told to senders."""

    reservation: Reservation
    pages: list[int]
    """Granted now, by ordinal from the attempt's `num_cached` on: all that it needs, or the next ones where they are
    granted page by page."""
    present: list[int]
    """Ordinals behind those that are cached which are not to be written either."""
    tell: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What a step did to an attempt, and what must follow."""

    reservation: Reservation
    is_ready: bool = False
    """It became READY: wake who waits for it, tell the proxy."""
    is_failed: bool = False
    """It will never be ready, `reservation.reason` says why: wake who waits for it, tell the proxy."""
    is_released: bool = False
    """It is GONE and holds no page: tell the proxy, and pump."""
    stop: tuple[bytes, ...] = ()
    """Connections to be told that it is over; they must then say when they have ended."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A windowed attempt's consumer has read the first `count` ordinals: tell the writers."""

    reservation: Reservation
    count: int
    tell: tuple[bytes, ...]
    is_ready: bool
    """That was the last one, and every writer is done: as in `Change`."""
