"""The way of one push to one receiver: it is the session that was there already, or a new one where that has died
unnoticed.

Nobody says anything on a session without attempts. So a receiver that was restarted is found out only when the next
push asks it for pages. That push must not fail because of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transfer import wire
from transfer.errors import PeerLost, ReceiverLost, TransferError
from transfer.roles.session import Session


class Route:
    """A `Route` leads to the receiver at `endpoint`, of a decoder with `num_ranks` ranks. Every wait ends at
    `deadline`, on the loop's clock.

    Mutable state: `session`, the one in use; `_is_old`, which is True while that session was there before this push and
    may be dead.
    """

    def __init__(
        self,
        endpoint: wire.Endpoint,
        num_ranks: int,
        deadline: float,
        session_to: Callable[[wire.Endpoint], Session],
        *,
        is_old: bool,
    ) -> None:
        self._endpoint = endpoint
        self._num_ranks = num_ranks
        self._deadline = deadline
        self._session_to = session_to
        self._is_old = is_old
        self.session = session_to(endpoint)

    def __repr__(self) -> str:
        return f"<Route to a decoder of {self._num_ranks} ranks, {self.session!r}>"

    async def ready(self) -> None:
        """Waits until hands are shaken. Raises `HandshakeRefused` or `PeerLost`, and `TransferError` for a receiver of
        another rank or decoder."""
        try:
            await self._shake_hands()
        except PeerLost as error:
            await self.renew(error)

    async def renew(self, error: PeerLost) -> None:
        """Makes another session in place of one that was there before. Raises `error` if it was not there before, and
        else what `ready` raises."""
        if not self._is_old:
            raise error
        self._is_old = False
        self.session = self._session_to(self._endpoint)
        await self._shake_hands()

    async def revive(self) -> None:
        """Makes another session, as `renew` does, if the session was lost while nobody was looking."""
        if self.session.is_lost:
            self.session = self._session_to(self._endpoint)
            await self._shake_hands()

    async def _shake_hands(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self.session.ready()
        except TimeoutError:
            cause = self.session.likely_cause
            raise ReceiverLost(f"{self._endpoint.address} did not answer within the attempt's time; {cause}") from None
        self._check_rank()

    def _check_rank(self) -> None:
        """Raises `TransferError` unless rank 0 has answered, of a decoder with as many ranks as the receivers' list
        has."""
        theirs = self.session.welcome.layout
        if (theirs.tp_rank, theirs.tp_size) != (0, self._num_ranks):
            raise TransferError(
                f"{self._endpoint.address} is rank {theirs.tp_rank} of {theirs.tp_size}, "
                f"not 0 of {self._num_ranks} as the receivers' list says"
            )
