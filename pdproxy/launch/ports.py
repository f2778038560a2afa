"""The module finds ports for programs of this machine that are started, killed, and started again."""

from __future__ import annotations

import random
import socket

from pdproxy.launch.errors import PreflightError

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""The ports that are tried. They are below those which the kernel gives to outgoing connections, so that a killed
engine finds its port free again."""
_NUM_TRIES = 200


def free_ports(count: int, dice: random.Random) -> list[int]:
    """Returns `count` different ports on which no process listens just now. Raises `PreflightError`."""
    found: list[int] = []
    for port in dice.sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        if is_free(port):
            found.append(port)
    raise PreflightError(f"there are no {count} free ports between {PORTS.start} and {PORTS.stop}")


def free_range(count: int, dice: random.Random) -> range:
    """Returns `count` ports in a row on which no process listens just now. Raises `PreflightError`."""
    for first in dice.sample(PORTS, _NUM_TRIES):
        if all(map(is_free, range(first, first + count))):
            return range(first, first + count)
    raise PreflightError(f"there are no {count} free ports in a row between {PORTS.start} and {PORTS.stop}")


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
