"""The module holds what is said of an engine's own KV cache: what an answer takes of it, and what the engine tells.

Both go from process to process. So msgspec must see the types of their fields, which a compiled tuple loses.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple


class Room(NamedTuple):
    """`Room` is what an attempt takes in the KV cache of whoever writes its answer, in tokens."""

    prompt: int = 0
    growth: int = 0
    """The length that the answer is thought to have."""
    most: float = inf
    """The length that the answer has at most."""
    num: int = 1
    """The number of answers side by side, of which the lengths above are those of all together."""

    @property
    def tokens(self) -> int:
        return self.prompt + self.growth


NO_ROOM = Room()


class KvCache(NamedTuple):
    """`KvCache` is what an engine tells of its own KV cache, in tokens; None stands for what it does not tell."""

    tokens: int | None = None
    block: int = 1
    """The tokens per block, of which a sequence takes whole ones."""
    used: int | None = None
    is_queueing: bool = False
    """True where it lets requests wait, so that not all which it has are in this memory."""


UNKNOWN_CACHE = KvCache()
