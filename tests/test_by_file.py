"""A process of a test run that crashes costs the run one test, and is named; all other tests are run once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.helpers.by_file import ByFile

def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
"""
TESTS = """
import os, pathlib, signal, pytest

@pytest.mark.parametrize("name", {names})
def test_it(name):
    with open("run", "a") as file:
        file.write(f"{{pathlib.Path(__file__).stem}}-{{name}} ")
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize(
    "files",
    [
        {"a": ["1", "crashes", "2"], "b": ["1"], "c": ["1", "2", "3", "4"], "d": ["1"], "e": ["1", "2"]},
        {"a": ["1"], "b": ["1", "2"], "c": ["crashes"]},
    ],
    ids=["in the first file", "in the last test"],
)
def test_a_process_that_crashes_costs_one_test(tmp_path: Path, files: dict[str, list[str]]) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for file, names in files.items():
        (tmp_path / f"test_{file}.py").write_text(TESTS.format(names=names))
    options = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=8", "--rootdir=."]
    # To load all plugins that are installed takes longer than all else here, and these tests need none but this one.
    options += ["-p", "xdist.plugin"]
    usual = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", os.devnull, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**usual, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    all_tests = sorted(f"test_{file}-{name}" for file, names in files.items() for name in names)
    assert sorted((tmp_path / "run").read_text().split()) == all_tests, done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert f"1 failed, {len(all_tests) - 1} passed" in done.stdout
    (crashed,) = (file for file, names in files.items() if "crashes" in names)
    assert f"crashed while running 'test_{crashed}.py::test_it[crashes]'" in done.stdout
    assert "Fatal Python error: Segmentation fault" in done.stderr, "where it crashed"
