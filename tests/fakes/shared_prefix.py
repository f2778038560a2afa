"""Requests that share a prefix, their writers, their readers, and a list that stands for the memory they meet in.

Nobody here looks at the table's books: a writer writes where it was told, for as long as it lives and has not said that
it has ended, and a reader looks at what is there. So a page that is handed out too early shows up as a wrong chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fakes.reservations import wanted
from tests.fakes.snapshot import snapshot
from transfer.memory.reservations import Change, Grant, Holding, Reservations

Mark = tuple[str, bytes]
"""Which attempt wrote which chunk."""
NOTHING: Mark = ("nobody", b"")
REASON = "over"
"""The same for all, since it is remembered, and makes no difference to what can follow."""
NUM_PARTS = 2
"""Heads, say: a request with two ranks has each of them write one part of every page."""


@dataclass
class WritingRank:
    """One sender rank of one request. WAITING for the grant, WRITING, or DONE, ENDED, DEAD."""

    state: str = "WAITING"
    to_write: list[int] = field(default_factory=list)
    """Ordinals that have not landed yet."""
    is_stopped: bool = False


@dataclass
class Request:
    name: str
    chunks: tuple[bytes, ...]
    num_ranks: int = 1
    ranks: dict[int, WritingRank] = field(default_factory=dict)
    pages: list[int] = field(default_factory=list)
    reading: list[int] | None = None
    is_over: bool = False
    """Cancelled, expired or consumed: nothing more is wanted of it."""


class SharedPrefix:
    """A table, a memory of one mark per page and part, and requests.

    `steps(name)` are what may happen next to a request; `act` does it, grants what follows, and looks at what it met.
    """

    def __init__(self, num_pages: int) -> None:
        self.table = Reservations(num_pages)
        self.requests: dict[str, Request] = {}
        self.memory: dict[tuple[int, int], Mark] = {}
        self.num_read = 0

    def add(self, request: Request) -> None:
        self.requests[request.name] = request

    def steps(self, name: str) -> list[str]:
        """None: its life is over, and its writers have ended."""
        request = self.requests[name]
        known = self.table.get(name)
        steps = []
        if not request.is_over:
            steps += [f"join {rank}" for rank in range(request.num_ranks) if rank not in request.ranks][:1]
            if known is not None:
                steps += {Holding.READY: ["take"], Holding.TAKEN: ["consume"]}.get(known.holding, [])
                steps += [] if known.holding is Holding.TAKEN else ["cancel", "expire"]
        for rank, writer in request.ranks.items():
            if writer.state == "WRITING":
                steps.append(f"write {rank}" if writer.to_write else f"done {rank}")
            if writer.state in ("WAITING", "WRITING"):
                steps += [f"end {rank}"] if writer.is_stopped else []
                steps += [f"die {rank}"] if writer.state == "WRITING" or not writer.is_stopped else []
        return steps

    def act(self, name: str, step: str) -> None:
        request = self.requests[name]
        verb, _, rank = step.partition(" ")
        getattr(self, f"_{verb}")(request, *([int(rank)] if rank else []))
        for grant in self.table.pump():
            self._tell(grant)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _join(self, request: Request, rank: int) -> None:
        request.ranks[rank] = WritingRank()
        asked = wanted(request.name, len(request.chunks), expected=range(request.num_ranks), keys=request.chunks)
        grant = self.table.request(asked, rank, _identity(request, rank))
        if grant is not None:
            self._tell(grant)

    def _write(self, request: Request, rank: int) -> None:
        """The next page lands, wanted or not."""
        ordinal = request.ranks[rank].to_write.pop(0)
        page = request.pages[ordinal]
        assert self.table._pool.owners(page) == {request.name}, f"page {page} was somebody's when a write landed"
        for part in range(rank, NUM_PARTS, request.num_ranks):
            self.memory[page, part] = (request.name, request.chunks[ordinal])

    def _done(self, request: Request, rank: int) -> None:
        request.ranks[rank].state = "DONE"
        self._stop(self.table.writes_done(request.name, rank))

    def _end(self, request: Request, rank: int) -> None:
        request.ranks[rank].state = "ENDED"
        self._stop(self.table.writes_ended(request.name, rank, REASON))

    def _die(self, request: Request, rank: int) -> None:
        """Its process; from here on nothing lands, and the receiver knows."""
        request.ranks[rank].state = "DEAD"
        for change in self.table.writer_gone(_identity(request, rank), REASON):
            self._stop(change)

    def _take(self, request: Request) -> None:
        request.reading = self.table.take(request.name)
        self.check_read(request)

    def _consume(self, request: Request) -> None:
        self.check_read(request)
        self.table.consume(request.name)
        request.reading = None
        request.is_over = True
        self.num_read += 1

    def _cancel(self, request: Request) -> None:
        self._stop(self.table.withdraw(request.name, REASON))

    def _expire(self, request: Request) -> None:
        assert request.name in [r.attempt for r in self.table.expired(10.0)]
        self._stop(self.table.withdraw(request.name, REASON))

    def _tell(self, grant: Grant) -> None:
        """Those who are told begin to write."""
        request = self.requests[grant.reservation.attempt]
        request.pages = grant.pages
        for rank, writer in request.ranks.items():
            if _identity(request, rank) in grant.tell:
                writer.state = "WRITING"
                writer.to_write = [o for o in range(len(request.chunks)) if o not in grant.present]

    def _stop(self, change: Change | None) -> None:
        if change is None or not change.is_failed:
            return
        request = self.requests[change.reservation.attempt]
        request.is_over = True
        for rank, writer in request.ranks.items():
            writer.is_stopped |= _identity(request, rank) in change.stop
            if writer.state == "WAITING":
                writer.state = "ENDED"  # it was never told where to write

    # ── what must be true ───────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Books add up, no page that a write may land in is anybody else's, and what is READY is the right prompt."""
        self.table.check_integrity()
        for request in self.requests.values():
            known = self.table.get(request.name)
            if any(writer.state == "WRITING" and writer.to_write for writer in request.ranks.values()):
                for ordinal in {o for writer in request.ranks.values() for o in writer.to_write}:
                    owners = self.table._pool.owners(request.pages[ordinal])
                    assert owners == {request.name}, f"{owners} have a page that {request.name} may still write"
            if known is not None and known.holding in (Holding.READY, Holding.TAKEN):
                self.check_chunks(request, known.pages, range(len(request.chunks)))
            elif known is not None and known.holding is Holding.RESERVED:
                self.check_chunks(request, known.pages, sorted(known.present))
            is_gone = known is None and (request.ranks or request.is_over)
            if is_gone and not any(writer.state == "WRITING" for writer in request.ranks.values()):
                assert request.is_over, f"{request.name} vanished"

    def check_read(self, request: Request) -> None:
        assert request.reading is not None
        self.check_chunks(request, request.reading, range(len(request.chunks)))

    def check_chunks(self, request: Request, pages: list[int], ordinals: list[int] | range) -> None:
        for part in range(NUM_PARTS):
            seen = [self.memory.get((pages[ordinal], part), NOTHING)[1] for ordinal in ordinals]
            assert seen == [request.chunks[o] for o in ordinals], f"{request.name} would read {seen}"

    def check_nothing_left(self) -> None:
        self.table.check_integrity()
        assert not self.table._attempts
        assert self.table.num_free == self.table.num_pages

    def signature(self) -> object:
        """Equal signatures have equal futures: all that is remembered, and of what only counts up, the differences."""
        table, pool = self.table, self.table._pool
        idle = [(page, pool._num_left - left_at) for page, left_at in pool._idle.items()]
        books = (table._attempts, table._queue, table._writing, pool._owners, pool._pages_of, pool._blank, pool._key_of)
        return snapshot((*books, idle, sorted(self.memory.items()))), repr(self.requests)


def _identity(request: Request, rank: int) -> bytes:
    return f"{request.name}/{rank}".encode()
