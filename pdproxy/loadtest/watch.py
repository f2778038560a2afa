"""The module looks at the target a few times a second: what is under way, and, if the target is a proxy of ours, where
it waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from pdproxy.engines.http.base import EngineBroken, EngineClient, EngineUnreachable
from pdproxy.loadtest.clock import Clock
from pdproxy.loadtest.record import Moment

WATCH_S = 0.25
TIMEOUT_S = 1.0


class _Instance(msgspec.Struct):
    name: str
    state: str
    draining: bool = False
    capacity: int | None = None
    held: int | None = None
    queue: int | None = None


class _Trip(msgspec.Struct):
    """_Trip is what the status page tells of one request under way, or of one whose pages have not come back."""

    phase: str = "receive"
    orphan: bool = False


class _Status(msgspec.Struct):
    """_Status is the part of the proxy's status page that is drawn later."""

    fleet: list[_Instance]
    in_flight: list[_Trip]


_status = msgspec.json.Decoder(_Status)


class Watch:
    """Watch collects what can be seen of the target.

    Mutable state: the moments; whether the target turned out to have no such page.
    """

    def __init__(self, client: EngineClient, clock: Clock, num_open: Callable[[], int]) -> None:
        self.moments: list[Moment] = []
        self._client = client
        self._clock = clock
        self._num_open = num_open
        self._is_stranger = False

    async def run(self, every_s: float = WATCH_S, then: Callable[[], None] = lambda: None) -> None:
        """Looks every `every_s` seconds until it is cancelled, and calls `then` after each look."""
        while True:
            began_s = self._clock.now_s()
            await self.look()
            then()
            await asyncio.sleep(max(0.0, began_s + every_s - self._clock.now_s()))

    async def look(self) -> None:
        """Adds a moment. A target that does not answer in time has told nothing; one that answers with something
        else than a status page is not asked again, unless it is an error of the server's."""
        status = None if self._is_stranger else await self._ask()
        self.moments.append(_moment(self._clock.now_s(), self._num_open(), status))

    async def _ask(self) -> _Status | None:
        try:
            status, body = await self._client.get("/status", timeout_s=TIMEOUT_S)
        except (EngineUnreachable, EngineBroken):
            return None
        try:
            if status == 200:
                return _status.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        self._is_stranger = status < 500  # an error of the server's may pass
        return None


def _moment(at_s: float, num_open: int, status: _Status | None) -> Moment:
    if status is None:
        return Moment(at_s=at_s, num_open=num_open)
    under_way = [context.phase for context in status.in_flight if not context.orphan]
    fleet = status.fleet
    return Moment(
        at_s=at_s,
        num_open=num_open,
        in_flight=len(under_way),
        by_phase=dict(Counter(under_way)),
        waiting={one.name: one.queue for one in fleet if one.queue is not None},
        held={one.name: one.held for one in fleet if one.held is not None},
        capacity={one.name: one.capacity for one in fleet if one.capacity is not None},
        states={one.name: "draining" if one.draining else one.state for one in fleet},
    )
