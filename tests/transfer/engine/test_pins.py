"""What is pinned for prompts that are still being sent: it stays, it is given back, and nobody ever waits for it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.toy_scheduler import CHUNK, SYSTEM, TAIL, ToyScheduler, new_sequence
from transfer.engine.sequence import Sequence, Stage
from transfer.errors import IntegrityError

PROMPT = list(range(14))
OTHER = list(range(50, 64))


def keys_of(prompt: list[int]) -> list[bytes]:
    """As a prefiller names them, without the last page."""
    return new_sequence(prompt).keys[: -(-len(prompt) // CHUNK) - 1]


def is_held(toy: ToyScheduler, key: bytes) -> bool:
    return any(o.key == key and o.owners for o in toy.scheduler.store._objects)


def handed(toy: ToyScheduler, attempt: str, prompt: list[int], num_pinned: int, num_answer: int = 4) -> Sequence:
    """The sequence of an attempt that was pinned and has arrived."""
    sequence = new_sequence(prompt, num_answer, is_handoff=True)
    toy.scheduler.adopt_pins(sequence, attempt, num_pinned)
    return sequence


def test_what_is_pinned_outlives_those_who_need_room() -> None:
    toy = ToyScheduler(20, max_pinned=10)
    toy.run(new_sequence(PROMPT))
    assert toy.scheduler.pin("a", keys_of(PROMPT)) == 3
    toy.run(new_sequence(OTHER, 40))
    toy.scheduler.check_integrity()
    assert toy.scheduler.statistics().num_evicted == 0
    toy.run(sequence := handed(toy, "a", PROMPT, 3))
    assert (sequence.num_reused, toy.scheduler.store.num_available) == (3, 20)


def test_what_is_not_pinned_is_gone() -> None:
    """The same without the pin, so that the test above says something."""
    toy = ToyScheduler(20)
    toy.run(new_sequence(PROMPT))
    toy.run(new_sequence(OTHER, 64))
    toy.run(sequence := new_sequence(PROMPT, is_handoff=True))
    assert sequence.num_reused < 3


@pytest.mark.parametrize("max_pinned", [0, 1, 2, 3, 9])
def test_pins_leave_room_for_the_longest_sequence(max_pinned: int) -> None:
    toy = ToyScheduler(10 + max_pinned, max_pinned)
    toy.run(new_sequence(PROMPT))
    assert toy.scheduler.pin("a", keys_of(PROMPT)) == min(3, max_pinned)
    toy.scheduler.check_integrity()
    toy.run(new_sequence(OTHER, 10 * CHUNK - 14 + 1))


def test_a_page_that_several_attempts_pin_counts_once() -> None:
    toy = ToyScheduler(13, max_pinned=3)
    toy.run(new_sequence(PROMPT), new_sequence(OTHER[:6]))
    for attempt in "abc":
        assert toy.scheduler.pin(attempt, keys_of(PROMPT)) == 3
    assert toy.scheduler.pin("d", keys_of(OTHER[:6])) == 0
    for attempt in "ab":
        toy.scheduler.unpin(attempt)
        assert toy.scheduler.pin("d", keys_of(OTHER[:6])) == 0
    toy.scheduler.unpin("c")
    assert toy.scheduler.pin("d", keys_of(OTHER[:6])) == 1
    toy.scheduler.check_integrity()
    toy.scheduler.unpin("d")
    assert toy.scheduler.store.num_available == 13


def test_the_head_never_waits_for_a_pin() -> None:
    """The pins' own sequence waits behind it: had they taken the head's room, neither would ever begin."""
    toy = ToyScheduler(12, max_pinned=2)
    toy.run(new_sequence(PROMPT))
    num_pinned = toy.scheduler.pin("a", keys_of(PROMPT))
    largest = toy.add(new_sequence(OTHER, 10 * CHUNK - 14 + 1))
    sequence = toy.add(handed(toy, "a", PROMPT, num_pinned))
    for waiting in (largest, sequence):
        for _ in range(60):
            toy.step()
        assert waiting.stage is Stage.OVER
        toy.scheduler.drop(waiting)
    assert toy.scheduler.store.num_available == 12


def test_what_a_sequence_has_taken_over_makes_room_for_other_pins() -> None:
    toy = ToyScheduler(13, max_pinned=3)
    toy.run(new_sequence(PROMPT), new_sequence(OTHER[:9]))
    toy.scheduler.pin("a", keys_of(PROMPT))
    sequence = toy.add(handed(toy, "a", PROMPT, 3))
    assert toy.scheduler.pin("b", keys_of(OTHER[:9])) == 0, "it may still have to wait"
    toy.step()
    assert toy.scheduler.pin("b", keys_of(OTHER[:9])) == 2
    toy.scheduler.unpin("b")
    toy.scheduler.drop(sequence)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "while it waits for pages"])
@pytest.mark.parametrize("what", ["unpinned", "dropped", "ends", "refused"])
def test_everything_comes_back(what: str, waits: bool) -> None:
    toy = ToyScheduler(13, max_pinned=3)
    toy.run(new_sequence(PROMPT))
    assert toy.scheduler.pin("a", keys_of(PROMPT)) == 3
    blocker = toy.add(new_sequence(OTHER, 10 * CHUNK - 14 + 1)) if waits else None
    toy.step()
    if what == "unpinned":
        toy.scheduler.unpin("a")
        toy.scheduler.unpin("a")
    else:
        sequence = handed(toy, "a", PROMPT, 3)
        toy.scheduler.unpin("a")
        assert is_held(toy, keys_of(PROMPT)[0]), "whoever adopted it answers for it"
        if what == "refused":
            toy.scheduler.refused(sequence)
        else:
            toy.add(sequence)
            toy.step()
            assert (sequence.stage is Stage.WAITING) == waits
            if what == "ends" and blocker is not None:
                toy.scheduler.drop(blocker)
            for _ in range(9 if what == "ends" else 0):
                toy.step()
            assert (sequence.stage is Stage.OVER) == (what == "ends")
            toy.scheduler.drop(sequence)
            toy.scheduler.drop(sequence)
    if blocker is not None:
        toy.scheduler.drop(blocker)
    toy.scheduler.check_integrity()
    assert toy.scheduler.store.num_available == 13
    assert toy.scheduler._pins.pages == set()


def test_an_attempts_name_may_come_again_while_its_sequence_runs() -> None:
    """What is pinned under the name then is not the sequence's: giving it back takes nothing from under the reader."""
    toy = ToyScheduler(20, max_pinned=6)
    toy.run(new_sequence(PROMPT))
    toy.scheduler.pin("a", keys_of(PROMPT))
    running = toy.add(handed(toy, "a", PROMPT, 3, num_answer=30))
    toy.step()
    assert toy.scheduler.pin("a", keys_of(PROMPT)) == 3
    with pytest.raises(IntegrityError, match="already"):
        toy.scheduler.pin("a", keys_of(PROMPT))
    toy.scheduler.unpin("a")
    toy.scheduler.check_integrity()
    assert all(is_held(toy, key) for key in keys_of(PROMPT))
    for _ in range(30):
        toy.step()
    assert running.stage is Stage.OVER
    toy.scheduler.drop(running)


