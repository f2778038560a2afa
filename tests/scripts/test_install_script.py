"""The scripts as a user meets them, in a copy of the files around the two packages; nothing is installed or
downloaded."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20
BASH_SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("scripts", "examples", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash")
)


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_venv", ROOT / "scripts" / "install_venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


install_venv = _load()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout without `.venv`."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def installed(root: Path) -> Path:
    """A checkout whose `.venv` says that it is finished; its python is the one that runs the tests."""
    bin = root / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python").symlink_to(sys.executable)
    (root / ".venv" / "pyvenv.cfg").touch()
    stamp = install_venv.Stamp(
        root=str(root),
        python=install_venv.python_version(root / ".venv"),
        fingerprint=install_venv.fingerprint(root),
        extras=["demo", "dev", "engine"],
        made_here=True,
        is_done=True,
    )
    install_venv.write_stamp(root / ".venv", stamp)
    return root


def run(root: Path, script: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        [root / script, *arguments], capture_output=True, text=True, env=env, cwd=cwd, timeout=PATIENCE_S
    )


@pytest.mark.parametrize("script", BASH_SCRIPTS)
def test_every_script_parses_and_may_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert "\nset -euo pipefail\n" in (ROOT / script).read_text()
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.parametrize("script", BASH_SCRIPTS)
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    result = subprocess.run(["shellcheck", ROOT / script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_there_are_scripts() -> None:
    assert {"scripts/launch_1p1d.sh", "scripts/launch_xpyd.sh", "examples/1p1d/run.sh"} <= set(BASH_SCRIPTS)


class TestUpToDate:
    def test_nothing_is_done_from_anywhere(self, installed: Path) -> None:
        before = _contents(installed)
        result = run(installed, "scripts/install", cwd=Path("/"))
        assert result.returncode == 0
        assert result.stderr == "install: .venv is up to date (demo, dev, engine)\n"
        assert _contents(installed) == before

    def test_the_command_takes_over_with_the_environment_first_on_its_path(self, installed: Path) -> None:
        program = "import os, sys; print(os.environ['PATH'].split(':')[0], sys.argv[1:]); sys.exit(7)"
        result = run(installed, "scripts/install", "dev", "--", "python", "-c", program, "--", "a b")
        assert result.stdout == f"{installed / '.venv' / 'bin'} ['--', 'a b']\n"
        assert result.returncode == 7

    def test_the_demo_hands_its_options_to_launcher_and_question(self, installed: Path) -> None:
        (installed / ".venv" / "bin" / "python").unlink()
        fake = installed / ".venv" / "bin" / "python"
        fake.write_text(
            f'#!/bin/sh\ncase "$1" in -I) exec {sys.executable} "$@";; esac\nfor word; do echo "$word"; done\n'
        )
        fake.chmod(0o755)
        result = run(installed, "examples/1p1d/run.sh", "--once", "--prompt", "-x y", "--port", "9", cwd=Path("/"))
        words = result.stdout.splitlines()
        launcher, question = words[: words.index("--")], words[words.index("--") + 1 :]
        assert launcher[:3] == ["-m", "pdproxy", "up"]
        assert launcher[-3:] == ["--once", "--port", "9"]
        assert question == ["python", str(installed / "examples/1p1d/chat.py"), "--prompt=-x y"]


class TestWhatMakesItOutOfDate:
    def check(self, root: Path, *extras: str) -> bool:
        return bool(install_venv.is_up_to_date(root, set(extras)))

    def test_not_fewer_extras_but_more(self, installed: Path) -> None:
        stamp = install_venv.read_stamp(installed / ".venv")
        install_venv.write_stamp(installed / ".venv", replace(stamp, extras=["demo", "engine"]))
        assert self.check(installed, "engine")
        assert not self.check(installed, "engine", "dev")

    @pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
    def test_a_changed_requirement(self, installed: Path, name: str) -> None:
        with (installed / name).open("a") as file:
            file.write("\n# changed\n")
        assert not self.check(installed, "engine")

    def test_an_unfinished_run(self, installed: Path) -> None:
        stamp = install_venv.read_stamp(installed / ".venv")
        install_venv.write_stamp(installed / ".venv", replace(stamp, is_done=False))
        assert not self.check(installed, "engine")

    def test_a_python_that_is_gone(self, installed: Path) -> None:
        (installed / ".venv" / "bin" / "python").unlink()
        assert not self.check(installed, "engine")

    def test_a_moved_checkout(self, installed: Path) -> None:
        moved = installed.rename(installed.with_name("moved"))
        assert not self.check(moved, "engine")

    def test_a_stamp_that_cannot_be_read(self, installed: Path) -> None:
        (installed / ".venv" / install_venv.STAMP).write_text("{")
        assert not self.check(installed, "engine")


class TestInstalling:
    """With the two commands that would download something recorded instead of run."""

    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        done: list[list[str]] = []

        def record(command: Sequence[str | Path], log: Path, progress: object) -> None:
            done.append([str(word) for word in command])

        monkeypatch.setattr(install_venv, "run", record)
        return done

    def test_what_an_interrupted_run_left_is_made_anew(self, installed: Path, commands: list[list[str]]) -> None:
        stamp = install_venv.read_stamp(installed / ".venv")
        install_venv.write_stamp(installed / ".venv", replace(stamp, is_done=False))
        install_venv.bring_up_to_date(installed, {"engine"})
        assert not (installed / ".venv" / "pyvenv.cfg").exists()
        venv, pip, compileall = commands
        assert venv[1:4] == ["-I", "-m", "venv"]
        assert pip[-3:] == [str(installed / "constraints.txt"), "--editable", f"{installed}[demo,dev,engine]"]
        assert "compileall" in compileall
        assert install_venv.read_stamp(installed / ".venv").is_done

    def test_an_environment_made_by_somebody_else_is_added_to(self, installed: Path, commands: list[list[str]]) -> None:
        (installed / ".venv" / install_venv.STAMP).unlink()
        (installed / ".venv" / "lib" / "python3" / "site-packages" / "pip").mkdir(parents=True)
        install_venv.bring_up_to_date(installed, {"engine"})
        assert (installed / ".venv" / "pyvenv.cfg").exists()
        assert [command[3] for command in commands] == ["pip", "compileall"]
        assert not install_venv.read_stamp(installed / ".venv").made_here

    def test_a_failure_leaves_it_unfinished_and_says_why(
        self, installed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(command: Sequence[str | Path], log: Path, progress: object) -> None:
            raise install_venv.InstallError("no disk space left")

        monkeypatch.setattr(install_venv, "run", fail)
        (installed / "constraints.txt").write_text("")
        with pytest.raises(install_venv.InstallError, match="no disk space left"):
            install_venv.bring_up_to_date(installed, {"engine"})
        assert not install_venv.is_up_to_date(installed, {"engine"})

    def test_the_reason_is_found_in_the_log(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        fail = "print('Collecting x'); print('ERROR: no matching distribution'); print('hint'); exit(1)"
        with pytest.raises(
            install_venv.InstallError, match=r"^ERROR: no matching distribution; all of the output is in"
        ):
            install_venv.run([sys.executable, "-c", fail], log, install_venv.Progress("trying"))
        assert log.read_text().splitlines()[-1] == "hint"

    def test_no_disk(self, root: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(install_venv, "ENGINE_DISK_BYTES", 1 << 62)
        with pytest.raises(install_venv.InstallError, match="GiB of disk left, and this needs"):
            install_venv.bring_up_to_date(root, {"engine"})
        assert not commands

    def test_the_second_of_two_waits_for_the_first(self, root: Path) -> None:
        (root / ".venv").mkdir()
        with (root / ".venv" / install_venv.LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            command = [root / "scripts" / "install"]
            env = {**os.environ, "PYTHON": sys.executable}
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as second:
                assert second.stderr is not None
                assert second.stderr.readline() == "install: another installation is at work here; waiting for it\n"
                second.terminate()
                assert second.wait(PATIENCE_S) == 130


class TestOneLineErrors:
    def test_no_python(self, root: Path) -> None:
        bash = shutil.which("bash")
        assert bash is not None
        result = subprocess.run(
            [bash, root / "scripts" / "install"], capture_output=True, text=True, env={"PATH": str(root)}
        )
        assert result.returncode == 1
        assert result.stderr.startswith("install: no Python 3.11 or later among: python3 ")
        assert result.stderr.count("\n") == 1

    def test_no_venv_module(self, root: Path) -> None:
        python = root / "python-without-venv"
        python.write_text(f'#!/bin/sh\ncase "$*" in *venv*) exit 1;; esac\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        env = {**os.environ, "PYTHON": str(python)}
        result = subprocess.run([root / "scripts" / "install"], capture_output=True, text=True, env=env)
        assert result.returncode == 1
        assert result.stderr.startswith(f"install: {python} has no venv module; ")
        assert result.stderr.count("\n") == 1

    def test_unknown_extra(self, root: Path) -> None:
        result = run(root, "scripts/install", "engines")
        assert result.returncode == 1
        assert result.stderr.startswith("install: no extra named 'engines'; there are: engine, ")
        assert not (root / ".venv").exists()


@pytest.mark.parametrize("script", ["scripts/install", "examples/1p1d/run.sh"])
def test_help_is_given_without_installing(root: Path, script: str) -> None:
    result = run(root, script, "--help")
    assert result.returncode == 0
    assert f"usage: {script} " in result.stdout + result.stderr
    assert not (root / ".venv").exists()


def _contents(root: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in root.rglob("*") if "__pycache__" not in path.parts}
