"""Settles what a request left behind: pages that may still be filling, or lie unread.

Cancelling a request does not free its pages. So the errand is done that frees them, until it has, or the decoder has
said by itself that they are free, or the time has passed after which their keeper drops them anyway; only then does the
lease go back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pdproxy.attempt import Attempt
from pdproxy.engines.base import Abandoned, EngineBroken, EngineRefused, EngineUnreachable, Errand, MalformedReply
from pdproxy.errors import DeadlineExceeded, KvFailed
from pdproxy.fleet.instance import Instance

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""For the word of a decoder that has just finished its answer; it is on its way."""
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MAX_ERRANDS = 8
"""At one instance at once: an outage must not become a storm."""


class Reaper:
    """Owns orphaned attempts until they are settled. `run` must be running for `adopt` to be more than a release."""

    def __init__(self, *, call_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        # State: the orphans; the task group their settling runs in, while `run` does; an event for the next one to be
        # settled; what came of them.
        self._orphans: dict[str, Attempt] = {}
        self._tasks: TaskGroup | None = None
        self._settled = anyio.Event()
        self._limits: dict[str, anyio.Semaphore] = {}
        self._outcomes: dict[str, int] = dict.fromkeys(("adopted", "told", "freed", "dropped", "expired", "void"), 0)

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
            outcome = await self._find_out(attempt)
            self._outcomes[outcome] += 1
            if outcome == "expired":
                seconds = attempt.manner.lease_s
                log.warning("%r: its pages were waited for for %g s and are taken as free", attempt, seconds)
        finally:
            self._forget(attempt)

    async def _find_out(self, attempt: Attempt) -> str:
        """How it was, that its pages are free."""
        deadline = self._clock() + attempt.manner.lease_s
        try:
            return await self._wait_until_free(attempt, attempt.abandon(), deadline)
        except Exception:  # of an adapter; the others' settling goes on
            log.exception("settling %r met a bug; its pages are waited for", attempt)
            return await self._wait_until_free(attempt, Abandoned.LEASE, deadline)

    async def _wait_until_free(self, attempt: Attempt, way: Errand | Abandoned, deadline: float) -> str:
        if way is Abandoned.FREE:
            return "freed"
        if isinstance(way, Errand):
            await _delay(way, attempt)
        pause_s = GRACE_S if attempt.is_decoded else 0.0
        while (left_s := deadline - self._clock()) > 0:
            if await self._told_within(attempt, min(pause_s, left_s)):
                return "told"
            if attempt.is_void:
                return "void"
            if isinstance(way, Errand) and await self._is_done(way, attempt):
                return "dropped"
            pause_s = min(max(pause_s * 2, FIRST_PAUSE_S), MAX_PAUSE_S)
        return "expired"

    async def _told_within(self, attempt: Attempt, pause_s: float) -> bool:
        if pause_s > 0:
            with anyio.move_on_after(pause_s):
                await (anyio.sleep_forever() if attempt.expectation is None else attempt.expectation.released.wait())
        return attempt.is_settled

    async def _is_done(self, errand: Errand, attempt: Attempt) -> bool:
        """Do it; True when the pages are free."""
        instance = attempt.instance(errand.role)
        limit = self._limits.setdefault(instance.name, anyio.Semaphore(MAX_ERRANDS))
        try:
            with anyio.fail_after(attempt.manner.lease_s):  # in the queue as well
                async with limit:
                    with anyio.fail_after(errand.timeout_s or self._call_timeout_s):
                        return await _do(errand, instance, attempt.headers(instance))
        except (EngineUnreachable, EngineBroken, MalformedReply, TimeoutError) as error:
            log.debug("%s was to drop attempt %s: %r", instance.name, attempt.flight.attempt, error)
            if isinstance(error, EngineUnreachable | EngineBroken):
                instance.suspect(f"it cannot be asked to drop pages: {error}", is_lost=isinstance(error, EngineRefused))
            return False

    def _forget(self, attempt: Attempt) -> None:
        self._orphans.pop(attempt.flight.attempt, None)
        attempt.give_up()
        self._settled.set()
        self._settled = anyio.Event()


async def _delay(errand: Errand, attempt: Attempt) -> None:
    expectation = attempt.expectation if errand.or_ready else None
    with anyio.move_on_after(min(errand.delay_s, attempt.manner.lease_s / 2)):
        if expectation is not None:
            with suppress(KvFailed, DeadlineExceeded):
                await expectation.ready(math.inf)
            if expectation.is_ready:
                return
        if not attempt.is_void:
            await anyio.sleep_forever()


async def _do(errand: Errand, instance: Instance, headers: Mapping[str, str]) -> bool:
    leg = await instance.client.post(errand.call.path, errand.call.body, headers)
    try:
        body = await leg.read()
        return instance.adapter.read_errand(leg.status, body)
    finally:
        leg.close()
