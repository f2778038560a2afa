"""Prompts that arrive in pieces: their turn for cache pages, what becomes of their pages, and that none is stuck."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.engine.api import GenerationJob
from transfer.engine.cache_need import cache_need
from transfer.engine.intake import CacheIntake
from transfer.engine.sampling import SamplingParams
from transfer.engine.scheduler import Scheduler
from transfer.engine.sequence import Sequence, Stage
from transfer.engine.staged import Arrival, StagedPrompt
from transfer.errors import AttemptLost, IntegrityError, ReservationRefused
from transfer.geometry import PageGroup
from transfer.plan.blocks import page_table
from transfer.wire import Handoff

CHUNK = 4
ALIKE = (PageGroup("full", 2),)
HYBRID = (PageGroup("full", 1), PageGroup("sliding", 2, 6))
Groups = tuple[PageGroup, ...]


def unused(_: object) -> None:
    raise AssertionError("nobody calls this here")


def new_staged(name: str, num_prompt: int, groups: Groups = ALIKE) -> StagedPrompt:
    need = cache_need(groups, CHUNK, num_prompt, num_prompt)
    return StagedPrompt(name, need, page_table(groups, num_prompt, CHUNK), on_copied=unused, on_error=unused)


def new_sequence(name: str, num_prompt: int, num_answer: int = 4, groups: Groups = ALIKE) -> Sequence:
    prompt = list(range(num_prompt))
    job = GenerationJob(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0),
        max_tokens=num_answer,
        handoff=Handoff(attempt=name, prompt_token_ids=prompt, first_token_id=7, num_pages=1),
    )
    need = cache_need(groups, CHUNK, num_prompt + num_answer - 1, num_prompt)
    return Sequence(job, need, page_table(groups, num_prompt, CHUNK), on_token=unused, on_error=unused)


def arrive(scheduler: Scheduler, name: str, num_prompt: int, groups: Groups = ALIKE) -> StagedPrompt:
    staged = new_staged(name, num_prompt, groups)
    scheduler.add(staged)
    assert scheduler.admit() == [staged]
    return staged


@pytest.mark.parametrize("groups", [ALIKE, HYBRID])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 19, 40])
def test_a_sequence_goes_on_with_the_very_pages_of_its_prompt(groups: Groups, num_prompt: int) -> None:
    scheduler = Scheduler(40, CHUNK)
    staged = arrive(scheduler, "a", num_prompt, groups)
    before = [staged.page(ordinal) for ordinal in range(len(staged.prompt_pages))]
    assert scheduler.pool.num_held == len(set(before)), "pages for the prompt and for nothing else"
    sequence = new_sequence("a", num_prompt, 30, groups)
    scheduler.go_on(sequence, staged)
    scheduler.check_integrity()
    assert scheduler.admit() == [sequence]
    assert [sequence.page(ordinal) for ordinal in range(len(sequence.prompt_pages))] == before
    assert scheduler.pool.num_held == sequence.need.num_pages > len(before)
    scheduler.check_integrity()
    scheduler.unstage(staged)
    assert scheduler.pool.num_held == sequence.need.num_pages, "they are the sequence's now"
    scheduler.drop(sequence)
    assert scheduler.pool.num_held == 0


def test_an_attempts_name_may_come_again_while_its_sequence_runs() -> None:
    """The second prompt's pages are not the first one's: giving them back takes nothing from under the reader."""
    scheduler = Scheduler(20, CHUNK)
    sequence = new_sequence("a", 20, 6)
    scheduler.go_on(sequence, arrive(scheduler, "a", 20))
    assert scheduler.admit() == [sequence]
    scheduler.unstage(arrive(scheduler, "a", 24))
    scheduler.check_integrity()
    assert scheduler.pool.num_held == sequence.need.num_pages
    scheduler.drop(sequence)
    assert scheduler.pool.num_held == 0


def test_it_waits_for_its_turn_and_one_at_a_time_is_staged() -> None:
    scheduler = Scheduler(10, CHUNK)
    running, first, second = new_sequence("r", 20, 2), new_staged("1", 24), new_staged("2", 4)
    for holder in (running, first, second):
        scheduler.add(holder)
    assert scheduler.admit() == [running]
    assert first.tables == []
    scheduler.drop(running)
    assert scheduler.admit() == [first]
    assert scheduler.admit() == [], "there is room for the second, but the first one still has no sequence"
    assert scheduler.counts["staged"] == 1
    sequence = new_sequence("1", 24, 2)
    scheduler.go_on(sequence, first)
    assert scheduler.admit() == [sequence, second]


def test_the_answer_of_a_staged_prompt_comes_before_whoever_waits() -> None:
    scheduler = Scheduler(8, CHUNK)
    running = new_sequence("r", 8, 2)
    scheduler.add(running)
    scheduler.admit()
    staged = arrive(scheduler, "a", 20)
    waiting = new_sequence("w", 4, 2)
    scheduler.add(waiting)
    sequence = new_sequence("a", 20, 6)
    scheduler.go_on(sequence, staged)
    assert scheduler.admit() == [], "no page is left, for nobody"
    scheduler.drop(running)
    assert scheduler.admit() == [sequence]
    assert waiting.stage is Stage.WAITING
    scheduler.drop(sequence)
    assert scheduler.admit() == [waiting]


@pytest.mark.parametrize("stage", ["waiting", "staged", "its sequence waits", "its sequence runs"])
def test_pages_come_back_once_from_every_stage(stage: str) -> None:
    scheduler = Scheduler(8, CHUNK)
    blocker = new_sequence("b", 12, 1)
    if stage in ("waiting", "its sequence waits"):
        scheduler.add(blocker)
        scheduler.admit()
    staged, sequence = new_staged("a", 20 if stage != "waiting" else 24), new_sequence("a", 20, 6)
    scheduler.add(staged)
    scheduler.admit()
    assert bool(staged.tables) == (stage != "waiting")
    if stage.startswith("its sequence"):
        scheduler.go_on(sequence, staged)
        assert scheduler.admit() == ([sequence] if stage == "its sequence runs" else [])
    for _ in range(2):
        scheduler.unstage(staged)
        scheduler.check_integrity()
    if stage.startswith("its sequence"):
        assert scheduler.pool.num_held > blocker.need.num_pages - 1
        for _ in range(2):
            scheduler.drop(sequence)
    if blocker.tables:
        scheduler.drop(blocker)
    scheduler.check_integrity()
    assert scheduler.pool.num_held == 0
    assert not any(n for name, n in scheduler.counts.items() if name != "kept")


def test_what_is_not_staged_cannot_be_gone_on_with() -> None:
    scheduler = Scheduler(8, CHUNK)
    staged = arrive(scheduler, "a", 8)
    scheduler.unstage(staged)
    sequence = new_sequence("a", 8)
    with pytest.raises(IntegrityError, match="not staged"):
        scheduler.go_on(sequence, staged)
    staged = arrive(scheduler, "a", 8)
    with pytest.raises(ValueError, match="needs 9 cache pages of 8"):
        scheduler.go_on(new_sequence("a", 8, 27), staged)
    assert scheduler.counts["staged"] == 1
    assert sequence.stage is Stage.WAITING


# ── random lives ────────────────────────────────────────────────────────────────────────────────────────────────────

EVENT = st.one_of(
    st.tuples(st.just("sequence"), st.integers(1, 24), st.integers(1, 9)),
    st.tuples(st.just("prompt"), st.integers(1, 30), st.just(0)),
    st.tuples(st.just("next"), st.integers(0, 9), st.integers(1, 6)),
    st.tuples(st.just("end"), st.integers(0, 50), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, max_size=40), st.sampled_from([ALIKE, HYBRID]))
def test_nobody_is_stuck_and_no_page_is_lost(events: list[tuple[str, int, int]], groups: Groups) -> None:
    """A cache for one large request and not for two; whoever runs ends some time, whoever waits gets its turn."""
    scheduler = Scheduler(9 if groups is ALIKE else 13, CHUNK)
    prompts: list[tuple[StagedPrompt, int]] = []
    running: list[Sequence] = []
    for number, (event, size, more) in enumerate(events):
        if event == "sequence":
            scheduler.add(new_sequence(f"s{number}", size, more, groups))
        elif event == "prompt":
            prompts.append((new_staged(f"p{number}", size, groups), size))
            scheduler.add(prompts[-1][0])
        elif event == "next":
            _next_step_of_a_prompt(scheduler, prompts, size, more, groups)
        elif running:
            scheduler.drop(running.pop(size % len(running)))
        running += [holder for holder in scheduler.admit() if isinstance(holder, Sequence)]
        scheduler.check_integrity()
    for turn in range(4 * len(events) + 4):
        _next_step_of_a_prompt(scheduler, prompts, turn, 1 + turn % 6, groups)
        if running:
            scheduler.drop(running.pop(0))
        running += [holder for holder in scheduler.admit() if isinstance(holder, Sequence)]
        scheduler.check_integrity()
    assert scheduler.pool.num_held == 0
    assert not any(scheduler.counts.values())


def _next_step_of_a_prompt(
    scheduler: Scheduler, prompts: list[tuple[StagedPrompt, int]], which: int, num_answer: int, groups: Groups
) -> None:
    """The staged one fails, or is asked for; or one that waits for its turn fails."""
    staged = next(((prompt, size) for prompt, size in prompts if prompt.tables), None)
    if staged is None:
        if prompts and which % 5 == 0:
            scheduler.unstage(prompts.pop(which % len(prompts))[0])
        return
    prompts.remove(staged)
    if which % 3 == 0:
        scheduler.unstage(staged[0])
    else:
        scheduler.go_on(new_sequence(staged[0].attempt, staged[1], num_answer, groups), staged[0])


# ── the intake ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Told:
    """A worker, and a receiver, that only listen."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.lost = False

    def stage(self, staged: StagedPrompt) -> None:
        self.heard.append(staged)

    def arrived(self, staged: StagedPrompt, arrival: Arrival) -> None:
        self.heard.append(arrival)

    def unstage(self, staged: StagedPrompt) -> None:
        self.heard.append(("unstage", staged.attempt))

    def pages_taken(self, attempt: str, count: int) -> None:
        if self.lost:
            raise AttemptLost("it is over")
        self.heard.append((attempt, count))

    def cancel(self, attempt: str, reason: str) -> None:
        self.heard.append(("cancel", attempt, reason))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def intake(told: Told) -> CacheIntake:
    return CacheIntake(told, 10, told.pages_taken, told.cancel)


