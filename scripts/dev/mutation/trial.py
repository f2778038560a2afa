"""Runs pytest in a copy of the tree, and says how that ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
"""The folder from which the plugin is imported."""


@dataclass(frozen=True, slots=True)
class Ending:
    """An `Ending` tells how a run ended. `status` is pytest's exit status, None where it took too long and was
    killed."""

    status: int | None
    seconds: float
    output: str

    @property
    def has_passed(self) -> bool:
        return self.status == 0


def run_pytest(
    folder: Path, arguments: Sequence[str], *, limit_s: float | None, environment: Mapping[str, str] | None = None
) -> Ending:
    """Runs pytest in `folder`. When this returns, pytest is gone, with everything that it started."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *arguments]
    path = os.pathsep.join(filter(None, (str(folder), str(HERE), os.environ.get("PYTHONPATH"))))
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {}), "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            has_ended = _wait(child.pid, limit_s)
        finally:
            # Before it is reaped, while no other process can have got its number.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    return Ending(child.returncode if has_ended else None, time.monotonic() - started, said)


def _wait(pid: int, limit_s: float | None) -> bool:
    """Tells whether the process has ended in time. The process is not reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([descriptor], [], [], limit_s)
        return bool(ended)
    finally:
        os.close(descriptor)
