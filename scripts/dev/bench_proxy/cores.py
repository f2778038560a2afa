"""Which core does what: the proxy has one for itself, the helpers and everybody else the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Cores:
    """Of what this process may use. The same for both where there is only one: then figures mean little."""

    proxy: int
    helpers: int

    @property
    def both(self) -> frozenset[int]:
        return frozenset((self.proxy, self.helpers))

    @classmethod
    def here(cls) -> Self:
        """The last two: the first one is where interrupts usually go."""
        usable = sorted(os.sched_getaffinity(0))
        return cls(proxy=usable[-1], helpers=usable[-2] if len(usable) > 1 else usable[-1])


@contextlib.contextmanager
def on(core: int) -> Iterator[None]:
    """This thread, and what is started in here, with all its threads and children: they see a machine of one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
