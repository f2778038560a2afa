"""The systemd unit: systemd itself takes it, and its times, signals and options are the proxy's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from pdproxy.config.settings import load
from pdproxy.serve import ABORT_S
from tests.helpers.manifests import ROOT

FOLDER = ROOT / "examples" / "systemd"
UNIT, CONFIG = FOLDER / "pdproxy.service", FOLDER / "pdproxy.toml"


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("NOT TESTED by systemd itself: install systemd")
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)


def test_systemd_takes_it(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/pdproxy/bin/pdproxy", sys.executable))
    done = analyze("verify", "--man=no", copy)
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, said) == (0, [])


def test_systemd_finds_a_mistake(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("KillMode=mixed", "KillMod=mixed"))
    done = analyze("verify", "--man=no", copy)
    assert "KillMod" in done.stderr


def test_it_has_few_rights() -> None:
    """2.0 of 10, where 10 is everything."""
    done = analyze("security", "--offline=true", "--no-pager", "--threshold=20", UNIT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_line_is_one() -> None:
    [command] = unit()["ExecStart"]
    program, serve, *words = command.split()
    assert (program, serve) == ("/opt/pdproxy/bin/pdproxy", "serve")
    settings = load([word.replace("/etc/pdproxy", str(FOLDER)) for word in words])
    assert settings.config == CONFIG
    assert {one.role for one in settings.fleet()} == {"prefill", "decode"}


def test_what_is_commented_out_is_right(tmp_path: Path) -> None:
    whole = tmp_path / "pdproxy.toml"
    whole.write_text(
        "\n".join(
            line.removeprefix("#") if line[:1] == "#" and line[1:2] != " " else line
            for line in CONFIG.read_text().splitlines()
        )
    )
    settings = load(["--config", str(whole)])
    assert settings.coordinator is not None
    assert settings.replica_port


def test_who_leaves_has_the_time() -> None:
    settings = load(["--config", str(CONFIG)])
    [limit_s] = unit()["TimeoutStopSec"]
    assert float(limit_s) > settings.drain_grace_s + settings.drain_timeout_s + ABORT_S
    assert unit()["KillMode"] == ["mixed"], "SIGTERM goes to the first process alone, which ends the others in order"
