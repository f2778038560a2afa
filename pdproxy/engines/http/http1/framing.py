"""The module finds where a reply's body ends, and whether all of it is there. It does no I/O: bytes in, bytes out.

`chunked` has the third way to frame a body. Bytes that come after a body's end are a surplus: an engine that writes it
cannot be trusted with another request on that connection.
"""

from __future__ import annotations

from typing import Protocol

from pdproxy.engines.http.base import EngineBroken


class Framing(Protocol):
    """A `Framing` finds the end of one body. It is fed until it is complete, and not after."""

    __slots__ = ()

    is_complete: bool
    has_surplus: bool
    """Tells that bytes came after the body's end."""

    def strip(self, data: bytes) -> bytes:
        """Returns the bytes of `data` that are body. Raises `EngineBroken` for data that is not framed as
        it should be.
        """

    def closed(self) -> None:
        """Takes note that nothing more will come. Raises `EngineBroken` where something is missing."""


class Counted(Framing):
    """A `Counted` frames a body of `num_bytes`; 0 for a reply without one. Mutable state: the number of bytes that are
    to come.
    """

    __slots__ = ("_left", "has_surplus", "is_complete")

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self.is_complete = num_bytes == 0
        self.has_surplus = False

    def strip(self, data: bytes) -> bytes:
        left = self._left - len(data)
        if left > 0:
            self._left = left
            return data
        body = data[: self._left] if left else data
        self._left, self.is_complete, self.has_surplus = 0, True, left < 0
        return body

    def closed(self) -> None:
        if not self.is_complete:
            raise EngineBroken(f"it closed the connection {self._left} bytes before the end of its answer")


class UntilClose(Framing):
    """An `UntilClose` frames a body that goes on until the connection is closed. Nobody can know whether something of
    it is missing.
    """

    __slots__ = ("has_surplus", "is_complete")

    def __init__(self) -> None:
        self.is_complete = False
        self.has_surplus = False

    def strip(self, data: bytes) -> bytes:
        return data

    def closed(self) -> None:
        self.is_complete = True
