"""A prefix cache as engines have one, which tells what happens in it: as plain as can be, to be compared with.

It has a fixed number of blocks, and may hold several copies of one: who reads the same prompt at the same time computes
it again. What was used last is given up last, and the end of a prompt before its beginning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdproxy.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event

Prefix = tuple[int, ...]
"""All tokens up to the end of a block."""


class PrefixCache:
    def __init__(self, dice: random.Random, *, block_size: int = 4, num_blocks: int = 40) -> None:
        self._dice = dice
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.blocks: list[Prefix] = []
        """Of which the first one is given up first. One that is here twice is there twice."""
        self.names: dict[Prefix, bytes | int] = {}
        self.events: list[Event] = []

    def name(self, prefix: Prefix) -> bytes | int:
        """The engine's hash of it, which nobody can compute."""
        if prefix not in self.names:
            self.names[prefix] = self._dice.choice([self._dice.randbytes(32), self._dice.getrandbits(64)])
        return self.names[prefix]

    def cached_tokens(self, ids: Sequence[int]) -> int:
        """What a request would be told as ``cached_tokens``."""
        size = self.block_size
        for i in range((len(ids) - 1) // size):
            if tuple(ids[: (i + 1) * size]) not in self.blocks:
                return i * size
        return max(0, len(ids) - 1) // size * size

    def read(self, ids: Sequence[int], *, again: bool = False) -> None:
        """Reads a prompt: what is missing is computed; with `again`, everything is."""
        size = self.block_size
        prefixes = [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]
        if len(prefixes) > self.num_blocks:
            return
        num_hits = 0 if again else self.cached_tokens(ids) // size
        for prefix in prefixes[:num_hits]:
            self.blocks.remove(prefix)
        while len(self.blocks) + len(prefixes) > self.num_blocks:
            self._remove(self.blocks.pop(0))
        if new := prefixes[num_hits:]:
            parent = self.name(prefixes[num_hits - 1]) if num_hits else None
            self._store(new, parent, ids[num_hits * size : len(prefixes) * size])
        self.blocks += reversed(prefixes)

    def clear(self) -> None:
        self.blocks.clear()
        self.events.append(AllBlocksCleared())

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _store(self, prefixes: Sequence[Prefix], parent: bytes | int | None, ids: Sequence[int]) -> None:
        names = [self.name(prefix) for prefix in prefixes]
        self.events.append(
            BlockStored(
                block_hashes=names,
                parent_block_hash=parent,
                token_ids=list(ids),
                block_size=self.block_size,
                medium="GPU",
                group_idx=0,
            )
        )

    def _remove(self, prefix: Prefix) -> None:
        self.events.append(BlockRemoved(block_hashes=[self.name(prefix)], medium="GPU", group_idx=0))
