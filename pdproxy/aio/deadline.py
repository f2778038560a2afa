"""The module cuts blocks of a coroutine short: after a time, which may move, or because somebody says so.

It does the same as `asyncio.timeout`, for code that runs per request and per token: to move a limit costs an
assignment. Several blocks may be nested, with their times in any order.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import current_task, get_running_loop
from collections.abc import Callable
from types import TracebackType
from typing import Final

from pdproxy.aio.coarse_timer import MIN_S, Alarm, CoarseTimer, alarms_of

MakeError = Callable[[], Exception]

_SPENT: Final = RuntimeError("a deadline is entered once")
"""The error that stands in for the error of a block that is over. The function which makes that error may hold a whole
request, and this limit.
"""


class Deadline(Alarm):
    """``with Deadline(seconds, error):`` raises `error` out of the block when the block has not ended by then.

    A `Deadline` belongs to the task that enters it, and is entered once. `error` may be an exception, or a function
    that makes one at the moment in which the block is cut short. `seconds` may be infinite. `outer` is a limit within
    whose block this one is entered, so that the running loop need not be asked for.

    Mutable state: the time at which it is due, on the loop's clock, and the error that is raised then; the alarms that
    it is set among, or the timer of a limit that is due soon; whether the block was cut short.
    """

    __slots__ = (
        "_alarms",
        "_error",
        "_loop",
        "_num_cancels",
        "_outer",
        "_seconds",
        "_task",
        "_timer",
        "due_at",
        "is_cut",
    )

    due_at: float

    def __init__(self, seconds: float, error: Exception | MakeError, outer: Deadline | None = None) -> None:
        self._seconds = seconds
        self._error = error
        self._outer = outer
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._alarms: CoarseTimer | None = None
        self.due_at = math.inf
        self.is_cut = False

    def __enter__(self) -> Deadline:
        self._loop = loop = get_running_loop() if self._outer is None else self._outer._loop
        self._task = task = current_task(loop)
        assert task is not None
        self._num_cancels = task.cancelling()
        if self._seconds < math.inf:
            self._due_in(self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._alarms is not None:
            self._alarms.take_back(self)
        if self._timer is not None:
            self._timer.cancel()
        task, self._task = self._task, None
        reason, self._error = self._error, _SPENT
        if not self.is_cut:
            return
        assert task is not None
        # Somebody else may have cancelled the task as well: then it is not for us to say that it goes on.
        if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            assert isinstance(reason, Exception)
            raise reason

    @property
    def seconds_left(self) -> float:
        """Returns the seconds until the limit is due, 0 or more. May be asked inside the block only."""
        return max(0.0, self.due_at - self._loop.time())

    def wait(self, seconds: float, error: Exception | MakeError) -> None:
        """Replaces the limit: `error` is raised when `seconds` from now have passed.

        Changes nothing once the block was cut.
        """
        if not self.is_cut:
            self._error = error
            self._due_in(seconds)

    def more(self, seconds: float) -> None:
        """Moves the limit to `seconds` from now, with the same error. The new time must not be sooner than the
        old one.
        """
        self.due_at = self._loop.time() + seconds

    def cut(self) -> None:
        """Cuts the block short now. Does nothing outside the block, or a second time."""
        if self._task is not None and not self.is_cut:
            self.is_cut = True
            if not isinstance(self._error, Exception):
                self._error = self._error()
            self._task.cancel()

    def is_due(self) -> None:
        """Is called when the limit is due, and cuts the block short. A subclass may have something to do before
        that.
        """
        self.cut()

    def ring(self) -> None:
        self._alarms = None
        self.is_due()

    def _due_in(self, seconds: float) -> None:
        self.due_at = due_at = self._loop.time() + seconds
        if seconds < MIN_S:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due_at, self._ring_soon)
        elif self._alarms is None and seconds < math.inf:
            self._alarms = alarms_of(self._loop)
            self._alarms.set(self)

    def _ring_soon(self) -> None:
        """Is called by the limit's own timer. Cuts the block short, unless the limit has moved since."""
        self._timer = None
        left = self.due_at - self._loop.time()
        if left <= 0.0:
            self.is_due()
        elif left < math.inf:
            self._due_in(left)
