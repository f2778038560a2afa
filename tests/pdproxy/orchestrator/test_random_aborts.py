"""Besides the named races: many clients, random faults, random departures. It finds leaks, not lost wake-ups."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineUnreachable
from tests.fakes.fake_engine import BROKEN, FakeEngine, error_reply
from tests.fakes.proxy_harness import Call, proxy_in_front_of

pytestmark = pytest.mark.usefixtures("both_ways")

ENTRIES = ("prefill", "decode")
"""Points at which a connection may yet be refused."""


class Moody(FakeEngine):
    """Breaks or dawdles at any point, by chance."""

    dice: random.Random | None = None

    async def pass_point(self, point: str) -> None:
        await super().pass_point(point)
        if self.dice is None:
            return
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        if self.dice.random() < 0.05:
            raise self.dice.choice([BROKEN, EngineUnreachable("refused")] if point in ENTRIES else [BROKEN])

    def receive(self, attempt: str, num_pages: int) -> None:
        if self.dice is not None:
            self.signals = self.dice.choice(["ready"] * 8 + ["failed", "released", "lost"])
            self.consumed_signal = self.dice.random() < 0.8
        super().receive(attempt, num_pages)


async def client(call: Call, dice: random.Random) -> None:
    if dice.random() < 0.3:
        call.block()
        for _ in range(dice.randrange(60)):
            await asyncio.sleep(0)
        call.unblock()
    if dice.random() < 0.4:
        for _ in range(dice.randrange(60)):
            await asyncio.sleep(0)
        call.leave()
    await call.done()


def some_prompts(dice: random.Random) -> list[int] | list[list[int]]:
    """One prompt, or in one case of four a few, each of which would fit alone."""
    prompts = [[1] * dice.randrange(1, 97) for _ in range(dice.choice([1, 1, 1, 5]))]
    return prompts if len(prompts) > 1 else prompts[0]


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_leaks(seed: int) -> None:
    dice = random.Random(seed)
    prefillers, decoders = ([Moody(role, num_pages=6) for _ in range(2)] for role in ("prefill", "decode"))
    engines = [*prefillers, *decoders]
    options: dict[str, Any] = {"kv_timeout_s": 0.02, "probe_interval_s": 0.01, "engine_lease_s": 0.2}
    async with proxy_in_front_of(list(prefillers), list(decoders), **options) as house:
        for engine in engines:
            engine.dice = dice
        prefillers[0].fail_at["prefill"] = error_reply(503, "busy")
        calls = [
            house.call(prompt=some_prompts(dice), stream=dice.random() < 0.5, max_tokens=dice.randrange(1, 9))
            for _ in range(60)
        ]
        await asyncio.gather(*(client(call, dice) for call in calls))
        statuses = {call.so_far().status for call in calls if call.is_started}
        assert statuses <= {200, 429, 502, 503, 504}
        assert 200 in statuses
