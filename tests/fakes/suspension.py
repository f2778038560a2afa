"""Strikes a request at its n-th suspension, so that a test can interrupt it at every point there is.

A coroutine gives up control only where it suspends, so nothing can happen to it anywhere else: who has struck at each
suspension has tried everything that cancellation can do. What the loop itself does can be counted here as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

T = TypeVar("T")

_watched: ContextVar[Suspensions | None] = ContextVar("suspensions", default=None)


class Suspensions:
    """Counts how often one request suspends, in its own task or in one that it started, and strikes at the n-th.

    `strike` is called as soon as the request hangs there; with `as_it_wakes`, when what it waited for has come and it
    has not yet run again.
    """

    def __init__(self, strike_at: int, strike: Callable[[], None], *, as_it_wakes: bool = False) -> None:
        self._strike_at = strike_at
        self._strike = strike
        self._as_it_wakes = as_it_wakes
        # State: suspensions so far; whether the request has come to its end.
        self.num = 0
        self.is_over = False

    @property
    def is_reached(self) -> bool:
        """There was an n-th suspension."""
        return self.num >= self._strike_at

    async def watch(self, request: Coroutine[Any, Any, T]) -> T:
        """Run `request` in this task. Its children count as long as it runs, within `counting_children`."""
        token = _watched.set(self)
        try:
            return await _Counted(request, self)
        finally:
            self.is_over = True
            _watched.reset(token)

    def follow(self, child: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return _Counted(child, self)

    def suspended(self, on: object) -> None:
        """`on` is the future that is awaited; for a bare turn of the loop there is none."""
        if self.is_over:
            return
        self.num += 1
        if self.num != self._strike_at:
            return
        if not self._as_it_wakes:
            self._strike()
        elif isinstance(on, asyncio.Future):
            on.add_done_callback(lambda _: self._strike())  # ahead of the task's own, which comes next
        else:
            asyncio.get_running_loop().call_soon(self._strike)


class _Counted(Coroutine[Any, Any, T]):
    """`coroutine`, which tells of every suspension on its way up."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], suspensions: Suspensions) -> None:
        self._coroutine = coroutine
        self._suspensions = suspensions

    def send(self, value: Any) -> Any:
        return self._told(self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        return self._told(self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return cast(Generator[Any, Any, T], self)

    def __next__(self) -> Any:
        return self.send(None)

    def _told(self, on: object) -> object:
        self._suspensions.suspended(on)
        return on


@contextmanager
def counting_children() -> Iterator[None]:
    """Within, whatever task a watched request starts counts as a part of it."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_start)
    try:
        yield
    finally:
        loop.set_task_factory(None)


def _start(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    suspensions = _watched.get()
    return asyncio.Task(coroutine if suspensions is None else suspensions.follow(coroutine), loop=loop, **options)


class LoopTurns:
    """How often the running loop has turned since. Mutable state: `num`."""

    def __init__(self) -> None:
        self.num = 0


@contextmanager
def counting_turns() -> Iterator[LoopTurns]:
    """Within, every iteration of the running loop is counted: a loop with nothing to do does not turn."""
    loop: Any = asyncio.get_running_loop()
    turns, run_once = LoopTurns(), loop._run_once

    def counted() -> None:
        turns.num += 1
        run_once()

    loop._run_once = counted
    try:
        yield turns
    finally:
        del loop._run_once


async def cost_of_waiting(seconds: float) -> tuple[int, float]:
    """Turns of the loop and seconds of CPU while the caller sleeps for so long, one turn being its own.

    The least of three times: what has its own reasons to look round now and then falls into one of them at most.
    """
    costs = []
    for _ in range(3):
        with counting_turns() as turns:
            started = time.process_time()
            await asyncio.sleep(seconds)
            costs.append((turns.num, time.process_time() - started))
    return min(costs)


def num_timers() -> int:
    """Timers of the running loop that nobody has cancelled."""
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled)
