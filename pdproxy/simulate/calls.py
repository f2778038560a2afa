"""Callbacks that are to be made: what `asyncio.Handle` and `asyncio.TimerHandle` are to other loops, and no more."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Protocol

import msgspec


class Canceller(Protocol):
    """Keeps timers."""

    def has_cancelled_one(self) -> None:
        """One of those that are set is not wanted any more."""


class Call(msgspec.Struct, eq=False):
    """For who set it to cancel. Mutable state: whether it was cancelled, and then what it would have called is
    forgotten."""

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


class Timer(Call, eq=False):
    """One of a time. Mutable state: whether it is among the timers of its `keeper`, too."""

    due_at: float
    keeper: Canceller
    is_set: bool

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.callback, self.args = _nothing, ()
            if self.is_set:
                self.keeper.has_cancelled_one()

    def when(self) -> float:
        return self.due_at


def _nothing() -> None:
    """Is called."""
