"""Real vLLM tells what is in its prefix cache, and what it finds there for a prompt is what was known before."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from pdproxy.kv_events.index import KvIndex, Trust
from pdproxy.kv_events.subscriber import Subscriber
from tests.fakes.hostile import new_dice
from tests.helpers.ports import free_range
from tests.vllm.engines import BLOCK_SIZE, PYTHON_VARIABLE, Engine, Fleet
from tests.vllm.turns import Chats

ENGINES = ("events-single",)
ALL_ENGINES = ENGINES
LEAST_RIGHT = 0.99
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@asynccontextmanager
async def following(engine: Engine) -> AsyncIterator[KvIndex]:
    context, index = zmq.asyncio.Context(), KvIndex()
    task = asyncio.create_task(Subscriber(index, context, engine.events, engine.events_replay, name="vllm").run())
    try:
        await becomes(lambda: index.trust is Trust.EXACT)
        yield index
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def becomes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_vllms_own_block_manager_and_publisher(say: Callable[[str], None]) -> None:
    """Without a model, so that nothing but the events makes a difference: all is predicted, to the token."""
    seed = new_dice().getrandbits(32)
    command = [os.environ[PYTHON_VARIABLE], "-m", "tests.vllm.block_manager", str(free_range(2)[0]), str(seed)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=600)
    told = json.loads(ended.stdout.splitlines()[-1])
    say(str(told))
    assert told["index"]["state"] == "exact"
    assert told["exactly"] == told["turns"]
    assert told["cached"] > told["turns"] / 2
    assert told["gone"] > 5


def right(turns: list[tuple[int, int]]) -> float:
    return sum(abs(predicted - cached) <= BLOCK_SIZE for predicted, cached in turns) / len(turns)


async def test_what_is_cached_is_known_before(using: Fleet, say: Callable[[str], None]) -> None:
    """In a cache too small for all conversations: one after the other, three at a time, and one after the other again,
    so that what came of the crowd is seen, too."""
    engine, dice = using["events-single"], new_dice()
    chats = Chats(dice, engine.url)
    async with following(engine) as index, chats.client:
        alone = [await chats.turn(index, dice.choice(chats.chats)) for _ in range(200)]

        async def take_part(own: list[list[dict[str, str]]]) -> list[tuple[int, int]]:
            return [await chats.turn(index, dice.choice(own)) for _ in range(40)]

        crowd = [
            turn for some in await asyncio.gather(*(take_part(chats.chats[i::3]) for i in range(3))) for turn in some
        ]
        alone += [await chats.turn(index, dice.choice(chats.chats)) for _ in range(100)]
        status = index.status()
        say(
            f"cached tokens predicted within one block: {right(alone):.1%} of {len(alone)} alone, exactly "
            f"{sum(one == other for one, other in alone) / len(alone):.1%}; {right(crowd):.1%} of {len(crowd)} in a "
            f"crowd; {sum(cached for _, cached in alone)} tokens were cached; {chats.num_given_up} "
            f"times something had been given up; {status}"
        )
        assert status["state"] == "exact", status
        assert index.block_size == BLOCK_SIZE
        assert sum(cached > 0 for _, cached in alone) > 100, "nothing was cached, so that nothing was predicted"
        assert chats.num_given_up > 20, "too little was given up"
        assert right(alone) >= LEAST_RIGHT, [turn for turn in alone if abs(turn[0] - turn[1]) > BLOCK_SIZE]
