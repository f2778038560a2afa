"""The module compiles what has to be compiled where it is used, and keeps it: the mock engines and the clients, which
are C, to be lighter than what they measure; and pdproxy."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pdproxy.compiled.build import COMPILERS, BuildError, check_tools, compile_into, copy_into
from pdproxy.compiled.modules import MODULES
from pdproxy.compiled.stamp import SUFFIX, digest
from scripts.dev.common.errors import BenchError

SOURCES = Path(__file__).with_name("c_sources")
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
MISSING = "the benchmark's helpers are compiled, and there is no C compiler: apt install gcc, or pip install ziglang"


def compiler() -> tuple[str, ...]:
    """Returns the command of a C compiler. Raises `BenchError` where there is none."""
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    raise BenchError(MISSING)


def build(name: str) -> Path:
    """Returns the program ``engine`` or ``client``; it is compiled unless that has been done with the same sources
    before. Raises `BenchError`."""
    command = compiler()
    program = _folder() / f"{name}-{_digest(command)}"
    if not program.exists():
        unfinished = program.with_suffix(f".{os.getpid()}")
        built = subprocess.run(
            [*command, *FLAGS, "-o", str(unfinished), str(SOURCES / f"{name}.c")], capture_output=True, text=True
        )
        if built.returncode != 0:
            raise BenchError(f"{name}.c does not compile: {built.stderr[-2000:].strip()}")
        unfinished.rename(program)
    return program


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies are folders with pdproxy in them, for ``PYTHONPATH``."""

    interpreted: Path
    compiled: Path | None


def why_not_compiled() -> str | None:
    """Returns why pdproxy cannot be compiled; None: it can be."""
    try:
        check_tools()
    except BuildError as error:
        return str(error)
    return None


def copies(work: Path, *, is_compiled: bool) -> Copies:
    """Returns copies of this pdproxy. The compiled one is kept, as the helpers are; to make it takes a minute or two.

    Raises `BenchError` where it does not compile.
    """
    try:
        copy_into(work / "interpreted")
        return Copies(work / "interpreted", _compiled() if is_compiled else None)
    except BuildError as error:
        raise BenchError(str(error)) from None


def copy_of(checkout: Path, work: Path, *, is_compiled: bool) -> Path:
    """Returns a folder with a copy of the pdproxy in another `checkout`, made by its own code. Raises `BenchError`."""
    folder = work / "earlier"
    make = "compile_into" if is_compiled else "copy_into"
    program = f"from pathlib import Path; from pdproxy.compiled.build import {make}; {make}(Path({str(folder)!r}))"
    made = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        raise BenchError(f"the pdproxy in {checkout} cannot be copied: {made.stderr[-2000:].strip()}")
    return folder


def _compiled() -> Path:
    made_with = (digest(), SUFFIX, sys.executable, MODULES)
    folder = _folder() / f"pdproxy-{hashlib.sha256(repr(made_with).encode()).hexdigest()[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            compile_into(Path(unfinished, "copy"))
            try:
                Path(unfinished, "copy").rename(folder)
            except OSError:  # another run may have made it meanwhile
                if not folder.exists():
                    raise
    return folder


def _folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"pdproxy-bench-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BenchError(f"{folder} is somebody else's")
    return folder


def _digest(command: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((command, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
