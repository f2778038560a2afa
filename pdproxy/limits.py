"""Blocks of a coroutine that may be cut short: after a time, which may move, or because somebody says so.

What `asyncio.timeout` does, for code that runs per request and per token: a limit that moves costs an assignment, for
its timer is left where it is and looks again when it goes off. Several may be nested, in any order of their times.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

from pdproxy.alarms import MIN_S, alarms_of


class Limit:
    """``with Limit(seconds, error):`` raises `error` out of the block when it has not ended by then.

    Of the task that enters it. `error` may be an exception, or be made in the moment in which the block is cut short.
    `seconds` may be infinite.

    Mutable state: when it is due, on the loop's clock, and what is raised then; the alarm, or the timer, set for that
    moment or an earlier one; whether the block was cut short.
    """

    __slots__ = (
        "_error",
        "_loop",
        "_num_cancels",
        "_rings_at",
        "_seconds",
        "_slot",
        "_task",
        "_timer",
        "due_at",
        "is_cut",
    )

    def __init__(self, seconds: float, error: Exception | Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._error = error
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._slot: int | None = None
        self._rings_at = math.inf
        self._num_cancels = 0
        self.due_at = math.inf
        self.is_cut = False

    def __enter__(self) -> Limit:
        self._loop = loop = asyncio.get_running_loop()
        self._task = task = asyncio.current_task(loop)
        assert task is not None
        self._num_cancels = task.cancelling()
        if self._seconds < math.inf:
            self._set(loop.time() + self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_back()
        task, self._task = self._task, None
        if not self.is_cut:
            return
        assert task is not None
        # Somebody else may have cancelled the task as well: then it is not for us to say that it goes on.
        if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            assert isinstance(self._error, Exception)
            raise self._error

    def wait(self, seconds: float, error: Exception | Callable[[], Exception]) -> float:
        """From now on it is `error` that is raised, after so many seconds. Returns when, on the loop's clock."""
        self._error = error
        self._set(self._loop.time() + seconds)
        return self.due_at

    def more(self, seconds: float) -> None:
        """So many seconds from now, with the same error. The cheapest way to move it."""
        self.due_at = self._loop.time() + seconds

    def cut(self) -> None:
        """Now. Does nothing outside the block, or a second time."""
        if self._task is not None and not self.is_cut:
            self.is_cut = True
            if not isinstance(self._error, Exception):
                self._error = self._error()
            self._task.cancel()

    def _set(self, due_at: float) -> None:
        self.due_at = due_at
        if due_at < self._rings_at:
            self._take_back()
            self._ring_at(due_at)

    def _ring_at(self, due_at: float) -> None:
        self._rings_at = due_at
        if due_at - self._loop.time() >= MIN_S:
            self._slot = alarms_of(self._loop).set(due_at, self._ring)
        else:
            self._timer = self._loop.call_at(due_at, self._ring)

    def _take_back(self) -> None:
        if self._slot is not None:
            alarms_of(self._loop).take_back(self._slot, self._ring)
            self._slot = None
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._slot = self._timer = None
        self._rings_at = math.inf
        if self._loop.time() >= self.due_at:
            self.cut()
        elif self.due_at < math.inf:
            self._ring_at(self.due_at)
