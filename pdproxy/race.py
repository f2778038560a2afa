"""Work that depends on something else: it is waited for until that happens, or as long as that goes well."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from pdproxy.alarms import MIN_S, alarms_of
from pdproxy.flag import Flag
from pdproxy.limits import Limit

T = TypeVar("T")


class _OvertakenError(Exception):
    """Raised out of work that was cut short. Nobody outside sees it."""


async def unless(flag: Flag, work: Callable[[], Awaitable[T]], *, grace_s: float = 0.0) -> T | None:
    """What `work` returns; None where `flag` was set first and `work` had not ended `grace_s` later: cancelled then.

    Raises what `work` raises, as it is. Takes no task.
    """
    overtaken = _OvertakenError()
    limit = Limit(math.inf, overtaken)

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


async def beside(
    companion: Callable[[], Coroutine[Any, Any, object]], work: Callable[[], Awaitable[T]], *, after_s: float = 0.0
) -> T:
    """What `work` returns, with `companion` running beside it from `after_s` on, and cancelled at its end.

    A companion that returns is no longer needed; one that fails ends the work, unless that is done in the same moment.
    Raises what either raises, as it is. A companion whose time does not come takes no task.
    """
    limit = Limit(math.inf, _OvertakenError)
    beside_it = _Companion(companion, limit, asyncio.get_running_loop(), after_s)
    try:
        with limit:
            if after_s <= 0.0:
                await asyncio.sleep(0)  # it goes first
            return await work()
    except Exception:
        await beside_it.end()
        if beside_it.failure is not None:  # the work may have failed of that
            raise beside_it.failure from None
        raise
    finally:
        if beside_it.has_begun:
            await beside_it.end()
        else:
            beside_it.take_back()


class _Companion:
    """Begins after `after_s`. Implements `alarms.Alarm`.

    Mutable state: the timer of one that begins soon, and its task from then on; what it failed of.
    """

    __slots__ = ("_companion", "_limit", "_loop", "_task", "_timer", "due_at", "failure")

    def __init__(
        self,
        companion: Callable[[], Coroutine[Any, Any, object]],
        limit: Limit,
        loop: asyncio.AbstractEventLoop,
        after_s: float,
    ) -> None:
        self._companion = companion
        self._limit = limit
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self.failure: Exception | None = None
        self.due_at = loop.time() + after_s
        if after_s >= MIN_S:
            alarms_of(loop).set(self)
        elif after_s > 0.0:
            self._timer = loop.call_later(after_s, self.ring)
        else:
            self.ring()

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    def ring(self) -> None:
        """It begins."""
        self._task = self._loop.create_task(self._run())

    def take_back(self) -> None:
        """It shall not begin."""
        alarms_of(self._loop).take_back(self)
        if self._timer is not None:
            self._timer.cancel()

    async def _run(self) -> None:
        try:
            await self._companion()
        except Exception as error:
            self.failure = error
            self._limit.wait(0.0, _OvertakenError)

    async def end(self) -> None:
        """It is cancelled, and waited for, whatever happens meanwhile. Idempotent."""
        self.take_back()
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        interrupted: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
