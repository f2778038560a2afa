"""A launch from its first process to its end, with stand-ins for engines and the proxy that are there at once."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pdproxy.launch.errors import PreflightError, ProgramDied
from pdproxy.launch.fleet import start
from pdproxy.launch.fleet_plan import FleetPlan, Needs
from pdproxy.launch.kinds.base import EnginePlan, Seat
from pdproxy.launch.options import RunOptions
from pdproxy.launch.process import Program
from tests.e2e.cluster import free_ports

STANDIN = str(Path(__file__).parents[1] / "helpers/standin_instance.py")


class Screen(io.StringIO):
    """Does something once a line begins so."""

    def __init__(self, words: str = "", act: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._words, self._act = words, act

    def write(self, text: str) -> int:
        if self._words and text.startswith(self._words):
            asyncio.get_running_loop().call_soon(self._act)
        return super().write(text)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def standin(name: str, *ready: str) -> Program:
    (port,) = free_ports(1)
    command = (sys.executable, STANDIN, str(port), *ready)
    return Program(name=name, command=command, ready_url=f"http://127.0.0.1:{port}/ready")


def plan(folder: Path, *ready: str, engine: Program | None = None) -> FleetPlan:
    """One engine, ``near``, and a proxy that has got a request through those that are `ready`."""
    proxy = standin("proxy", *ready)
    assert proxy.ready_url is not None
    seat = Seat(role="decode", index=0, ordinal=0, device="cpu", name="near")
    return FleetPlan(
        engines=(
            EnginePlan(seat=seat, program=engine or standin("near"), ports=(), traits=(), tables=({"name": "near"},)),
        ),
        needs=(Needs(model=None, python=None, modules=()),),
        proxy=proxy,
        ports=(),
        host="127.0.0.1",
        url=proxy.ready_url.removesuffix("/ready"),
        files={},
        folder=folder / "fleet",
        tiny_model=None,
        timeout_s=20.0,
    )


def launch(plan: FleetPlan, folder: Path, command: Sequence[str] = (), screen: Screen | None = None) -> tuple[int, str]:
    """In a loop of its own, as the command line has it; the exit status, and what was said."""
    screen = screen or Screen()
    console = Console(file=screen, width=300)
    status = asyncio.run(start(plan, RunOptions(work_dir=folder, is_once=bool(command)), command, console))
    return status, screen.getvalue()


def test_a_command_has_the_address_and_its_status_is_the_launchs(tmp_path: Path) -> None:
    whole = plan(tmp_path, "near", "far")
    asks = f"import os; exit(7 if os.environ['PDPROXY_URL'] == {whole.url!r} else 1)"
    status, said = launch(whole, tmp_path, (sys.executable, "-c", asks))
    assert status == 7
    assert "near is ready after" in said
    assert "far is not ready" not in said
    assert said.index("starting 0 prefillers, 1 decoder and the proxy\n") < said.index("near is ready after")


def test_what_a_launch_says_when_it_serves_can_be_pasted(tmp_path: Path) -> None:
    whole = plan(tmp_path, "near")
    pasted: list[str] = []

    def paste() -> None:
        line = next(line for line in screen.getvalue().splitlines() if "curl" in line)
        answer = subprocess.run(["bash", "-c", line.partition("  curl")[2].join(("curl -sS", ""))], capture_output=True)
        pasted.append(answer.stdout.decode() + answer.stderr.decode())
        interrupt()

    screen = Screen("  to try it", lambda: threading.Thread(target=paste).start())
    status, said = launch(whole, tmp_path, screen=screen)
    assert status == 0
    assert json.loads(pasted[0])["usage"]["completion_tokens"] == 32
    assert f"serving on {whole.url}/v1 until Ctrl-C\n  model        standin\n" in said
    assert f"  status page  {whole.url}/ui\n" in said


def test_where_clients_need_a_key_the_line_has_its_place(tmp_path: Path) -> None:
    locked = plan(tmp_path, "near", "--locked")
    table = {"name": "near", "model": "it's"}
    locked = replace(locked, engines=(replace(locked.engines[0], tables=(table,)),))
    _, said = launch(locked, tmp_path, screen=Screen("  to try it", interrupt))
    line = next(line for line in said.splitlines() if "to try it" in line)
    words = shlex.split(line)
    assert words[words.index("-H") + 2 :][:2] == ["-H", "authorization: Bearer KEY"]
    assert json.loads(words[-1])["model"] == "it's"


@pytest.mark.parametrize(
    ("words", "ready", "status"),
    [("near is ready", ["near"], 130), ("proxy is ready", [], 130), ("serving on", ["near"], 0)],
    ids=["while starting", "while the canary waits", "while it serves"],
)
def test_one_ctrl_c(tmp_path: Path, words: str, ready: list[str], status: int) -> None:
    ended, said = launch(plan(tmp_path, *ready), tmp_path, screen=Screen(words, interrupt))
    assert ended == status
    assert said.endswith("stopping all at SIGINT; a second one kills\nstopped by SIGINT\n")


def test_an_engine_that_dies_at_start(tmp_path: Path) -> None:
    dies = Program(name="near", command=(sys.executable, "-c", "exit('no memory')"), ready_url="http://127.0.0.1:9/")
    with pytest.raises(ProgramDied, match=r"near exited with status 1; its last lines:\n  no memory"):
        launch(plan(tmp_path, "near", engine=dies), tmp_path)


def test_nothing_is_started_for_a_command_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="there is no program none-such"):
        launch(plan(tmp_path, "near"), tmp_path, ("none-such",))
    assert not (tmp_path / "fleet").exists()
