"""The build puts extensions beside the sources of a package, and takes them away.

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

from pdproxy.compiled.stamp import PACKAGE, STAMP, Stamp, digest, extensions, write_stamp

NEEDED = ("msgspec", "mypyc", "setuptools")
COMPILERS = ("cc", "gcc", "clang")
PACKAGES = ("pdproxy", "transfer")
"""Names of the packages that a complete copy has."""
_LAST_CHARS = 4000


class BuildError(Exception):
    """BuildError says in words for a user why nothing was compiled."""


def check_tools() -> None:
    """Raises `BuildError` where a tool is missing, and says what brings it."""
    check_compiler()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(f"to compile takes {' and '.join(missing)}: pip install 'pdproxy[compile]'")


def check_compiler() -> None:
    """Raises `BuildError` where something is missing that pip does not bring."""
    if _compiler() is None:
        raise BuildError("to compile takes a C compiler, and there is none: apt install gcc")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError("to compile takes Python's headers, and there are none: apt install python3-dev")


def compile_in_place(package: Path = PACKAGE) -> int:
    """Compiles `package` beside its sources. Returns the number of extension files. Raises `BuildError`, `OSError`."""
    check_tools()
    with tempfile.TemporaryDirectory(prefix="pdproxy-compile-") as folder:
        work = Path(folder)
        _copy_sources(package, work / "pdproxy")
        made = digest(work / "pdproxy")
        _make(work, work / "made")
        found = extensions(work / "made" / "pdproxy")
        remove(package)
        # A process that starts in between, or after this was killed, finds extensions that no stamp names.
        for name in found:
            _put(work / "made" / "pdproxy" / name, package / name)
        write_stamp(package, Stamp(made, found))
    return len(found)


def compile_into(folder: Path) -> int:
    """Makes a complete copy of the packages and compiles it. Returns the number of extension files. Raises
    `BuildError`, also where `folder` is not empty, and `OSError`."""
    copy_into(folder)
    return compile_in_place(folder / "pdproxy")


def copy_into(folder: Path) -> None:
    """Makes a complete copy of the packages, sources only. Raises `BuildError` where `folder` is not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BuildError(f"{folder} is not empty")
    for name in PACKAGES:
        _copy_sources(PACKAGE.with_name(name), folder / name)


def remove(package: Path = PACKAGE) -> int:
    """Removes all extensions, whichever Python they are for. Returns how many there were."""
    (package / STAMP).unlink(missing_ok=True)
    found = list(package.rglob("*.so"))
    for path in found:
        path.unlink()
    return len(found)


def _make(sources: Path, into: Path) -> None:
    """Compiles in a process of its own, which runs in the folder `sources` and has the memory that mypy needs. Raises
    `BuildError`."""
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
    """Returns a compiler's command: the one of ``CC``, else the one that Python was made with, where it is there; else
    a known name; None where there is none."""
    usual = os.environ.get("CC") or sysconfig.get_config_var("CC") or ""
    words = shlex.split(usual)
    if words and shutil.which(words[0]) is not None:
        return usual
    return next((name for name in COMPILERS if shutil.which(name) is not None), None)


def _copy_sources(package: Path, to: Path) -> None:
    shutil.copytree(package, to, ignore=shutil.ignore_patterns("__pycache__", "*.so", STAMP.name))


def _put(made: Path, path: Path) -> None:
    """Puts the file in place by a rename: a process that has the former one in its memory keeps it."""
    beside = path.with_suffix(f".{os.getpid()}")
    shutil.copyfile(made, beside)
    beside.replace(path)
