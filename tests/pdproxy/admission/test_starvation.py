"""A request for nearly the whole buffer gets in although small ones never stop coming.

Thirty-two clients ask for 4 of 64 slots each, again and again as soon as they are answered; one asks for 63. It can
only run when nearly everything else has left, so somebody has to stop letting others pass it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest

from tests.fakes.fake_engine import FakeEngine, FakeReply
from tests.fakes.proxy_harness import Harness, proxy_in_front_of, until

NUM_SLOTS = 64
NUM_CLIENTS = 32
SMALL, LARGE = 4, 63
ENOUGH = 600
"""Small requests served; who has not got in by then has been starved."""


class Working(FakeEngine):
    """A prefiller that takes its time, not always the same, and notes who got to it."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__("prefill")
        self.dice = dice
        self.served: list[str] = []

    async def handle(self, path: str, raw: bytes, headers: Mapping[str, str]) -> FakeReply:
        if path.endswith("completions"):
            self.served.append(headers["x-request-id"])
            for _ in range(self.dice.randrange(1, 40)):
                await asyncio.sleep(0)
        return await super().handle(path, raw, headers)


async def keep_asking(house: Harness, name: str, started: list[str]) -> None:
    """One answered request after the other."""
    for number in range(ENOUGH):
        request_id = f"{name}-{number}"
        started.append(request_id)
        answer = await house.post(prompt=[1] * 16 * SMALL, headers={"x-request-id": request_id})
        assert answer.status == 200
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_overtakes", [0, 1, 16])
async def test_large_request_gets_in_after_so_many_overtakes(max_overtakes: int, seed: int) -> None:
    prefiller = Working(random.Random(seed))
    decoder = FakeEngine("decode", num_pages=NUM_SLOTS)
    async with proxy_in_front_of([prefiller], [decoder], max_overtakes=max_overtakes) as house:
        admission = house.proxy.pool.of_role("decode")[0].admission
        started: list[str] = []
        clients = [asyncio.create_task(keep_asking(house, f"small-{n}", started)) for n in range(NUM_CLIENTS)]
        await until(lambda: len(prefiller.served) > 2 * NUM_CLIENTS and admission.num_waiting > 0)
        large = house.call(prompt=[1] * 16 * LARGE, headers={"x-request-id": "large"})
        num_before = len(started)
        await until(lambda: "large" in prefiller.served or len(prefiller.served) > ENOUGH)
        assert "large" in prefiller.served, f"{len(prefiller.served)} small requests went, and it did not"
        later = set(started[num_before:])
        num_overtakes = sum(request_id in later for request_id in prefiller.served[: prefiller.served.index("large")])
        print(f"{num_overtakes} overtook it, of the {max_overtakes} that may")
        assert num_overtakes <= max_overtakes
        assert (await large.answer()).status == 200
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await until(lambda: house.proxy.orchestrator.num_requests == 0)
