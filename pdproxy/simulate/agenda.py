"""The module keeps what is still to happen, and when: every callback of the virtual loop goes through it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from heapq import heapify, heappop, heappush
from typing import Any

from pdproxy.simulate.calls import Call, Timer
from pdproxy.simulate.errors import StuckError

MIN_CANCELLED = 1024
"""The number of cancelled timers that may wait among the others; there may be more while they are not the majority."""
PROCESS: ContextVar[object] = ContextVar("process")
"""The process that runs in a context. What one sets in motion belongs to it, too."""


class Agenda:
    """Agenda runs callbacks in the order in which asyncio would run them. If several timers are due at the same time,
    the one that was set first runs first.

    Mutable state: the time; what is ready; the timers by when they are due, a heap of those times, how many timers
    there are, and how many of them were cancelled; how many callbacks have run; the processes that stand still, each
    with the callbacks that it would have run since; whether it is closed.
    """

    def __init__(self, on_error: Callable[[Call, BaseException], None]) -> None:
        """Makes an agenda. `on_error` is called with an exception that a callback raised and that no other code has
        seen."""
        self.now = 0.0
        self.num_callbacks = 0
        self.is_closed = False
        self._on_error = on_error
        self._ready: deque[Call] = deque()
        self._timers: dict[float, list[Timer]] = {}
        self._times: list[float] = []
        self._num_timers = 0
        self._num_cancelled = 0
        self._frozen: dict[object, list[Call]] = {}

    def time(self) -> float:
        """Returns the seconds since the loop was made, of simulated time."""
        return self.now

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_timers(self) -> int:
        """Returns how many timers are set that were not cancelled."""
        return self._num_timers - self._num_cancelled

    def close(self) -> None:
        """Forgets everything; nothing happens any more. It is idempotent."""
        self.is_closed = True
        self._ready.clear()
        self._timers.clear()
        self._times.clear()

    def turn(self) -> None:
        """Runs what is due, and what was ready when the turn began; time passes only where nothing was ready.

        Raises `StuckError` where nothing is left that could ever happen.
        """
        ready, times = self._ready, self._times
        if not ready:
            self._pass_time()
        now = self.now
        while times and times[0] <= now:
            for timer in self._timers.pop(heappop(times)):
                self._num_timers -= 1
                timer.is_set = False
                if timer.is_cancelled:
                    self._num_cancelled -= 1
                else:
                    ready.append(timer)
        num_ready = len(ready)
        self.num_callbacks += num_ready
        frozen = self._frozen
        for _ in range(num_ready):
            call = ready.popleft()
            if not call.is_cancelled:
                if frozen and (late := frozen.get(call.context.get(PROCESS))) is not None:
                    late.append(call)
                    continue
                try:
                    call.context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._on_error(call, error)

    def _pass_time(self) -> None:
        """Sets the time to when the next timer is due that was not cancelled. Raises `StuckError` where there is
        none."""
        times, timers = self._times, self._timers
        while times:
            alike = timers[times[0]]
            if not (alike[0].is_cancelled and all(timer.is_cancelled for timer in alike)):
                break
            del timers[heappop(times)]
            num = len(alike)
            self._num_timers -= num
            self._num_cancelled -= num
        if not times:
            raise StuckError(f"at {self.now:g} s everybody waits and nobody will ever be woken")
        self.now = max(self.now, times[0])

    def freeze(self, process: object) -> None:
        """Runs nothing of a process until `thaw`. Both are idempotent."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: object) -> None:
        """Runs what a process would have run meanwhile, in order."""
        self._ready.extend(self._frozen.pop(process, ()))

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Call:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        call = Call(callback, args, copy_context() if context is None else context, False)
        self._ready.append(call)
        return call

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Timer:
        """Returns a timer that runs at `when`, in seconds. Infinity means never: such a timer does not prevent a
        `StuckError`."""
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        is_set = when < math.inf
        timer = Timer(callback, args, copy_context() if context is None else context, False, when, self, is_set)
        if is_set:
            self._num_timers += 1
            alike = self._timers.get(when)
            if alike is None:
                self._timers[when] = [timer]
                heappush(self._times, when)
            else:
                alike.append(timer)
        return timer

    def has_cancelled_one(self) -> None:
        """Counts a cancelled timer; the timer itself calls this. The timer stays among the others until it comes up, or
        there are too many cancelled ones."""
        self._num_cancelled += 1
        if self._num_cancelled > MIN_CANCELLED and self._num_cancelled > self._num_timers // 2:
            self._sweep()

    def _sweep(self) -> None:
        """Forgets the timers that were cancelled."""
        for when, timers in list(self._timers.items()):
            left = [timer for timer in timers if not timer.is_cancelled]
            if left:
                self._timers[when] = left
            else:
                del self._timers[when]
        self._times[:] = self._timers
        heapify(self._times)
        self._num_timers -= self._num_cancelled
        self._num_cancelled = 0
