"""Ports for programs that listen where they are told to, start a moment later, and may be started again."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from pdproxy.launch import ports

_given: set[int] = set()
"""Ports of processes that may not listen yet."""


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, which the kernel gives to no outgoing connection meanwhile, and which were not
    given to anybody before, here or (in a run of several processes) by another.

    One that the kernel chooses is one of those it chooses for connections, too, and a connection that has been over for
    less than a minute is enough to keep a server from starting there.
    """
    number, num_workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    found: list[int] = []
    while len(found) < count:
        (port,) = ports.free_ports(1, random.SystemRandom())
        if port not in _given and port % int(num_workers or 1) == int(number) % int(num_workers or 1):
            _given.add(port)
            found.append(port)
    return found


def free_range(count: int) -> Sequence[int]:
    """The same in a row, in a run of one process."""
    while True:
        found = ports.free_range(count, random.SystemRandom())
        if _given.isdisjoint(found):
            _given.update(found)
            return found
