"""Messages between the ranks of a decoder's vLLM, beside vLLM's own steps: each of the others speaks with rank 0."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from transfer import wire


class Joined(msgspec.Struct, frozen=True, tag=True):
    """`Joined` is a rank's first word: prefillers may write to its slab."""

    rank: int
    slab: wire.Slab


class AskToTake(msgspec.Struct, frozen=True, tag=True):
    """`AskToTake` asks for the pages of an attempt, in order to copy them into vLLM's blocks."""

    attempt: str
    num_tokens: int


class TakeEnded(msgspec.Struct, frozen=True, tag=True):
    """`TakeEnded` says that this rank reads the attempt no more; that its pages were another attempt's, with
    `is_wrong`."""

    attempt: str
    is_wrong: bool = False


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """`Delivered` answers the `WaitDelivered` of this number."""

    number: int


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """`Leaving` is a rank's last word: vLLM ends it, and nothing has failed."""


class Taken(msgspec.Struct, frozen=True, tag=True):
    """`Taken` answers `AskToTake`: these pages, or `error`, for which nobody can have them."""

    attempt: str
    written: list[wire.WrittenPages] = []
    error: str | None = None


class WaitDelivered(msgspec.Struct, frozen=True, tag=True):
    """`WaitDelivered` asks for a word when `RankSlab.delivered` has returned."""

    number: int


FromRank: TypeAlias = Joined | AskToTake | TakeEnded | Delivered | Leaving
FromRankZero: TypeAlias = Taken | WaitDelivered
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
from_rank_zero: msgspec.msgpack.Decoder[FromRankZero] = msgspec.msgpack.Decoder(FromRankZero)
