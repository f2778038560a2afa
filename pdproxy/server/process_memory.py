"""The memory of a process that serves is tuned here: the collector skips what stays, and freed memory is kept. It also
says how much of it there may be."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

THRESHOLDS = 2_000, 5, 1_000
"""Thresholds of the garbage collector. Hardly anything that a request leaves behind is a cycle. The collector must not
go through the objects of running streams again and again, and no collection may take long."""
OWN_MAPPING_BYTES = 4 << 20
"""Size in bytes from which on the kernel maps a block on its own, and gets it back when the block is freed."""
KEPT_BYTES = 32 << 20
"""The most bytes that lie free at the end of the heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The numbers of these options in glibc's malloc.h."""

_LARGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""The number of this advice in Linux's mman.h, from Linux 6.1 on."""
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 +(\[heap\])?$")
"""Matches a line of /proc/self/maps for the process's own memory."""


def allowed_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the bytes that this process may have: all of the machine's, or less where a control group of the process,
    as a container is one, has a limit. `cgroups` is where they are mounted, `own` tells which are the process's."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine_bytes, *_group_limits(cgroups, own)])


def _group_limits(cgroups: Path, own: Path) -> Iterator[int]:
    """Yields the limits of the process's control group and of those around it, in either version. Inside a container
    the innermost one that can be seen is the mount itself, whatever path the process is told."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, name = (cgroups, "memory.max") if not controllers else (cgroups / "memory", "memory.limit_in_bytes")
            group = Path(path.lstrip("/"))
            for place in (group, *group.parents):
                with suppress(OSError, ValueError):  # there is no such group here, or its limit is "max"
                    yield int((root / place / name).read_text())


def settle() -> None:
    """Tunes the memory of a process that has started, when all that is there stays. Call it once."""
    _spare_what_stays()
    _keep_what_comes_back()


def _spare_what_stays() -> None:
    """Excludes what is there from garbage collection, and sets the collector's thresholds. Looking through it would
    take a tenth of a second each time, in which no token moves."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def _keep_what_comes_back() -> None:
    """Has glibc keep large blocks, and the end of the heap, which it hands back to the kernel as soon as they are free.
    To get them again costs a page fault for every 4 KiB: two thirds of all the time that it takes to receive a prompt
    of 512 KiB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries do not have it
        mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def use_large_pages() -> None:
    """Puts the process's present memory into pages of 2 MiB. Does nothing where the kernel does not know how.

    It is for a process that goes through hundreds of MB in no order: the processor finds far more of such pages without
    looking them up. Takes a tenth of a second per 50 MB.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    maps = Path("/proc/self/maps")
    if madvise is None or not maps.exists():
        return
    for found in filter(None, map(_OWN_MEMORY.match, maps.read_text().splitlines())):
        begins = -(-int(found[1], 16) // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        ends = int(found[2], 16) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        if begins < ends:
            madvise(ctypes.c_void_p(begins), ctypes.c_size_t(ends - begins), _MADV_COLLAPSE)