def test_who_waits_is_told_when_a_pin_goes() -> None:
    """So that a sleeping engine looks again."""
    toy = ToyScheduler(13, max_pinned=3)
    toy.run(new_sequence(PROMPT))
    toy.scheduler.pin("a", keys_of(PROMPT))
    assert not toy.scheduler.unpin("a")
    toy.scheduler.pin("a", keys_of(PROMPT))
    blocker, waiting = toy.add(new_sequence(OTHER, 20)), toy.add(new_sequence(OTHER[1:], 20))
    toy.step()
    assert waiting.stage is Stage.WAITING
    assert toy.scheduler.unpin("a")
    for sequence in (blocker, waiting):
        toy.scheduler.drop(sequence)


def test_two_threads_at_once() -> None:
    """One pins and unpins while the other reads prompts into the cache and evicts them; nothing is lost."""
    toy, is_over, errors = ToyScheduler(12, max_pinned=4), threading.Event(), list[BaseException]()
    prompts = [[seed, *range(12)] for seed in range(100, 108)]

    def pin() -> None:
        try:
            number = 0
            while not is_over.is_set():
                attempt, number = f"attempt {number}", number + 1
                toy.scheduler.pin(attempt, keys_of(prompts[number % 8]))
                toy.scheduler.statistics()
                toy.scheduler.unpin(attempt)
        except BaseException as error:  # told to the test
            errors.append(error)

    thread, interval = threading.Thread(target=pin), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for number in range(250):
            toy.run(new_sequence(prompts[number % 8], 1 + number % 18))
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()
    assert errors == []
    assert toy.scheduler.store.num_available == 12
    assert toy.scheduler.statistics().num_evicted > 100


EVENT = st.one_of(
    st.tuples(st.just("add"), SYSTEM, TAIL, st.integers(1, 9)),
    st.tuples(st.just("pin"), SYSTEM, TAIL, st.integers(1, 9)),
    st.tuples(st.just("arrive"), st.integers(0, 9)),
    st.tuples(st.just("unpin"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.just(("step",)),
    st.just(("step",)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, max_size=60), st.integers(0, 12))
def test_every_sequence_reads_its_own_tokens_whatever_is_pinned(events: list[Any], max_pinned: int) -> None:
    """8 pages are enough for the longest sequence. Attempts arrive, or do not, in any order; and all of it ends."""
    num_pages = 8 + max_pinned
    toy = ToyScheduler(num_pages, max_pinned)
    alive: list[Sequence] = []
    arriving: dict[str, tuple[list[int], int, int]] = {}
    for number, event in enumerate(events):
        if event[0] == "add":
            alive.append(toy.add(new_sequence(event[1] + event[2], event[3])))
        elif event[0] == "pin":
            prompt = event[1] + event[2]
            num_pinned = toy.scheduler.pin(str(number), keys_of(prompt))
            arriving[str(number)] = prompt, event[3], num_pinned
        elif event[0] in ("arrive", "unpin") and arriving:
            attempt = list(arriving)[event[1] % len(arriving)]
            prompt, num_answer, num_pinned = arriving.pop(attempt)
            if event[0] == "unpin":
                toy.scheduler.unpin(attempt)
            else:
                sequence = new_sequence(prompt, num_answer, is_handoff=True)
                if num_pinned:
                    toy.scheduler.adopt_pins(sequence, attempt, num_pinned)
                alive.append(toy.add(sequence))
        elif event[0] == "drop" and alive:
            toy.scheduler.drop(alive.pop(event[1] % len(alive)))
        else:
            toy.step()
        toy.scheduler.check_integrity()
    toy.run_out(alive)  # although attempts that never arrived still have their pins
    for attempt in arriving:
        toy.scheduler.unpin(attempt)
    toy.scheduler.check_integrity()
    assert toy.scheduler.store.num_available == num_pages
