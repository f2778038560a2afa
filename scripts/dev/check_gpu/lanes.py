"""Finds which lane UCX takes, by what it prints under ``UCX_PROTO_INFO=y``."""

from __future__ import annotations

import re

_PROCESS = re.compile(r"\[[^\]\s]*?:?(\d+):\d+\]\s*$")
PUT = "remote memory write by ucp_put*"


def put_lanes(text: str, *, but_of: int | None = None) -> list[str]:
    """Returns lines such as ``host memory to host: 0..inf zero-copy cma/memory``, one per kind of write and range of
    sizes, in the order in which they were first seen. Those of the process with the number `but_of` are left out.

    Several connections with the same lanes are told once. The list is empty where UCX printed no table.
    """
    found: dict[str, None] = {}
    between = ""
    for line in text.splitlines():
        begin, _, table = line.partition("|")
        process = _PROCESS.search(begin)
        if but_of is not None and process is not None and int(process[1]) == but_of:
            continue
        cells = [cell.strip() for cell in table.rstrip(" |").split("|")]
        if len(cells) == 1 and cells[0]:
            between = cells[0].partition(" from ")[2] if cells[0].startswith(PUT) else ""
        elif len(cells) == 3 and between and cells[0] != "Range":
            found[f"{between}: {' '.join(cells)}"] = None
    return list(found)


def emulated(lanes: list[str]) -> list[str]:
    """Returns the lanes from GPU memory over which UCX copies in software, on the receiver's thread: these are no
    lanes. From host memory to a GPU there are no others, and nobody writes so."""
    return [lane for lane in lanes if "software emulation" in lane and not lane.startswith("host memory")]
