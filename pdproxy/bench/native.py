"""The mock engines and the clients are C, to be lighter than what they measure, and compiled where they are used."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pdproxy.bench.errors import BenchError

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
COMPILERS = ("cc", "gcc", "clang")
MISSING = "the benchmark's helpers are compiled, and there is no C compiler: apt install gcc, or pip install ziglang"


def compiler() -> tuple[str, ...]:
    """The command of a C compiler. Raises `BenchError` where there is none."""
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            return (path,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    raise BenchError(MISSING)


def build(name: str) -> Path:
    """``engine`` or ``client``, compiled unless that has been done with the same sources before."""
    command = compiler()
    folder = Path(tempfile.gettempdir(), f"pdproxy-bench-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BenchError(f"{folder} is somebody else's")
    program = folder / f"{name}-{_digest(command)}"
    if not program.exists():
        unfinished = program.with_suffix(f".{os.getpid()}")
        built = subprocess.run(
            [*command, *FLAGS, "-o", str(unfinished), str(SOURCES / f"{name}.c")], capture_output=True, text=True
        )
        if built.returncode != 0:
            raise BenchError(f"{name}.c does not compile: {built.stderr[-2000:].strip()}")
        unfinished.rename(program)
    return program


def _digest(command: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((command, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
