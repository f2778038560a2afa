"""Reaper takes care of what requests have left behind: pages that may still be filling, or lie unread.

The kernel decides what is due and which evidence frees pages; here its errands and looks are carried out. Cancelling a
request frees nothing, and neither does an engine that cannot be reached.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from pdproxy.admission.account import Lease
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Evidence, Way
from pdproxy.admission.orphans import Job
from pdproxy.engines.adapter import MalformedReply, ReleaseCall
from pdproxy.engines.http.base import EngineBroken, EngineRefused, EngineUnreachable, LocalFault
from pdproxy.engines.traits import EngineTraits
from pdproxy.errors import DeadlineExceeded, KvFailed
from pdproxy.fleet.instance import Instance
from pdproxy.kv_signals.board import Expectation

log = logging.getLogger(__name__)

OUTCOMES: Mapping[Evidence, str] = {
    Evidence.ENGINE_SAID: "told",
    Evidence.ERRAND_DONE: "dropped",
    Evidence.LEASE_OVER: "expired",
    Evidence.INCARNATION_ENDED: "void",
}
"""The outcome of an orphan, by the evidence that freed it; it is ``freed`` where closing the leg was enough."""


class Orphan(Protocol):
    """Orphan is an attempt whose request is over, while its pages are not known to be free."""

    @property
    def id(self) -> str: ...

    @property
    def lease(self) -> Lease: ...

    @property
    def expectation(self) -> Expectation | None:
        """The place on the board where signals tell of the KV; None where they are heard elsewhere, or not at all."""

    @property
    def traits(self) -> EngineTraits: ...

    def way(self) -> Way:
        """Returns how the pages become free."""

    def orphan_facts(self, now: float) -> dict[str, Any]:
        """Returns what the status page shows. `now` is in seconds on the admission's clock."""

    def settled(self) -> None:
        """Notes that the pages have come back, or that nobody waits for them any more. Idempotent."""


class Reaper:
    """Reaper owns orphaned attempts until their pages have come back. While `run` does not run, nothing is done for
    them.

    `look` asks an instance how it is; it never raises.
    """

    def __init__(
        self, admission: Admission, *, call_timeout_s: float, look: Callable[[Instance], Awaitable[object]]
    ) -> None:
        self._admission = admission
        self._call_timeout_s = call_timeout_s
        self._look = look
        admission.on_settled = self._settled_one
        # State: the orphans; the task group in which they are dealt with, while `run` runs; an event for the next
        # one to be settled; the number of each outcome.
        self._orphans: dict[Lease, Orphan] = {}
        self._tasks: TaskGroup | None = None
        self._settled = anyio.Event()
        self._outcomes: dict[str, int] = dict.fromkeys(("adopted", "told", "freed", "dropped", "expired", "void"), 0)

    @property
    def orphans(self) -> Iterable[Orphan]:
        return self._orphans.values()

    async def run(self) -> None:
        """Does what is due, until cancelled. What remains then is left to the engines, which drop it when their leases
        are over."""
        admission = self._admission
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                while True:
                    admission.orphans_changed.clear()
                    jobs, pause_s = admission.take_due()
                    for job in jobs:
                        tasks.start_soon(self._do, job)
                    with anyio.move_on_after(pause_s):
                        await admission.orphans_changed.wait()
        finally:
            self._tasks = None
            for attempt in self._orphans.values():
                attempt.settled()
            self._orphans.clear()
            self._wake()

    def adopt(self, attempt: Orphan) -> None:
        """Makes the reaper responsible for the attempt's pages. Returns at once."""
        self._outcomes["adopted"] += 1
        way = attempt.way()
        self._orphans[attempt.lease] = attempt
        self._admission.abandon(attempt.lease, way)
        if self._tasks is None:
            attempt.settled()
            self._orphans.pop(attempt.lease, None)
        elif isinstance(way.errand, ReleaseCall) and way.errand.or_ready:
            self._tasks.start_soon(self._hurry_when_ready, attempt)

    async def idle(self) -> None:
        """Waits until nothing is left to settle."""
        while self._orphans:
            await self._settled.wait()

    def statistics(self) -> dict[str, Any]:
        return {"open": len(self._orphans), **self._outcomes}

    def _settled_one(self, lease: Lease) -> None:
        """Notes that the pages of an orphan have come back."""
        attempt = self._orphans.pop(lease, None)
        if attempt is None or lease.freed_by is None:
            return
        is_freed = lease.way is not None and lease.way.is_closing and not lease.way.is_told
        is_freed = is_freed and lease.freed_by is Evidence.ERRAND_DONE
        self._outcomes["freed" if is_freed else OUTCOMES[lease.freed_by]] += 1
        if lease.freed_by is Evidence.LEASE_OVER:
            log.warning("%r: its pages were waited for for %g s", attempt, attempt.traits.lease_s)
        attempt.settled()
        self._wake()

    def _wake(self) -> None:
        """Wakes all who wait in `idle`. An event can be set only once, so that the next ones get a new one."""
        self._settled.set()
        self._settled = anyio.Event()

    # ── what is due ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _do(self, job: Job) -> None:
        if job.lease is None:
            if not job.place.look_lock.locked():  # where it is locked, a look is under way already
                await self._look(job.place)
            return
        attempt = self._orphans.get(job.lease)
        is_done = False
        try:
            if attempt is not None and job.lease.way is not None:
                is_done = await self._has_done(job.lease.way.errand, job.place, attempt)
        except Exception:  # of an adapter; it must not stop the errands for others
            log.exception("an errand for %r met a bug", attempt)
        finally:
            self._admission.errand_ended(job.lease, is_done)

    async def _has_done(self, errand: ReleaseCall, instance: Instance, attempt: Orphan) -> bool:
        """Carries out the errand. Returns True when the pages are free, or will be without anybody's help."""
        try:
            with anyio.fail_after(errand.timeout_s or self._call_timeout_s):
                return await _call(errand, instance, errand.headers)
        except (EngineUnreachable, EngineBroken, MalformedReply, TimeoutError) as error:
            log.debug("%s was to drop attempt %s: %r", instance.name, attempt.id, error)
            if isinstance(error, EngineUnreachable | EngineBroken) and not isinstance(error, LocalFault):
                instance.suspect(f"it cannot be asked to drop pages: {error}", is_lost=isinstance(error, EngineRefused))
            return False

    async def _hurry_when_ready(self, attempt: Orphan) -> None:
        """Has the errand done at once when every rank has the KV: then no write can be under way any more that it would
        meet."""
        expectation = attempt.expectation
        if expectation is not None:
            with suppress(KvFailed, DeadlineExceeded):
                await expectation.ready(math.inf)
            if expectation.is_ready:
                self._admission.hurry(attempt.lease)


async def _call(errand: ReleaseCall, instance: Instance, headers: Mapping[str, str]) -> bool:
    leg = await instance.client.post(errand.call.path, errand.call.body, headers)
    try:
        body = await leg.read()
        return instance.adapter.read_errand(leg.status, body)
    finally:
        leg.close()
