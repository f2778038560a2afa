"""The module describes the machine that figures are measured on. Without it they say nothing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

MIB = 1 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def facts() -> dict[str, Any]:
    """Returns what every report tells of the machine. Its cores are those that this process may use."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def version_of(package: str) -> str | None:
    """Returns the version of a package, or None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model(cpuinfo: str) -> str:
    """Returns the model, for instance ``AMD EPYC …``, or the architecture where the kernel names no model."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.machine())


def rss_mb(pid: int | str = "self", proc: Path = Path("/proc")) -> float:
    """Returns the MiB of a process that are resident in memory. Raises `OSError` where there is no such process."""
    return int((proc / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES / MIB
