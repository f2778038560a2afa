"""Shared by the tests of the engine: a prefiller and a decoder of a tiny model, over NIXL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

WINDOW = 6
"""Tokens: larger than a chunk, and no multiple of it."""


@pytest.fixture
async def new_pair(tiny_model: Callable[..., Path]) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Makes a `Pair` of a named model, with a PD buffer and a cache of some pages; what the test leaves behind in it
    fails the test."""
    from tests.fakes.engine_pair import WINDOWED, engine_pairs  # where NIXL is not installed, such tests are skipped

    async with engine_pairs() as make:

        async def make_of(family: str = "llama", **options: Any) -> Any:
            return await make(tiny_model(family, window=WINDOW if family in WINDOWED else None), **options)

        yield make_of
