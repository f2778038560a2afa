"""An event loop in which time is a number: it jumps to whatever is due next, as soon as nobody has anything to do.

What runs in it are ordinary coroutines, tasks and futures of asyncio, which cannot tell the difference, except that
computing takes no time. So a day of traffic takes as long as its events take to compute, and two runs are the same run.

There are no sockets, threads, signals or processes here: what asks for them is refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

import msgspec

from pdproxy.simulate.errors import StuckError

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Awaited = Generator[Any, None, T] | Awaitable[T]
ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

MIN_CANCELLED = 1024
"""So many cancelled timers may wait among the others, and as many as there are others."""


class _Call(msgspec.Struct, eq=False):
    """A callback that is to be made, for who set it to cancel: an `asyncio.Handle`, without what only other loops ask
    of one. Mutable state: whether it was cancelled, and then what it would have called is forgotten."""

    callback: Callable[..., object]
    args: tuple[object, ...]
    context: Context
    is_cancelled: bool

    def cancel(self) -> None:
        """Idempotent; does nothing once it has been called."""
        self.is_cancelled = True
        self.callback, self.args = _nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.callback!r}{', cancelled' if self.is_cancelled else ''}>"


class _Timer(_Call, eq=False):
    """One of a time: an `asyncio.TimerHandle`. Mutable state: whether it is among the timers of its `loop`, too."""

    due_at: float
    loop: VirtualLoop
    is_set: bool

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.callback, self.args = _nothing, ()
            if self.is_set:
                self.loop.has_cancelled_one()

    def when(self) -> float:
        return self.due_at


def _nothing() -> None:
    """Is called."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Callbacks run in the order in which asyncio would run them; of timers that are due at the same time, those first
    that were set first.

    Mutable state: the time; what is ready; the timers by when they are due, a heap of those times, how many timers
    there are, and how many of them were cancelled; whether it runs, is to stop, is closed; who is told of exceptions;
    how many callbacks have run.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[_Call] = deque()
        self._timers: dict[float, list[_Timer]] = {}
        self._times: list[float] = []
        self._num_timers = 0
        self._num_cancelled = 0
        self._is_running = False
        self._is_stopping = False
        self._is_closed = False
        self._is_debug = False
        self._on_exception: ExceptionHandler | None = None
        self.num_callbacks = 0

    def time(self) -> float:
        """Seconds since the loop was made, of simulated time."""
        return self._now

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_forever(self) -> None:
        """Until `stop`. Raises `StuckError` where nothing is left that could ever happen."""
        self._check_open()
        if self._is_running:
            raise RuntimeError("This event loop is already running")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")
        self._is_running = True
        asyncio._set_running_loop(self)
        try:
            while not self._is_stopping:
                self._turn()
        finally:
            self._is_running = self._is_stopping = False
            asyncio._set_running_loop(None)

    def run_until_complete(self, future: Awaited[T]) -> T:
        """Its result. Raises what it raises, and `StuckError`."""
        self._check_open()
        is_new = not asyncio.isfuture(future)
        waited: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        waited.add_done_callback(self._stop_at)
        try:
            self.run_forever()
        except BaseException:
            if is_new and waited.done() and not waited.cancelled():
                waited.exception()  # it is raised already
            raise
        finally:
            waited.remove_done_callback(self._stop_at)
        if not waited.done():
            raise RuntimeError("Event loop stopped before Future completed.")
        return waited.result()

    def stop(self) -> None:
        """After what is ready now has run."""
        self._is_stopping = True

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Nothing runs in it any more. Idempotent."""
        if self._is_running:
            raise RuntimeError("Cannot close a running event loop")
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        self._times.clear()

    async def shutdown_asyncgens(self) -> None:
        """None are kept account of."""

    async def shutdown_default_executor(self) -> None:
        """There is none."""

    def _turn(self) -> None:
        """What is due, and what was ready when the turn began; time passes only where there was neither."""
        ready, times = self._ready, self._times
        if not ready:
            self._pass_time()
        now = self._now
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
        for _ in range(num_ready):
            call = ready.popleft()
            if not call.is_cancelled:
                try:
                    call.context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"Exception in {call!r}", "exception": error})

    def _pass_time(self) -> None:
        """To when the next one is due who was not cancelled."""
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
            raise StuckError(f"at {self._now:g} s everybody waits and nobody will ever be woken")
        self._now = max(self._now, times[0])

    def _stop_at(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and isinstance(future.exception(), (SystemExit, KeyboardInterrupt)):
            return  # on its way out already
        self.stop()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")

    # ── setting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def call_soon(  # type: ignore[override]
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> _Call:
        if self._is_closed:
            self._check_open()
        call = _Call(callback, args, copy_context() if context is None else context, False)
        self._ready.append(call)
        return call

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Timer:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Timer:
        """At infinity is never: such a timer keeps nobody from being stuck."""
        if self._is_closed:
            self._check_open()
        is_set = when < math.inf
        timer = _Timer(callback, args, copy_context() if context is None else context, False, when, self, is_set)
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
        """Called by a timer itself. It stays among the others until it comes up, or there are too many such."""
        self._num_cancelled += 1
        if self._num_cancelled > MIN_CANCELLED and self._num_cancelled > self._num_timers // 2:
            self._sweep()

    def _sweep(self) -> None:
        """Forget those who were cancelled."""
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

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **more: Any,
    ) -> asyncio.Task[T]:
        self._check_open()
        return asyncio.Task(coro, loop=self, name=name, context=context, **more)  # type: ignore[arg-type]

    def get_task_factory(self) -> None:
        """Tasks are asyncio's own."""

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def get_debug(self) -> bool:
        return self._is_debug

    def set_debug(self, enabled: bool) -> None:
        self._is_debug = enabled

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._on_exception

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._on_exception = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        log.error("%s", context.get("message", "unhandled exception in event loop"), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._on_exception is None:
            self.default_exception_handler(context)
        else:
            self._on_exception(self, context)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "running" if self._is_running else "idle"
        num_timers = self._num_timers - self._num_cancelled
        return f"<VirtualLoop at {self._now:g} s, {state}: {len(self._ready)} ready, {num_timers} timers>"


def run(main: Coroutine[Any, Any, T], *, loop: VirtualLoop | None = None) -> T:
    """What `main` returns, in a loop of its own if none is given; whatever still runs then is cancelled, and waited
    for.

    An exception that nobody would ever have seen, in a callback or a task, is raised here: a simulation with a bug in
    it has found out nothing.
    """
    loop = loop or VirtualLoop()  # type: ignore[abstract]
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    try:
        result = loop.run_until_complete(main)
    finally:
        _cancel_all(loop)
        loop.close()
    for context in unseen:
        error = context.get("exception")
        raise RuntimeError(f"{context.get('message')}, which nobody saw") from error
    return result


def _cancel_all(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
