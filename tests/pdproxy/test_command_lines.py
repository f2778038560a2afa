"""The help of every command can be read by itself, and what is mistyped gets a suggestion."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from pdproxy import cli
from pdproxy.config.settings import Settings
from transfer.command_line.commands import UsageError, did_you_mean

APPS = {
    "pdproxy": cli.app,
    **{
        f"pdproxy {name}": importlib.import_module(f"pdproxy.{name if name != 'up' else 'launch'}.command").app
        for name in ("up", "loadtest", "simulate")
    },
    "python -m pdproxy.compiled": importlib.import_module("pdproxy.compiled.command").app,
}
"""Every command line of its own."""
RAW_TYPE = re.compile(r"\b(str|int|float|bool|list|tuple|range|path|Path|None)\b|<")
PHRASE = re.compile(r"[A-Z].*[^. ]( {1,2}\[.*\])?")
"""A phrase that begins like a sentence, and has its default and its range at its end."""


def found(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if type(command) is not cli.Untouched:
        yield name, command
    for each, one in getattr(command, "commands", {}).items():
        yield from found(f"{name} {each}", one)


COMMANDS = dict(pair for name, app in APPS.items() for pair in found(name, typer.main.get_command(app)))
EVERY = pytest.mark.parametrize("name", COMMANDS)


def help_rows(name: str) -> list[tuple[str, tuple[str, str]]]:
    command = COMMANDS[name]
    context = command.make_context(name, [], resilient_parsing=True)
    return [row for row in command.help_rows(context) if row[0] != "Help"]


def invoke(name: str, *words: str) -> Result:
    """What a command says of `words`."""
    root = next(root for root in sorted(APPS, key=len, reverse=True) if name.startswith(root))
    return CliRunner().invoke(APPS[root], [*name.removeprefix(root).split(), *words])


def test_every_command_is_here() -> None:
    """`pdproxy loadtest` and the other groups have commands of their own."""
    commands = {"serve", "up", "loadtest", "loadtest run", "loadtest compare", "simulate", "pages", "keys"}
    assert {f"pdproxy {one}" for one in commands} <= COMMANDS.keys()


@EVERY
def test_options_stand_in_groups_and_can_be_read_alone(name: str) -> None:
    rows = help_rows(name)
    assert rows or hasattr(COMMANDS[name], "commands")
    for heading, (written, text) in rows:
        assert heading[0].isupper(), written
        assert heading != "Options", f"{written} has no group"
        assert not RAW_TYPE.search(re.sub(r"--[a-z-]+", "", written)), f"nobody writes a value like this: {written}"
        assert PHRASE.fullmatch(text), f"{written}: {text}"


@EVERY
def test_help_is_short_to_ask_for(name: str) -> None:
    short, long = invoke(name, "-h"), invoke(name, "--help")
    assert (short.exit_code, short.output) == (0, long.output)
    assert all(f"\n{heading}:" in short.output for heading, _ in help_rows(name))


def test_serve_has_every_option_of_the_settings() -> None:
    written = {row[0].split()[0] for _, row in help_rows("pdproxy serve")}
    only_in_files = {"--instances", "--models", "--attempt-key"}
    assert written == {f"--{name.replace('_', '-')}" for name in Settings.model_fields} - only_in_files


@EVERY
def test_a_mistyped_option_gets_a_suggestion(name: str) -> None:
    option = next((row[0].split()[0] for _, row in help_rows(name) if row[0].startswith("--")), "--help")
    result = invoke(name, f"{option[:-1]}x{option[-1]}")
    assert result.exit_code == 2
    assert f"did you mean {option}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "meant"), [(("pdproxy", "lodtest"), "loadtest"), (("pdproxy loadtest", "rum"), "run")]
)
def test_a_mistyped_command_gets_a_suggestion(words: tuple[str, str], meant: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert f"There is no command {words[1]} (did you mean {meant}?)" in result.output
    assert "did you mean" not in invoke(words[0], "qqqqqq").output


def test_what_is_like_nothing_gets_no_suggestion() -> None:
    assert did_you_mean(["--qqqqqq"], ["--port"]) == ""
    assert "There is no option --qqqqqq." in invoke("pdproxy pages", "--qqqqqq").output
    assert "did you mean --no-canary or" in invoke("pdproxy serve", "--no-cannary").output
    assert issubclass(type(typer.BadParameter("")), UsageError)


def test_one_flag_is_one_option_in_all_commands() -> None:
    """Help, type and check of these are the same wherever they are taken; defaults are the command's own."""
    shared = {"--seed", "--slo", "--faults", "--trace", "--rate", "--clients", "--arrivals", "--burstiness"}
    shared |= {"--prefillers", "--decoders", "--engine-args", "--proxy-args", "--work-dir"}
    users = ("pdproxy up", "pdproxy loadtest run", "pdproxy simulate")
    options = [(one.opts[0], one) for name in users for one in COMMANDS[name].params if one.opts[0] in shared]
    for flag in shared:
        same = [(one.help, one.metavar, one.min, one.max) for name, one in options if name == flag]
        assert len(same) == 2, flag
        assert same[0] == same[1]
