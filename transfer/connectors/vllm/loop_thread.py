"""A thread with an event loop, beside vLLM's own threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class LoopThread:
    """A `LoopThread` runs what other threads ask it for. They wait for that; the loop itself has little to do."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _do(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Returns what `work` returns, on the thread that asks. Raises what it raises, and `TimeoutError`."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout_s)

    def _stop(self) -> None:
        """Ends the thread. Waits for that, but not for long."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def use_own_stream(pages: torch.Tensor) -> None:
    """Gives this thread a stream of its own where `pages` are on a GPU. On vLLM's, a look at a tag waits for the whole
    step."""
    if pages.is_cuda:
        torch.cuda.set_stream(torch.cuda.Stream(pages.device))  # type: ignore[no-untyped-call]
