"""DescriptorBudget says whether the proxy has descriptors left for one more request, and tells when they run out.

A request takes its client's connection and one to an engine at a time; where both legs are sent at once, it takes two
of those. Connections to engines that are kept alive give way.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from pdproxy.errors import OutOfDescriptors
from transfer.descriptors import LOCAL_ERRNOS, RESERVE, Descriptors

log = logging.getLogger(__name__)

CALM_S = 2.0
"""Seconds without a refusal after which a shortage is over."""
LOOK_S = 2.0
SHORT_LOOK_S = 0.25
"""Seconds between two measurements: as a rule, and while descriptors are short."""
CLOSING_TURNS = 4
"""Turns of the event loop within which a connection is closed."""
RETRY_AFTER_S = 1.0
MESSAGE = "the proxy has as many connections open as it can have; try again soon"


class Spare(Protocol):
    """Spare has connections open that nobody uses."""

    def give_up_one(self) -> bool:
        """Closes one of them. Returns False where there was none."""


class DescriptorBudget(Descriptors):
    """DescriptorBudget belongs to one proxy.

    Mutable state, besides that of `Descriptors`: how many connections to engines a request has at a time; who keeps
    connections that can be closed; what was refused, and what failed for lack of anything; whether there is a shortage,
    and when it was felt last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.legs_per_request = 1
        self.give_up_client: Callable[[], bool] = lambda: False
        """Closes the connection of a client that wants nothing. Returns False where there is none."""
        self.spares: dict[Spare, None] = {}
        self.num_refused = 0
        self.local_errors = Counter(dict.fromkeys((errno.errorcode[one] for one in LOCAL_ERRNOS), 0))
        self.is_short = False
        self._felt_at = 0.0

    @property
    def most_requests(self) -> int:
        """About how many requests there can be at once."""
        return max(0, self.limit - self.num_others - RESERVE) // (1 + self.legs_per_request)

    def check(self, num_requests: int) -> None:
        """Raises `OutOfDescriptors` where there are not enough for so many requests, whose clients are connected."""
        if not self._lacks(num_requests):
            return
        self.measure_again()
        # Whoever is given up makes room for a leg one turn of the event loop later, which is soon enough.
        if self._lacks(num_requests) and not all(self.give_up_client() for _ in range(self.legs_per_request)):
            self.num_refused += 1
            self._feel(f"{num_requests - 1} requests are under way")
            raise OutOfDescriptors(MESSAGE, retry_after_s=RETRY_AFTER_S)

    def _lacks(self, num_requests: int) -> bool:
        needed = self.num_others + self.num_clients + self.legs_per_request * num_requests
        return needed + RESERVE > self.limit

    def make_room(self) -> bool:
        return any(spare.give_up_one() for spare in list(self.spares)) or self.give_up_client()

    async def room(self) -> None:
        """Waits, where only the reserve is left, until a connection that nobody uses is closed, if there is any."""
        if self.is_tight and self.make_room():
            for _ in range(CLOSING_TURNS):
                await asyncio.sleep(0)

    def turned_away(self) -> None:
        super().turned_away()
        self._feel(f"{self.num_clients} clients are connected")

    def failed(self, error: OSError) -> None:
        """Counts a socket that could not be made, or connected, for a reason of this machine's own."""
        super().failed(error)
        self.local_errors[errno.errorcode.get(error.errno or 0, "other")] += 1
        self._feel(str(error))

    def status(self) -> dict[str, int]:
        """Returns what the status page shows."""
        return {
            "limit": self.limit,
            "free": self.num_free,
            "clients": self.num_clients,
            "to_engines": self.num_opened,
            "others": self.num_others,
            "most_requests": self.most_requests,
        }

    # ── the beginning and the end of a shortage ─────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Measures again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(SHORT_LOOK_S if self.is_short or self.is_tight else LOOK_S)

    def look(self) -> None:
        """Measures, and tells when a shortage is over."""
        self.measure()
        if self.is_short and monotonic() - self._felt_at >= CALM_S:
            self.is_short = False
            log.info("descriptors suffice again: %d of %d are free", self.num_free, self.limit)

    def _feel(self, why: str) -> None:
        self._felt_at = monotonic()
        if self.is_short:
            return
        self.is_short = True
        log.warning(
            "out of descriptors or the like (%s; %d of %d are free): what cannot be served is answered 503 until there "
            "are some; a higher `ulimit -n` allows more",
            why,
            max(0, self.num_free),
            self.limit,
        )
