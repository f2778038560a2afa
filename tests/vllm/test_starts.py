"""What happens to a program that hangs or ends as it starts; with stand-ins for vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.vllm.program import Program, is_group_alive
from tests.vllm.starts import BUSY_S, IDLE_S, LIMIT_S, TRIES, bring_up

STEP_S = IDLE_S - 1
PROGRAM = """
import subprocess, sys, time
how = sys.argv[1]
if how == "hang":
    subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
print(f"this one will {how}", flush=True)
if how == "burn":
    subprocess.run([sys.executable, "-I", "-S", "-c", "while True: pass"])
if how == "end":
    sys.exit(3)
time.sleep(600)
"""


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class StandIn(Program):
    """Each of its starts does what `hows` says next: ``serve``, ``hang``, ``toil`` or ``end``.

    Whenever one is asked that hangs or toils, `STEP_S` are over, in which only the latter takes processor time.
    """

    hows: list[str]
    clock: Clock
    may_answer: Callable[[], bool] = field(default=lambda: True)

    def command(self) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", PROGRAM, self.hows[len(self.groups)]]

    def environment(self) -> dict[str, str]:
        return {}

    def answers(self) -> bool:
        log = self.logs[-1].read_text()
        if "will hang" in log or "will toil" in log:
            self.clock.now += STEP_S
        return "will serve" in log and self.may_answer()

    def cpu_s(self) -> float:
        return self.clock.now * BUSY_S / STEP_S if "will toil" in self.logs[-1].read_text() else 0.0


@dataclass
class Starter:
    """Makes stand-ins, and remembers what was said."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    said: list[str] = field(default_factory=list)
    programs: list[StandIn] = field(default_factory=list)

    def started(self, name: str, *hows: str) -> StandIn:
        self.programs.append(StandIn(name, self.folder, list(hows), self.clock))
        self.programs[-1].start()
        return self.programs[-1]

    def bring_up(self) -> None:
        bring_up(self.programs, self.said.append, self.clock, poll_s=0.01)


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for program in starter.programs:
        program.kill()
        assert not any(is_group_alive(group) for group in program.groups)


def state_of(program: Program) -> str:
    """Of its leader, by the kernel: ``T`` when it is frozen."""
    return Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_one_that_hangs_is_killed_with_its_children_and_started_again(starter: Starter) -> None:
    program = starter.started("a", "hang", "serve")
    starter.bring_up()
    first, second = program.groups
    assert not is_group_alive(first)
    assert is_group_alive(second)
    assert program.is_ready
    assert state_of(program) != "T"
    assert [log.read_text() for log in program.logs] == ["this one will hang\n", "this one will serve\n"]
    again, ready = starter.said
    assert again.startswith(f"a did nothing for {IDLE_S:g} s as it started (its processes: ")
    assert str(program.logs[0]) in again
    assert f"{first} " in again
    assert ready == f"ready: a after {2 * STEP_S:g} s"


def test_one_that_is_slow_has_more_time(starter: Starter) -> None:
    program = starter.started("a", "toil", "serve")
    starter.bring_up()
    assert program.is_ready
    assert starter.said[0].startswith(f"a was not ready within {LIMIT_S:g} s (its processes: ")
    assert LIMIT_S < starter.clock.now <= LIMIT_S + STEP_S


def test_processor_time_is_that_of_the_whole_group(tmp_path: Path) -> None:
    program = StandIn("a", tmp_path, ["burn"], Clock())
    program.start()
    try:
        while Program.cpu_s(program) < 0.1:
            assert program.is_running
    finally:
        program.kill()
    assert Program.cpu_s(program) == 0


def test_one_that_ends_is_started_again_at_once(starter: Starter) -> None:
    program = starter.started("a", "end", "serve")
    starter.bring_up()
    assert program.is_ready
    assert starter.clock.now == 0
    assert starter.said[0].startswith("a ended as it started, with status 3; it is started again")


def test_after_the_last_try_all_logs_are_shown(starter: Starter) -> None:
    program = starter.started("a", "hang", "end", "hang")
    with pytest.raises(RuntimeError, match=r"a did nothing for .* started 3 times") as raised:
        starter.bring_up()
    assert len(program.groups) == TRIES
    assert [line for line in str(raised.value).splitlines() if "this one" in line] == [
        "this one will hang",
        "this one will end",
        "this one will hang",
    ]
    assert not any(is_group_alive(group) for group in program.groups)


def test_who_is_ready_is_frozen_until_the_others_are(starter: Starter) -> None:
    early, first, last = (starter.started(name, "serve") for name in ("early", "first", "last"))
    early.is_ready = True
    last.may_answer = lambda: state_of(early) == state_of(first) == "T"
    starter.bring_up()
    assert "T" not in [state_of(program) for program in starter.programs]
    assert starter.said == ["ready: first after 0 s, last after 0 s"]
