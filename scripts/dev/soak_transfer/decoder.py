"""The decoder of a soak, as a process. `python -m scripts.dev.soak_transfer.decoder NUM_PAGES SEED LIFETIME_S` starts
it.

It reads every attempt that is granted here, looks at every byte, and gives the pages back. It withdraws the attempts
whose fate is that.
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
from scripts.dev.soak_transfer.plan import CONFIG, IDENTITY, PAGE_BYTES, Fate, Wish, pattern
from scripts.dev.soak_transfer.queue_watch import WatchedReservations
from transfer.agents.nixl import NixlAgent
from transfer.errors import AttemptLost, IllegalTransition
from transfer.memory.buffer import PagedBuffer
from transfer.roles.receiver import Receiver

READ_S = 0.03
"""The most seconds for which a reader keeps what it has taken."""


class WatchedReceiver(Receiver):
    """A `WatchedReceiver` is a receiver that is looked at from inside."""

    def __init__(self, agent: NixlAgent, buffer: PagedBuffer) -> None:
        super().__init__(agent, buffer, IDENTITY, CONFIG)
        self._reservations = self.watch = WatchedReservations(buffer.num_pages)

    def tables(self) -> dict[str, int]:
        """Returns how much it remembers."""
        return {
            "attempts": len(self.watch.all()),
            "waiters": len(self._waiters),
            "moved": len(self._moved),
            "writers": len(self._last_heard),
            "peers": len(self._peers),
            "tombstones": len(self._tombstones),
        }


class Decoder(Peer):
    """A `Decoder` is the soak's decoder. Mutable state: `_reading`, a task per granted attempt; `counts`, what has come
    of them."""

    def __init__(self, num_pages: int, seed: str) -> None:
        super().__init__("cpu")
        self._agent = NixlAgent(uuid.uuid4().hex, receives=True)
        self._buffer = PagedBuffer(num_pages, PAGE_BYTES)
        self._words = self._buffer.pages.numpy().view(np.uint64)
        self._pattern = pattern()
        self._receiver = WatchedReceiver(self._agent, self._buffer)
        self._receiver.watch.on_grant = self._granted
        self._dice = random.Random(f"{seed} decoder")
        self._reading: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    async def start(self) -> int:
        """Starts it. Returns the port."""
        await self._receiver.start()
        return self._receiver.endpoint.port

    async def look(self) -> dict[str, Any]:
        """Returns the figures of one moment. Before, checks that the counts of pages add up."""
        watch = self._receiver.watch
        watch.check_integrity()
        return {
            "held": watch.num_pages - watch.num_free,
            "queued": watch.num_queued,
            "stalled_s": round(max(watch.longest_stall_s, watch.stalled_s()), 3),
            "granted": watch.num_granted,
            "overtaken": watch.num_overtaken,
            "longest_wait": watch.longest_wait,
            "longest_wait_s": round(watch.longest_wait_s, 3),
            "longest_queue": watch.longest_queue,
            "writes_saved": watch.statistics()["writes_saved"],
            "wrong_tags": self._receiver.num_wrong_tags,
            "counts": dict(self.counts),
        }

    async def settle(self, timeout_s: float) -> bool:
        """Waits until every page is free. Returns False when `timeout_s` does not suffice."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._receiver.watch.all() or self._reading:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True

    async def vitals(self) -> dict[str, Any]:
        return own_vitals() | {"tables": self._receiver.tables()}

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        await self._receiver.aclose()
        await asyncio.to_thread(self._agent.close)

    def _granted(self, attempt: str) -> None:
        wish = Wish.parse(attempt)
        if wish.fate is not Fate.FORGET:
            task = asyncio.get_running_loop().create_task(self._read(wish))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _read(self, wish: Wish) -> None:
        try:
            if wish.fate is Fate.CANCEL:
                await asyncio.sleep(self._dice.uniform(0, 2 * READ_S))
                self._receiver.cancel(wish.attempt)
            await self._receiver.wait_ready(wish.attempt)
            pages = self._receiver.take(wish.attempt)
        except (AttemptLost, IllegalTransition):
            self.counts[f"lost: {wish.fate}"] += 1
            return
        await asyncio.sleep(self._dice.uniform(0, READ_S))
        is_right = self._is_right(wish, pages)
        self._receiver.consumed(wish.attempt)
        self.counts["right" if is_right else "wrong"] += 1

    def _is_right(self, wish: Wish, pages: list[int]) -> bool:
        return len(pages) == wish.num_pages and all(
            bool((self._words[page] ^ self._pattern == wish.word(ordinal)).all()) for ordinal, page in enumerate(pages)
        )


def main(num_pages: str, seed: str, lifetime_s: str) -> None:
    run(lambda: Decoder(int(num_pages), seed), lifetime_s)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
