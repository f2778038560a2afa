"""The costs of a process of a soak."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

MIB = 1 << 20


def vitals() -> dict[str, Any]:
    """Returns the figures of this process, now. A leak is growth from one idle moment to another."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tasks": len(asyncio.all_tasks()),
    }
