"""Whose turn it is: nobody is frozen by a long prompt, and pages come back from every stage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.engine.api import GenerationJob
from transfer.engine.cache_need import cache_need
from transfer.engine.sampling import SamplingParams
from transfer.engine.scheduler import Scheduler
from transfer.engine.sequence import Sequence, Stage
from transfer.errors import IllegalTransition, IntegrityError
from transfer.geometry import PageGroup
from transfer.plan.blocks import page_table
from transfer.wire import Handoff

CHUNK = 4
ALIKE = (PageGroup("full", 2),)
HYBRID = (PageGroup("full", 1), PageGroup("sliding", 2, 6), PageGroup("sliding", 2, 6))


def new_sequence(
    name: str,
    num_prompt: int,
    num_answer: int = 4,
    *,
    is_handoff: bool = False,
    groups: tuple[PageGroup, ...] = ALIKE,
    **more: Any,
) -> Sequence:
    prompt = list(range(num_prompt))
    handoff = Handoff(attempt=name, prompt_token_ids=prompt, first_token_id=7, num_pages=1) if is_handoff else None
    job = GenerationJob(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0),
        max_tokens=num_answer,
        handoff=handoff,
    )
    need = cache_need(groups, CHUNK, num_prompt + num_answer, num_prompt if is_handoff else 0)
    prompt_pages = page_table(groups, num_prompt, CHUNK)
    return Sequence(job, need, prompt_pages, on_token=lambda _: None, on_error=lambda _: None, **more)


def pages_of(sequence: Sequence) -> list[int]:
    return [page for table in sequence.tables for page in table if page is not None]


def run_step(scheduler: Scheduler) -> tuple[str | None, list[str]]:
    """One turn as the worker takes it; whose chunk was read, and whose tokens were written."""
    scheduler.admit()
    step = scheduler.next_step()
    if step.prefill is not None:
        chunk = step.prefill
        assert chunk.start == chunk.sequence.num_computed
        assert 0 < chunk.end - chunk.start <= CHUNK
        assert chunk.start == chunk.block * CHUNK, "a chunk begins a block"
        chunk.sequence.num_computed = chunk.end
        if chunk.is_last:
            scheduler.prefilled(chunk.sequence)
            write_token(scheduler, chunk.sequence)
    for sequence in step.decode:
        write_token(scheduler, sequence)
    scheduler.check_integrity()
    read = step.prefill.sequence.job.request_id if step.prefill else None
    return read, [sequence.job.request_id for sequence in step.decode]


def write_token(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.append(99)
    if sequence.is_finished or sequence.stops_after_first:
        scheduler.finish(sequence)


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_long_prompt_freezes_neither_answers_nor_other_prompts() -> None:
    scheduler = Scheduler(100, CHUNK)
    answer = new_sequence("answer", 4, 30)
    scheduler.add(answer)
    run_step(scheduler)
    for name, num_prompt in (("long", 40), ("short", 8), ("tiny", 3)):
        scheduler.add(new_sequence(name, num_prompt))
    turns = [run_step(scheduler) for _ in range(6)]
    assert [read for read, _ in turns] == ["long", "short", "tiny", "long", "short", "long"]
    assert all("answer" in written for _, written in turns), "one token of the answer in every step"


def test_a_prompt_that_comes_late_waits_for_one_turn_of_each_other() -> None:
    scheduler = Scheduler(100, CHUNK)
    for name in ("a", "b"):
        scheduler.add(new_sequence(name, 40))
    run_step(scheduler)
    scheduler.add(new_sequence("late", 4))
    reads = [run_step(scheduler)[0] for _ in range(3)]
    assert reads.index("late") <= 2


def test_a_prompt_is_read_chunk_by_chunk_and_its_last_chunk_is_what_is_left() -> None:
    scheduler = Scheduler(100, CHUNK)
    sequence = new_sequence("a", 10)
    scheduler.add(sequence)
    ends = []
    while sequence.stage is not Stage.DECODE:
        run_step(scheduler)
        ends.append(sequence.num_computed)
    assert ends == [4, 8, 10]


def test_a_handoff_goes_straight_to_its_answer() -> None:
    scheduler = Scheduler(100, CHUNK)
    sequence = new_sequence("a", 40, is_handoff=True)
    scheduler.add(sequence)
    assert scheduler.admit() == [sequence]
    assert sequence.stage is Stage.DECODE
    step = scheduler.next_step()
    assert (step.prefill, step.decode) == (None, [sequence])


def test_nothing_to_do() -> None:
    scheduler = Scheduler(2, CHUNK)
    assert not scheduler.has_work
    assert scheduler.next_step().prefill is None
    scheduler.add(new_sequence("kept", 4, 4, stops_after_first=True))
    run_step(scheduler)
    scheduler.add(new_sequence("waits", 4, 4))
    scheduler.admit()
    assert not scheduler.has_work, "who waits for pages gives no work: the worker sleeps"
    assert scheduler.counts == {"waiting": 1, "prefilling": 0, "decoding": 0, "kept": 1, "staged": 0}


# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_pages_before_the_first_step_in_order_of_arrival() -> None:
    scheduler = Scheduler(6, CHUNK)
    big, bigger, small = new_sequence("big", 12), new_sequence("bigger", 16), new_sequence("small", 3, 1)
    for sequence in (big, bigger, small):
        scheduler.add(sequence)
    assert scheduler.admit() == [big]
    assert len(pages_of(big)) == 4
    assert scheduler.admit() == [], "small would fit, but it is not its turn"
    scheduler.drop(big)
    assert scheduler.admit() == [bigger, small]
    scheduler.check_integrity()


def test_one_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(2, CHUNK)
    with pytest.raises(ValueError, match="needs 3 cache pages of 2"):
        scheduler.add(new_sequence("a", 8))
    assert scheduler.counts["waiting"] == 0


STAGES = ("waiting", "admitted", "in mid-prompt", "answering", "finished", "handoff")


@pytest.mark.parametrize("stage", STAGES)
def test_pages_come_back_from_every_stage(stage: str) -> None:
    scheduler = Scheduler(8, CHUNK)
    blocker = new_sequence("blocker", 20)
    if stage == "waiting":
        scheduler.add(blocker)
        scheduler.admit()
    sequence = new_sequence("a", 10, is_handoff=stage == "handoff")
    scheduler.add(sequence)
    if stage not in ("waiting", "admitted"):
        for _ in range({"in mid-prompt": 1, "answering": 3, "finished": 6, "handoff": 1}[stage]):
            run_step(scheduler)
    scheduler.admit()
    expected = {"waiting": Stage.WAITING, "admitted": Stage.PREFILL, "in mid-prompt": Stage.PREFILL}
    assert sequence.stage is expected.get(stage, Stage.OVER if stage == "finished" else Stage.DECODE)

    scheduler.drop(sequence)
    scheduler.drop(sequence)
    scheduler.drop(blocker) if stage == "waiting" else None
    scheduler.check_integrity()
    assert (sequence.stage, sequence.tables, scheduler.pool.num_free) == (Stage.OVER, [], 8)
    assert not any(scheduler.counts.values())


def test_a_finished_sequence_keeps_its_pages_until_it_is_dropped() -> None:
    """A prefiller's pages are read by the transfer after the prompt was computed."""
    scheduler = Scheduler(4, CHUNK)
    sequence = new_sequence("a", 8, 4, stops_after_first=True)
    scheduler.add(sequence)
    for _ in range(2):
        run_step(scheduler)
    assert (sequence.stage, len(pages_of(sequence)), scheduler.pool.num_free) == (Stage.OVER, 3, 1)
    scheduler.finish(sequence)
    assert scheduler.counts["kept"] == 1
    scheduler.drop(sequence)
    assert scheduler.pool.num_free == 4


