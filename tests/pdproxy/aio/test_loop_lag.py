"""How late the loop is: what is told of it, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdproxy.aio.loop_lag import TICK_S, LoopLag
from tests.fakes.calls import until


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


@asynccontextmanager
async def measured() -> AsyncIterator[tuple[LoopLag, list[float]]]:
    """A monitor at work, and the lags that it tells."""
    told: list[float] = []
    lag = LoopLag(told.append)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    yield lag, told
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert lag.stalled_s() >= 0.0


async def test_a_loop_that_stands_still_is_told_at_once_and_once() -> None:
    async with measured() as (lag, told):
        before = lag.stalled_s()
        stand_still(TICK_S + 0.5)
        during = lag.stalled_s() - before
        assert during >= 0.45, "no tick has seen it yet"
        await until(lambda: bool(told))
        assert max(told) >= 0.45
        assert during <= lag.stalled_s() - before < during + 0.4, "and it does not count twice"


async def test_before_it_runs_and_after_that_it_knows_of_nothing() -> None:
    lag = LoopLag(lambda lag_s: None)
    assert lag.stalled_s() == 0.0
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    stand_still(TICK_S + 0.1)
    assert lag.stalled_s() == 0.0
