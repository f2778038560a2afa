"""Ctrl-C: the first ends the run and lets what was measured be written, the second ends everything."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """`event` is set by the first signal; the second cancels `task`. `signum` is the first one."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.event = asyncio.Event()
        self.signum: int | None = None
        self._task = task

    def __call__(self, signum: int) -> None:
        if self.signum is None:
            self.signum = signum
            self.event.set()
        else:
            self._task.cancel()


@contextmanager
def stoppable(afterwards: Callable[[], None] | None = None) -> Iterator[Stop]:
    """While the block runs, in the main thread's event loop; whoever caught these signals before does no longer.

    `afterwards` is called by those that come later, until somebody else catches them; None: nobody does.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stop = Stop(task)
    for signum in SIGNALS:
        loop.add_signal_handler(signum, stop, signum)
    try:
        yield stop
    finally:
        for signum in SIGNALS:
            if afterwards is None:
                loop.remove_signal_handler(signum)
            else:
                loop.add_signal_handler(signum, afterwards)
