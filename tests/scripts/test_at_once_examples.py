"""examples/1p1d/sglang and mooncake: their files, and their scripts with one that prints in the launcher's place."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdproxy.config.settings import load
from pdproxy.launch import command
from pdproxy.launch.options import FleetOptions

EXAMPLES = Path(__file__).parents[2] / "examples/1p1d"
KINDS = ["sglang", "mooncake"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file(kind: str) -> None:
    settings = load(["--config", str(EXAMPLES / kind / "serve.toml")])
    told = [(one.role, one.engine, one.bootstrap_port) for one in settings.fleet()]
    assert told == [("prefill", kind, 8998), ("decode", kind, None)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_script(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, abort_s = _run(kind, tmp_path, "--model", "/m", "--decoders", "2", VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="90")
    seen: list[FleetOptions] = []

    async def launch(options: FleetOptions, command: list[str], console: object) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("pdproxy.launch.command.launch", launch)
    result = CliRunner().invoke(command.app, words)
    assert result.exit_code == 0, result.output
    (options,) = seen
    assert (options.engine, options.num_decoders, abort_s) == (kind, 2, "90")
    assert list(options.proxy_args) == (["--engine-lease-s", "90"] if kind == "mooncake" else [])


def test_mooncake_waits_a_minute_and_not_eight(tmp_path: Path) -> None:
    words, abort_s = _run("mooncake", tmp_path)
    assert (words[-1], abort_s) == ("--engine-lease-s 60", "60")


@pytest.mark.parametrize("kind", KINDS)
def test_commands_in_the_readme_are_those_of_its_files(kind: str) -> None:
    readme = (EXAMPLES / kind / "README.md").read_text()
    blocks = "\n".join(readme.split("```sh\n")[1:]).replace("\\\n", " ")
    (serve,) = [shlex.split(line) for line in blocks.splitlines() if line.startswith("pdproxy serve")]
    assert serve == ["pdproxy", "serve", "--config", f"examples/1p1d/{kind}/serve.toml"]
    launches = [line for line in blocks.splitlines() if "launch.sh" in line]
    assert launches
    assert all(line.startswith(f"examples/1p1d/{kind}/launch.sh --python ") for line in launches)


def _run(kind: str, root: Path, *words: str, **env: str) -> tuple[list[str], str]:
    """What the script gives the launcher, and Mooncake's limit in its environment."""
    here = root / "examples/1p1d" / kind
    here.mkdir(parents=True)
    (root / "scripts").mkdir()
    shutil.copy(EXAMPLES / kind / "launch.sh", here)
    launcher = root / "scripts/launch_xpyd.sh"
    launcher.write_text('#!/bin/sh\nprintf "%s\\0" "$@" "$VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"\n')
    launcher.chmod(0o755)
    usual = {name: text for name, text in os.environ.items() if not name.startswith("VLLM_")}
    printed = subprocess.run(
        [here / "launch.sh", *words], stdout=subprocess.PIPE, text=True, check=True, env=usual | env, cwd="/"
    ).stdout
    *given, abort_s, _ = printed.split("\0")
    return given, abort_s
