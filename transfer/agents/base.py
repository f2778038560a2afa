"""What a data mover owes the two roles. The roles know nothing of NIXL; tests give them a mover of their own.

A *region* is one registered slab of memory. A write copies *spans*, runs of bytes, from the local region to a peer's.
It cannot be cancelled: until its future is done the destination may change, so it belongs to nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Spans: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""int64 ``[n, 3]``: offset in the local region, offset in the peer's region, bytes."""


TAG_BYTES = 16
TAG_COPIES = 64


@dataclass(frozen=True, slots=True)
class Region:
    """One slab of memory: `num_bytes` bytes from `base_address` on."""

    base_address: int
    num_bytes: int
    device_id: int = 0
    memory: str = "DRAM"
    """``DRAM`` or ``VRAM``."""


@dataclass(frozen=True, slots=True)
class Tag:
    """Bytes that are to be at the peer behind those of a write, in the same transfer as the last of them.

    `spans` as of a write, but the first column is an offset in `TAG_COPIES` copies of `value`, one behind the other:
    a run of so many tags is one span.
    """

    value: bytes
    spans: Spans


class Event(Protocol):
    """An event tells whether some work is done, on a GPU for example. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Returns at once whether the event has happened. Once it has, the answer stays True."""
        ...


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """A finished write: its bytes are at the peer, flushed."""

    num_bytes: int
    """Without the tag's."""
    started: float
    """`time.monotonic()` when it was posted."""
    finished: float


class TransferAgent(Protocol):
    """Moves bytes. Methods may be called from any thread and return at once; the work happens on the agent's own.

    The futures cannot be cancelled, because the work cannot be: it is done even if nobody waits for it. All they raise
    is a `TransferError`.
    """

    @property
    def epoch(self) -> str:
        """This process start's own id; doubles as the agent's name on the wire."""
        ...

    def register(self, region: Region) -> Future[None]:
        """Make the local slab usable; at most one per agent, before `connect` or `metadata`."""
        ...

    def metadata(self) -> Future[bytes]:
        """What a peer needs to write into the registered region."""
        ...

    def connect(self, peer: str, metadata: bytes, region: Region) -> Future[None]:
        """Get ready to write into `region` of the agent whose epoch is `peer`. Raises `PeerLost` when it cannot.

        May be repeated; every `connect` that succeeded is to be undone by one `disconnect`. After a `PeerLost` the next
        one connects anew, as soon as no write to the lost peer is under way any more.
        """
        ...

    def write(
        self,
        peer: str,
        spans: Spans,
        *,
        not_after: Callable[[], float],
        after: Event | None = None,
        tag: Tag | None = None,
    ) -> Future[WriteReceipt]:
        """Copy `spans`, in no particular order, and then `tag`. No spans at all is a write like any other, of 0 bytes.

        The array must stay as it is until the future is done. Raises `PeerLost` when the peer has died (a
        write or two may seem to succeed before that is noticed), and a plain `TransferError`, with nothing posted and
        the connection unharmed, for spans that leave either region.

        No byte is read before `after` says that it has happened. It is asked on the agent's thread, again and again;
        other writes go on meanwhile. What it raises fails this write and is the error's cause.

        `not_after` returns the fence, on `time.monotonic()`: once that has passed, the peer may have given the pages to
        someone else; nothing (more) is posted then and `PeerLost` is raised. It is called on the agent's thread right
        before bytes are handed over, and again before each piece where an agent posts a large write in pieces: while
        the peer is heard, the fence moves on.
        """
        ...

    def disconnect(self, peer: str) -> Future[None]:
        """Undo one `connect`. The last one forgets the peer as soon as nothing is under way to it; of its writes, what
        was not handed over by then fails.
        """
        ...

    def close(self) -> None:
        """Stop the agent's thread; waits for it. Writes under way fail, and may land all the same. Idempotent."""
        ...
