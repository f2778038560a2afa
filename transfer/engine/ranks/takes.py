"""Attempts that were received, read by all ranks: taken together, and given back when none of them reads any more."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from transfer.engine.api import RankLost
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.messages import DropKv, TakeKv, WaitRead
from transfer.errors import AttemptLost, TransferError
from transfer.roles.receiver import Receiver


class RanksTake:
    """Takes attempts at `receiver`, rank 0's, for all ranks. `spawn` starts what goes on behind a call.

    What must hold: pages are given back only when no rank reads them. A violation would be seen as another attempt's
    tag, found by the rank that was still copying. Keeps no state.
    """

    def __init__(
        self, receiver: Receiver, ranks: OtherRanks, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._receiver = receiver
        self._ranks = ranks
        self._spawn = spawn

    async def take(self, attempt: str) -> list[int]:
        """Take the attempt's pages, and have every rank look at its own. Returns the pages. Raises `AttemptLost`."""
        pages = self._receiver.take(attempt)
        if self._ranks.size == 1:
            return pages
        try:
            await self._ranks.ask(TakeKv(attempt, self._receiver.written(attempt)))
        except BaseException as error:
            is_ours = isinstance(error, TransferError)
            self._spawn(self._give_back(attempt, DropKv(attempt), is_wrong=is_ours))
            if is_ours:
                raise AttemptLost(f"attempt {attempt}: {error}") from None
            raise
        return pages

    def let_go(self, attempt: str) -> None:
        """This rank reads it no longer, and the others have been told the step `LetGo`."""
        if self._ranks.size == 1:
            self._receiver.consumed(attempt)
        else:
            self._spawn(self._give_back(attempt, WaitRead(attempt)))

    async def _give_back(self, attempt: str, question: DropKv | WaitRead, *, is_wrong: bool = False) -> None:
        """The answer to `question` says that no other rank reads it."""
        try:
            await self._ranks.ask(question)
        except RankLost:
            return  # nobody knows whether it still reads, and the engine ends
        self._receiver.consumed(attempt, is_wrong=is_wrong)