def test_a_handoff_gets_pages_for_what_it_will_read_and_no_more() -> None:
    """40 tokens are 10 blocks; of them a window of 6 needs tokens 35 to 39: blocks 8 and 9. The answer is block 10."""
    scheduler = Scheduler(100, CHUNK)
    sequence = new_sequence("a", 40, 4, is_handoff=True, groups=HYBRID)
    scheduler.add(sequence)
    scheduler.admit()
    full, *windowed = sequence.tables
    assert None not in full
    assert len(full) == 11
    for table in windowed:
        assert [block for block, page in enumerate(table) if page is not None] == [8, 9, 10]
    assert scheduler.pool.num_held == len(set(pages_of(sequence))) == 11 + 3 + 3
    assert [sequence.page(ordinal) for ordinal in range(len(sequence.prompt_pages))] == [
        *full[:8], full[8], windowed[0][8], windowed[1][8], full[9], windowed[0][9], windowed[1][9],
    ]  # fmt: skip
    scheduler.check_integrity()


def test_a_page_that_is_null_here_is_not_given_out() -> None:
    sequence = new_sequence("a", 8, groups=HYBRID)
    sequence.tables = [[5, 6], [None, 7], [None, 8]]
    with pytest.raises(IntegrityError, match="no page for block 0 of group 1"):
        sequence.page(1)


