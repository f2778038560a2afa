"""Prompts that begin alike, in the scheduler: what is found is not computed again, never written, and never lost.

The cache's bytes are played by a dict: page → the tokens whose KV it holds.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.toy_scheduler import CHUNK, SYSTEM, TAIL, ToyScheduler, new_sequence
from transfer.engine.sequence import Sequence, Stage
from transfer.errors import IntegrityError

PROMPT = list(range(14))


@pytest.mark.parametrize(
    ("prompt", "num_reused"),
    [
        (PROMPT, 3),
        (PROMPT[:12], 2),
        (PROMPT[:13], 3),
        (PROMPT[:4], 0),
        (PROMPT[:5], 1),
        (PROMPT + [99] * 9, 3),
        ([*PROMPT[:7], 99, *PROMPT[8:]], 1),
        ([99, *PROMPT[1:]], 0),
    ],
    ids=["again", "full blocks only", "and a token", "one block", "and a token more", "longer", "differs", "at once"],
)
def test_only_what_was_not_found_is_computed(prompt: list[int], num_reused: int) -> None:
    """At least one token is: there is nothing to sample from otherwise."""
    toy = ToyScheduler(20)
    toy.run(first := new_sequence(PROMPT))
    assert (toy.num_read, first.num_cached_tokens) == (14, 0)
    toy.run(second := new_sequence(prompt))
    assert second.num_cached_tokens == num_reused * CHUNK
    assert toy.num_read == 14 + len(prompt) - num_reused * CHUNK


def test_pages_are_shared_while_both_run() -> None:
    toy = ToyScheduler(20)
    first, second = new_sequence(PROMPT, 30), new_sequence([*PROMPT, 50], 30)
    toy.add(first)
    for _ in range(5):
        toy.step()
    toy.add(second)
    toy.step()
    assert second.pages[:3] == first.pages[:3]
    assert not set(second.pages[3:]) & set(first.pages)
    toy.scheduler.drop(first)
    toy.scheduler.check_integrity()
    while second.stage is not Stage.OVER:
        toy.step()
    toy.scheduler.drop(second)
    assert toy.scheduler.store.num_available == 20


def test_two_that_are_read_at_the_same_time_have_a_copy_each() -> None:
    toy = ToyScheduler(20)
    first, second = new_sequence(PROMPT), new_sequence(PROMPT)
    toy.run(first, second)
    assert toy.num_read == 28
    toy.run(third := new_sequence(PROMPT))
    assert third.num_cached_tokens == 12


def test_a_handoff_is_copied_only_where_it_is_missing() -> None:
    """Of a prompt of full blocks nothing is left to copy: its next token comes into a block of its own."""
    toy = ToyScheduler(20)
    toy.run(new_sequence(PROMPT[:12]))
    toy.run(handed := new_sequence(PROMPT[:12], is_handoff=True))
    assert (handed.num_reused, handed.num_cached_tokens) == (3, 0)
    toy.run(new_sequence(list(range(50, 64)), is_handoff=True))
    toy.run(read := new_sequence(list(range(50, 66))))
    assert read.num_cached_tokens == 12, "and what was handed over is found too"


def test_an_abort_in_mid_prompt_leaves_what_was_complete() -> None:
    toy = ToyScheduler(20)
    aborted = toy.add(new_sequence(PROMPT))
    for _ in range(2):
        toy.step()
    toy.scheduler.drop(aborted)
    toy.scheduler.check_integrity()
    assert toy.scheduler.store.num_available == 20
    toy.run(again := new_sequence(PROMPT))
    assert again.num_cached_tokens == 8


def test_what_nobody_holds_makes_room() -> None:
    toy = ToyScheduler(5)
    toy.run(new_sequence(PROMPT))
    toy.run(new_sequence(list(range(30, 44)), 6))
    toy.run(again := new_sequence(PROMPT))
    assert again.num_cached_tokens == 0


def test_the_front_of_a_prompt_stays_longer_than_its_end() -> None:
    toy = ToyScheduler(5)
    toy.run(new_sequence(PROMPT))
    toy.run(new_sequence([60, 61, 62], 8))
    toy.run(again := new_sequence(PROMPT))
    assert again.num_cached_tokens == 8


def test_who_waits_for_pages_holds_none() -> None:
    """Not those that it would share either: others may need them."""
    toy = ToyScheduler(6)
    toy.run(new_sequence(PROMPT))
    blocker = toy.add(new_sequence([70, 71, 72], 6))
    toy.step()
    waiting = toy.add(new_sequence(PROMPT, 10))
    toy.step()
    assert (waiting.stage, waiting.pages) == (Stage.WAITING, [])
    assert toy.scheduler.store.num_available == 4
    toy.scheduler.drop(blocker)
    toy.step()
    assert waiting.num_cached_tokens > 0
    toy.scheduler.drop(waiting)


def test_a_prefiller_keeps_what_it_shares_until_it_is_dropped() -> None:
    """The pages are being sent."""
    toy = ToyScheduler(4)
    toy.run(new_sequence(PROMPT, 1))
    kept = toy.add(new_sequence(PROMPT, 1, stops_after_first=True))
    toy.step()
    assert (kept.stage, kept.num_reused) == (Stage.OVER, 3)
    other = toy.add(new_sequence([70], 1))
    toy.step()
    assert other.stage is Stage.WAITING
    toy.scheduler.drop(kept)
    toy.step()
    assert other.stage is Stage.OVER


def test_two_that_write_one_page_are_noticed() -> None:
    toy = ToyScheduler(20)
    first, second = new_sequence(PROMPT), new_sequence([99, *PROMPT])
    for sequence in (toy.add(first), toy.add(second)):
        toy.step()
        assert sequence.pages
    second.pages[0] = first.pages[0]
    second.tables = second.need.tables(second.pages)
    with pytest.raises(IntegrityError):
        toy.scheduler.check_integrity()


ADD = st.tuples(st.just("add"), SYSTEM, TAIL, st.integers(1, 9), st.booleans())
EVENT = st.one_of(ADD, st.just(("step",)), st.just(("step",)), st.tuples(st.just("drop"), st.integers(0, 9)))


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, max_size=60), st.sampled_from([8, 12, 30]))
def test_every_sequence_reads_its_own_tokens(events: list[Any], num_pages: int) -> None:
    """Whatever is shared, evicted, aborted, handed over or waiting meanwhile; and all of it ends."""
    toy = ToyScheduler(num_pages)
    alive: list[Sequence] = []
    for event in events:
        if event[0] == "add":
            _, system, tail, num_answer, is_handoff = event
            alive.append(toy.add(new_sequence(system + tail, num_answer, is_handoff=is_handoff)))
        elif event[0] == "drop" and alive:
            toy.scheduler.drop(alive.pop(event[1] % len(alive)))
        else:
            toy.step()
        toy.scheduler.check_integrity()
    toy.run_out(alive)
    assert toy.scheduler.store.num_available == num_pages
    assert not any(toy.scheduler.counts.values())
