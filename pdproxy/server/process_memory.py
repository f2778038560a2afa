"""How a process that serves treats its memory: what stays is not looked through again, and what comes back is kept."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

THRESHOLDS = 2_000, 5, 1_000
"""Of the garbage collector. Hardly anything that a request leaves behind is a cycle; what streams under way hold shall
not be gone through again and again; and no look shall take long."""
OWN_MAPPING_BYTES = 4 << 20
"""From here on a block is the kernel's, and goes back to it."""
KEPT_BYTES = 32 << 20
"""So much may lie free at the end of the heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers, of malloc.h."""

_LARGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""Linux's number, of mman.h, from 6.1 on."""
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 +(\[heap\])?$")
"""A line of /proc/self/maps."""


def settle() -> None:
    """Once a process has started, and all that is there stays."""
    _spare_what_stays()
    _keep_what_comes_back()


def _spare_what_stays() -> None:
    """To look it through for garbage takes the collector a tenth of a second each time, in which no token moves."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def _keep_what_comes_back() -> None:
    """glibc hands large blocks, and the end of the heap, back to the kernel as soon as they are free. To get them again
    costs a page fault for every 4 KiB: of a prompt of 512 KiB, two thirds of all that it takes to receive it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def use_large_pages() -> None:
    """For a process that goes through hundreds of MB in no order: what it has just now is put into pages of 2 MiB, of
    which the processor finds far more without looking them up. Takes a tenth of a second per 50 MB. Does nothing where
    the kernel does not know how."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    maps = Path("/proc/self/maps")
    if madvise is None or not maps.exists():
        return
    for found in filter(None, map(_OWN_MEMORY.match, maps.read_text().splitlines())):
        begins = -(-int(found[1], 16) // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        ends = int(found[2], 16) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        if begins < ends:
            madvise(ctypes.c_void_p(begins), ctypes.c_size_t(ends - begins), _MADV_COLLAPSE)
