"""An event that also calls back: whoever is concerned by it need not keep a task that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal


class CallbackEvent:
    """Set once, for good. Has no loop of its own. Mutable state: whether it is set; who is called then."""

    __slots__ = ("_callbacks", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: dict[Callable[[], None], None] = {}

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Calls everybody back, in the order in which they came. Idempotent."""
        self._is_set = True
        callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def on_set(self, callback: Callable[[], None]) -> None:
        """Call `callback`, once, which must not raise: at once if the flag is set already."""
        if self._is_set:
            callback()
        else:
            self._callbacks[callback] = None

    def forget(self, callback: Callable[[], None]) -> None:
        """It need not be called any more. Idempotent."""
        self._callbacks.pop(callback, None)

    async def wait(self) -> Literal[True]:
        """Until it is set."""
        if self._is_set:
            return True
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        self.on_set(wake)
        try:
            await woken
        finally:
            self.forget(wake)
        return True

    def __repr__(self) -> str:
        return f"<Flag {'set' if self._is_set else 'not set'}, {len(self._callbacks)} to be called>"
