"""Puts extensions beside the sources of a package, and takes them away.

They are made in a temporary folder, of a copy of the sources; the package is touched when all of them are there.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from pdproxy.compiled.stamp import PACKAGE, SUFFIX, Stamp, digest, write_stamp

NEEDED = ("mypyc", "setuptools")
COMPILERS = ("cc", "gcc", "clang")
PACKAGES = ("pdproxy", "transfer")
"""What a complete copy has."""
UNFINISHED = ""
_LAST_CHARS = 4000


class BuildError(Exception):
    """In words for a user."""


def check_tools() -> None:
    """Raises `BuildError` where something is missing that it takes, saying what brings it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(f"to compile takes {' and '.join(missing)}: pip install 'pdproxy[compile]'")
    if _compiler() is None:
        raise BuildError("to compile takes a C compiler, and there is none: apt install gcc")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError("to compile takes Python's headers, and there are none: apt install python3-dev")


def compile_in_place(package: Path = PACKAGE) -> int:
    """How many files that took. Raises `BuildError`, `OSError`."""
    check_tools()
    with tempfile.TemporaryDirectory(prefix="pdproxy-compile-") as folder:
        work = Path(folder)
        _copy_sources(package, work / "pdproxy")
        made = digest(work / "pdproxy")
        _make(work, work / "made")
        found = sorted(path.relative_to(work / "made" / "pdproxy") for path in work.glob(f"made/**/*{SUFFIX}"))
        remove(package)
        # Whoever starts in between, or after this was killed, is told.
        write_stamp(package, Stamp(UNFINISHED, SUFFIX))
        for name in found:
            _put(work / "made" / "pdproxy" / name, package / name)
        write_stamp(package, Stamp(made, SUFFIX))
    return len(found)


def compile_into(folder: Path) -> int:
    """A complete copy of the packages, compiled. Raises `BuildError`, `OSError`; also where there is something."""
    copy_into(folder)
    return compile_in_place(folder / "pdproxy")


def copy_into(folder: Path) -> None:
    """A complete copy of the packages, sources only. Raises `BuildError` where there is something already."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BuildError(f"{folder} is not empty")
    for name in PACKAGES:
        _copy_sources(PACKAGE.with_name(name), folder / name)


def remove(package: Path = PACKAGE) -> int:
    """All extensions, whoever made them. How many there were."""
    found = list(package.rglob("*.so"))
    for path in found:
        path.unlink()
    write_stamp(package, None)
    return len(found)


def _make(sources: Path, into: Path) -> None:
    """In a process of its own, which is `sources` and has mypy's memory."""
    compiler = _compiler()
    environment = os.environ | ({} if compiler is None else {"CC": compiler})
    made = subprocess.run(
        [sys.executable, "-m", "pdproxy.compiled.extensions", str(into)],
        cwd=sources,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if made.returncode != 0:
        raise BuildError(f"it does not compile:\n{made.stdout[-_LAST_CHARS:].strip()}")


def _compiler() -> str | None:
    """A command: the one that Python was made with where it is there."""
    usual = os.environ.get("CC") or sysconfig.get_config_var("CC") or ""
    words = shlex.split(usual)
    if words and shutil.which(words[0]) is not None:
        return usual
    return next((name for name in COMPILERS if shutil.which(name) is not None), None)


def _copy_sources(package: Path, to: Path) -> None:
    shutil.copytree(package, to, ignore=shutil.ignore_patterns("__pycache__", "*.so", "stamp.json"))


def _put(made: Path, path: Path) -> None:
    """By a rename: a process that has the former one in its memory keeps it."""
    beside = path.with_suffix(f".{os.getpid()}")
    shutil.copyfile(made, beside)
    beside.replace(path)
