"""The outbox collects messages for another process, so that those of one turn of the event loop go as one frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

SOON_S: Final = 0.005
"""The longest time in seconds that a message waits for others which may wait a moment."""


class Outbox:
    """`Outbox` collects messages, and calls `write` with all of them, in order, at the end of the turn.

    Mutable state: the messages; the number of their frame; whether they go at the end of this turn; whether somebody
    flushes before that; the timer of those that may wait a moment.
    """

    __slots__ = ("_is_due", "_is_held", "_messages", "_timer", "_write", "frame")

    def __init__(self, write: Callable[[list[Any]], object]) -> None:
        self._write = write
        self._messages: list[Any] = []
        self.frame = 0
        self._is_due = self._is_held = False
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, message: Any) -> None:
        """Sends a message with the next ones, or at `flush`."""
        self._messages.append(message)

    def send(self, message: Any) -> None:
        """Sends a message at the end of this turn, or at `let_go`."""
        self._messages.append(message)
        if not self._is_due:
            self._is_due = True
            if not self._is_held:
                asyncio.get_running_loop().call_soon(self.flush)

    def send_soon(self, message: Any) -> None:
        """Sends a message with the next one, or by itself after `SOON_S` seconds."""
        self._messages.append(message)
        if self._timer is None and not self._is_due:
            self._timer = asyncio.get_running_loop().call_later(SOON_S, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.flush()

    def hold(self) -> None:
        """Keeps what is sent until `let_go`, which the caller calls in the same turn: answers to what has come go
        without another turn of the loop, and in one frame all the same."""
        self._is_held = True

    def let_go(self) -> None:
        """Sends what has become due since `hold`."""
        self._is_held = False
        if self._is_due:
            self.flush()

    def flush(self) -> None:
        """Sends now what there is."""
        self._is_due = False
        if messages := self._messages:
            self._messages = []
            self.frame += 1
            self._write(messages)

    def clear(self) -> None:
        """Forgets what was not sent."""
        self._messages.clear()
        self.frame += 1
