"""The module makes a model to try everything with, where the user names none."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from pdproxy.launch.errors import LaunchError, describe
from pdproxy.launch.logs import doing
from pdproxy.launch.machine import environment
from pdproxy.launch.preflight import check_model
from pdproxy.launch.process import Program
from pdproxy.launch.supervisor import Supervisor


async def make_tiny_model(supervisor: Supervisor, folder: Path, console: Console) -> Path:
    """Makes a small random model in `folder`, unless one is there, and returns the folder. The model is moved into
    place only when it is complete. Raises `LaunchError`."""
    if (folder / "config.json").is_file():
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = (sys.executable, "-m", "transfer.engine.tiny", "--out", str(part), "--seed", "0")
    program = Program(name="tiny", command=command, env=environment("cpu"))
    try:
        with doing(console, f"making a tiny random model in {folder}"):
            process = await supervisor.run(program)
        if process.status:
            raise LaunchError("\n  ".join([f"making the tiny model {describe(process.status)}:", *process.tail]))
        # Fails where another launch was faster, which is as good.
        with suppress(OSError):
            part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    check_model(folder)
    console.print(f"made a tiny random model in {folder}", highlight=False, markup=False)
    return folder