def test_a_table_that_is_not_what_is_held_is_noticed() -> None:
    scheduler = Scheduler(4, CHUNK)
    sequence = new_sequence("a", 8)
    scheduler.add(sequence)
    scheduler.admit()
    sequence.tables[0][0] = None
    with pytest.raises(IntegrityError, match="has in its tables"):
        scheduler.check_integrity()


def test_an_illegal_stage_is_refused_and_changes_nothing() -> None:
    sequence = new_sequence("a", 4)
    sequence.move_to(Stage.OVER)
    with pytest.raises(IllegalTransition, match="OVER → PREFILL"):
        sequence.move_to(Stage.PREFILL)
    assert sequence.stage is Stage.OVER


def test_received_pages_are_let_go_of_once() -> None:
    calls = []
    sequence = new_sequence("a", 4, is_handoff=True, on_received=lambda: calls.append(1))
    sequence.let_go_of_received()
    sequence.let_go_of_received()
    assert calls == [1]


# ── random lives ────────────────────────────────────────────────────────────────────────────────────────────────────

ADD = st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 6), st.booleans())
DROP = st.tuples(st.just("drop"), st.integers(0, 50))
STEP = st.just(("step",))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(ADD, DROP, STEP, STEP), max_size=50), st.sampled_from([ALIKE, HYBRID]))
def test_everyone_finishes_and_no_page_is_lost(events: list[Any], groups: tuple[PageGroup, ...]) -> None:
    num_pages = 9 if groups is ALIKE else 15
    scheduler = Scheduler(num_pages, CHUNK)
    alive: list[Sequence] = []
    for number, event in enumerate(events):
        if event[0] == "add":
            _, num_prompt, num_answer, is_handoff = event
            sequence = new_sequence(f"s{number}", num_prompt, num_answer, is_handoff=is_handoff, groups=groups)
            alive.append(sequence)
            scheduler.add(sequence)
        elif event[0] == "drop" and alive:
            scheduler.drop(alive.pop(event[1] % len(alive)))
        elif event[0] == "step":
            run_step(scheduler)
        scheduler.check_integrity()
    _run_to_the_end(scheduler, alive)
    assert scheduler.pool.num_free == num_pages
    assert not any(scheduler.counts.values())


def _run_to_the_end(scheduler: Scheduler, alive: list[Sequence]) -> None:
    """Every step does something for somebody, so all end within as many steps as there are chunks and tokens."""
    most = sum(s.num_prompt_tokens // CHUNK + 2 + s.job.max_tokens for s in alive) + 1
    for _ in range(most):
        run_step(scheduler)
        for sequence in [s for s in alive if s.stage is Stage.OVER]:
            scheduler.drop(sequence)
            alive.remove(sequence)
    assert alive == []
