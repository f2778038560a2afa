"""A prompt that arrives in pieces, larger than the PD buffer: its cache pages, before anybody asks for its answer.

These are the steps of such a prompt:

    waiting for cache pages ──► staged, pages are copied in as they arrive ──► a sequence goes on with it
             └──────────────────────────┴── failed, cancelled, nobody came ──► dropped
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from transfer.engine.cache_need import BlockTable, CacheNeed, cache_page
from transfer.plan.blocks import PageTable

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Arrival:
    """An `Arrival` tells which pages of the prompt lie in which pages of the PD buffer."""

    ordinals: range
    received_pages: list[int]


@dataclass(slots=True, eq=False)
class StagedPrompt:
    """A `StagedPrompt` has cache pages for one attempt's prompt, and for nothing else. It is plain data; the callbacks
    run on the engine's thread.

    Mutable state: `pages` and `tables` (none while it waits for them), `arrivals` (not copied so far).
    """

    attempt: str
    need: CacheNeed
    prompt_pages: PageTable
    on_copied: Callable[[int], None]
    """Is called with the number of pages, first ones first, that have been copied in all."""
    on_error: Callable[[Exception], None]
    pages: list[int] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    owner: str = field(default_factory=lambda: f"prompt {next(_serial)}")
    """The name under which the prompt's cache pages are held. Each prompt has another one, because an attempt's name
    may come again while a sequence still has the first one's pages."""

    def __repr__(self) -> str:
        state = "staged" if self.tables else "waiting"
        return f"<StagedPrompt {self.attempt[:8]} {state}, {self.prompt_pages!r}>"

    @property
    def own_pages(self) -> list[int]:
        return self.pages

    def page(self, ordinal: int) -> int:
        """Returns the cache page for page `ordinal` of the prompt."""
        return cache_page(self.prompt_pages, self.tables, ordinal)
