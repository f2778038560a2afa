"""Some prefillers of a soak, as one process:
`python -m scripts.dev.soak_transfer.prefillers COUNT PAGES AT_ONCE SEED LIFETIME_S`.

Each is a sender with an agent and a slab of its own. It has several attempts under way at once, each of which is
followed by another one when it is over. It asks nobody before it pushes.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from typing import Any

import numpy as np

from scripts.dev.common.peer import Peer, run
from scripts.dev.common.vitals import own_vitals
from scripts.dev.soak_transfer.plan import (
    CHUNK_SIZE,
    EXPIRY_S,
    IDENTITY,
    MAY_EXPIRE,
    PAGE_BYTES,
    TIMEOUT_S,
    Fate,
    Wish,
    draw,
    pattern,
)
from transfer.agents.nixl import NixlAgent
from transfer.errors import AttemptLost, ReservationRefused, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.roles.sender import Push, Sender
from transfer.wire import Endpoint, PushParams

PAUSE_S = 0.02
"""The most seconds between the parts of a prompt, and the seconds before the next try where something is wrong."""


class Prefiller:
    """A `Prefiller` is one sender. Mutable state: `counts`, what came of its wishes."""

    def __init__(self, num_pages: int, num_at_once: int, seed: str) -> None:
        self.counts: Counter[str] = Counter()
        self._agent = NixlAgent(uuid.uuid4().hex, receives=False)
        self._slab = PagedBuffer(num_pages * num_at_once, PAGE_BYTES)
        self._words = self._slab.pages.numpy().view(np.uint64)
        self._pattern = pattern()
        self._sender = Sender(self._agent, IDENTITY)
        self._num_pages = num_pages
        self._num_at_once = num_at_once
        self._seed = seed

    async def start(self, port: int) -> None:
        await asyncio.wrap_future(self._agent.register(self._slab.region))
        self._endpoint = Endpoint(rank=0, host="127.0.0.1", port=port)

    async def close(self) -> None:
        await self._sender.aclose()
        await asyncio.to_thread(self._agent.close)

    @property
    def num_pushes(self) -> int:
        return len(self._sender._pushes)

    async def work(self, is_calm: asyncio.Event) -> None:
        """Works until `is_calm` is set. What is begun is ended."""
        async with asyncio.TaskGroup() as tasks:
            for place in range(self._num_at_once):
                tasks.create_task(self._work(place, is_calm))

    async def _work(self, place: int, is_calm: asyncio.Event) -> None:
        dice = random.Random(f"{self._seed} {place}")
        while not is_calm.is_set():
            wish = draw(dice, uuid.uuid4().hex, self._num_pages)
            try:
                outcome = await self._push(wish, place * self._num_pages, dice)
            except AttemptLost:
                outcome = "lost"
            except ReservationRefused as error:
                outcome = "refused" if "free pages within" not in str(error) else "no room in time"
            except TransferError as error:
                outcome = type(error).__name__
                await asyncio.sleep(PAUSE_S)
            self.counts[f"{wish.fate}: {outcome}"] += 1

    async def _push(self, wish: Wish, first_page: int, dice: random.Random) -> str:
        timeout_s = dice.uniform(*EXPIRY_S) if wish.fate in MAY_EXPIRE else TIMEOUT_S
        params = PushParams(attempt=wish.attempt, receivers=[self._endpoint], timeout_s=timeout_s)
        push = await self._sender.open(params, num_tokens=wish.num_pages * CHUNK_SIZE, keys=wish.keys)
        try:
            return await self._write(push, wish, first_page, dice)
        finally:
            push.abort("the soak is over")  # without effect on one that has succeeded
            await push.wait_ended()

    async def _write(self, push: Push, wish: Wish, first_page: int, dice: random.Random) -> str:
        end = wish.num_pages - (wish.fate in (Fate.ABORT, Fate.EXPIRE))
        half = dice.randint(0, end)
        for part in (range(half), range(half, end)):
            for ordinal in part:
                self._words[first_page + ordinal] = self._pattern ^ wish.word(ordinal)
            push.pages_filled(part, [first_page + ordinal for ordinal in part])
            await asyncio.sleep(dice.uniform(0, PAUSE_S))
        if wish.fate is Fate.ABORT:
            push.abort("by the dice")
            return "aborted"
        if wish.fate is Fate.EXPIRE:
            await push.failed.wait()
            return "expired"
        await push.finish()
        return "pushed"


class Prefillers(Peer):
    """`Prefillers` is one process with several of them. Mutable state: `_work`, while the load is on."""

    def __init__(self, count: int, num_pages: int, num_at_once: int, seed: str) -> None:
        super().__init__("cpu")
        self._all = [Prefiller(num_pages, num_at_once, f"{seed} {index}") for index in range(count)]
        self._is_calm = asyncio.Event()
        self._work: asyncio.Future[list[None]] | None = None

    async def start(self, port: int) -> None:
        """Starts all of them. The decoder listens on this port of this machine."""
        for prefiller in self._all:
            await prefiller.start(port)

    async def admit(self) -> None:
        """Begins the work, if it has not begun."""
        if self._work is None:
            self._is_calm.clear()
            self._work = asyncio.ensure_future(asyncio.gather(*(p.work(self._is_calm) for p in self._all)))

    async def calm(self) -> None:
        """Lets everybody come to an end. Raises what ended one of them before."""
        self._is_calm.set()
        work, self._work = self._work, None
        if work is not None:
            await work

    async def counts(self) -> dict[str, int]:
        if self._work is not None and self._work.done():
            await self._work
        return dict(sum((prefiller.counts for prefiller in self._all), Counter()))

    async def vitals(self) -> dict[str, Any]:
        return own_vitals() | {"tables": {"pushes": sum(prefiller.num_pushes for prefiller in self._all)}}

    async def close(self) -> None:
        for prefiller in self._all:
            await prefiller.close()


def main(count: str, num_pages: str, num_at_once: str, seed: str, lifetime_s: str) -> None:
    run(lambda: Prefillers(int(count), int(num_pages), int(num_at_once), seed), lifetime_s)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
