"""The engine's thread. It is the only one that touches the model, the cache and the scheduler.

Other threads hand it commands (plain functions) and are called back. It sleeps on its inbox while there is nothing to
compute.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import TypeVar

import torch

from transfer.engine.api import RankLost
from transfer.engine.layer_reports import report_block, report_reused
from transfer.engine.model import ModelRunner
from transfer.engine.paged_cache import PagedStore
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.messages import CopyIn, Feed, Reuse
from transfer.engine.sampling import sample
from transfer.engine.scheduler import Chunk, Scheduler, Step
from transfer.engine.sequence import Sequence, Stage
from transfer.engine.staged import Arrival, StagedPrompt
from transfer.errors import IntegrityError

log = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0
"""The longest time, in seconds, that `EngineWorker.close` waits for the step under way."""
COUNT_EVERY_S = 1.0
"""The seconds between two updates of `statistics` while the worker computes."""


class EngineWorker:
    """An `EngineWorker` runs `step` after `step` until closed.

    Mutable state, all owned by the thread: `scheduler`, `runner`, `store`. For any thread to read: `failure`, set once
    if the thread dies, and `statistics` of the scheduler's store, set when the thread falls asleep and now and then
    while it computes (counting takes time); `_counted_at` is when, and `_is_counted` whether no page has moved since.
    `received` is the PD buffer that handoffs are copied from, None where this engine receives none. `ranks` take every
    step too.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: PagedStore,
        scheduler: Scheduler,
        received: torch.Tensor | None,
        ranks: OtherRanks | None = None,
    ) -> None:
        self.runner = runner
        self.store = store
        self.scheduler = scheduler
        self.failure: BaseException | None = None
        self.statistics = scheduler.statistics()
        self._counted_at = time.monotonic()
        self._is_counted = True
        self._received = received
        self._ranks = ranks or OtherRanks()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops after the current step, and waits `CLOSE_TIMEOUT_S` for the thread.

        A thread that goes on keeps the model, the cache and `received` alive, as this object does.
        """
        self._inbox.put(None)
        if self._thread.ident is not None:  # it was started
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.error(
                "the engine's thread does not end: it has been in one step for %g s or more. It goes on with the model "
                "and the KV cache, which are not freed, and may be cut off anywhere when this process ends",
                CLOSE_TIMEOUT_S,
            )

    # ── from any thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, sequence: Sequence) -> None:
        self.call(lambda: self._begin(sequence, lambda: self.scheduler.add(sequence)))

    def stage(self, staged: StagedPrompt) -> None:
        """Queues a prompt that will arrive in pieces."""
        self.call(lambda: self.scheduler.add(staged))

    def arrived(self, staged: StagedPrompt, arrival: Arrival) -> None:
        """Copies these pages as soon as the prompt has pages of its own, and tells `on_copied`."""
        self.call(lambda: self._arrived(staged, arrival))

    def go_on(self, sequence: Sequence, staged: StagedPrompt) -> None:
        """Does the same as `add`, for the sequence of a prompt that has arrived."""
        self.call(lambda: self._begin(sequence, lambda: self.scheduler.go_on(sequence, staged)))

    def unstage(self, staged: StagedPrompt) -> None:
        """Forgets the prompt and frees its pages, unless a sequence goes on with it."""
        self.call(lambda: self.scheduler.unstage(staged))

    def pin(self, attempt: str, keys: Seq[bytes]) -> int:
        """Pins chunks, which is done when it returns: no step is waited for. See `EngineCache.pin`."""
        return self.scheduler.pin(attempt, keys)

    def unpin(self, attempt: str) -> None:
        """Gives pins back. See `EngineCache.unpin`."""
        if self.scheduler.unpin(attempt):
            self.call(lambda: None)  # the thread may sleep, and a sequence can be admitted now

    def adopt_pins(self, sequence: Sequence, attempt: str, num_pinned: int) -> None:
        """Gives the pins of a taken attempt to the sequence. `add` that next, and `drop` it in the end."""
        self.scheduler.adopt_pins(sequence, attempt, num_pinned)

    def drop(self, sequence: Sequence) -> Future[None]:
        """Forgets the sequence and frees its pages, in whatever stage it is."""
        return self.call(lambda: self._drop(sequence))

    def end(self, error: RankLost) -> None:
        """Gives up. Every sequence gets the error, and no step is taken any more."""

        def fail() -> None:
            raise error

        self._inbox.put(fail)

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Runs `command` on the engine's thread between two steps. Returns a future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step(self.scheduler.next_step())
        except BaseException as error:
            self.failure = error
            if isinstance(error, RankLost):
                log.error("%s", error)
                for sequence in self.scheduler.sequences:
                    sequence.on_error(error)
            else:
                log.exception("the engine's thread died")

    def _take_commands(self) -> bool:
        """Does what the inbox asks for. Waits for something while there is nothing to compute. Returns False where the
        thread is to stop."""
        while True:
            self._admit()
            self._count()
            try:
                command = self._inbox.get(block=not self.scheduler.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _admit(self) -> None:
        for holder in self.scheduler.admit():
            if isinstance(holder, StagedPrompt):
                self._copy_arrivals(holder)
            else:
                self._guard(holder, self._load if holder.job.handoff is not None else self._report_reused)
            self._is_counted = False

    def _count(self) -> None:
        """Keeps `statistics` up to date, unless there is more to do first."""
        is_asleep = self._inbox.empty() and not self.scheduler.has_work
        if not self._is_counted and (is_asleep or time.monotonic() - self._counted_at > COUNT_EVERY_S):
            self.statistics = self.scheduler.statistics()
            self._counted_at, self._is_counted = time.monotonic(), True

    def _arrived(self, staged: StagedPrompt, arrival: Arrival) -> None:
        staged.arrivals.append(arrival)
        if staged.tables:
            self._copy_arrivals(staged)

    def _copy_arrivals(self, staged: StagedPrompt) -> None:
        """Copies from the PD buffer into the prompt's own pages. A failure ends the prompt and nothing else."""
        arrivals, staged.arrivals = staged.arrivals, []
        try:
            for arrival in arrivals:
                self._copy_in(arrival.received_pages, [staged.page(ordinal) for ordinal in arrival.ordinals])
                staged.on_copied(arrival.ordinals.stop)
        except Exception as error:
            log.exception("%r failed", staged)
            self.scheduler.unstage(staged)
            staged.on_error(error)

    def _copy_in(self, received_pages: list[int], pages: list[int]) -> None:
        assert self._received is not None
        self.store.copy_in(self._received, received_pages, pages)
        self.runner.synchronize()

    def _load(self, sequence: Sequence) -> None:
        """Takes a handoff's KV out of the PD buffer, if it is there. After that it is as if this engine had read the
        prompt."""
        handoff = sequence.job.handoff
        assert handoff is not None
        if sequence.num_reused < sequence.num_pinned:
            raise IntegrityError(
                f"{sequence!r} has {sequence.num_reused} of the {sequence.num_pinned} pages pinned for it"
            )
        if sequence.received_pages:
            # Pages that were found in the cache, pinned for this attempt or left by others, are not copied.
            missing = range(sequence.num_reused, len(sequence.prompt_pages))
            pages = [sequence.page(ordinal) for ordinal in missing]
            received_pages = sequence.received_pages[sequence.num_reused - sequence.num_pinned :]
            step = CopyIn(handoff.attempt, missing.start, pages)
            self._ranks.do(step, lambda: self._copy_in(received_pages, pages))
            if sequence.check_received is not None:
                sequence.check_received()
        sequence.let_go_of_received()
        self.scheduler.computed(sequence, sequence.num_prompt_tokens)
        sequence.append(handoff.first_token_id)
        if sequence.is_finished:
            self.scheduler.finish(sequence)

    def _step(self, step: Step) -> None:
        if step.prefill is not None:
            chunk = step.prefill
            self._guard(chunk.sequence, lambda _: self._read_chunk(chunk))
        for sequence in step.decode:
            if sequence.stage is Stage.DECODE:
                self._guard(sequence, self._write_token)

    def _read_chunk(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        token_ids = sequence.job.prompt_token_ids[chunk.start : chunk.end]
        logits = self._feed(sequence, chunk.start, token_ids, chunk.block)
        self.scheduler.computed(sequence, chunk.end)
        if chunk.is_last:
            self.scheduler.prefilled(sequence)
            self._choose(sequence, logits)

    def _feed(self, sequence: Sequence, position: int, token_ids: list[int], block: int) -> torch.Tensor:
        """Feeds the tokens on every rank. The sequence's listener is told of the layers of `block` meanwhile."""
        listener, on_layers, push = sequence.on_layers, None, sequence.job.push
        if listener is not None:
            on_layers = report_block(self.runner, sequence.prompt_pages, sequence.tables, block, listener)
        step = Feed(sequence.tables, position, token_ids, push.attempt if push else None, block)
        logits: torch.Tensor = self._ranks.do(
            step, lambda: self.runner.forward(self.store, sequence.tables, position, token_ids, on_layers)
        )
        return logits

    def _report_reused(self, sequence: Sequence) -> None:
        """Tells the listener of pages that need not be computed. It may have them at once."""
        listener, push = sequence.on_layers, sequence.job.push
        if listener is None or push is None or not sequence.num_reused:
            return
        pages = [sequence.page(ordinal) for ordinal in range(sequence.num_reused)]
        self._ranks.tell(Reuse(push.attempt, pages))
        report_reused(self.runner, sequence.prompt_pages, pages, listener)

    def _write_token(self, sequence: Sequence) -> None:
        block = sequence.num_computed // self.scheduler.chunk_size
        logits = self._feed(sequence, sequence.num_computed, sequence.output[-1:], block)
        sequence.num_computed += 1
        self._choose(sequence, logits)

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> None:
        token = sample(
            logits,
            sequence.job.sampling,
            position=len(sequence.output),
            counts=sequence.counts,
            forbidden=sequence.forbidden,
        )
        sequence.append(token.token_id)
        if sequence.stops_after_first or sequence.is_finished:
            self.scheduler.finish(sequence)
        sequence.on_token(token)

    def _begin(self, sequence: Sequence, start: Callable[[], None]) -> None:
        """Starts a sequence. If the scheduler does not take it, its caller gets the error and is not left waiting."""
        try:
            start()
        except Exception as error:
            log.exception("%r could not be started", sequence)
            sequence.let_go_of_received()
            self.scheduler.refused(sequence)
            sequence.on_error(error)

    def _guard(self, sequence: Sequence, work: Callable[[Sequence], None]) -> None:
        """Does work for one sequence. Its failure is its own: it ends, the others go on."""
        try:
            work(sequence)
        except RankLost:
            raise  # this error ends all sequences
        except Exception as error:
            log.exception("%r failed", sequence)
            self._stop(sequence)
            sequence.on_error(error)

    def _stop(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        sequence.let_go_of_received()

    def _drop(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self.scheduler.drop(sequence)
        self._is_counted = False
