"""The stage of every measurement: the processes with buffers of one page size in them, and one transfer at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from scripts.dev.bench_transfer.plan import LAYERS, Case
from scripts.dev.bench_transfer.processes import Children
from scripts.dev.bench_transfer.samples import Sample, Timed
from scripts.dev.common.child import Child
from scripts.dev.common.errors import BenchError


class Stage:
    """A `Stage` moves cases. Mutable state: `_address`, where our receiver listens now; `_attempts`, counted; `_case`,
    what is prepared."""

    def __init__(self, children: Children, seed: int) -> None:
        self.children = children
        self._seed = seed
        self._address: list[Any] = []
        self._attempts = itertools.count()
        self._case: Case | None = None

    @property
    def case(self) -> Case:
        assert self._case is not None
        return self._case

    @property
    def senders(self) -> Sequence[Child]:
        return self.children.senders[: self.case.senders]

    @property
    def receiver(self) -> Child:
        return self.children.receiver

    async def lay_out(self, page_bytes: int, num_pages: int, num_layers: int) -> None:
        """Makes new buffers everywhere, `num_pages` pages at the receiver, and our transfer over them.

        The i-th of the senders is only needed where there are i of them: it holds its share.
        """
        self._address = await self.receiver.ask("lay_out", page_bytes, num_pages, num_layers)
        await self.children.copier.ask("lay_out", page_bytes, num_pages, num_layers)
        for index, sender in enumerate(self.children.senders):
            share = max(1, num_pages // (index + 1))
            await sender.ask("lay_out", page_bytes, share, num_layers, self._seed + (index << 40))

    async def add_bare(self) -> None:
        """Adds bare NIXL beside ours, over the same buffers."""
        facts = await self.receiver.ask("bare")
        for sender in self.children.senders:
            await sender.ask("bare", facts)

    async def prepare(self, case: Case) -> None:
        """Tells everybody what the next transfers are."""
        self._case = case
        by_layer = case.mode == LAYERS
        for index, sender in enumerate(self.senders):
            await sender.ask("prepare", case.layout, case.pages_per_sender, self._seed, index, by_layer)
        await self.children.copier.ask("prepare", case.layout, case.pages, self._seed, by_layer)

    async def check(self) -> None:
        """Moves the case once both ways, ours and bare NIXL. Bare NIXL writes into the pages that ours was granted,
        also from here on.

        Raises `BenchError` where other bytes arrive than were sent: a way that skips the work looks fast.
        """
        sums = [await sender.ask("checksum") for sender in self.senders]
        await self.receiver.ask("clear")
        pages = await self._send_ours()
        await self._compare("our transfer", pages, sums)
        for sender, remote in zip(self.senders, pages, strict=True):
            await sender.ask("prepare_bare", remote)
        await self.receiver.ask("clear")
        await self._all("send_bare")
        await self._compare("bare NIXL", pages, sums)

    async def open(self) -> tuple[list[str], list[Timed]]:
        """Reserves pages for one attempt per sender. Returns their names, and what reserving took."""
        attempts = [f"bench-{next(self._attempts)}" for _ in self.senders]
        pairs = zip(self.senders, attempts, strict=True)
        laps = [Timed(**await sender.ask("open", *self._address, attempt)) for sender, attempt in pairs]
        return attempts, laps

    async def ours(self) -> tuple[Sample, list[Timed]]:
        """Moves the case once by ours. Returns the sample, and what reserving took, which is not in its seconds (but
        its CPU is)."""
        before = await self.receiver.ask("cpu")
        attempts, opened = await self.open()
        laps = await self._all("send")
        await self.receiver.ask("take", attempts)
        used = await self.receiver.ask("cpu") - before
        await self._forget(attempts)
        return Sample(span(laps), sum(lap.cpu_s for lap in (*opened, *laps)), used), opened

    async def nixl(self) -> Sample:
        before = await self.receiver.ask("cpu")
        laps = await self._all("send_bare")
        used = await self.receiver.ask("cpu") - before
        return Sample(span(laps), sum(lap.cpu_s for lap in laps), used)

    async def copy(self) -> Sample:
        lap = Timed(**await self.children.copier.ask("copy"))
        return Sample(span([lap]), lap.cpu_s)

    async def compute(self, layer_s: float, value: int, *, as_layers: bool) -> float:
        """Computes layers one after the other. They are sent at once, or all at the end. Returns the seconds that are
        not hidden."""
        attempts, _ = await self.open()
        (sender,) = self.senders
        exposed_s: float = await sender.ask("compute", layer_s, value, as_layers)
        await self.receiver.ask("take", attempts)
        await self._compare("our transfer", await self._forget(attempts), [await sender.ask("checksum")])
        return exposed_s

    async def _send_ours(self) -> list[list[int]]:
        attempts, _ = await self.open()
        await self._all("send")
        await self.receiver.ask("take", attempts)
        return await self._forget(attempts)

    async def _forget(self, attempts: Sequence[str]) -> list[list[int]]:
        return [await self.receiver.ask("pages", attempt) for attempt in attempts]

    async def _all(self, command: str) -> list[Timed]:
        """Asks every sender of the case at the same time. Returns what was timed."""
        answers = await asyncio.gather(*(sender.ask(command) for sender in self.senders))
        return [Timed(**answer) for answer in answers]

    async def _compare(self, name: str, pages: Sequence[Sequence[int]], expected: Sequence[int]) -> None:
        for sender, there, wanted in zip(self.senders, pages, expected, strict=True):
            if await self.receiver.ask("checksum", there) != wanted:
                raise BenchError(f"{name} did not deliver what {sender.name} sent ({self.case})")


def span(laps: Sequence[Timed]) -> float:
    """Returns the seconds from the first beginning to the last end."""
    return max(lap.ended for lap in laps) - min(lap.started for lap in laps)
