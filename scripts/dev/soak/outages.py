"""When the proxy was dead: which lost connections are the soak's own doing, and which are the proxy's fault."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Outages:
    """The proxy's deaths, all of which the soak has caused.

    Mutable state: `num_begun`, and whether the proxy `is_down` now, which is from just before it is killed until its
    successor listens.
    """

    num_begun: int = 0
    is_down: bool = False
    _begun_at: float = -inf

    def begin(self) -> None:
        """The proxy is about to be killed."""
        self.num_begun += 1
        self.is_down = True
        self._begun_at = time.monotonic()

    def began_within(self, seconds: float) -> bool:
        """Tells whether the proxy was killed in the last so many seconds."""
        return time.monotonic() - self._begun_at < seconds

    def end(self) -> None:
        """Its successor answers."""
        self.is_down = False

    def mark(self) -> int:
        """A mark to be kept from when a request is sent, for `excuse`."""
        return self.num_begun

    def excuse(self, mark: int) -> bool:
        """Whether a connection may have been lost that was in use since `mark`: the proxy is down or was meanwhile."""
        return self.is_down or self.num_begun != mark
