"""The module knows when the proxy was dead: so it can tell lost connections that are the soak's own doing from those
that are the proxy's fault."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Outages:
    """Outages are the proxy's deaths, all of which the soak has caused.

    Mutable state: `num_begun`, and whether the proxy `is_down` now, which is from just before it is killed until its
    successor listens; when the last one began.
    """

    num_begun: int = 0
    is_down: bool = False
    _begun_at: float = -inf

    def begin(self) -> None:
        """Notes that the proxy is about to be killed."""
        self.num_begun += 1
        self.is_down = True
        self._begun_at = time.monotonic()

    def began_within(self, seconds: float) -> bool:
        """Tells whether the proxy was killed in the last `seconds` seconds."""
        return time.monotonic() - self._begun_at < seconds

    def end(self) -> None:
        """Notes that the proxy's successor answers."""
        self.is_down = False

    def mark(self) -> int:
        """Returns a mark to be kept from when a request is sent, for `excuse`."""
        return self.num_begun

    def excuse(self, mark: int) -> bool:
        """Tells whether a connection in use since `mark` may have been lost by an outage: the proxy is down or was
        meanwhile."""
        return self.is_down or self.num_begun != mark


class Excuses:
    """Excuses tells whether something that a client's request needs had an outage while it ran."""

    def __init__(self, *outages: Outages) -> None:
        self._all = outages

    def mark(self) -> tuple[int, ...]:
        """Returns a mark to be kept from when a request is sent, for `hold`. Of what has an outage then, it is an older
        one, so that the outage counts also when it is over."""
        return tuple(one.mark() - one.is_down for one in self._all)

    def hold(self, mark: tuple[int, ...]) -> bool:
        """Tells whether there is an excuse for what became of a request that was sent at `mark`."""
        return any(one.excuse(at) for one, at in zip(self._all, mark, strict=True))
