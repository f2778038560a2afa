"""The search around the kernel: it ends without a violation, and finds every fault that is planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.dev.check_kernel import command
from scripts.dev.check_kernel.command import find_planted, find_planted_in_fleet, main
from scripts.dev.check_kernel.faults import BOTH, FAULTS, LINE, ONE, Fault
from scripts.dev.check_kernel.fleet import faults as fleet_faults
from scripts.dev.check_kernel.fleet import stories as fleet_stories
from scripts.dev.check_kernel.fleet import walk
from scripts.dev.check_kernel.fleet import world as fleets
from scripts.dev.check_kernel.fleet.plans import PLANS as FLEETS
from scripts.dev.check_kernel.model import Model
from scripts.dev.check_kernel.search import search
from scripts.dev.check_kernel.stories import story
from scripts.dev.check_kernel.world import Plan


@pytest.mark.parametrize("plan", [ONE, LINE, BOTH], ids=lambda plan: plan.name)
def test_every_order_of_events_in_a_tiny_world_is_good(plan: Plan) -> None:
    result = search(Model(plan))
    assert result.violation is None, story(Model(plan), result)
    assert result.is_complete
    assert result.states > 15
    assert result.transitions > result.states > result.depth


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_found(fault: Fault) -> None:
    assert find_planted(fault).violation is not None


def test_the_story_is_as_short_as_can_be_and_ends_with_what_is_wrong() -> None:
    fault = FAULTS[0]
    with fault.planted() as model:
        told = story(model, search(model)).splitlines()
    assert told == [
        "  1 request A asks for 2 pages; request A gets o1 and p1",
        "  2 request A is sent to p1",
        "  3 p1 writes the KV of request A to o1",
        "  4 o1 accepts no connections any more, and is taken as down",
        "  ⇒ Violation: o1 holds 2 pages for request A, and the ledger takes them as free",
    ]


@pytest.mark.parametrize("plan", FLEETS, ids=lambda plan: plan.name)
def test_walks_through_a_fleet_whose_leaders_follow_one_another(plan: fleets.Plan) -> None:
    result = walk.search(plan, seed=1, num_walks=5, length=60)
    assert result.violation is None, fleet_stories.story(plan, result)
    assert result.num_events == 300


@pytest.mark.parametrize("fault", fleet_faults.FAULTS, ids=lambda fault: fault.name)
def test_fault_that_is_planted_in_a_fleet_is_found(fault: fleet_faults.Fault) -> None:
    result = find_planted_in_fleet(fault)
    assert result.violation is not None
    told = fleet_stories.story(fault.plan, result).splitlines()
    assert result.violation in told[-1]


def test_the_command_writes_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """It writes them to stdout where no file is named, and then nothing else."""
    assert main(["--world", "line, two owners", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {"states", "transitions", "depth", "violations", "wall_s"} <= figures.keys()
    assert (figures["violations"], len(figures["worlds"])) == (0, 1)


def test_the_command_plants_each_fault_and_fails_where_one_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That all of them are found is shown above, one by one."""
    assert len(FAULTS) + len(fleet_faults.FAULTS) >= 40
    one, other, in_fleet = FAULTS[0], FAULTS[-1], fleet_faults.FAULTS[0]
    harmless = Fault("nothing", LINE, ())
    for faults, status in ((one, other), 0), ((one, harmless), 1):
        monkeypatch.setattr(command, "FAULTS", faults)
        monkeypatch.setattr(fleet_faults, "FAULTS", (in_fleet,))
        assert main(["--planted", "--json", str(tmp_path / "figures.json")]) == status
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert (figures["planted"], figures["found"]) == (3, 3 - status)
        assert list(figures["stories"]) == [fault.name for fault in (*faults, in_fleet)]
