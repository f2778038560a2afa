"""Shared by the tests of the engine: a prefiller and a decoder of a tiny model, over NIXL."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

WINDOW = 6
"""Tokens: larger than a chunk, and no multiple of it."""


@cache
def measured_once(device: Any) -> Any:
    """What an agent's writes to another of this process are worth."""
    from transfer.agents.lane import measure_lane
    from transfer.agents.nixl import NixlAgent

    return measure_lane(lambda epoch, receives: NixlAgent(epoch, receives=receives, device=device), device)


@pytest.fixture(autouse=True)
def lane_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine measures its lane when it starts, which takes longer than the rest of the start: two agents are made
    for it. All engines of this process would find the same. tests/transfer/test_lane.py tests the measuring."""
    if engine := sys.modules.get("transfer.engine.engine"):
        monkeypatch.setattr(engine, "measure_lane", lambda new_agent, device, options: measured_once(device))


@pytest.fixture
async def new_pair(tiny_model: Callable[..., Path]) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Makes a `Pair` of a named model, with a PD buffer and a cache of some pages; what the test leaves behind in it
    fails the test."""
    from tests.fakes.engine_pair import WINDOWED, engine_pairs  # where NIXL is not installed, such tests are skipped

    async with engine_pairs() as make:

        async def make_of(family: str = "llama", **options: Any) -> Any:
            return await make(tiny_model(family, window=WINDOW if family in WINDOWED else None), **options)

        yield make_of
