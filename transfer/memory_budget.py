"""One budget of bytes for all that a server keeps for its clients: what they send, and what they have not taken yet.

Memory that nobody counts runs out unseen, and the kernel then ends the process and every request in it. With a budget
the one request that is too much is refused, and the others go on. The proxy and the built-in engine have a budget each.
"""

from __future__ import annotations

import sys

SMALL_BYTES = 64 * 1024
"""The most bytes of a share that may use all of the budget."""
SPARED = 8
"""The part of the budget that new large requests may not use, as a divisor. Small requests are served beside them, and
those that are being served can be finished."""
SPARED_FOR_SMALL = 16
"""The part of the budget that is for small requests alone, as a divisor."""


class MemoryBudget:
    """A `MemoryBudget` is at most `limit_bytes` for all of its shares together.

    Mutable state: the bytes that its shares have, which always add up to `num_bytes`; how often a share got no more.
    """

    __slots__ = ("begin_limit_bytes", "go_on_limit_bytes", "limit_bytes", "num_bytes", "num_refused")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.begin_limit_bytes = limit_bytes - limit_bytes // SPARED
        """The most bytes in use with which a share that is not small gets more by `take`."""
        self.go_on_limit_bytes = limit_bytes - limit_bytes // SPARED_FOR_SMALL
        """The most bytes in use with which such a share gets more by `take_on`."""
        self.num_bytes = 0
        self.num_refused = 0

    def share(self) -> MemoryShare:
        """Returns an empty share. Its owner must `release` it."""
        return MemoryShare(self)

    def __repr__(self) -> str:
        return f"<MemoryBudget {self.num_bytes} of {self.limit_bytes} bytes, {self.num_refused} refused>"


class MemoryShare:
    """A `MemoryShare` is what one owner has of a budget. The end of a ``with`` block releases it.

    Mutable state: its bytes. An owner that has released it may use it again.
    """

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """Returns the most bytes of the whole budget."""
        return self._budget.limit_bytes

    def take(self, num_bytes: int) -> bool:
        """Takes `num_bytes` more for what is still to be received. Returns False, and takes nothing, where the budget
        has no room for them."""
        return self._take(num_bytes, self._budget.begin_limit_bytes)

    def take_on(self, num_bytes: int) -> bool:
        """Takes `num_bytes` more for a request that is being served: it comes before those that begin. Returns False,
        and takes nothing, where the budget has no room for them."""
        return self._take(num_bytes, self._budget.go_on_limit_bytes)

    def _take(self, num_bytes: int, limit_bytes: int) -> bool:
        budget, share_bytes = self._budget, self.num_bytes + num_bytes
        used_bytes = budget.num_bytes + num_bytes
        if used_bytes > (budget.limit_bytes if share_bytes <= SMALL_BYTES else limit_bytes):
            budget.num_refused += 1
            return False
        budget.num_bytes = used_bytes
        self.num_bytes = share_bytes
        return True

    def charge(self, num_bytes: int) -> None:
        """Takes `num_bytes` more for what is in memory already, whether or not there is room. Others get less then."""
        self._budget.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Gives `num_bytes` back. Raises `ValueError`, and changes nothing, where the share has fewer."""
        if num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes of {self!r} cannot be given back")
        self._budget.num_bytes -= num_bytes
        self.num_bytes -= num_bytes

    def release(self) -> None:
        """Gives everything back. Idempotent."""
        self._budget.num_bytes -= self.num_bytes
        self.num_bytes = 0

    def __enter__(self) -> MemoryShare:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<MemoryShare {self.num_bytes} bytes>"


def least_budget(share_bytes: int) -> int:
    """Returns the bytes of the smallest budget in which there is room for a share of `share_bytes`."""
    return -(-share_bytes * SPARED // (SPARED - 1))


UNLIMITED = MemoryBudget(sys.maxsize)
"""A budget for what is no client's."""
