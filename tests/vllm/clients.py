"""Clients that ask one question after the other while something is done to the fleet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Self

import httpx

from tests.vllm.proxy import Proxy
from tests.vllm.questions import Question

NUM_CLIENTS = 2


class Clients:
    """``async with`` lets them ask until the block ends. A subclass asks, and notes in `wrong` what was no right
    answer."""

    def __init__(self, proxy: Proxy, questions: Sequence[Question]) -> None:
        self.wrong: list[str] = []
        self._client = httpx.AsyncClient(base_url=proxy.url, timeout=120)
        self._questions = questions
        self._is_over = False

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._go_on(number)) for number in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _go_on(self, first: int) -> None:
        for number in itertools.count(first):
            if self._is_over:
                return
            await self._ask(number % len(self._questions))

    async def _ask(self, number: int) -> None:
        raise NotImplementedError
