"""Whose turn it is. Pure: no torch, no threads, no clock.

Every step runs one chunk of one prompt and one token of every answer. Prompts take turns chunk by chunk, so that a long
one freezes neither the answers being written nor the prompts behind it. A sequence gets all the cache pages it can ever
need before it starts, in order of arrival, so none can block another half way; and no page that nobody will read
(`transfer.engine.cache_need`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from transfer.engine.sequence import Sequence, Stage
from transfer.errors import IntegrityError
from transfer.memory.pages import PagePool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a prompt; they fill (or begin) block `block` in every page group."""

    sequence: Sequence
    block: int
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Step:
    prefill: Chunk | None
    decode: list[Sequence]


class Scheduler:
    """Sequences and the cache pages they hold.

    Mutable state: `_waiting` (arrival order), `_prefilling` (the head is next), `_decoding`, `_kept` (over, pages still
    held), `pool`. Every sequence is in exactly one of the four.
    """

    def __init__(self, num_pages: int, chunk_size: int) -> None:
        self.pool = PagePool(num_pages)
        self.chunk_size = chunk_size
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._kept: list[Sequence] = []

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self._waiting)} waiting, {len(self._prefilling)} in prefill, "
            f"{len(self._decoding)} in decode, {self.pool!r}>"
        )

    @property
    def counts(self) -> dict[str, int]:
        return {
            "waiting": len(self._waiting),
            "prefilling": len(self._prefilling),
            "decoding": len(self._decoding),
            "kept": len(self._kept),
        }

    def add(self, sequence: Sequence) -> None:
        """Queue a WAITING sequence. Raises `ValueError` if it needs more pages than there are."""
        if sequence.need.num_pages > self.pool.num_pages:
            raise ValueError(f"{sequence!r} needs {sequence.need.num_pages} cache pages of {self.pool.num_pages}")
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give pages to those whose turn it is; a handoff goes straight to DECODE. Returns the newly admitted."""
        admitted = []
        while self._waiting and self._take_pages(self._waiting[0]):
            sequence = self._waiting.popleft()
            is_handoff = sequence.job.handoff is not None
            sequence.move_to(Stage.DECODE if is_handoff else Stage.PREFILL)
            (self._decoding if is_handoff else self._prefilling).append(sequence)
            admitted.append(sequence)
        return admitted

    def next_step(self) -> Step:
        """The work of one turn; changes nothing but whose prompt comes next."""
        chunk = None
        if self._prefilling:
            sequence = self._prefilling[0]
            self._prefilling.rotate(-1)
            end = min(sequence.num_computed + self.chunk_size, sequence.num_prompt_tokens)
            chunk = Chunk(sequence, sequence.num_computed // self.chunk_size, sequence.num_computed, end)
        return Step(chunk, list(self._decoding))

    @property
    def has_work(self) -> bool:
        return bool(self._prefilling or self._decoding)

    def prefilled(self, sequence: Sequence) -> None:
        """The prompt is read and the first token sampled: on to DECODE."""
        self._prefilling.remove(sequence)
        sequence.move_to(Stage.DECODE)
        self._decoding.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """No more steps for it; pages stay held until `drop`. Idempotent."""
        if sequence.stage is Stage.OVER:
            return
        place = {Stage.WAITING: self._waiting, Stage.PREFILL: self._prefilling, Stage.DECODE: self._decoding}
        place[sequence.stage].remove(sequence)
        sequence.move_to(Stage.OVER)
        self._kept.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget it and free its pages. Idempotent."""
        self.finish(sequence)
        if sequence in self._kept:
            self._kept.remove(sequence)
            self._give_back_pages(sequence)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the pages of all sequences and the free ones are all the pages."""
        self.pool.check_integrity()
        places = (self._waiting, self._prefilling, self._decoding, self._kept)
        held = [page for place in places for s in place for page in self._pages_of(s)]
        if len(held) != len(set(held)) or len(held) != self.pool.num_held:
            raise IntegrityError(f"{len(held)} pages in sequences, {self.pool.num_held} held: {self!r}")

    # ── whose pages: the only place where a sequence gets and loses them ────────────────────────────────────────────

    def _take_pages(self, sequence: Sequence) -> bool:
        """All of them, or none and False."""
        if not self.pool.can_allocate(sequence.need.num_pages):
            return False
        sequence.tables = sequence.need.tables(self.pool.allocate(sequence.need.num_pages, sequence))
        return True

    def _give_back_pages(self, sequence: Sequence) -> None:
        self.pool.leave(sequence)
        sequence.tables = []

    def _pages_of(self, sequence: Sequence) -> list[int]:
        """What it holds, which must be what is in its tables."""
        held = self.pool.pages_of(sequence)
        if {page for table in sequence.tables for page in table if page is not None} != set(held):
            raise IntegrityError(f"{sequence!r} holds {held}, and has in its tables {sequence.tables}")
        return held
