"""A short soak, as a user runs it: every fault there is, and nothing wrong, held or left at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("PDPROXY_TEST_SEED", "6"))
"""This one kills a decoder and the proxy and restarts a prefiller, all in the first 13 s."""


def start(folder: Path, model: Path, *options: str) -> subprocess.Popen[str]:
    # Every process it starts has the folder's name in its command line.
    shutil.copytree(model, folder / "model")
    places = {"--model": "model", "--json": "report.json", "--log-dir": "logs"}
    flags = [word for flag, name in places.items() for word in (flag, str(folder / name))]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/soak.py"), "--seed", str(SEED), *flags, *options],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )


def report_in(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # gone meanwhile
        if str(folder) in command:
            found.append(command)
    return found


@dataclass(frozen=True)
class Storm:
    """A soak that has ended, and what it wrote."""

    status: int
    output: str
    report: dict[str, Any]
    left_over: list[str]
    """Its processes that are still there."""


@pytest.fixture(scope="module")
def storm(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Storm:
    folder = tmp_path_factory.mktemp("storm")
    size = ("--prefillers", "2", "--decoders", "2", "--clients", "60")
    soak = start(folder, tiny_model(), "--minutes", "0.25", "--kill-proxy-every", "6", *size)
    try:
        _, output = soak.communicate(timeout=160)
    finally:
        soak.kill()
    print(output)
    return Storm(soak.returncode, output, report_in(folder), processes_of(folder))


def test_a_short_storm_of_everything(storm: Storm) -> None:
    report = storm.report
    assert f"seed {SEED}" in storm.output
    assert report["is_complete"]
    for name in ("wrong_answers", "hung", "held_at_end", "leaked_pages", "unserved_at_end", "crashes"):
        assert report[name] == 0, name
    assert report["fd_growth"] <= 8
    assert report["task_growth"] <= 4
    assert report["rss_growth_mb"] < 64
    assert report["seed"] == SEED
    # It was no walk in the park.
    verdicts = ("completed", "typed_errors", "left", "proxy_killed", "wrong_answers", "hung")
    assert report["requests"] == sum(report[name] for name in verdicts) > 200
    assert report["paths"]["disaggregated"] > 50
    assert report["typed_errors"] > 0
    assert report["left"] > 0
    assert sum(report["faults"].values()) >= 2
    assert report["faults"]["proxy killed"] >= 1
    assert report["proxy_killed"] == sum(report["lost_connections"].values()) > 0
    assert all(report["signals"][fate] > 0 for fate in ("lost", "late", "doubled", "reordered"))
    assert not storm.left_over


def test_no_decoder_has_let_an_attempt_wait_for_pages(storm: Storm) -> None:
    """But for those of the proxy that was killed, which may ask for pages after its successor has looked."""
    assert storm.report["reservations_waited"] == 0
    assert storm.status == 0


def test_ctrl_c_stops_everything_and_writes_what_is_known(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    soak = start(tmp_path, tiny_model(), "--minutes", "1", "--prefillers", "1", "--decoders", "1", "--clients", "5")
    try:
        assert soak.stderr is not None
        for line in soak.stderr:
            if line.startswith("warming up"):
                break
        assert len(processes_of(tmp_path)) > 3
        soak.send_signal(signal.SIGINT)
        _, output = soak.communicate(timeout=60)
    finally:
        soak.kill()
    assert soak.returncode == 128 + signal.SIGINT, output
    report = report_in(tmp_path)
    assert (report["is_complete"], report["seed"], report["held_at_end"]) == (False, SEED, None)
    assert not processes_of(tmp_path)
