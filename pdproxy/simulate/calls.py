"""The module keeps callbacks that are to be made: they are what `asyncio.Handle` and `asyncio.TimerHandle` are to other
loops, and no more."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Protocol

import msgspec

ENGINES = Context()
"""The context of what engines do by themselves: it belongs to nobody who asked them."""


class Canceller(Protocol):
    """Canceller keeps timers, and hears when one is cancelled."""

    def has_cancelled_one(self) -> None:
        """Notes that one of the timers that are set is not wanted any more."""


class Call(msgspec.Struct, eq=False):
    """Call is a callback to be made; the caller who set it can cancel it.

    Mutable state: whether it was cancelled; a cancelled call forgets what it would have called.
    """

    callback: Callable[..., object]
    args: tuple[object, ...]
    context: Context
    is_cancelled: bool

    def cancel(self) -> None:
        """Cancels the call. It is idempotent, and does nothing once the callback has been called."""
        self.is_cancelled = True
        self.callback, self.args = _nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.callback!r}{', cancelled' if self.is_cancelled else ''}>"


class Timer(Call, eq=False):
    """Timer is a call at a set time.

    Mutable state: that of a call; whether it is among the timers of its `keeper`.
    """

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
    """Does nothing: a cancelled call calls it."""
