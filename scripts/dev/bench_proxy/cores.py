"""The module says which core does what: the proxy has one for itself, the helpers and everybody else have the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores are two of those that this process may use. They are the same where there is only one: then figures mean
    little."""

    proxy: int
    helpers: int

    @property
    def both(self) -> frozenset[int]:
        return frozenset((self.proxy, self.helpers))

    @classmethod
    def here(cls) -> Self:
        """Returns the last two cores: the first one is where interrupts usually go."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(proxy=usable[-1], helpers=usable[-2] if len(usable) > 1 else usable[-1])


@contextlib.contextmanager
def on(core: int) -> Iterator[None]:
    """Puts this thread on one core while the block runs, and what is started in here, with all its threads and
    children: they see a machine of one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
