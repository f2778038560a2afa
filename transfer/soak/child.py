"""What the processes of a soak have in common: how they are run, and what they cost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from transfer.bench.peer import Peer, serve

MIB = 1 << 20


def run(make: Callable[[], Peer], lifetime_s: str) -> None:
    """Answer commands on standard input until it ends, or for `lifetime_s`: nobody has to clean up after a soak."""
    signal.alarm(int(float(lifetime_s)))
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX reports a dead peer on standard output
    asyncio.run(_serve(make, answers))


async def _serve(make: Callable[[], Peer], answers: Any) -> None:
    await serve(make(), answers)


def vitals() -> dict[str, Any]:
    """Of this process, now: a leak is growth from one idle moment to another."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tasks": len(asyncio.all_tasks()),
    }
