"""The way from the engine's thread back to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def on_loop(function: Callable[..., Any]) -> Callable[..., None]:
    """Returns `function`, to be called from the engine's thread. It runs on the loop that runs now, unless that has
    ended."""
    loop = asyncio.get_running_loop()

    def call(*args: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function, *args)

    return call
