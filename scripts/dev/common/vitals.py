"""The module tells what a process costs: memory, descriptors, threads, tasks. A leak is growth from one idle moment to
another."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.dev.common.machine import rss_mb


@dataclass(frozen=True, slots=True)
class Vitals:
    """Vitals is what a process uses at one moment; `rss_mb` is in MiB."""

    num_fds: int
    num_threads: int
    num_tasks: int
    rss_mb: float

    def facts(self) -> dict[str, float]:
        return asdict(self)


def read_vitals(pid: int, num_tasks: int) -> Vitals:
    """Returns the vitals of a process as proc(5) tells them; tasks are what the process says of itself."""
    folder = Path(f"/proc/{pid}")
    return Vitals(
        num_fds=len(os.listdir(folder / "fd")),
        num_threads=len(os.listdir(folder / "task")),
        num_tasks=num_tasks,
        rss_mb=round(rss_mb(pid), 1),
    )


def own_vitals() -> dict[str, Any]:
    """Returns the figures of this process, as the report of a transfer's soak names them."""
    own = read_vitals(os.getpid(), len(asyncio.all_tasks()))
    return {"rss_mb": own.rss_mb, "fds": own.num_fds, "threads": own.num_threads, "tasks": own.num_tasks}
