"""An event loop that a test turns by hand: one iteration at a time, on a clock that only the test moves.

Races are then written down instead of waited for: what happens between two iterations, and in which order.
"""

from __future__ import annotations

import asyncio


class SteppedLoop(asyncio.SelectorEventLoop):
    """`time()` is `now`; nothing runs but in `step`, `settle` and `advance`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def step(self) -> None:
        """One iteration: what is ready now, and not what that makes ready."""
        self.call_soon(self.stop)
        self.run_forever()

    @property
    def is_idle(self) -> bool:
        """Nothing is ready to run."""
        return not self._ready  # type: ignore[attr-defined]

    @property
    def num_timers(self) -> int:
        return sum(not handle.cancelled() for handle in self._scheduled)  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Until nothing is ready."""
        while not self.is_idle:
            self.step()

    def advance(self, seconds: float) -> None:
        """Let time pass, and let run whatever was due."""
        self.settle()
        self.now += seconds
        self.step()
        self.settle()

    def finish(self) -> None:
        """Cancel what still runs and close."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.settle()
        self.close()
