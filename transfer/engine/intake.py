"""The intake takes a prompt that is larger than the PD buffer into the KV cache while it arrives.

The prompt waits for its turn like any other, for the cache pages of the prompt alone. Pages that arrive before it has
them stay in the PD buffer. No credit is given for these, so the sender waits. When all of it has been copied the
attempt is ready like any other one, and the request for its answer goes on with its pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from transfer.engine.cache_need import cache_need
from transfer.engine.on_loop import on_loop
from transfer.engine.staged import Arrival, StagedPrompt
from transfer.errors import AttemptLost, IllegalTransition, ReservationRefused
from transfer.plan.blocks import PageTable

log = logging.getLogger(__name__)


class Stager(Protocol):
    """A `Stager` is the part of `EngineWorker` that is needed here."""

    def stage(self, staged: StagedPrompt) -> None: ...
    def arrived(self, staged: StagedPrompt, arrival: Arrival) -> None: ...
    def unstage(self, staged: StagedPrompt) -> None: ...


class CacheIntake:
    """A `CacheIntake` is an `Intake` over a KV cache of `num_pages` pages.

    `pages_taken(attempt, count)` and `cancel(attempt, reason)` are the receiver's.

    Mutable state: `_staged`, by attempt the prompts for which nobody has come. Event loop's thread only.
    """

    def __init__(
        self,
        worker: Stager,
        num_pages: int,
        pages_taken: Callable[[str, int], None],
        cancel: Callable[[str, str], object],
    ) -> None:
        self._worker = worker
        self._num_pages = num_pages
        self._pages_taken = pages_taken
        self._cancel = cancel
        self._staged: dict[str, StagedPrompt] = {}

    def __repr__(self) -> str:
        return f"<CacheIntake {list(self._staged.values())}>"

    def check(self, table: PageTable) -> None:
        """Raises `ReservationRefused` unless the cache can hold the prompt and one token of an answer."""
        need = cache_need(table.groups, table.chunk_size, table.num_tokens + 1, table.num_tokens)
        if need.num_pages > self._num_pages:
            raise ReservationRefused(
                f"the prompt needs {need.num_pages} pages of KV cache, and this engine has {self._num_pages}"
            )

    def opened(self, attempt: str, table: PageTable) -> None:
        staged = StagedPrompt(
            attempt=attempt,
            need=cache_need(table.groups, table.chunk_size, table.num_tokens, table.num_tokens),
            prompt_pages=table,
            on_copied=on_loop(lambda count: self._copied(attempt, count)),
            on_error=on_loop(lambda error: self._cancel(attempt, f"it could not be taken in: {error}")),
        )
        self._staged[attempt] = staged
        self._worker.stage(staged)

    def arrived(self, attempt: str, ordinals: range, pages: Sequence[int]) -> None:
        if (staged := self._staged.get(attempt)) is not None:
            self._worker.arrived(staged, Arrival(ordinals, list(pages)))

    def closed(self, attempt: str, reason: str) -> None:
        if (staged := self._staged.pop(attempt, None)) is not None:
            log.info("%r is dropped: %s", staged, reason)
            self._worker.unstage(staged)

    def hand_over(self, attempt: str) -> StagedPrompt:
        """Returns a prompt that has arrived. From here on it is the caller's."""
        return self._staged.pop(attempt)

    def close(self) -> None:
        """Drops all prompts, because nobody will come for them any more."""
        for attempt in list(self._staged):
            self.closed(attempt, "shutting down")

    def _copied(self, attempt: str, count: int) -> None:
        try:
            self._pages_taken(attempt, count)
        except (AttemptLost, IllegalTransition) as error:
            log.debug("what was copied of attempt %s is worthless: %s", attempt, error)
