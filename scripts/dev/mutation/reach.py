"""A pytest plugin that writes down which lines of the named files each passing test goes through.

Frames of other files are left alone after their first event, so that a test takes a few times as long, not a hundred
times. What a test's subprocesses do is not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

FILES = "MUTANTS_FILES"
"""The environment variable that has the files, joined like a search path."""
OUTPUT = "MUTANTS_OUTPUT"
"""The environment variable that has the file for what was found."""


class Reach:
    """A `Reach` is the plugin. Mutable state: what the test under way has gone through, and what all tests have that
    passed."""

    def __init__(self, files: list[str], output: Path) -> None:
        self._named = {file: number for number, file in enumerate(files)}
        self._output = output
        self._lines: set[tuple[int, int]] = set()
        self._files: set[str] = set()
        self._has_failed = False
        self._tests: dict[str, dict[str, Any]] = {}

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        self._files.add(name)
        number = self._named.get(name)
        if number is None:
            return None
        lines = self._lines

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add((number, frame.f_lineno))
            return on_line

        return on_line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines, self._files, self._has_failed = set(), set(), False
        started = time.perf_counter()
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if self._lines and not self._has_failed:
                self._tests[item.nodeid] = {
                    "lines": sorted(self._lines),
                    "num_files": len(self._files),
                    "seconds": time.perf_counter() - started,
                }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= not report.passed

    def pytest_sessionfinish(self) -> None:
        self._output.write_text(json.dumps(self._tests))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reach(os.environ[FILES].split(os.pathsep), Path(os.environ[OUTPUT])))
