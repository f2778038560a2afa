"""The module has an event loop in which time is a number: it jumps to whatever is due next, as soon as there is nothing
to do.

Ordinary coroutines, tasks and futures of asyncio run in it, and cannot tell the difference, except that computing takes
no time. So a day of traffic takes as long as its events take to compute, and two runs are the same run.

There are no sockets, threads, signals or processes here: what asks for them is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from pdproxy.simulate.agenda import Agenda
from pdproxy.simulate.calls import Call

log = logging.getLogger(__name__)

T = TypeVar("T")
Awaited = Generator[Any, None, T] | Awaitable[T]
ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class VirtualLoop(asyncio.AbstractEventLoop):
    """VirtualLoop is what asyncio asks of a loop, in front of an `Agenda`.

    Mutable state: whether it runs, is to stop; who is told of exceptions.
    """

    def __init__(self) -> None:
        self._agenda = agenda = Agenda(self._tell_of)
        self._is_running = False
        self._is_stopping = False
        self._is_debug = False
        self._on_exception: ExceptionHandler | None = None
        # Nothing stands between those who call these, dozens of times per request, and what does them.
        self.time = agenda.time  # type: ignore[method-assign]
        self.call_soon = agenda.call_soon  # type: ignore[assignment, method-assign]
        self.call_later = agenda.call_later  # type: ignore[assignment, method-assign]
        self.call_at = agenda.call_at  # type: ignore[assignment, method-assign]
        self.freeze, self.thaw = agenda.freeze, agenda.thaw

    @property
    def num_callbacks(self) -> int:
        """Returns how many callbacks have run."""
        return self._agenda.num_callbacks

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_forever(self) -> None:
        """Runs until `stop`. Raises `StuckError` where nothing is left that could ever happen."""
        self._check_open()
        if self._is_running:
            raise RuntimeError("This event loop is already running")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("Cannot run the event loop while another loop is running")
        self._is_running = True
        asyncio._set_running_loop(self)
        turn = self._agenda.turn
        try:
            while not self._is_stopping:
                turn()
        finally:
            self._is_running = self._is_stopping = False
            asyncio._set_running_loop(None)

    def run_until_complete(self, future: Awaited[T]) -> T:
        """Runs until the future is done, and returns its result. Raises what it raises, and `StuckError`."""
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
        """Stops the loop after what is ready now has run."""
        self._is_stopping = True

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._agenda.is_closed

    def close(self) -> None:
        """Closes the loop; nothing runs in it any more. It is idempotent."""
        if self._is_running:
            raise RuntimeError("Cannot close a running event loop")
        self._agenda.close()

    async def shutdown_asyncgens(self) -> None:
        """Does nothing: the loop keeps no account of asynchronous generators."""

    async def shutdown_default_executor(self) -> None:
        """Does nothing: there is no executor."""

    def _stop_at(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and isinstance(future.exception(), (SystemExit, KeyboardInterrupt)):
            return  # on its way out already
        self.stop()

    def _check_open(self) -> None:
        if self._agenda.is_closed:
            raise RuntimeError("Event loop is closed")

    # ── setting ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
        """Returns None: tasks are asyncio's own."""

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

    def _tell_of(self, call: Call, error: BaseException) -> None:
        self.call_exception_handler({"message": f"Exception in {call!r}", "exception": error})

    def __repr__(self) -> str:
        agenda = self._agenda
        state = "closed" if agenda.is_closed else "running" if self._is_running else "idle"
        return f"<VirtualLoop at {agenda.now:g} s, {state}: {agenda.num_ready} ready, {agenda.num_timers} timers>"


def run(main: Coroutine[Any, Any, T], *, loop: VirtualLoop | None = None) -> T:
    """Returns what `main` returns, in a loop of its own if none is given. It cancels whatever still runs then, and
    waits for it.

    An exception in a callback or a task that no other code has seen is raised here as `RuntimeError`: a simulation with
    a bug in it has found out nothing.
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
