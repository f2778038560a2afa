"""Programs of Debian's packages, for tests and soaks, on machines where nobody has installed them.

apt fetches a package once, without root, into ``${XDG_CACHE_HOME:-~/.cache}/pdproxy/servers``. Nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.dev.common.errors import BenchError

_FETCH_S = 120


class NotToBeHadError(BenchError):
    """There is no such program on this machine, and none could be fetched. The message says how to get it."""


def cache_folder() -> Path:
    """Returns the folder, which exists, that keeps what was fetched."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdproxy" / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def program(package: str, path: str, variable: str) -> Path:
    """Returns the program at `path` of the package: the one on PATH, else the one that was fetched. `variable` is what
    the message names as the way to give another. Raises `NotToBeHadError`."""
    name = Path(path).name
    if found := shutil.which(name):
        return Path(found)
    kept = cache_folder() / name
    if not kept.exists():
        if not has_apt():
            raise NotToBeHadError(
                f"install {name} (Debian and Ubuntu: the package {package}), or name it in {variable}"
            )
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            # It gets its name last, and so is whole where it is there; of two processes the second replaces the same.
            (unpacked([package], Path(scratch)) / path).replace(kept)
    return kept


def has_apt() -> bool:
    """Tells whether packages can be fetched here."""
    return bool(shutil.which("apt-get") and shutil.which("dpkg-deb"))


def unpacked(packages: Sequence[str], scratch: Path) -> Path:
    """Returns a folder in `scratch` with the files of these packages. Raises `NotToBeHadError`."""
    # Lists of our own: the machine's may be missing, and only root can fetch those.
    for folder in ("lists/partial", "archives/partial"):
        (scratch / folder).mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={scratch / 'lists'}", "-o", f"Dir::Cache={scratch}"]
    apt += ["-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=1"]
    run([*apt, "update"], scratch)
    run([*apt, "download", *packages], scratch)
    for package in packages:
        archive = next(scratch.glob(f"{package}_*.deb"), None)
        if archive is None:
            raise NotToBeHadError(f"apt-get fetched no {package}")
        run(["dpkg-deb", "-x", str(archive), str(scratch / "whole")], scratch)
    return scratch / "whole"


def run(command: list[str], folder: Path) -> None:
    """Runs a command that fetches or unpacks something. Raises `NotToBeHadError` where it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotToBeHadError(f"{command[0]} took longer than {_FETCH_S} s") from None
    except OSError as error:
        raise NotToBeHadError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or "no word of it").splitlines()[-1]
        raise NotToBeHadError(f"{command[0]} failed: {last}")
