"""The README's first command, as a user runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cluster import free_ports

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="would install: run the tests by scripts/test")
def test_run_once_prints_an_answer_and_the_table() -> None:
    names = ("--port", "--prefill-port", "--decode-port", "--receiver-port", "--notify-port")
    ports = [word for name, port in zip(names, free_ports(len(names)), strict=True) for word in (name, str(port))]
    command = [str(ROOT / "examples/1p1d/run.sh"), "--once", *ports]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=170, env={**os.environ, "COLUMNS": "120"}, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "disaggregated path" in result.stdout
    for phase in ("tokenize", "slot wait", "prefill", "kv wait", "first byte", "decode"):
        assert phase in result.stdout
    assert "GB/s" in result.stdout
