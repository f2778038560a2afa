"""What a data mover owes the two roles. The roles know nothing of NIXL; tests give them a mover of their own.

A *region* is one registered slab cut into equal pages. A write copies whole pages between two regions, by index. It
cannot be cancelled: until its future is done the destination pages may change, so they belong to nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Region:
    """One slab of memory: `num_pages` pages of `page_bytes` bytes from `base_address` on."""

    base_address: int
    page_bytes: int
    num_pages: int
    device_id: int = 0
    memory: str = "DRAM"
    """``DRAM`` or ``VRAM``."""

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages


@dataclass(frozen=True, slots=True)
class WriteReceipt:
    """A finished write: its bytes are at the peer, flushed."""

    num_bytes: int
    started: float
    """`time.monotonic()` when it was posted."""
    finished: float


class TransferAgent(Protocol):
    """Moves pages. Methods may be called from any thread and return at once; the work happens on the agent's own.

    The futures cannot be cancelled, because the work cannot be: it is done even if nobody waits for it.
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

        May be repeated; every `connect` that succeeded is to be undone by one `disconnect`.
        """
        ...

    def write(
        self, peer: str, local_pages: Sequence[int], remote_pages: Sequence[int], *, not_after: float
    ) -> Future[WriteReceipt]:
        """Copy local page i to remote page i, pairwise. Raises `PeerLost` when the peer has died.

        `not_after` (on `time.monotonic()`) fences a process that was frozen: once it has passed, the peer may have
        given the pages to someone else; nothing is posted then and `PeerLost` is raised.
        """
        ...

    def disconnect(self, peer: str) -> Future[None]:
        """Undo one `connect`; the last one forgets the peer. Writes still under way may land all the same."""
        ...

    def close(self) -> None:
        """Stop the agent's thread; waits for it. Idempotent."""
        ...
