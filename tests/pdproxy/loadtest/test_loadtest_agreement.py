"""Wrong answers: those that say otherwise than the others who were asked the same."""

from __future__ import annotations

from pdproxy.loadtest.agreement import asks_alike, differing
from tests.fakes.measured_runs import failed, left, record, run_of


def test_one_that_says_otherwise_is_found() -> None:
    same = [record(index, question=7, answer_digest="aa") for index in range(3)]
    assert differing(same) == (0, 3)
    assert differing([*same, record(3, question=7, answer_digest="bb")]) == (1, 4)


def test_who_was_asked_alone_is_not_compared() -> None:
    assert not differing([record(0), record(1)])


def test_only_whole_answers_of_the_same_turn_and_length_are_compared() -> None:
    others = [
        failed(1, question=0),
        left(2, question=0),
        record(3, question=0, turn=1, answer_digest="bb"),
        record(4, question=0, answer_tokens_asked=9, answer_digest="cc"),
    ]
    assert not differing([record(0, question=0), *others])


def test_runs_that_ask_the_same_at_different_rates() -> None:
    sizes = {"sizes": "fixed:10 → fixed:5"}
    one = run_of([record(0)], settings={**sizes, "rate": 2.0})
    assert asks_alike(one, run_of([record(0)], settings={**sizes, "rate": 4.0}))
    assert not asks_alike(one, run_of([record(0)], settings={**sizes, "rate": 2.0}, seed=2))
    assert not asks_alike(one, run_of([record(0)], settings={"sizes": "fixed:11 → fixed:5"}))
    assert not asks_alike(one, run_of([record(0)], settings={**sizes}, model="other"))
