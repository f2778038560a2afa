"""The border between a receiver and an engine's own cache. A failure there costs a transfer, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transfer.memory.engine_cache import EngineCache

log = logging.getLogger(__name__)


class GuardedCache:
    """A `GuardedCache` is an `EngineCache` that never raises. Where the engine's cache raises, nothing counts as
    cached, and everything is sent."""

    def __init__(self, cache: EngineCache) -> None:
        self._cache = cache

    def pin(self, attempt: str, keys: Sequence[bytes]) -> int:
        try:
            num_cached = self._cache.pin(attempt, keys)
            if 0 <= num_cached <= len(keys):
                return num_cached
            log.error("the engine's cache says that it has %d of %d chunks", num_cached, len(keys))
        except Exception:  # border: an engine's own code
            log.exception("the engine's cache failed")
        self.unpin(attempt)  # it may have pinned some of them
        return 0

    def unpin(self, attempt: str) -> None:
        try:
            self._cache.unpin(attempt)
        except Exception:  # border: an engine's own code
            log.exception("the engine's cache failed")
