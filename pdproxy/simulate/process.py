"""The module has processes that share the virtual loop and of which each can stand still or end by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any

from pdproxy.engines.http.base import EngineClient, Leg
from pdproxy.simulate.agenda import PROCESS
from pdproxy.simulate.calls import ENGINES
from pdproxy.simulate.loop import VirtualLoop


class Process:
    """Process runs what is begun in its `context`, and whatever comes of that.

    Mutable state: its tasks.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        self.context = Context()
        self.context.run(PROCESS.set, self)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins a task, and returns it."""
        task = self._loop.create_task(work, context=self.context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Has something called in this process: in this instant, unless it stands still."""
        self._loop.call_soon(callback, *args, context=self.context)

    def freeze(self) -> None:
        """Makes the process stand still until `thaw`. Both are idempotent."""
        self._loop.freeze(self)

    def thaw(self) -> None:
        self._loop.thaw(self)

    def kill(self) -> None:
        """Ends all tasks, at once. Nobody must hear what they say on their way out: that is the caller's part."""
        self._loop.thaw(self)
        for task in self._tasks:
            task.cancel()


class Distant:
    """Distant is an engine as a process sees it that may stand still: what the engine does meanwhile, it does all the
    same. Implements `engines.http.base.EngineClient`."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        asked: asyncio.Task[Leg] = self._loop.create_task(self._engine.post(path, body, headers), context=ENGINES)
        try:
            return await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled() and asked.exception() is None:
                asked.result().close()  # it had come, and nobody has seen it
            raise

    async def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        return await self._engine.get(path, timeout_s=timeout_s, headers=headers)

    async def aclose(self) -> None:
        """Does nothing: nothing is open."""
