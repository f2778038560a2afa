"""The order of work: whose turn it is. It is pure: no torch, no threads, no clock.

Every step runs one chunk of one prompt and one token of every answer. Prompts take turns chunk by chunk, so that a long
one freezes neither the answers being written nor the prompts behind it. A sequence gets all the cache pages it can ever
need before it starts, in order of arrival, so none can block another half way; and no page that nobody will read
(`transfer.engine.cache_need`).

A prompt that arrives in pieces (`transfer.engine.staged`) is the one thing that holds pages and will ask for more, for
its answer. So there is one at a time, and when it asks it is the head of the queue: those who run have all they will
ever need and end by themselves, and nobody else can take what they give back.

What a prompt that is still being sent finds in the cache is pinned for its attempt (`transfer.engine.pins`), from any
thread, before it is a sequence. Pins leave room for the longest sequence, so the head of the queue waits for those who
run, and never for a pin.

Pages come from a `KvStore`: full chunks of a prompt stay there for those that begin alike, until their page is needed.
Where keys are given, page i of a sequence is block i of its prompt: there is one page group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from transfer.engine.pins import Pins
from transfer.engine.sequence import Sequence, Stage
from transfer.engine.staged import StagedPrompt
from transfer.errors import IntegrityError
from transfer.memory.pages import PagePool
from transfer.memory.store import KvStore, StoreFull, StoreStatistics

Holder: TypeAlias = Sequence | StagedPrompt


class CacheEvents(Protocol):
    """`CacheEvents` are told of the prefix cache. Neither method may raise."""

    def stored(self, parent: bytes | None, key: bytes, token_ids: Seq[int]) -> None:
        """Tells that the chunk `key` of these tokens, which follows `parent`, can be found."""

    def removed(self, keys: Seq[bytes]) -> None:
        """Tells that these chunks are about to be given up."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A `Chunk` is tokens `start` to `end` of a prompt. They fill (or begin) block `block` in every page group."""

    sequence: Sequence
    block: int
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A `Step` is the work of one turn: a chunk of one prompt, if there is any, and a token for each of `decode`."""

    prefill: Chunk | None
    decode: list[Sequence]


class Scheduler:
    """A `Scheduler` holds sequences and the cache pages they hold.

    Mutable state: `_waiting` (arrival order), `_prefilling` (the head is next), `_decoding`, `_kept` (over, pages still
    held), `pool`. Every sequence is in exactly one of the four. `_staged` is the prompt that has pages and no sequence.
    `store` is the only one that takes pages from `pool`. `_is_blocked`: the head of `_waiting` did not get its pages,
    and nothing has changed since. `_pins` is what attempts keep in `store` before they are sequences. One thread calls
    it, except the methods that any thread may call: `_lock` guards `store`, `_pins` and `_is_blocked`.
    """

    def __init__(self, num_pages: int, chunk_size: int, max_pinned: int = 0, events: CacheEvents | None = None) -> None:
        """Makes an empty scheduler. `max_pinned` pages at most are pinned for attempts; the others are enough for any
        one sequence. `events` are told what comes into the cache and what leaves it."""
        self.pool = PagePool(num_pages)
        self.store = KvStore(self.pool)
        self._events = events
        if events is not None:
            self.store.on_evicted = events.removed
        self._pins = Pins(self.store, max_pinned)
        self._lock = threading.Lock()
        self.chunk_size = chunk_size
        self._waiting: deque[Holder] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._kept: list[Sequence] = []
        self._staged: StagedPrompt | None = None
        self._is_blocked = False

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self._waiting)} waiting, {len(self._prefilling)} in prefill, "
            f"{len(self._decoding)} in decode, {self.store!r}>"
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

    # ── from any thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, attempt: str, keys: Seq[bytes]) -> int:
        """Keeps the pages of the first of `keys` for `attempt`, until `unpin`, or until the sequence that adopts them
        is dropped. Returns how many keys that are, 0 where there is no room for more pins."""
        with self._lock:
            return self._pins.pin(attempt, keys)

    def unpin(self, attempt: str) -> bool:
        """Gives back the pins of an attempt that nobody will come for. Idempotent. Returns whether anybody waits for
        pages."""
        with self._lock:
            self._pins.unpin(attempt)
            was_blocked, self._is_blocked = self._is_blocked, False
            return was_blocked

    def adopt_pins(self, sequence: Sequence, attempt: str, num_pinned: int) -> None:
        """Gives the attempt's pins to the sequence, which must be added next. `drop` gives them back."""
        with self._lock:
            sequence.owner, sequence.num_pinned = self._pins.adopt(attempt), num_pinned

    def statistics(self) -> StoreStatistics:
        with self._lock:
            return self.store.statistics()

    # ── from one thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, holder: Holder) -> None:
        """Queues a WAITING sequence, or a prompt to be staged. Raises `ValueError` if there are not pages enough."""
        self._check_fits(holder)
        self._waiting.append(holder)

    def go_on(self, sequence: Sequence, staged: StagedPrompt) -> None:
        """Takes in the sequence of the staged prompt. The sequence takes over the prompt's pages, and gets those of its
        answer next.

        Raises `ValueError` as `add` does, and `IntegrityError` if the prompt is not staged; nothing changes then.
        """
        self._check_fits(sequence)
        if staged is not self._staged:
            raise IntegrityError(f"{sequence!r} cannot go on with {staged!r}: it is not staged")
        sequence.go_on_with(staged)
        self._staged = None
        self._waiting.appendleft(sequence)
        self._is_blocked = False

    def unstage(self, staged: StagedPrompt) -> None:
        """Forgets a prompt and frees its pages. Idempotent; without effect once a sequence goes on with it."""
        if staged is self._staged:
            self._staged = None
            self._give_back_pages(staged)
        elif staged in self._waiting:
            self._waiting.remove(staged)
            self._is_blocked = False

    def admit(self) -> list[Holder]:
        """Gives pages to those whose turn it is. A handoff goes straight to DECODE. Returns the newly admitted."""
        admitted = []
        while self._may_admit() and self._take_pages(self._waiting[0]):
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
        """Returns the work of one turn. Changes nothing but whose prompt comes next."""
        chunk = None
        if self._prefilling:
            sequence = self._prefilling[0]
            self._prefilling.rotate(-1)
            end = min(sequence.num_computed + self.chunk_size, sequence.num_prompt_tokens)
            chunk = Chunk(sequence, sequence.num_computed // self.chunk_size, sequence.num_computed, end)
        return Step(chunk, list(self._decoding))

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that are not over."""
        waiting = [holder for holder in self._waiting if isinstance(holder, Sequence)]
        return [*waiting, *self._prefilling, *self._decoding]

    @property
    def has_work(self) -> bool:
        return bool(self._prefilling or self._decoding)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes that the KV of the sequence's first `num_tokens` tokens is in its pages. Others find the full blocks of
        its prompt now."""
        first, end = sequence.num_computed // self.chunk_size, num_tokens // self.chunk_size
        sequence.num_computed = num_tokens
        with self._lock:
            for block, (key, page) in list(enumerate(zip(sequence.keys, sequence.pages, strict=False)))[first:end]:
                if self.store.publish(sequence.owner, key, page):
                    self._tell(sequence, block)

    def _tell(self, sequence: Sequence, block: int) -> None:
        """Tells who follows the cache that this block of the sequence's prompt is in it."""
        if self._events is not None:
            start, end = block * self.chunk_size, (block + 1) * self.chunk_size
            parent = sequence.keys[block - 1] if block else None
            self._events.stored(parent, sequence.keys[block], sequence.job.prompt_token_ids[start:end])

    def prefilled(self, sequence: Sequence) -> None:
        """Moves the sequence to DECODE, because its prompt is read and the first token is sampled."""
        self._prefilling.remove(sequence)
        sequence.move_to(Stage.DECODE)
        self._decoding.append(sequence)

    def refused(self, sequence: Sequence) -> None:
        """Gives back what was pinned for a sequence that `add` or `go_on` did not take."""
        self._give_back_pages(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Ends the steps of a sequence. Its pages stay held until `drop`. Idempotent."""
        if sequence.stage is Stage.OVER:
            return
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
            self._is_blocked = False
        elif sequence.stage is Stage.PREFILL:
            self._prefilling.remove(sequence)
        else:
            self._decoding.remove(sequence)
        sequence.move_to(Stage.OVER)
        self._kept.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence and frees its pages. Idempotent."""
        self.finish(sequence)
        if sequence in self._kept:
            self._kept.remove(sequence)
            self._give_back_pages(sequence)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless the sequences' pages are those that the store says are held, each written by
        one sequence only."""
        with self._lock:
            self._check_integrity()

    def _check_integrity(self) -> None:
        self.pool.check_integrity()
        self.store.check_integrity()
        self._pins.check_integrity()
        places = (self._waiting, self._prefilling, self._decoding, self._kept, [self._staged] if self._staged else [])
        holders = [holder for place in places for holder in place]
        held = {page for holder in holders for page in self._pages_of(holder)} | self._pins.pages
        own = [page for holder in holders for page in holder.own_pages]
        counts = self.store.statistics()
        if len(held) != counts.num_private + counts.num_pinned or len(own) != len(set(own)):
            raise IntegrityError(f"{len(held)} pages in sequences, {len(own)} of them written here: {self!r}")

    def _may_admit(self) -> bool:
        """Returns whether to look if there are pages for the head of the queue."""
        if not self._waiting or self._is_blocked:
            return False
        return self._staged is None or not isinstance(self._waiting[0], StagedPrompt)

    def _check_fits(self, holder: Holder) -> None:
        if holder.need.num_pages > self.pool.num_pages:
            raise ValueError(f"{holder!r} needs {holder.need.num_pages} cache pages of {self.pool.num_pages}")

    # ── whose pages: the only place where a sequence gets and loses them ────────────────────────────────────────────

    def _take_pages(self, holder: Holder) -> bool:
        """Gives the holder all pages that it lacks, or none; returns False then. Pages that are found of its prompt are
        shared, and count as computed."""
        with self._lock:
            found = self._find_prompt(holder)
            held = [*holder.pages, *found]
            try:
                more = self.store.allocate(holder.owner, holder.need.num_pages - len(held))
            except StoreFull:
                self.store.unpin(holder.owner, self._unpinned_keys(holder))
                self._is_blocked = True
                return False
            self._pins.hand_over(holder.owner)
        holder.pages = [*held, *more]
        holder.tables = holder.need.tables(holder.pages)
        if isinstance(holder, Sequence):
            holder.num_reused, holder.num_computed = len(found), len(found) * self.chunk_size
        return True

    def _find_prompt(self, holder: Holder) -> tuple[int, ...]:
        """Returns the pages that hold the beginning of its prompt. A sequence whose prompt was staged has the prompt in
        its own pages."""
        if isinstance(holder, StagedPrompt) or holder.pages:
            return ()
        return self.store.lookup(holder.owner, holder.reusable_keys).pages

    def _unpinned_keys(self, holder: Holder) -> list[bytes]:
        """Returns the keys of the pages that the holder was about to share and that were not pinned for it before."""
        return holder.keys[holder.num_pinned :] if isinstance(holder, Sequence) else []

    def _give_back_pages(self, holder: Holder) -> None:
        with self._lock:
            self._pins.hand_over(holder.owner)
            self.store.release(holder.owner)
        holder.pages, holder.tables = [], []
        self._is_blocked = False

    def _pages_of(self, holder: Holder) -> list[int]:
        """Returns the pages that it holds. Raises `IntegrityError` unless these are the pages in its tables."""
        if {page for table in holder.tables for page in table if page is not None} != set(holder.pages):
            raise IntegrityError(f"{holder!r} holds {holder.pages}, and has in its tables {holder.tables}")
        return holder.pages
