"""The library's public face: every name is there, nothing heavy comes with the package, and the example runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import transfer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "transfer" / "two_processes.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.engine
@pytest.mark.parametrize("name", transfer.__all__)
def test_every_name_is_there(name: str) -> None:
    pytest.importorskip("torch")
    assert getattr(transfer, name).__name__ == name
    assert name in dir(transfer)


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Sendr'"):
        transfer.Sendr  # noqa: B018


def test_the_package_brings_nothing_heavy() -> None:
    code = "import sys, transfer; print(sorted({'torch', 'nixl', 'numpy', 'zmq'} & set(sys.modules)))"
    assert run("-c", code).stdout == "[]\n"


def test_the_docs_show_the_example_as_it_is() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```\n" in (ROOT / "docs" / "transfer.md").read_text()


@pytest.mark.engine
def test_the_example_runs() -> None:
    """4 layers, 7 pages: page i's keys of the last layer are all i + 3."""
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    done = run(str(EXAMPLE), OMP_NUM_THREADS="1", UCX_NET_DEVICES="lo", UCX_TLS="tcp,sm,self")
    sums = [float((page + 3) * 2 * 16 * 64) for page in range(7)]
    assert done.returncode == 0, done.stderr
    assert "458,752 bytes in " in done.stdout
    assert f"at the decoder: {sums}" in done.stdout
