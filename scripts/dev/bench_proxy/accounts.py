"""The module counts what processes have used: CPU by their clocks, to the nanosecond, memory, and what others used
meanwhile.

A process is accounted for with its threads and with its children, which share its session.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from scripts.dev.common import machine

BUSY_ERROR_S = 0.03
"""The seconds by which `busy_s` may be wrong on both ends together: the kernel looks only once per tick which process
is running."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def sessions(proc: Path = Path("/proc")) -> dict[int, list[int]]:
    """Returns the pids of all processes, by the session that they belong to."""
    found: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            session = int(_after_name((folder / "stat").read_text())[3])
            found.setdefault(session, []).append(int(folder.name))
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the seconds of user and system time together, of all threads, those that have ended too."""
    return sum(_each_cpu_s(pids))


def rss_mb(pids: Iterable[int], proc: Path = Path("/proc")) -> float:
    """Returns the MiB that are resident in memory, of all that still run."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += machine.rss_mb(pid, proc)
    return total


def busy_s(cores: Collection[int], stat: str | None = None) -> float:
    """Returns the CPU seconds that processes, or other machines on the same hardware, have taken of these cores since
    the start.

    Interrupts are left out: what serves our own sockets is among them. `stat` is ``/proc/stat``.
    """
    text = Path("/proc/stat").read_text() if stat is None else stat
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("cpu"))
    return sum(_busy_ticks(lines[f"cpu{core}"]) for core in cores) / _TICKS_PER_S


def _busy_ticks(counts: str) -> int:
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, counts.split()[:8])
    return user + nice + system + steal


def _each_cpu_s(pids: Iterable[int]) -> Iterator[float]:
    for pid in pids:
        with contextlib.suppress(OSError):
            # As clock_getcpuclockid(3) makes it: the id of another process's CPU clock.
            yield time.clock_gettime((~pid << 3) | 2)


def _after_name(stat: str) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the program's name, in which there may be anything."""
    return stat[stat.rindex(")") + 1 :].split()
