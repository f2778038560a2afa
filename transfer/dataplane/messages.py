"""The messages between an engine and its data plane. Each is one struct, and they arrive in order.

`Command`s go from the engine to the data plane, `Report`s come back. Every push has a number that the engine chose.
"""

from __future__ import annotations

from typing import Any

import msgspec

from transfer import errors
from transfer.errors import HandshakeRefused, StaleTerm, TransferError
from transfer.plan.layout import LayerKv
from transfer.plan.runs import Run
from transfer.wire import PushParams


class _Message(msgspec.Struct, tag=True, frozen=True):
    pass


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Open(_Message, frozen=True):
    """`Open` asks to reserve pages at the decoder: see `Sender.open`. Answered with `Granted`, or with `Failed` and
    `Ended`."""

    number: int
    params: PushParams
    num_tokens: int
    keys: list[bytes]
    deadline: float
    """The moment when the attempt's time is over, on `time.monotonic()`, which all processes of a machine share."""


class Filled(_Message, frozen=True):
    """`Filled` says that layers `first_layer` to `end_layer` of these pages are filled, or will be when the event has
    happened.

    An `end_layer` of None stands for all layers. At most one of `flag`, `ipc_event` and `event` is given: a shared flag
    (slot and count), the handle of a CUDA event, or, where no process lies between, the event itself.
    """

    number: int
    ordinals: list[int]
    local_pages: list[int]
    first_layer: int = 0
    end_layer: int | None = None
    flag: tuple[int, int] | None = None
    ipc_event: bytes | None = None
    event: Any = None


class Finish(_Message, frozen=True):
    """`Finish` asks to tell the decoder when everything is there. Answered with `Finished`, or with `Failed`."""

    number: int


class Drain(_Message, frozen=True):
    """`Drain` asks when nothing is read any more of what was filled so far. Answered with `Drained`, or with
    `Ended`."""

    number: int


class Abort(_Message, frozen=True):
    """`Abort` gives the push up. Answered with `Failed`, unless the push has succeeded, and with `Ended`."""

    number: int
    reason: str


class Close(_Message, frozen=True):
    """`Close` ends every push, and then the data plane."""


Command = Open | Filled | Finish | Drain | Abort | Close


# ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ready(_Message, frozen=True):
    """`Ready` says that the slab is registered and that pushes can be opened."""


class CannotStart(_Message, frozen=True):
    """`CannotStart` says why the process cannot serve. It is the last report: the process ends."""

    reason: str


class Granted(_Message, frozen=True):
    """`Granted` says that pages are reserved. The decoder's own cache has the first `num_cached` pages. The decoder has
    the bytes of the pages in `present` already."""

    number: int
    num_cached: int
    present: list[Run]


class Failed(_Message, frozen=True):
    """`Failed` says that the push is over without having succeeded. `kind` is the name of a class in
    `transfer.errors`."""

    number: int
    kind: str
    arguments: list[str]

    @classmethod
    def of(cls, number: int, error: TransferError) -> Failed:
        if isinstance(error, HandshakeRefused):
            return cls(number, "HandshakeRefused", [error.field, str(error.ours), str(error.theirs)])
        if isinstance(error, StaleTerm):
            return cls(number, "StaleTerm", [str(error.term), str(error.heard)])
        return cls(number, type(error).__name__, [str(error)])

    @property
    def error(self) -> TransferError:
        """Returns the error that was met there; a plain `TransferError` where its class is not one of
        `transfer.errors`."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, TransferError)):
            return TransferError(*self.arguments)
        return kind(*self.arguments)


class Finished(_Message, frozen=True):
    """`Finished` says that all bytes are at the decoder, and that it has been told. `seconds` is how long a write was
    under way."""

    number: int
    num_bytes: int
    seconds: float


class Drained(_Message, frozen=True):
    """`Drained` says that all that was filled before one `Drain` has been read. Of several, the first comes first."""

    number: int


class Ended(_Message, frozen=True):
    """`Ended` says that no write of the push can land any more."""

    number: int


Report = Ready | CannotStart | Granted | Failed | Finished | Drained | Ended


# ── how a process is started ────────────────────────────────────────────────────────────────────────────────────────


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """`Setup` is the first message to the data plane's process. The slab is mapped from a descriptor or from
    `gpu_slab`."""

    parent: int
    """The engine's process number. The data plane does not outlive this process."""
    epoch: str
    model: str
    layers: list[LayerKv | None]
    chunk_size: int
    element_bytes: int
    dtype: str
    num_ranks: int
    rank: int
    device: str
    slab_bytes: int
    slab_descriptor: int | None
    gpu_slab: tuple[Any, ...] | None
    flags_descriptor: int
    backends: list[str]
    backend_options: dict[str, dict[str, str]]
    progress_delay_us: int
    fleet_key: str | None = None
    log_level: int
