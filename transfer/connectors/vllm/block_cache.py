"""The blocks that a decoder's vLLM has in its prefix cache, as its receiver sees them. What is there need not be sent.

vLLM keeps its table of blocks in the process of the scheduler. Where the worker is in the same one, as with one rank on
a GPU, blocks are looked up there; with several ranks, and on a CPU, the worker has a process of its own, and nothing
counts as cached. Blocks are looked up and not pinned: the scheduler may be asleep, and the table is its
own. So a block may be gone when its request is scheduled. The scheduler's half sees that then, and the prompt is
computed again: slower, and never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_pools: dict[str, Any] = {}


def publish(engine: str, pool: Any) -> None:
    """Shows the block pool of this process's scheduler to the worker in the same process."""
    _pools[engine] = pool


class BlockCache:
    """A `BlockCache` is the `EngineCache` of the vLLM engine of this name. Keys are vLLM's block hashes."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        """Returns how many of the first `keys` are in the cache. They are not kept there."""
        pool = _pools.get(self._engine)
        if pool is None:
            return 0
        try:
            return next((at for at, key in enumerate(keys) if pool.get_cached_block(key, [0]) is None), len(keys))
        except RuntimeError:  # the scheduler's thread changed what was being looked at
            return 0

    def unpin(self, attempt: str) -> None:
        """Does nothing: nothing is pinned."""
