"""The reading of received attempts by all ranks. Pages are taken together, and given back when no rank reads them any
more."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from transfer.engine.api import RankLost
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.messages import DropKv, TakeKv, WaitRead
from transfer.errors import AttemptLost, TransferError
from transfer.roles.receiver import Receiver


class RanksTake:
    """A `RanksTake` takes attempts at `receiver`, rank 0's, for all ranks. `spawn` starts what goes on behind a call.

    What must hold: pages are given back only when no rank reads them. A violation would be seen as another attempt's
    tag, found by the rank that was still copying. It keeps no state.
    """

    def __init__(
        self, receiver: Receiver, ranks: OtherRanks, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._receiver = receiver
        self._ranks = ranks
        self._spawn = spawn

    async def take(self, attempt: str) -> list[int]:
        """Takes the attempt's pages, and asks every rank to look at its own. Returns the pages. Raises `AttemptLost`
        where they are wrong on any rank."""
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
        """Notes that this rank reads the attempt no longer. The others have been told the step `LetGo`."""
        if self._ranks.size == 1:
            self._receiver.consumed(attempt)
        else:
            self._spawn(self._give_back(attempt, WaitRead(attempt)))

    async def _give_back(self, attempt: str, question: DropKv | WaitRead, *, is_wrong: bool = False) -> None:
        """Gives the pages back when `question` is answered, because the answer says that no other rank reads them."""
        try:
            await self._ranks.ask(question)
        except RankLost:
            return  # it is not known whether that rank still reads, and the engine ends
        self._receiver.consumed(attempt, is_wrong=is_wrong)
