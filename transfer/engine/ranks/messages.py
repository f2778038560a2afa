"""The messages between the ranks of one engine, one struct each.

`Step`s go from rank 0's engine thread to the others', in order, without answers. `Ask`s go from rank 0's event loop to
the others', and each has one answer; a number tells which.
"""

from __future__ import annotations

from typing import Any

import msgspec

from transfer.wire import PushParams, Slab, WrittenPages


class _Message(msgspec.Struct, tag=True, frozen=True):
    pass


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Feed(_Message, frozen=True):
    """`Feed` says: feed `token_ids`, the tokens from `position` on, into the pages of `tables`.

    With an `attempt` they are block `block` of a prompt that is being pushed.
    """

    tables: list[list[int | None]]
    position: int
    token_ids: list[int]
    attempt: str | None = None
    block: int = 0


class Reuse(_Message, frozen=True):
    """`Reuse` says that the first pages of the attempt's prompt are in `pages` of the cache already, and may be
    sent."""

    attempt: str
    pages: list[int]


class CopyIn(_Message, frozen=True):
    """`CopyIn` says: copy what was received of the attempt, from ordinal `first` on, into `pages` of the cache."""

    attempt: str
    first: int
    pages: list[int]


class LetGo(_Message, frozen=True):
    """`LetGo` says that nothing more of the attempt will be copied. Rank 0 waits for that before it gives the pages
    away."""

    attempt: str


Step = Feed | Reuse | CopyIn | LetGo


# ── asks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Start(_Message, frozen=True):
    """`Start` says: open the ends of the transfer. Answered with `RankFacts`. `epoch` is rank 0's."""

    epoch: str


class Look(_Message, frozen=True):
    """`Look` asks for the facts of a rank. Answered with `RankFacts`."""


class OpenPush(_Message, frozen=True):
    """`OpenPush` asks to reserve pages for the attempt at the decoder. Answered when they are granted, or with the
    error."""

    params: PushParams
    num_tokens: int
    keys: list[bytes]


class WatchPush(_Message, frozen=True):
    """`WatchPush` waits for a push. Answered when it has succeeded or is unknown; with an error as soon as it has
    failed."""

    attempt: str


class FinishPush(_Message, frozen=True):
    """`FinishPush` waits until all bytes of a push are at the decoder. Answered with the number of bytes that were
    sent."""

    attempt: str


class AbortPush(_Message, frozen=True):
    """`AbortPush` gives the push up, also while its pages are still asked for. Idempotent."""

    attempt: str
    reason: str


class EndPush(_Message, frozen=True):
    """`EndPush` waits for the end of a push. Answered when none of its writes can land any more."""

    attempt: str


class TakeKv(_Message, frozen=True):
    """`TakeKv` says: begin to read the attempt's pages, which rank 0 has taken (see `RankSlab.take`). Fails where they
    are wrong."""

    attempt: str
    written: list[WrittenPages]


class DropKv(_Message, frozen=True):
    """`DropKv` says that nothing of the attempt will be read after all, whether this rank was to read it or not."""

    attempt: str


class WaitRead(_Message, frozen=True):
    """`WaitRead` waits until this rank has taken the step `LetGo` for the attempt, and reads nothing of it any more."""

    attempt: str


class WaitDelivered(_Message, frozen=True):
    """`WaitDelivered` waits as `RankSlab.delivered` does. Answered when nothing is undelivered."""


Ask = (
    Start | Look | OpenPush | WatchPush | FinishPush | AbortPush | EndPush | TakeKv | DropKv | WaitRead | WaitDelivered
)


class RankFacts(msgspec.Struct, frozen=True):
    """`RankFacts` tells of one rank's part of the PD buffer. A rank that receives nothing has none."""

    slab: Slab | None = None
    num_wrong_tags: int = 0


class Request(msgspec.Struct, frozen=True):
    """A `Request` carries an `Ask`. Its number is that of the answer, too."""

    number: int
    ask: Ask


class Answer(msgspec.Struct, frozen=True):
    """An `Answer` answers a `Request` of the same number. `error` tells why there is no `value`."""

    number: int
    value: Any = None
    error: str | None = None
