"""A folder whose process was killed is removed at the next start, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scripts.dev.common.work_folder import work_folder

HOLD = """
import sys, time
from scripts.dev.common.work_folder import work_folder
with work_folder("soak-") as folder:
    (folder / "data").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_folders_of_the_dead_are_removed_and_those_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "soak-logs-kept").mkdir()  # of somebody who has made it otherwise
    command, environment = [sys.executable, "-c", HOLD], {**os.environ, "TMPDIR": str(tmp_path)}
    holders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        dead, living = (Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout)
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait(10)
        assert dead.exists()
        with work_folder("soak-") as own:
            assert (own.exists(), dead.exists(), (living / "data").exists()) == (True, False, True)
        assert not own.exists()
        assert (tmp_path / "soak-logs-kept").exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(10)
            if holder.stdout:
                holder.stdout.close()
