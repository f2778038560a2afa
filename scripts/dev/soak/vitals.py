"""The module tells what the proxy costs: memory, descriptors, threads, tasks. A leak is growth from one idle moment to
another."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Vitals:
    """Vitals is what the proxy uses at one moment; `rss_mb` is in MiB."""

    num_fds: int
    num_threads: int
    num_tasks: int
    rss_mb: float

    def facts(self) -> dict[str, float]:
        return asdict(self)


def read_vitals(pid: int, num_tasks: int) -> Vitals:
    """Returns the vitals of a process as proc(5) tells them; tasks are what the process says of itself."""
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return Vitals(
        num_fds=len(os.listdir(folder / "fd")),
        num_threads=len(os.listdir(folder / "task")),
        num_tasks=num_tasks,
        rss_mb=round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1),
    )
