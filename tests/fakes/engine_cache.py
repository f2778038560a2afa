"""An engine's own KV cache, as a receiver sees it: it has what the test says, and knows what is pinned in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile


class FakeEngineCache:
    """Every pin is given back once, or is a reader's: anything else fails the test.

    `content` are the keys that it has; `pinned` what it keeps, by attempt; `num_asked` counts `pin`.
    """

    def __init__(self, content: Iterable[bytes] = ()) -> None:
        self.content = set(content)
        self.pinned: dict[str, tuple[bytes, ...]] = {}
        self.num_asked = 0

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        self.num_asked += 1
        assert attempt not in self.pinned, f"{attempt} is pinned twice"
        run = tuple(takewhile(self.content.__contains__, keys))
        if run:
            self.pinned[attempt] = run
        return len(run)

    def unpin(self, attempt: str) -> None:
        assert attempt in self.pinned, f"{attempt} is unpinned without a pin"
        del self.pinned[attempt]

    def evict(self, keys: Iterable[bytes]) -> None:
        """Those of them that nobody keeps."""
        kept = {key for pinned in self.pinned.values() for key in pinned}
        self.content -= set(keys) - kept

    def adopt(self, attempt: str) -> tuple[bytes, ...]:
        """The attempt was taken: what was pinned for it is its reader's, and given back by that."""
        return self.pinned.pop(attempt, ())
