"""Whether a command line is one that its program would take, without doing what it says."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer.main

from pdproxy import cli
from pdproxy.config import settings as config
from pdproxy.launch.agreement import check_agreement, check_all_agree
from pdproxy.launch.file_plan import plan_file
from pdproxy.launch.fleet_plan import plan_fleet
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions, RunOptions
from tests.docs.blocks import ROOT
from tests.helpers.launch_scripts import said_by

Check = Callable[[], object]
"""Raises whatever the program would complain of."""

COMMAND_LINE = re.compile(r"""(?:^ *from |")([\w.]+\.command)(?: import app|"[,)])""", re.MULTILINE)
LAUNCHER = "pdproxy.launch.command"
PYTHON = ("python", "python3", ".venv/bin/python")
MACHINE = Machine(cores=(0, 1), gpus=tuple("01234567"), environ={})
"""On which every example finds what it names."""


def find_check(words: Sequence[str]) -> Check | None:
    """None: nobody here knows this program."""
    words = [words[0].removeprefix("./"), *words[1:]]
    if words[0] in PYTHON and words[1:2] == ["-m"]:
        return _module(words[2], words[3:])
    if words[0] == "pdproxy":
        return _pdproxy(words[1:])
    if words[0] in PYTHON:
        words = words[1:]
    script = ROOT / words[0] if words else ROOT
    return _script(script, words[1:]) if script.is_file() else None


def _module(name: str, words: Sequence[str]) -> Check | None:
    if name == "pdproxy":
        return _pdproxy(words)
    if name == "transfer.engine":
        return lambda: _engine(words)
    return _typer(f"{name}.command", words) if _is_there(f"{name}.command") else None


def _pdproxy(words: Sequence[str]) -> Check:
    """``serve`` has settings, most others have a command line of their own, and the rest are in `cli`."""
    name, *rest = words
    if name == "serve":
        return lambda: config.load(rest).fleet()
    if name == "up":
        return lambda: plan_launch(rest)
    module = f"pdproxy.{name}.command"
    if name.isidentifier() and _is_there(module):
        return _typer(module, rest)
    return lambda: parse(cli.app, words)


def _script(path: Path, words: Sequence[str]) -> Check | None:
    text = path.read_text()
    if (found := COMMAND_LINE.search(text)) is not None:
        return _typer(found[1], words)
    if "-m pdproxy up " in text:
        return lambda: plan_launch(words)
    if "/scripts/launch_xpyd.sh" in text:
        return lambda: plan_launch(said_by(path, words)[0])
    return None


def plan_launch(words: Sequence[str]) -> None:
    """What would be started is planned, and is of engines that get along."""

    async def launch(options: FleetOptions, *_: object) -> int:
        check_agreement(plan_fleet(options, MACHINE).engines)
        return 0

    async def launch_file(path: Path, run: RunOptions, *_: object, **more: Any) -> int:
        check_all_agree(plan_file(path, run, MACHINE, **more).engines)
        return 0

    with patch(f"{LAUNCHER}.launch", launch), patch(f"{LAUNCHER}.launch_file", launch_file):
        command = typer.main.get_command(importlib.import_module(LAUNCHER).app)
        status = command.main(args=list(words), prog_name="example", standalone_mode=False)
    assert not status, f"it is refused: {' '.join(words)}"


def _engine(words: Sequence[str]) -> object:
    from transfer.engine.config import EngineSettings

    return EngineSettings(_cli_parse_args=list(words))  # type: ignore[call-arg]


def _typer(module: str, words: Sequence[str]) -> Check:
    return lambda: parse(importlib.import_module(module).app, words)


def parse(app: typer.Typer, words: Sequence[str]) -> None:
    """As it would be, with nothing done. What the program would find out later, it does not."""
    command = typer.main.get_command(app)
    _disarm(command)
    command.main(args=list(words), prog_name="example", standalone_mode=False)


def _disarm(command: Any) -> None:
    command.callback = None
    for each in getattr(command, "commands", {}).values():
        _disarm(each)


def options() -> set[str]:
    """Returns every flag that any of our programs has."""
    from transfer.engine.config import EngineSettings

    fields = [*config.Settings.model_fields, *EngineSettings.model_fields]
    names = {f"--{name.replace('_', '-')}" for name in fields} | {f"--no-{name.replace('_', '-')}" for name in fields}
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("pdproxy", "transfer", "scripts/dev")
        for path in (ROOT / folder).rglob("command.py")
        if "typer.Typer(" in path.read_text() and path.parent.name != "mutation"  # which runs by another name
    ]
    for app in [cli.app, *(importlib.import_module(module).app for module in modules)]:
        names |= _flags(typer.main.get_command(app))
    return names


def _flags(command: Any) -> set[str]:
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(_flags(each) for each in getattr(command, "commands", {}).values()))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
