"""The part of a decoder that every rank has: a slab, the agent that owns it, and a look at what lies in it. Only rank 0
also has a `Receiver`, which grants pages for all of them.

What must always hold: when rank 0 has given a page back, no write to that page is under way on any rank. A violation
would be seen as the tag of another attempt on the rank where it happened: `take` or `check_tags` finds it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from transfer import wire
from transfer.agents.base import TransferAgent
from transfer.errors import AttemptLost, TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.page_tags import PageTags
from transfer.plan.feeds import writers_of
from transfer.roles.handshake import Identity
from transfer.roles.sender_process import has_undelivered_bytes

log = logging.getLogger(__name__)

UNDELIVERED_LOOK_S = 0.01
"""The seconds between two looks whether a transport has read what a broken connection left. No event tells of that."""


class RankSlab:
    """A `RankSlab` is one rank's part of a PD buffer. Senders write to it. Rank 0's receiver tells them to which pages.

    Mutable state: `num_wrong_tags`; the agent and the tags have the rest.
    """

    def __init__(self, agent: TransferAgent, buffer: PagedBuffer, identity: Identity) -> None:
        """Takes the rank's agent, buffer and identity. Raises `TransferError` for a buffer whose pages are not those of
        `identity`."""
        layout = identity.layout
        if buffer.page_bytes != layout.page_bytes:
            raise TransferError(
                f"the buffer's pages have {buffer.page_bytes} bytes, this rank's layout {layout.page_bytes}"
            )
        self.num_wrong_tags = 0
        """Counts, since the start, how often pages were found to be written by another attempt than theirs."""
        self.agent = agent
        self.buffer = buffer
        self.tags = PageTags(buffer.tags, lambda num_senders: len(writers_of(layout.kv, num_senders, layout.rank)))
        self._identity = identity

    def __repr__(self) -> str:
        return f"<RankSlab {self._identity.layout.rank.index} {self.buffer!r}>"

    async def start(self) -> wire.Slab:
        """Registers the buffer. Returns what rank 0 passes on to senders."""
        region = self.buffer.region
        await asyncio.wrap_future(self.agent.register(region))
        return wire.Slab(
            epoch=self.agent.epoch,
            layout=self._identity.on_wire,
            metadata=await asyncio.wrap_future(self.agent.metadata()),
            base_address=region.base_address,
            num_pages=self.buffer.num_pages,
            device_id=region.device_id,
            memory=region.memory,
        )

    def take(self, attempt: str, written: Sequence[wire.WrittenPages]) -> list[int]:
        """Begins to read what `Receiver.take` has taken for all ranks, and `Receiver.written` describes.

        Returns the pages, as `Receiver.take` does. Raises `AttemptLost` where another attempt has written them.
        """
        pages = self.tags.expect_all(written)
        self.check_tags(attempt, pages)
        return pages

    def check_tags(self, attempt: str, pages: Sequence[int]) -> None:
        """Looks at these pages of a taken attempt. Call it once before they are copied and once after, on any thread.

        Raises `AttemptLost` where another attempt has written them. Then what was read of them is worthless.
        """
        wrong = self.tags.wrong(pages)
        if wrong:
            self.num_wrong_tags += 1
            text = f"{len(wrong)} of the {len(pages)} pages of attempt {attempt} were not written by it last"
            log.error("%s: pages %s; %r. A write has landed where it should not have", text, wrong[:20], self)
            raise AttemptLost(f"{text}: their KV would be another request's")

    @property
    def is_delivered(self) -> bool:
        """Tells whether nothing of a connection that has broken can arrive in this process any more. That is
        nearly always the case."""
        return not has_undelivered_bytes()

    async def delivered(self) -> None:
        """Waits until `is_delivered`."""
        while not self.is_delivered:  # noqa: ASYNC110
            await asyncio.sleep(UNDELIVERED_LOOK_S)


@dataclass(frozen=True, slots=True)
class OtherSlabs:
    """`OtherSlabs` holds the slabs of a decoder's ranks 1, 2, …, as rank 0 knows them.

    `delivered` asks each of them for `RankSlab.delivered` and waits for all answers. It raises `TransferError` where an
    answer cannot be had; then the pages that waited for it stay in quarantine.
    """

    slabs: Sequence[wire.Slab]
    delivered: Callable[[], Awaitable[object]]


def check_slabs(identity: Identity, others: Sequence[wire.Slab]) -> None:
    """Raises `TransferError` unless `others` are all ranks but `identity`'s own, which is rank 0, of one decoder."""
    rank = identity.layout.rank
    if rank.index != 0:
        raise TransferError(f"a decoder's receiver is on its rank 0, and this is rank {rank.index}")
    found = [identity.check(slab.layout).rank for slab in others]
    if [(one.size, one.index) for one in found] != [(rank.size, index) for index in range(1, rank.size)]:
        raise TransferError(
            f"the receiver of a decoder with {rank.size} ranks needs the slabs of ranks 1 to {rank.size - 1} in order, "
            f"and has been given {[f'{one.index} of {one.size}' for one in found]}"
        )
