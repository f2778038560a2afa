"""Work that depends on something else: it is waited for until that happens, or as long as that goes well."""

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


async def beside(companion: Callable[[], Awaitable[object]], work: Callable[[], Awaitable[T]]) -> T:
    """What `work` returns, with `companion` running beside it and cancelled at its end.

    A companion that returns is no longer needed; one that fails ends the work, unless that is done in the same moment.
    Raises what either raises, as it is.
    """
    results: list[T] = []
    errors: list[Exception] = []

    async def accompany() -> None:
        try:
            await companion()
        except Exception as error:  # handed around the task group, which would wrap it
            errors.insert(0, error)
            both.cancel_scope.cancel()

    async with anyio.create_task_group() as both:
        both.start_soon(accompany)
        try:
            results.append(await work())
        except Exception as error:
            errors.append(error)
        both.cancel_scope.cancel()
    if not results:
        raise errors[0]
    return results[0]
