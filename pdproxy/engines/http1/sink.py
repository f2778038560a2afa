"""Where a leg's body can be poured: bytes go from the socket's callback to it, without a task in between."""

from __future__ import annotations

from typing import Protocol

from pdproxy.engines.base import EngineBroken


class Sink(Protocol):
    """Called by the event loop, in this order: `feed` any number of times, then one of `end` and `fail`, once.

    It may call the leg's `pause`, `resume` and `close` from within. After `close` it hears nothing more. It must not
    raise: that costs the connection, and comes back as `fail`.
    """

    def feed(self, data: bytes) -> None:
        """The next bytes, never none. To have no more for now, call the leg's `pause`."""

    def end(self) -> None:
        """The body was fed to its end."""

    def fail(self, error: EngineBroken) -> None:
        """The body broke off."""
