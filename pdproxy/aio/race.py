"""The module runs work that depends on something else: until that happens, or as long as that goes well."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pdproxy.aio.callback_event import CallbackEvent
from pdproxy.aio.deadline import Deadline

T = TypeVar("T")


class _OvertakenError(Exception):
    """`_OvertakenError` is raised out of work that was cut short. Nobody outside sees it."""


async def cancel_when(flag: CallbackEvent, work: Callable[[], Awaitable[T]], *, grace_s: float = 0.0) -> T | None:
    """Returns what `work` returns, or None where `flag` was set and `work` did not end within `grace_s` seconds after
    that.

    In the latter case `work` is cancelled. Raises what `work` raises, as it is. Starts no task.
    """
    overtaken = _OvertakenError()
    limit = Deadline(math.inf, overtaken)

    def happened() -> None:
        limit.wait(grace_s, overtaken)

    try:
        with limit:
            flag.on_set(happened)
            try:
                return await work()
            finally:
                flag.forget(happened)
    except _OvertakenError as error:
        if error is not overtaken:
            raise
        return None


async def run_alongside(companion: Callable[[], Coroutine[Any, Any, object]], work: Callable[[], Awaitable[T]]) -> T:
    """Returns what `work` returns. `companion` goes first, runs beside it, and is cancelled when `work` ends.

    A companion that returns is no longer needed. One that fails ends the work, unless the work is done in the same
    moment. Raises what either raises, as it is.
    """
    limit = Deadline(math.inf, _OvertakenError)
    beside_it = _Companion(companion, limit)
    try:
        with limit:
            await asyncio.sleep(0)
            return await work()
    except Exception:
        await beside_it.end()
        if beside_it.failure is not None:  # the work may have failed of that
            raise beside_it.failure from None
        raise
    finally:
        await beside_it.end()


async def end_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until they have ended, even if the caller is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    interrupted: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


class _Companion:
    """A `_Companion` runs the companion in a task. Mutable state: the task, until it has ended; the error it failed
    with.
    """

    __slots__ = ("_companion", "_limit", "_task", "failure")

    def __init__(self, companion: Callable[[], Coroutine[Any, Any, object]], limit: Deadline) -> None:
        self._companion = companion
        self._limit = limit
        self._task: asyncio.Task[object] | None = asyncio.create_task(self._run())
        self.failure: Exception | None = None

    async def _run(self) -> None:
        try:
            await self._companion()
        except Exception as error:
            self.failure = error
            self._limit.wait(0.0, _OvertakenError)

    async def end(self) -> None:
        """Cancels the companion and waits until it has ended, even if the caller is cancelled meanwhile. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_all([task])
