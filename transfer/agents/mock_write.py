"""One write of a mock agent: the bytes that it carries, and how it ends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from transfer.agents.base import Region, Spans, Tag, WriteReceipt
from transfer.agents.fates import Fate, Land
from transfer.agents.spans import total_bytes
from transfer.errors import IllegalTransition, PeerLost, TransferError

Carried: TypeAlias = "list[tuple[int, bytes]]"
"""A list of (address at the peer, bytes), span by span."""


@dataclass(slots=True)
class Connection:
    """A `Connection` is one agent's view of a peer: where it may write to, how often it was connected, and whether it
    was lost."""

    peer: str
    region: Region
    num_users: int
    is_lost: bool = False

    def note(self, error: TransferError) -> None:
        self.is_lost = self.is_lost or isinstance(error, PeerLost)


class FabricView(Protocol):
    """A `FabricView` is the fabric on which a write is posted, as the write sees it."""

    def now(self) -> float: ...

    def settle(self, write: MockWrite, action: Callable[[], None]) -> None:
        """Does `action` now, or as soon as neither side stands still. Fails the write instead where the peer is
        gone."""
        ...

    def note_landed(self, write: MockWrite) -> None: ...


class MockWrite:
    """A `MockWrite` is a posted write. A test may call `land` on any that has not landed and `fail` on any whose future
    is not done, whatever its fate was to be.

    `land` also works when the future is done already, because the agent was closed or killed meanwhile: then the bytes
    arrive late and nobody is told. State: `has_landed`, and whether `future` is done.
    """

    def __init__(
        self,
        fabric: FabricView,
        serial: int,
        sender: str,
        connection: Connection,
        local: Region,
        spans: Spans,
        not_after: Callable[[], float],
        future: Future[WriteReceipt],
        tag: Tag | None = None,
    ) -> None:
        self.serial = serial
        """The number of this write in its fabric, from 1."""
        self.sender = sender
        self.connection = connection
        self.spans = spans
        self.not_after = not_after
        self.num_bytes = total_bytes(spans)
        self.future = future
        self.tag = tag
        self.has_landed = False
        self._fabric = fabric
        self._local = local
        self._started = fabric.now()

    def __repr__(self) -> str:
        state = "landed" if self.has_landed else "failed" if self.is_over else "under way"
        return f"<MockWrite {self.serial} {self.sender} → {self.peer} {len(self.spans)} spans {state}>"

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def is_over(self) -> bool:
        """Returns whether the future of the write is done. Bytes may land later all the same, where a test makes
        them."""
        return self.future.done()

    def land(self) -> None:
        """Copies what the local region holds *now*, as a real write would. Waits for a side that is frozen. Raises
        `IllegalTransition` where the write has landed before."""
        if self.has_landed:
            raise IllegalTransition(f"{self!r} cannot land again")
        self._fabric.settle(self, self.arrive)

    def fail(self, error: TransferError, landed: float = 0.0) -> None:
        """Makes the future raise `error`. `landed` (0 to 1) is the share of the bytes, from the first on, that lands.
        Raises `IllegalTransition` where the future is done."""
        if self.is_over:
            raise IllegalTransition(f"{self!r} cannot fail any more")
        self._fabric.settle(self, lambda: self.break_off(error, landed))

    def carried(self) -> Carried:
        """Returns what would land now, with the tag last."""
        ours, theirs = self._local.base_address, self.connection.region.base_address
        carried = [(theirs + there, ctypes.string_at(ours + here, size)) for here, there, size in self.spans.tolist()]
        if self.tag is not None:
            value = self.tag.value
            carried += [(theirs + there, value * (size // len(value))) for _, there, size in self.tag.spans.tolist()]
        return carried

    # ── for the fabric: at once, and without effect where it happened already ───────────────────────────────────────

    def arrive(self) -> None:
        if self.has_landed:
            return
        self.has_landed = True
        put(self.carried())
        if not self.is_over:
            self.future.set_result(WriteReceipt(self.num_bytes, self._started, self._fabric.now()))
        self._fabric.note_landed(self)

    def break_off(self, error: TransferError, landed: float) -> None:
        if self.is_over:
            return
        put(_first(self.carried(), round(self.num_bytes * landed)))
        self.connection.note(error)
        self.future.set_exception(error)


Script: TypeAlias = Callable[[MockWrite], Fate]
"""A function that is asked once per write, when the write is posted, and returns its fate. A write that is refused
before (fence, bounds, no connection) is not shown to it."""


def land_at_once(write: MockWrite) -> Fate:
    return Land()


def in_turn(*fates: Fate, then: Fate | None = None) -> Script:
    """Returns a script that deals `fates` to the next writes, one each, and `then` (default: `Land()`) to all
    others."""
    dealt = iter(fates)
    return lambda write: next(dealt, then or Land())


def put(carried: Carried) -> None:
    for address, content in carried:
        ctypes.memmove(address, content, len(content))


def _first(carried: Carried, num_bytes: int) -> Carried:
    """Returns the first `num_bytes` bytes of `carried`. The last part may be cut."""
    kept: Carried = []
    for address, content in carried:
        kept.append((address, content[:num_bytes]))
        num_bytes -= len(kept[-1][1])
    return kept
