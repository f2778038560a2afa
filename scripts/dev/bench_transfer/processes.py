"""The processes of one run, owned by one `async with`: none of them is left, whatever happens inside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from scripts.dev.common.child import Child, child_group

PEER = "scripts.dev.bench_transfer.peer"


@dataclass(frozen=True)
class Children:
    receiver: Child
    senders: Sequence[Child]
    copier: Child

    @property
    def all(self) -> list[Child]:
        return [self.receiver, *self.senders, self.copier]


@contextlib.asynccontextmanager
async def children(
    num_senders: int, device: str, lifetime_s: float, *, senders_on: str | None = None
) -> AsyncIterator[Children]:
    """Starts the processes together, and ends them together, however this is left. None lives longer than `lifetime_s`
    seconds.

    Their pages lie on `device`, those of the senders on `senders_on` where that is given.
    """
    async with child_group() as group:
        roles = ["receiver", "copier", *["sender"] * num_senders]
        on = {"sender": senders_on or device}
        started = [await group.start(role, PEER, role, on.get(role, device), lifetime_s) for role in roles]
        await asyncio.gather(*(child.ask("cpu") for child in started))
        receiver, copier, *senders = started
        yield Children(receiver, senders, copier)
