"""The module handles Ctrl-C: the first ends what is under way and lets what was measured be written, the second ends
everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from pdproxy.aio.signals import catching

T = TypeVar("T")


class Stopped(Exception):
    """Stopped means that the work was stopped before its end."""


class Stop:
    """Stop takes the signals: the first sets `event`, and the second cancels `task`. `signum` is the first one."""

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
def stoppable(afterwards: Callable[[int], object] | None = None) -> Iterator[Stop]:
    """Catches the signals while the block runs. `afterwards` is as that of `catching`."""
    task = asyncio.current_task()
    assert task is not None
    stop = Stop(task)
    with catching(stop, afterwards):
        yield stop


async def unless_stopped(work: Awaitable[T], stop: asyncio.Event) -> T:
    """Returns what `work` returns. Raises `Stopped` where `stop` is set before that: `work` has been cancelled by
    then."""
    try:
        async with asyncio.timeout(None) as leash, beside(_pull(leash, stop)):
            return await work
    except TimeoutError:
        raise Stopped from None
    except ExceptionGroup as group:  # it has one member, because the task that waits for the event does not fail
        raise group.exceptions[0] from None


@asynccontextmanager
async def beside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs the works until the block ends; an error of theirs ends the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


async def _pull(leash: asyncio.Timeout, stop: asyncio.Event) -> None:
    await stop.wait()
    leash.reschedule(asyncio.get_running_loop().time())
