"""The search around the transfer's roles: it ends without a violation, and finds every fault that is planted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scripts.dev.check_transfer.command import find_planted, main
from scripts.dev.check_transfer.faults import FAULTS, Fault
from scripts.dev.check_transfer.plans import WALKS
from scripts.dev.check_transfer.search import search, walk
from scripts.dev.check_transfer.stories import story
from scripts.dev.check_transfer.world import Plan

PLANS = (
    Plan(name="one attempt", faults=frozenset({"lose", "break", "kill"}), num_steps_of_time=0),
    Plan(name="one attempt and time", num_faults=0, num_steps_of_time=1),
    Plan(name="two attempts", attempts=(0, 1), num_faults=0, num_steps_of_time=0),
    Plan(name="two writes", pages_each=2, num_pages=2, faults=frozenset({"cancel"}), num_steps_of_time=0),
    Plan(name="one by two ranks", num_ranks=2, faults=frozenset({"cancel", "break"}), num_steps_of_time=0),
    Plan(name="two by two ranks", num_sender_ranks=2, num_ranks=2, num_faults=0, num_steps_of_time=0),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_order_of_events_in_a_tiny_world_is_good(plan: Plan) -> None:
    result = search(plan)
    assert result.violation is None, story(plan, result)
    assert result.is_complete
    assert result.states > 50
    assert result.transitions >= result.states > result.depth


def test_orders_that_are_left_out_lead_to_no_other_state(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        name="two attempts", attempts=(0, 1), faults=frozenset({"kill", "replace"}), num_steps_of_time=0, depth=7
    )
    fewer = search(plan)
    monkeypatch.setattr("scripts.dev.check_transfer.search._commute", lambda world, one, other: False)
    every = search(plan)
    assert (fewer.states, fewer.depth, fewer.violation) == (every.states, every.depth, every.violation)
    assert fewer.transitions < every.transitions


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_found(fault: Fault) -> None:
    assert find_planted(fault).violation is not None


def test_the_story_names_the_rank_whose_page_is_in_danger() -> None:
    (fault,) = [one for one in FAULTS if one.name == "pages come back when the first rank's writer has ended"]
    with fault.planted() as plan:
        told = story(plan, search(plan)).splitlines()
    assert told[-1] == "  ⇒ a write of a may still land in page 0 of r1, which is free"


@pytest.mark.parametrize("plan", WALKS, ids=lambda plan: plan.name)
def test_random_walks_find_nothing_and_are_the_same_twice(plan: Plan) -> None:
    first, second = walk(plan, 20, seed=3), walk(plan, 20, seed=3)
    assert first.violation is None, story(plan, first)
    assert (first.transitions, first.depth) == (second.transitions, second.depth)
    assert first.transitions > 200


def test_random_walks_find_what_is_planted() -> None:
    with FAULTS[2].planted() as plan:
        assert walk(replace(plan, num_faults=3), 200, seed=1).violation is not None


def test_the_story_is_as_short_as_can_be_and_ends_with_what_is_wrong() -> None:
    with FAULTS[7].planted() as plan:
        told = story(plan, search(plan)).splitlines()
    assert told == [
        "  1 the receiver hears Reserve of a from s1/1; a is reserved",
        "  2 s1/1 hears Reserved of a",
        "  3 s1 is killed",
        "  4 somebody says that s1 has ended; a is not here",
        "  ⇒ a write of a may still land in page 0, which is free",
    ]


def test_the_command_writes_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """It writes them to stdout where no file is named, and then nothing else."""
    assert main(["--world", "a shared chunk", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {"states", "transitions", "depth", "paths", "violations", "wall_s"} <= figures.keys()
    assert (figures["violations"], len(figures["worlds"])) == (0, 1)
    assert figures["worlds"][0]["is_complete"]


def test_the_command_ends_with_a_status_where_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    (fault,) = [one for one in FAULTS if one.name.startswith("a chunk")]
    with fault.planted():
        assert main(["--world", "a shared chunk"]) == 1
    assert "VIOLATION" in capsys.readouterr().out
