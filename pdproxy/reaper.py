"""Settles what a request left behind: pages at a decoder that may still be filling, or lie unread.

Cancelling a request does not free its pages. So the decoder is told to drop them, until it says that they are free, or
has said so by itself, or the time has passed after which it drops them anyway; only then does the lease go back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pdproxy.attempt import Attempt
from pdproxy.engines.base import EngineBroken, EngineUnreachable, MalformedReply
from pdproxy.fleet.instance import Instance

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""For the word of a decoder that has just finished its answer; it is on its way."""
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MAX_CANCELS = 8
"""Cancels at one decoder at once: an outage must not become a storm."""


class Reaper:
    """Owns orphaned attempts until they are settled. `run` must be running for `adopt` to be more than a release."""

    def __init__(
        self, *, engine_lease_s: float, call_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine_lease_s = engine_lease_s
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        # State: the orphans; the task group their settling runs in, while `run` does; an event for the next one to be
        # settled; what came of them.
        self._orphans: dict[str, Attempt] = {}
        self._tasks: TaskGroup | None = None
        self._settled = anyio.Event()
        self._limits: dict[str, anyio.Semaphore] = {}
        self._outcomes = {"adopted": 0, "told": 0, "dropped": 0, "expired": 0, "void": 0}

    @property
    def orphans(self) -> Iterable[Attempt]:
        return self._orphans.values()

    async def run(self) -> None:
        """Until cancelled; then everything left is released, for the process ends and the ledger with it."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            for attempt in list(self._orphans.values()):
                self._forget(attempt)

    def adopt(self, attempt: Attempt) -> None:
        """From here the reaper answers for the attempt's pages. Returns at once."""
        self._outcomes["adopted"] += 1
        self._orphans[attempt.flight.attempt] = attempt
        if self._tasks is None:
            self._forget(attempt)
        else:
            self._tasks.start_soon(self._settle, attempt)

    async def idle(self) -> None:
        """Until nothing is left to settle."""
        while self._orphans:
            await self._settled.wait()

    def statistics(self) -> dict[str, Any]:
        return {"open": len(self._orphans), **self._outcomes}

    async def _settle(self, attempt: Attempt) -> None:
        try:
            outcome = await self._wait_until_free(attempt)
            self._outcomes[outcome] += 1
            if outcome == "expired":
                log.warning(
                    "%r: its pages were waited for for %g s and are taken as free",
                    attempt,
                    self._engine_lease_s,
                )
        finally:
            self._forget(attempt)

    async def _wait_until_free(self, attempt: Attempt) -> str:
        """How it was found out."""
        deadline = self._clock() + self._engine_lease_s
        pause_s = GRACE_S if attempt.is_decoded else 0.0
        while (left_s := deadline - self._clock()) > 0:
            if await self._told_within(attempt, min(pause_s, left_s)):
                return "told"
            if attempt.is_void:
                return "void"
            if await self._cancel(attempt):
                return "dropped"
            pause_s = min(max(pause_s * 2, FIRST_PAUSE_S), MAX_PAUSE_S)
        return "expired"

    async def _told_within(self, attempt: Attempt, pause_s: float) -> bool:
        if pause_s > 0:
            with anyio.move_on_after(pause_s):
                await attempt.expectation.released.wait()
        return attempt.is_settled

    async def _cancel(self, attempt: Attempt) -> bool:
        """Tell the decoder; True when it says that the pages are free."""
        decoder = attempt.decoder
        limit = self._limits.setdefault(decoder.name, anyio.Semaphore(MAX_CANCELS))
        try:
            with anyio.fail_after(self._call_timeout_s):
                async with limit:
                    return await _tell_to_drop(decoder, attempt.flight.attempt)
        except (EngineUnreachable, EngineBroken, MalformedReply, TimeoutError) as error:
            log.debug("%s was told to drop attempt %s: %r", decoder.name, attempt.flight.attempt, error)
            return False

    def _forget(self, attempt: Attempt) -> None:
        self._orphans.pop(attempt.flight.attempt, None)
        attempt.give_up()
        self._settled.set()
        self._settled = anyio.Event()


async def _tell_to_drop(decoder: Instance, attempt: str) -> bool:
    call = decoder.adapter.cancel_call(attempt)
    leg = await decoder.client.post(call.path, call.body, {})
    try:
        body = await leg.read()
        if leg.status != 200:
            raise MalformedReply(f"it answers {call.path} with HTTP {leg.status}")
        return decoder.adapter.read_cancel(body)
    finally:
        with anyio.move_on_after(1.0, shield=True):
            await leg.aclose()
