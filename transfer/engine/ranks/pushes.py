"""The pushes of all ranks for one attempt, as one push. It has succeeded when all of them have, and fails when one
does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from transfer.dataplane.plane import DataPlane, PlanePush
from transfer.engine.api import RankLost
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.messages import AbortPush, EndPush, FinishPush, OpenPush, WatchPush
from transfer.errors import AttemptLost, TransferError
from transfer.plan.blocks import PageTable
from transfer.wire import PushParams


class RanksPush:
    """A `RanksPush` is the part of `PlanePush` that an engine uses, over all ranks. `own` is this rank's push.

    Mutable state: `_tie`, the task that passes a failure on in both directions; None where there is one rank.
    """

    def __init__(self, own: PlanePush, ranks: OtherRanks, attempt: str) -> None:
        self._own = own
        self._ranks = ranks
        self._attempt = attempt
        self._tie = asyncio.create_task(self._pass_failures_on(), name="tie") if ranks.size > 1 else None

    @classmethod
    async def open(
        cls, plane: DataPlane, ranks: OtherRanks, params: PushParams, num_tokens: int, keys: Sequence[bytes]
    ) -> RanksPush:
        """Opens the pushes of all ranks. Every rank reserves its pages at the same time, and then all have them or
        none. See `DataPlane.open`."""
        asked = asyncio.ensure_future(ranks.ask(OpenPush(params, num_tokens, list(keys))))
        own = plane.open(params, num_tokens=num_tokens, keys=keys)
        try:
            await asyncio.wrap_future(own.granted)
            await asked
        except BaseException as error:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            ranks.post(AbortPush(params.attempt, "another rank has no pages for it"))
            own.abort(str(error) or "its client has left")
            raise
        return cls(own, ranks, params.attempt)

    @property
    def table(self) -> PageTable:
        return self._own.table

    @property
    def num_cached(self) -> int:
        return self._own.num_cached

    @property
    def num_sent(self) -> int:
        return self._own.num_sent

    @property
    def failed(self) -> Future[str]:
        """Is done when the push has failed. A failure of any rank is one of all. See `PlanePush.failed`."""
        return self._own.failed

    @property
    def failure(self) -> str | None:
        return self._own.failure

    @property
    def error(self) -> TransferError | None:
        return self._own.error

    def layers_filled(self, ordinal: int, local_page: int, first_layer: int, end_layer: int) -> None:
        """Sends layers of this rank's heads. The others send theirs when they have computed them. Any thread may call
        this."""
        self._own.layers_filled(ordinal, local_page, first_layer, end_layer)

    def abort(self, reason: str) -> None:
        """Gives up the pushes of all ranks. See `PlanePush.abort`."""
        self._own.abort(reason)
        self._ranks.post(AbortPush(self._attempt, reason))

    async def finish(self) -> tuple[int, float]:
        """Waits until every rank's pages are at the decoder. Returns the bytes of all ranks, and this one's seconds.

        Raises `AttemptLost`, and not before every rank has given up or had finished: from then on the local pages may
        be written, and until then a rank could still tell its decoder that they have arrived. What arrived is shared
        with other attempts by its name, so bytes of another prompt in it would be wrong answers.
        """
        asked = asyncio.ensure_future(self._ranks.ask(FinishPush(self._attempt)))
        try:
            num_bytes, seconds = await asyncio.wrap_future(self._own.finish())
            return num_bytes + sum(await asked), seconds
        except TransferError as error:
            give_up = AbortPush(self._attempt, str(error))
            await asyncio.gather(self._ranks.ask(give_up), return_exceptions=True)
            raise AttemptLost(str(error)) from error
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def wait_ended(self) -> None:
        """Waits until no write of any rank can land any more. A rank that is lost writes nothing."""
        try:
            await asyncio.wrap_future(self._own.ended)
            await asyncio.gather(self._ranks.ask(EndPush(self._attempt)), return_exceptions=True)
        finally:
            if self._tie is not None:
                self._tie.cancel()
                await asyncio.gather(self._tie, return_exceptions=True)

    async def _pass_failures_on(self) -> None:
        watched = asyncio.ensure_future(self._ranks.ask(WatchPush(self._attempt)))
        failed = asyncio.wrap_future(self._own.failed)
        try:
            await asyncio.wait((watched, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                self._ranks.post(AbortPush(self._attempt, self._own.failure or "it failed at rank 0"))
            elif (error := watched.exception()) is not None and not isinstance(error, RankLost):
                self.abort(str(error))  # a lost rank is the end of this engine, and no fault of the decoder's
        finally:
            for task in (watched, failed):
                task.cancel()
            await asyncio.gather(watched, failed, return_exceptions=True)
