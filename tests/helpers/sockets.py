"""Where a process listens, as the kernel sees it."""

from __future__ import annotations

import os
from pathlib import Path


def listening(pid: int) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process listens (proc(5): ``net/tcp``, state 0A).

    An IPv6 address stays in hexadecimal.
    """
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in _links(pid) if link.startswith("socket:")}
    found = []
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/{pid}/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].rpartition(":")
                found.append((_readable(address), int(port, 16)))
    return found


def _links(pid: int) -> list[str]:
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue  # closed meanwhile
    return links


def _readable(address: str) -> str:
    """``0100007F`` → ``127.0.0.1``."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(address))) if len(address) == 8 else address
