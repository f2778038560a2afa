"""A scheduler whose model plays with tokens: what a page holds is a list, and every step reads all of it back."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from transfer.engine.api import GenerationJob
from transfer.engine.cache_need import cache_need
from transfer.engine.sampling import SamplingParams
from transfer.engine.scheduler import Scheduler
from transfer.engine.sequence import Sequence, Stage
from transfer.geometry import PageGroup
from transfer.plan.blocks import page_table
from transfer.plan.keys import chunk_keys
from transfer.wire import Handoff

CHUNK = 4
GROUPS = (PageGroup("full", 2),)
SYSTEM = st.sampled_from([list(range(9)), list(range(6)), [*range(5), 40, 41, 42, 43]])
"""How prompts begin: alike for a page, or two."""
TAIL = st.lists(st.integers(0, 1), max_size=9)
"""How they go on."""


def new_sequence(prompt: list[int], num_answer: int = 4, *, is_handoff: bool = False, **more: Any) -> Sequence:
    handoff = Handoff(attempt="a", prompt_token_ids=prompt, first_token_id=7, num_pages=1) if is_handoff else None
    job = GenerationJob(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0),
        max_tokens=num_answer,
        handoff=handoff,
    )
    need = cache_need(GROUPS, CHUNK, len(prompt) + num_answer - 1, len(prompt) if is_handoff else 0)
    table = page_table(GROUPS, len(prompt), CHUNK)
    keys = chunk_keys(prompt, table)
    return Sequence(job, need, table, on_token=lambda _: None, on_error=lambda _: None, keys=keys, **more)


class ToyScheduler:
    """A scheduler whose model writes tokens into pages, and reads all of them back at every step."""

    def __init__(self, num_pages: int, max_pinned: int = 0) -> None:
        self.scheduler = Scheduler(num_pages, CHUNK, max_pinned)
        self._content: dict[int, list[int]] = {}
        self.num_read = 0

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        for sequence in self.scheduler.admit():
            assert isinstance(sequence, Sequence)
            if sequence.job.handoff is not None:
                self._write(sequence, sequence.num_computed, sequence.job.prompt_token_ids[sequence.num_computed :])
                self.scheduler.computed(sequence, sequence.num_prompt_tokens)
                self._token(sequence)
        step = self.scheduler.next_step()
        if step.prefill is not None:
            chunk, sequence = step.prefill, step.prefill.sequence
            assert chunk.start == chunk.block * CHUNK == sequence.num_computed < chunk.end
            self._write(sequence, chunk.start, sequence.job.prompt_token_ids[chunk.start : chunk.end])
            self.num_read += chunk.end - chunk.start
            self.scheduler.computed(sequence, chunk.end)
            if chunk.is_last:
                self.scheduler.prefilled(sequence)
                self._token(sequence)
        for sequence in step.decode:
            self._write(sequence, sequence.num_computed, sequence.output[-1:])
            sequence.num_computed += 1
            self._token(sequence)
        self.scheduler.check_integrity()

    def run(self, *sequences: Sequence) -> None:
        """Until they are over; then they are dropped."""
        for sequence in sequences:
            self.scheduler.add(sequence)
        while any(sequence.stage is not Stage.OVER for sequence in sequences):
            self.step()
        for sequence in sequences:
            self.scheduler.drop(sequence)
        self.scheduler.check_integrity()

    def run_out(self, alive: list[Sequence]) -> None:
        """Works until all of these are over, drops each as soon as it is, and fails where one never ends."""
        for _ in range(20 * len(alive)):
            self.step()
            for sequence in [one for one in alive if one.stage is Stage.OVER]:
                assert sequence.num_reused >= sequence.num_pinned
                self.scheduler.drop(sequence)
                alive.remove(sequence)
        assert alive == []

    def _write(self, sequence: Sequence, position: int, tokens: list[int]) -> None:
        for at, token in enumerate(tokens, position):
            page = sequence.tables[0][at // CHUNK]
            assert page in sequence.own_pages, "what is shared is not written"
            assert page is not None
            kept = self._content.get(page, [])[: at % CHUNK]
            assert len(kept) == at % CHUNK
            self._content[page] = [*kept, token]
        all_tokens = (sequence.job.prompt_token_ids + sequence.output)[: position + len(tokens)]
        assert self._read(sequence, len(all_tokens)) == all_tokens

    def _read(self, sequence: Sequence, num_tokens: int) -> list[int]:
        pages = sequence.tables[0][: -(-num_tokens // CHUNK)]
        return [token for page in pages if page is not None for token in self._content[page]][:num_tokens]

    def _token(self, sequence: Sequence) -> None:
        sequence.append(90 + len(sequence.output))
        if sequence.is_finished or sequence.stops_after_first:
            self.scheduler.finish(sequence)