def test_the_cache_must_hold_the_prompt_and_a_token_of_the_answer(intake: CacheIntake) -> None:
    intake.check(page_table(ALIKE, 39, CHUNK))
    with pytest.raises(ReservationRefused, match="needs 11 pages of KV cache, and this engine has 10"):
        intake.check(page_table(ALIKE, 40, CHUNK))
    intake.check(page_table((PageGroup("sliding", 2, 6),), 4000, CHUNK))


async def test_what_arrives_goes_to_the_worker_until_it_is_closed(intake: CacheIntake, told: Told) -> None:
    intake.opened("a", page_table(ALIKE, 12, CHUNK))
    intake.arrived("a", range(2), [5, 4])
    staged = told.heard[0]
    assert told.heard[1:] == [Arrival(range(2), [5, 4])]
    staged.on_copied(2)
    await _turn()
    assert told.heard[2:] == [("a", 2)]
    intake.closed("a", "cancelled")
    intake.closed("a", "cancelled")
    intake.arrived("a", range(2, 3), [3])
    told.lost = True
    staged.on_copied(3)
    await _turn()
    assert told.heard[3:] == [("unstage", "a")], "once; what comes later is of no interest"


async def test_one_that_was_handed_over_is_not_dropped(intake: CacheIntake, told: Told) -> None:
    for attempt in ("a", "b"):
        intake.opened(attempt, page_table(ALIKE, 12, CHUNK))
    staged = intake.hand_over("a")
    assert (staged.attempt, staged.need.num_pages) == ("a", 3)
    intake.close()
    assert told.heard[2:] == [("unstage", "b")]


async def test_what_cannot_be_copied_ends_the_attempt(intake: CacheIntake, told: Told) -> None:
    intake.opened("a", page_table(ALIKE, 12, CHUNK))
    told.heard[0].on_error(RuntimeError("out of order"))
    await _turn()
    assert told.heard[1:] == [("cancel", "a", "it could not be taken in: out of order")]


async def _turn() -> None:
    """What was handed to the loop has run."""
    await asyncio.sleep(0)
