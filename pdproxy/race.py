"""Work that is worth nothing once something else has happened: it is waited for, or that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def unless(event: asyncio.Event, work: Callable[[], Awaitable[T]], *, grace_s: float = 0.0) -> T | None:
    """What `work` returns; None where `event` was set first and `work` had not ended `grace_s` later: cancelled then.

    Raises what `work` raises, as it is.
    """
    outcome: T | Exception | None = None
    async with anyio.create_task_group() as watchers:
        watchers.start_soon(_cancel_after, event, grace_s, watchers.cancel_scope)
        try:
            outcome = await work()
        except Exception as error:  # handed around the task group, which would wrap it
            outcome = error
        watchers.cancel_scope.cancel()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _cancel_after(event: asyncio.Event, grace_s: float, scope: anyio.CancelScope) -> None:
    await event.wait()
    await anyio.sleep(grace_s)
    scope.cancel()
