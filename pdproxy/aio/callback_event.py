"""The module holds an event that also calls functions back, so that nobody needs a task only to wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal


class CallbackEvent:
    """A `CallbackEvent` is set once, for good. It belongs to no event loop. Mutable state: whether it is set; who is
    called then.
    """

    __slots__ = ("_callbacks", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._callbacks: dict[Callable[[], None], None] = {}

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Sets the event and calls all callbacks, in the order in which they came. Idempotent."""
        self._is_set = True
        callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def on_set(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once, when the event is set; at once if it is set already. `callback` must not
        raise.
        """
        if self._is_set:
            callback()
        else:
            self._callbacks[callback] = None

    def forget(self, callback: Callable[[], None]) -> None:
        """Takes `callback` back: it is not called any more. Idempotent."""
        self._callbacks.pop(callback, None)

    async def wait(self) -> Literal[True]:
        """Waits until the event is set, and returns True."""
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
        return f"<CallbackEvent {'set' if self._is_set else 'not set'}, {len(self._callbacks)} to be called>"
