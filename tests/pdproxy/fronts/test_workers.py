"""The leader's care for its fronts' processes, with processes that do nothing."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from typing import Any

import pytest

from pdproxy.fronts import workers
from pdproxy.fronts.hub import Hub
from pdproxy.fronts.workers import Worker, Workers
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

IDLE = ("sh", "-c", "exec sleep 60")


def workers_of(house: Harness) -> Workers:
    proxy = house.leader or house.proxy
    hub = Hub(proxy.pool, proxy.pool.admission, proxy.reaper, proxy.counts)
    return Workers(proxy.settings, proxy.elsewhere, [[]], "nowhere", hub=hub)


async def test_a_front_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system had no room for it, which concerns no other front."""
    start, num_tries = Worker.start, 0

    async def once_in_vain(self: Worker, *given: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        await start(self, *given)

    monkeypatch.setattr(Worker, "start", once_in_vain)
    monkeypatch.setattr(workers, "PYTHON", IDLE)
    async with proxy_in_front_of(by_front=False) as house:
        fronts = workers_of(house)
        running = asyncio.create_task(fronts.run())
        await until(lambda: running.done() or any(one.pid for one in fronts._alive))
        await _end(fronts, running)


async def test_a_restart_that_meets_the_end_of_a_front_leaves_none_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PYTHON", IDLE)
    async with proxy_in_front_of(by_front=False) as house:
        fronts = workers_of(house)
        running = asyncio.create_task(fronts.run())
        await until(lambda: any(one.pid for one in fronts._alive))
        first: Sequence[Worker] = list(fronts._alive)
        first[0].kill()
        await until(lambda: first[0] not in fronts._alive)
        fronts.restart()  # while the leader still waits before it replaces the one that has ended
        await until(lambda: any(one.pid for one in fronts._alive))
        for one in fronts._alive:
            one.is_serving = True
        fronts._stir()
        await asyncio.sleep(4 * workers.FIRST_PAUSE_S)
        assert len(fronts._alive) == 1, fronts.status()
        await _end(fronts, running)


async def _end(fronts: Workers, running: asyncio.Task[None]) -> None:
    assert not running.done(), running
    await fronts.end()
    await running
