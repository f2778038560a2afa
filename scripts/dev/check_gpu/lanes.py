"""Finds which lane UCX takes, by what it prints under ``UCX_PROTO_INFO=y``."""

from __future__ import annotations

PUT = "remote memory write by ucp_put*"


def put_lanes(text: str) -> list[str]:
    """Returns lines such as ``host memory to host: 0..inf zero-copy cma/memory``, one per kind of write and range of
    sizes, in the order in which they were first seen.

    Several connections with the same lanes are told once. The list is empty where UCX printed no table.
    """
    found: dict[str, None] = {}
    between = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].rstrip(" |").split("|")]
        if len(cells) == 1 and cells[0]:
            between = cells[0].partition(" from ")[2] if cells[0].startswith(PUT) else ""
        elif len(cells) == 3 and between and cells[0] != "Range":
            found[f"{between}: {' '.join(cells)}"] = None
    return list(found)


def emulated(lanes: list[str]) -> list[str]:
    """Returns the lanes over which UCX copies in software, on the receiver's thread: for GPU memory these are no
    lanes."""
    return [lane for lane in lanes if "software emulation" in lane]
