"""The help of every command can be read by itself, what is mistyped gets a suggestion, and figures come as JSON."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from pdproxy import cli
from pdproxy.config.settings import Settings
from pdproxy.loadtest.record import write_run
from scripts.dev.bench_proxy.report import Findings, make_report
from tests.fakes.measured_runs import lively_run
from transfer.command_line.commands import UsageError, _with_stdout, did_you_mean
from transfer.engine.config import EngineSettings

ROOT = Path(__file__).resolve().parents[2]
WITH_NIXL = {
    "scripts/bench_transfer.py": "scripts.dev.bench_transfer.command",
    "scripts/check_transfer": "scripts.dev.check_transfer.command",
    "scripts/soak.py": "scripts.dev.soak.command",
    "scripts/soak_transfer.py": "scripts.dev.soak_transfer.command",
}
WITHOUT_OPTIONS = {"python -m scripts.dev.configuration_page"}
WITHOUT_FIGURES = {
    *("pdproxy", "pdproxy serve", "pdproxy up", "pdproxy keys", "pdproxy loadtest", "python -m pdproxy.compiled"),
    *("python -m transfer.engine", *WITHOUT_OPTIONS),
}
"""The commands that print no figures; all others take --json."""


def _mutants() -> Any:
    """Returns the command line of the mutation, which is run by the name that its copies have."""
    sys.path.insert(0, str(ROOT / "scripts" / "dev"))
    try:
        return importlib.import_module("mutation.command").app
    finally:
        sys.path.pop(0)


APPS = {
    "pdproxy": cli.app,
    **{
        f"pdproxy {name}": importlib.import_module(f"pdproxy.{name if name != 'up' else 'launch'}.command").app
        for name in ("up", "loadtest", "simulate")
    },
    **{
        name: importlib.import_module(module).app
        for name, module in {
            "python -m pdproxy.compiled": "pdproxy.compiled.command",
            "python -m transfer.engine": "transfer.engine.help",
            "python -m scripts.dev.configuration_page": "scripts.dev.configuration_page",
            "scripts/bench_proxy.py": "scripts.dev.bench_proxy.command",
            "scripts/check_gpu": "scripts.dev.check_gpu.options",
            "scripts/check_kernel": "scripts.dev.check_kernel.command",
            **(WITH_NIXL if find_spec("nixl") else {}),
        }.items()
    },
    "scripts/dev/mutants": _mutants(),
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
    assert rows or hasattr(COMMANDS[name], "commands") or name in WITHOUT_OPTIONS
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
def test_help_fits_a_terminal_and_names_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(name, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    flags = {flag for one in COMMANDS[name].params if not getattr(one, "hidden", False) for flag in one.opts}
    shown = {flag for flag in flags if flag.startswith("--") and not flag.startswith("--house")}
    assert shown <= set(re.findall(r"--[a-z][\w-]*", result.stdout))


def test_the_engines_help_has_every_option_of_its_settings() -> None:
    written = {row[0].split()[0] for _, row in help_rows("python -m transfer.engine")}
    only_in_the_environment = {"--attempt-key", "--fleet-key"}
    names = {f"--{name.replace('_', '-')}" for name in EngineSettings.model_fields}
    assert written == names - only_in_the_environment


@EVERY
def test_a_mistyped_option_gets_a_suggestion(name: str) -> None:
    if name == "python -m transfer.engine":
        pytest.skip("its settings read the words: tests/transfer/engine/test_engine_config.py")
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


# ── figures as JSON ─────────────────────────────────────────────────────────────────────────────────────────────────


CHEAP = {
    "pdproxy pages": ("--pd-buffer-size", "2GiB", "--bytes-per-token", "1024"),
    "pdproxy simulate": ("--requests", "20"),
    "pdproxy loadtest compare": ("run.jsonl",),
    "scripts/bench_proxy.py": ("--from", "report.json"),
}
"""Commands that have an answer within a second or so. What the others print is looked at where they are run anyway."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the cheap commands read, which is the working folder."""
    write_run(lively_run(seconds=3.0), tmp_path / "run.jsonl")
    machine = {"cores": 2, "cpu": "a CPU", "kernel": "6", "proxy_core": 1, "helper_core": 0, "python": "3.11"}
    findings = Findings("2026-01-01T00:00:00+00:00", machine | {"packages": {}}, 1, True, [], [])
    (tmp_path / "report.json").write_text(json.dumps(make_report(findings, is_complete=True)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@EVERY
def test_figures_can_be_had_as_json(name: str) -> None:
    found = {flag: one for one in COMMANDS[name].params for flag in one.opts}
    assert ("--json" in found) == (name not in WITHOUT_FIGURES)
    if "--json" in found:
        assert found["--json"].metavar == "[FILE]"


@pytest.mark.parametrize("where", ["last", "first", "dash"])
@pytest.mark.parametrize("name", CHEAP)
def test_json_is_one_document_and_all_that_stdout_gets(name: str, where: str, folder: Path) -> None:
    words = [*CHEAP[name], *(["--json"] if where == "last" else ["--json", "-"] if where == "dash" else [])]
    if where == "first":
        if not words[0].startswith("-"):
            pytest.skip("the word behind --json would be its file")
        words = ["--json", *words]
    result = invoke(name, *words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert isinstance(told, dict)
    assert told


@pytest.mark.parametrize("name", CHEAP)
def test_json_goes_to_a_file_and_people_get_the_rest(name: str, folder: Path) -> None:
    result = invoke(name, *CHEAP[name], "--json", "figures.json")
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads((folder / "figures.json").read_text()), dict)
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.stdout)
    assert result.stdout


def test_a_command_behind_two_dashes_keeps_its_json() -> None:
    """`pdproxy up -- COMMAND --json` is COMMAND's."""
    words = [
        ["--json"],
        ["--json", "--tp", "2"],
        ["--json", "-"],
        ["--json", "a"],
        ["--", "a", "--json"],
        ["--json", "--"],
    ]
    assert [_with_stdout(one) for one in words] == [
        ["--json", "-"],
        ["--json", "-", "--tp", "2"],
        ["--json", "-"],
        ["--json", "a"],
        ["--", "a", "--json"],
        ["--json", "-", "--"],
    ]
    group = typer.main.get_command(cli.app)
    context = group.make_context("pdproxy", ["up", "--", "x", "--json"])
    assert "-" not in [*context._protected_args, *context.args]
