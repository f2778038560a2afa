"""One sequence inside the engine: what is known of it, and how far it has come. It is plain data, without torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from transfer.engine.api import GenerationJob
from transfer.engine.cache_need import BlockTable, CacheNeed, cache_page
from transfer.engine.sampling import SampledToken
from transfer.engine.staged import StagedPrompt
from transfer.errors import IllegalTransition
from transfer.plan.blocks import PageTable

_serial = itertools.count()


class Stage(Enum):
    """A `Stage` tells whether a sequence waits for cache pages, reads its prompt, writes its answer, or is over."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    OVER = "over"


_ALLOWED = {
    Stage.WAITING: {Stage.PREFILL, Stage.DECODE, Stage.OVER},
    Stage.PREFILL: {Stage.DECODE, Stage.OVER},
    Stage.DECODE: {Stage.OVER},
    Stage.OVER: set[Stage](),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """A `Sequence` takes the cache pages of `need` when it leaves WAITING. It holds them until the scheduler drops it.

    The callbacks run on the engine's thread.
    """

    job: GenerationJob
    need: CacheNeed
    prompt_pages: PageTable
    """The pages of the prompt in the form in which they are sent or were received."""
    on_token: Callable[[SampledToken], None]
    on_error: Callable[[Exception], None]
    on_layers: Callable[[int, int, int, int], None] | None = None
    """Is called with (ordinal in `prompt_pages`, cache page, first layer, end layer) as soon as the prompt's KV of
    these layers of the page's group is in memory, in the middle of the forward pass that computes it."""
    stops_after_first: bool = False
    """True for a prefiller's sequence: it is over once the first token is sampled, and its pages are kept until it
    is dropped."""
    received_pages: list[int] = field(default_factory=list)
    """Holds the pages of the PD buffer with this prompt's KV, by ordinal from `num_pinned` on. They are copied in
    before decoding."""
    check_received: Callable[[], None] | None = None
    """Is called when the received pages have been copied. Raises where that was not this prompt's KV."""
    on_received: Callable[[], None] | None = None
    """Is called once, when `received_pages` are not needed any more (copied, or given up)."""
    owner: str = field(default_factory=lambda: f"sequence {next(_serial)}")
    """The name under which the sequence's cache pages are held. Where the sequence goes on with a staged prompt or with
    pins, it is their name."""
    keys: list[bytes] = field(default_factory=list)
    """Holds the names of the prompt's pages by ordinal, under which others find them. It is empty where nothing is
    shared."""
    num_pinned: int = 0
    """Counts the first of `keys` that were pinned for the sequence's attempt, under `owner`. Their pages are not in the
    PD buffer."""
    stage: Stage = Stage.WAITING
    pages: list[int] = field(default_factory=list)
    """Holds the sequence's cache pages in the order of `CacheNeed.tables`. It is empty while the sequence holds
    none."""
    num_reused: int = 0
    """Counts the first of `pages` that hold what earlier requests left. Others may be reading them, so they are never
    written."""
    tables: list[BlockTable] = field(default_factory=list)
    """Holds `pages` as one table per page group."""
    num_computed: int = 0
    """Counts the tokens whose KV is in the cache."""
    output: list[int] = field(default_factory=list)
    """Holds the answer so far. For a resumed answer it begins with those of its tokens that end the prompt."""
    counts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for token_id in self.job.answer_token_ids:
            self.append(token_id)

    def __repr__(self) -> str:
        num_new = len(self.output) - self.job.num_answer_tokens
        progress = f"{self.num_computed}/{self.num_prompt_tokens}+{num_new}"
        return f"<Sequence {self.job.request_id} {self.stage.value} {progress}>"

    def move_to(self, stage: Stage) -> None:
        if stage not in _ALLOWED[self.stage]:
            raise IllegalTransition(f"{self!r}: {self.stage.name} → {stage.name}")
        self.stage = stage

    def page(self, ordinal: int) -> int:
        """Returns the cache page for page `ordinal` of the prompt. Raises `IntegrityError` if it is null here."""
        return cache_page(self.prompt_pages, self.tables, ordinal)

    def go_on_with(self, staged: StagedPrompt) -> None:
        """Takes over the pages of a staged prompt. The prompt is in them; the answer still needs some."""
        self.owner, self.pages, self.tables = staged.owner, staged.pages, staged.tables

    @property
    def own_pages(self) -> list[int]:
        """The pages that only this sequence has written."""
        return self.pages[self.num_reused :]

    @property
    def reusable_keys(self) -> list[bytes]:
        """The names of those pages that need not be computed, or copied, where they are found.

        Only full blocks are named. A sequence that reads its prompt here must compute at least its last token.
        """
        num_tokens = self.num_prompt_tokens - (self.job.handoff is None)
        return self.keys[: num_tokens // self.prompt_pages.chunk_size]

    @property
    def num_cached_tokens(self) -> int:
        """Counts the prompt tokens that were not read because their KV was here. It is 0 for a handoff."""
        return self.num_reused * self.prompt_pages.chunk_size if self.job.handoff is None else 0

    @property
    def num_prompt_tokens(self) -> int:
        """Counts the tokens to be read before one is sampled, a resumed answer's included."""
        return len(self.job.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Tells whether the answer is as long as it may be, or has ended by itself."""
        return len(self.output) >= self.job.max_tokens or self.output[-1] in self.job.eos_token_ids

    @property
    def forbidden(self) -> frozenset[int]:
        """The end-of-sequence ids, while the answer is shorter than `min_tokens`; then none."""
        return self.job.eos_token_ids if len(self.output) < self.job.min_tokens else frozenset()

    def append(self, token_id: int) -> None:
        self.output.append(token_id)
        self.counts[token_id] += 1

    def let_go_of_received(self) -> None:
        """Tells once that the PD buffer's pages are not needed any more. Idempotent."""
        if self.on_received is not None:
            callback, self.on_received = self.on_received, None
            callback()
