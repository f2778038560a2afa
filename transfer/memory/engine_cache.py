"""The border to the decoder's engine, which is asked at a grant: the KV that it has in its own cache need not be
sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class EngineCache(Protocol):
    """An `EngineCache` is an engine's KV cache, as a receiver sees it. It is called on the event loop's thread and
    returns at once.

    Chunks that were pinned for an attempt stay in the cache until they are unpinned, or, once the attempt is taken,
    until the engine gives them up itself. A page that is evicted before that would show as a prompt whose first pages
    cannot be found when its sequence begins.
    """

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        """Keeps the chunks of the first of `keys`, all of them complete, for this attempt.

        Returns how many chunks that are, 0 for none. `keys` are those of the prompt's pages by ordinal.
        """

    def unpin(self, attempt: str) -> None:
        """Gives back the pins of an attempt that nobody will come for. Called once for each `pin` that returned more
        than 0 or failed, and not at all once the attempt was taken."""
