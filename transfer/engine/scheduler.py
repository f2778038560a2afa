"""Whose turn it is. Pure: no torch, no threads, no clock.

Every step runs one chunk of one prompt and one token of every answer. Prompts take turns chunk by chunk, so that a long
one freezes neither the answers being written nor the prompts behind it. A sequence gets all the cache pages it can ever
need before it starts, in order of arrival, so none can block another half way; and no page that nobody will read
(`transfer.engine.cache_need`).

A prompt that arrives in pieces (`transfer.engine.staged`) is the one thing that holds pages and will ask for more, for
its answer. So there is one at a time, and when it asks it is the head of the queue: those who run have all they will
ever need and end by themselves, and nobody else can take what they give back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from transfer.engine.sequence import Sequence, Stage
from transfer.engine.staged import StagedPrompt
from transfer.errors import IntegrityError
from transfer.memory.pages import PagePool

Holder: TypeAlias = Sequence | StagedPrompt


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
    held), `pool`. Every sequence is in exactly one of the four. `_staged` is the prompt that has pages and no sequence.
    """

    def __init__(self, num_pages: int, chunk_size: int) -> None:
        self.pool = PagePool(num_pages)
        self.chunk_size = chunk_size
        self._waiting: deque[Holder] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._kept: list[Sequence] = []
        self._staged: StagedPrompt | None = None

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
            "staged": int(self._staged is not None),
        }

    def add(self, holder: Holder) -> None:
        """Queue a WAITING sequence, or a prompt to be staged. Raises `ValueError` if there are not pages enough."""
        self._check_fits(holder)
        self._waiting.append(holder)

    def go_on(self, sequence: Sequence, staged: StagedPrompt) -> None:
        """The sequence of the staged prompt is here: it takes over its pages, and gets those of its answer next.

        Raises `ValueError` as `add`, and `IntegrityError` if the prompt is not staged; nothing changes then.
        """
        self._check_fits(sequence)
        if staged is not self._staged:
            raise IntegrityError(f"{sequence!r} cannot go on with {staged!r}: it is not staged")
        sequence.go_on_with(staged)
        self._staged = None
        self._waiting.appendleft(sequence)

    def unstage(self, staged: StagedPrompt) -> None:
        """Forget a prompt and free its pages. Idempotent; without effect once a sequence goes on with it."""
        if staged is self._staged:
            self._staged = None
            self._give_back_pages(staged)
        elif staged in self._waiting:
            self._waiting.remove(staged)

    def admit(self) -> list[Holder]:
        """Give pages to those whose turn it is; a handoff goes straight to DECODE. Returns the newly admitted."""
        admitted = []
        while self._waiting and self._may_start(self._waiting[0]) and self._take_pages(self._waiting[0]):
            holder = self._waiting.popleft()
            admitted.append(holder)
            if isinstance(holder, StagedPrompt):
                self._staged = holder
                continue
            is_handoff = holder.job.handoff is not None
            holder.move_to(Stage.DECODE if is_handoff else Stage.PREFILL)
            (self._decoding if is_handoff else self._prefilling).append(holder)
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
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is Stage.PREFILL:
            self._prefilling.remove(sequence)
        else:
            self._decoding.remove(sequence)
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
        places = (self._waiting, self._prefilling, self._decoding, self._kept, [self._staged] if self._staged else [])
        held = [page for place in places for holder in place for page in self._pages_of(holder)]
        if len(held) != len(set(held)) or len(held) != self.pool.num_held:
            raise IntegrityError(f"{len(held)} pages in sequences, {self.pool.num_held} held: {self!r}")

    def _may_start(self, head: Holder) -> bool:
        return self._staged is None or not isinstance(head, StagedPrompt)

    def _check_fits(self, holder: Holder) -> None:
        if holder.need.num_pages > self.pool.num_pages:
            raise ValueError(f"{holder!r} needs {holder.need.num_pages} cache pages of {self.pool.num_pages}")

    # ── whose pages: the only place where a sequence gets and loses them ────────────────────────────────────────────

    def _take_pages(self, holder: Holder) -> bool:
        """All that it lacks, or none and False."""
        held = self.pool.pages_of(holder.owner)
        num_lacking = holder.need.num_pages - len(held)
        if not self.pool.can_allocate(num_lacking):
            return False
        holder.tables = holder.need.tables([*held, *self.pool.allocate(num_lacking, holder.owner)])
        return True

    def _give_back_pages(self, holder: Holder) -> None:
        self.pool.leave(holder.owner)
        holder.tables = []

    def _pages_of(self, holder: Holder) -> list[int]:
        """What it holds, which must be what is in its tables."""
        held = self.pool.pages_of(holder.owner)
        if {page for table in holder.tables for page in table if page is not None} != set(held):
            raise IntegrityError(f"{holder!r} holds {held}, and has in its tables {holder.tables}")
        return held
