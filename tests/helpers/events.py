"""What pushes wait for, without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Happening(threading.Event):
    """A `transfer.agents.base.Event` that happens when the test says so. `then` is called by whoever first sees it."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._then: Callable[[], object] | None = then
        self.num_asked = 0
        self.threads: set[threading.Thread] = set()

    def query(self) -> bool:
        self.num_asked += 1
        self.threads.add(threading.current_thread())
        if self.is_set() and self._then is not None:
            then, self._then = self._then, None
            then()
        return self.is_set()


class Broken:
    """Nobody will ever know whether it has happened."""

    def query(self) -> bool:
        raise RuntimeError("device lost")
