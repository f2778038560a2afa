"""The interface of a data mover, as the two roles use it. The roles know nothing of NIXL; tests give them another
mover.

A *region* is one registered slab of memory. A write copies *spans*, runs of bytes, from the local region to a peer's.
It cannot be cancelled: until its future is done the destination may change, so it belongs to nobody else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Spans: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""An int64 array ``[n, 3]`` with one row per span: offset in the local region, offset in the peer's region, number of
bytes.
"""


TAG_BYTES = 16
"""The bytes of one tag."""
TAG_COPIES = 64
"""The number of copies of a tag that an agent keeps, one behind the other: see `Tag`."""


@dataclass(frozen=True, slots=True)
class Region:
    """A `Region` is one slab of memory: `num_bytes` bytes from `base_address` on."""

    base_address: int
    num_bytes: int
    device_id: int = 0
    memory: str = "DRAM"
    """The kind of memory: ``DRAM`` or ``VRAM``."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A `Tag` holds bytes that are written to the peer after those of a write, in the same transfer as the last of
    them.

    `spans` is like the spans of a write, but the first column is an offset in `TAG_COPIES` copies of `value`, which lie
    one behind the other. So a run of up to that many tags is one span.
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
    """A `WriteReceipt` describes a finished write: its bytes are at the peer, flushed."""

    num_bytes: int
    """Counts the bytes of the write, without those of the tag."""
    started: float
    """The moment when the write was posted, on `time.monotonic()`."""
    finished: float


class TransferAgent(Protocol):
    """A `TransferAgent` moves bytes. Methods may be called from any thread and return at once. The work happens on the
    agent's own thread.

    The futures cannot be cancelled, because the work cannot be: it is done even if nobody waits for it. They raise
    nothing but a `TransferError`.
    """

    @property
    def epoch(self) -> str:
        """The id of this process start. It is also the agent's name on the wire."""
        ...

    def register(self, region: Region) -> Future[None]:
        """Makes the local slab usable. An agent has at most one. Call this before `connect` or `metadata`."""
        ...

    def metadata(self) -> Future[bytes]:
        """Returns the bytes that a peer needs in order to write into the registered region."""
        ...

    def connect(self, peer: str, metadata: bytes, region: Region) -> Future[None]:
        """Gets ready to write into `region` of the agent whose epoch is `peer`. Raises `PeerLost` when it cannot.

        It may be repeated. Every `connect` that succeeded is to be undone by one `disconnect`. After a `PeerLost` the
        next one connects anew, as soon as no write to the lost peer is under way any more.
        """
        ...

    def prepare(self, tag: bytes) -> None:
        """Hears that writes with this tag are about to come. It is never needed, and makes the first of them sooner."""
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
        """Copies `spans`, in no particular order, and then `tag`. A write without any spans is a write like any other,
        of 0 bytes.

        The array must stay as it is until the future is done. Raises `PeerLost` when the peer has died (a write or two
        may seem to succeed before that is noticed). Raises a plain `TransferError` for spans that leave either region;
        then nothing is posted and the connection is unharmed.

        No byte is read before `after` says that it has happened. `after` is asked on the agent's thread, again and
        again; other writes go on meanwhile. An exception that it raises fails this write and is the error's cause.

        `not_after` returns the fence, on `time.monotonic()`. Once the fence has passed, the peer may have given the
        pages to someone else. Then nothing (more) is posted and `PeerLost` is raised. `not_after` is called on the
        agent's thread right before bytes are handed over, and again before each piece where an agent posts a large
        write in pieces: while the peer is heard, the fence moves on.
        """
        ...

    def disconnect(self, peer: str) -> Future[None]:
        """Undoes one `connect`. The last one forgets the peer as soon as nothing is under way to it. The parts of its
        writes that were not handed over by then fail."""
        ...

    def close(self) -> bool:
        """Stops the agent's thread, and waits for it. Writes under way fail, and may land all the same. Idempotent.

        Returns whether the thread has ended. While it has not, it may still read the registered region, and peers may
        still write to it: that memory is not to be freed (`close_agent` sees to it).
        """
        ...


def close_agent(agent: TransferAgent, slab: object) -> None:
    """Closes `agent`, and waits for that. `slab` is what owns the memory of its region: where the agent's thread does
    not end in time, the slab is kept until the process ends."""
    if not agent.close():
        never_free(slab)


def never_free(*objects: object) -> None:
    """Keeps the objects until the process ends; not even the interpreter's shutdown destroys them."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
