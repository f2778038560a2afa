"""The module forks the other ranks of an engine. They live no longer than rank 0."""

from __future__ import annotations

import os

from transfer.child_process import end_with_parent
from transfer.engine.ranks.link import Link


def start_ranks(size: int) -> tuple[int, list[Link]]:
    """Forks the other ranks of an engine. Returns, in each of the `size` processes, its rank and its links.

    Call it before there is any thread, and so before torch and numpy are imported. Rank 0 gets a link to each other
    rank. The others get one to rank 0, and end when rank 0 does. A signal that goes to all (Ctrl-C) is rank 0's to
    follow.
    """
    links: list[Link] = []
    for index in range(1, size):
        ours, theirs = Link.pair(index)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for link in (*links, ours):
                link.steps.close()  # closed but not shut down: rank 0 uses them
                link.asks.close()
            end_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            return index, [theirs]
        theirs.steps.close()
        theirs.asks.close()
        links.append(Link(index, ours.steps, ours.asks, pid))
    return 0, links
