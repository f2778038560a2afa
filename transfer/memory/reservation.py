"""One attempt at a receiver: how it holds its pages, who writes them, and what a step tells others. All are plain
records.

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
    """`Holding` tells how an attempt holds its pages."""

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
"""The steps that are allowed. Only an attempt that is granted page by page goes from QUEUED to QUARANTINED, or from
RESERVED to QUEUED."""

MAY_EXPIRE = frozenset({Holding.QUEUED, Holding.RESERVED, Holding.READY})
"""The states in which an attempt may expire. A TAKEN attempt is being read; a QUARANTINED one has expired already, or
as good as."""
GRANTED = frozenset({Holding.RESERVED, Holding.READY, Holding.TAKEN})


class WriterState(Enum):
    """`WriterState` tells how far a sender's rank is with the attempt's pages."""

    JOINED = "joined"
    DONE = "done"
    ENDED = "ended"


@dataclass(slots=True)
class Writer:
    """A `Writer` is one sender rank that writes an attempt. `identity` is its connection, the only one that speaks for
    it."""

    identity: bytes
    state: WriterState = WriterState.JOINED
    num_written: int = 0
    """Counts, for windowed attempts, the first ordinals that are complete by this writer."""

    def move_to(self, state: WriterState) -> None:
        if self.state is not WriterState.JOINED or state is WriterState.JOINED:
            raise IllegalTransition(f"writer {self.identity!r}: {self.state.name} → {state.name}")
        self.state = state


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """A `Reservation` is one attempt. The fields up to `keys` are what its senders ask for, each of them the same. The
    fields below `term` tell what became of it.

    `Reservations` changes it; everybody else only reads.
    """

    attempt: str
    num_pages: int
    num_tokens: int
    expires_at: float
    notify: str | None
    num_now: int
    """Counts the pages that a QUEUED attempt still asks for: all of them, or less where they are granted page by
    page."""
    expected: frozenset[int] = frozenset({0})
    """Holds the sender's tensor-parallel ranks that must write, to whichever ranks of the decoder."""
    num_senders: int = 1
    """Counts the tensor-parallel ranks of the sender, those that write nothing included."""
    keys: tuple[bytes, ...] = ()
    """Holds, per ordinal, the key of the chunk that will be there; ``b""`` for a private one. Where it is empty, all
    are private."""
    term: int | None = None
    """The term of the leader for whom the first rank to ask was sent; None where none was told."""
    holding: Holding = Holding.QUEUED
    writers: dict[int, Writer] = field(default_factory=dict)
    """Holds, by rank, those of `expected` that have joined."""
    pages: list[int] = field(default_factory=list)
    """Holds page numbers by ordinal, from `num_cached` on; in a windowed attempt, the ring. They stay when the attempt
    is GONE, for the report about it."""
    num_cached: int = 0
    """Counts the first ordinals that were in the engine's own cache when the attempt was granted. They take no page
    here."""
    present: frozenset[int] = frozenset()
    """Holds the ordinals whose page here held their bytes already when the attempt was granted. These pages are shared,
    and no sender writes them."""
    window: int = 0
    """The length of the ring in which ordinal i lives in ``pages[i % window]``. With 0 every ordinal has its page."""
    num_taken: int = 0
    """Counts, for windowed attempts, the first ordinals that have been read. Their pages may be written again."""
    reason: str = ""
    """Tells why the attempt failed or was withdrawn. It is empty while neither has happened."""
    outcome: str = "failed"
    """Tells the reason of the failure in the one word that `wire.KvReleased` has for it."""
    has_waited: bool = False
    """True once the attempt had to stay in the queue because the pages that it asked for were not free."""
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
        """Returns the pages that were granted for this attempt to write. Nobody else has them before it is READY."""
        if not self.present:
            return list(self.pages)
        return [page for ordinal, page in enumerate(self.pages, self.num_cached) if ordinal not in self.present]

    def page(self, ordinal: int) -> int:
        """Returns the page here of an ordinal that has one of its own: not in a windowed attempt, and not a cached
        one."""
        return self.pages[ordinal - self.num_cached]

    @property
    def num_needed(self) -> int:
        """The number of pages that the attempt has here when everything is granted."""
        return self.window or self.num_pages - self.num_cached

    @property
    def is_granted(self) -> bool:
        """Tells whether every page that it asked for is there (and not in quarantine)."""
        return self.holding in GRANTED and len(self.pages) == self.num_needed

    @property
    def num_written(self) -> int:
        """Counts, for windowed attempts, the first ordinals that are complete by every writer."""
        return min((self.writers[r].num_written if r in self.writers else 0 for r in self.expected), default=0)

    @property
    def is_complete(self) -> bool:
        """Tells whether every expected writer is done, and, in a windowed attempt, whether everything has been read."""
        done = {rank for rank, writer in self.writers.items() if writer.state is WriterState.DONE}
        return done == self.expected and (not self.window or self.num_taken == self.num_pages)

    @property
    def joined(self) -> list[bytes]:
        """Returns the connections of those writers whose writes may still land."""
        return [w.identity for w in self.writers.values() if w.state is WriterState.JOINED]

    def rank_of(self, identity: bytes) -> int | None:
        """Returns the rank that this connection writes for; None for a stranger, which can say nothing of the
        attempt."""
        return next((rank for rank, writer in self.writers.items() if writer.identity == identity), None)


@dataclass(frozen=True, slots=True)
class Grant:
    """A `Grant` holds pages that were granted just now, for all ranks, and the connections to be told of them."""

    reservation: Reservation
    pages: list[int]
    """Holds the pages that were granted now, by ordinal from the attempt's `num_cached` on: all that it needs, or the
    next ones where they are granted page by page."""
    present: list[int]
    """Holds the ordinals behind the cached ones which are not to be written either."""
    tell: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A `Change` tells what a step did to an attempt, and what must follow."""

    reservation: Reservation
    is_ready: bool = False
    """Tells that the attempt became READY: wake the waiter, tell the proxy."""
    is_failed: bool = False
    """Tells that the attempt will never be ready, for `reservation.reason`: wake the waiter, tell the proxy."""
    is_released: bool = False
    """Tells that the attempt is GONE and holds no page: tell the proxy, and pump."""
    stop: tuple[bytes, ...] = ()
    """Holds the connections to be told that the attempt is over. They must then say when they have ended."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A `Credit` tells that a windowed attempt's consumer has read the first `count` ordinals: tell the writers."""

    reservation: Reservation
    count: int
    tell: tuple[bytes, ...]
    is_ready: bool
    """Tells that this was the last page, and every writer is done: do the same as for `Change`."""
