"""The way to be stopped from outside: a process that owns others ends them before it goes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

STOPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stoppable(stopped_by: list[signal.Signals]) -> Iterator[None]:
    """Returns a context manager. While it is open, a signal cancels the task that is in here, so that its processes are
    ended in order."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        stopped_by.append(number)
        task.cancel()

    for number in STOPPED:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in STOPPED:
            loop.remove_signal_handler(number)
