"""The reading of received attempts by all ranks of a decoder's vLLM, as rank 0 keeps account of it.

What must hold: an attempt is taken once for all ranks, whichever asks first, and each of them is told the same; its
pages come back when every rank has said that it reads them no more, or is gone. A violation would be seen as a rank
that loads what another one was refused, as another attempt's tag under a rank that still copies, or as pages that are
taken while nothing runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transfer import wire
from transfer.errors import AttemptLost, TransferError
from transfer.roles.receiver import Receiver

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Take:
    """One attempt that was taken, or could not be: then `error` says why."""

    readers: set[int]
    """The ranks that may still read it, or have not asked yet."""
    pages: Sequence[int] = ()
    written: Sequence[wire.WrittenPages] = ()
    error: str | None = None
    is_wrong: bool = False
    """True once some rank has found pages that another attempt has written."""


class SharedTakes:
    """A `SharedTakes` takes attempts at `receiver` for all ranks. All calls are on the receiver's event loop.

    Mutable state: `_takes`, by attempt, until all ranks have ended it; `_ranks`, those that are not gone; `lost`, why
    nothing can be read any more; `num_wrong_tags`, how often another rank than 0 has found wrong pages.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.lost: TransferError | None = None
        self.num_wrong_tags = 0
        self._receiver = receiver
        self._ranks = set(range(receiver.num_ranks))
        self._takes: dict[str, Take] = {}

    def __repr__(self) -> str:
        return (
            f"<SharedTakes {len(self._takes)} being read by {self._receiver.num_ranks} ranks, {self.lost or 'alive'}>"
        )

    def take(self, rank: int, attempt: str, num_tokens: int) -> Take:
        """Begins to read an attempt on this rank. Raises `AttemptLost` where that cannot be, on any rank: it is not
        READY, its pages are wrong, or its prompt has not `num_tokens` tokens."""
        take = self._takes.get(attempt)
        if take is None:
            take = self._takes[attempt] = Take(set(self._ranks))
            try:
                take.pages = self._take(attempt, num_tokens)
                take.written = self._receiver.written(attempt) if self._receiver.num_ranks > 1 else ()
            except TransferError as error:
                take.error = str(error)
        if take.error is not None:
            self._leave(rank, attempt, take)
            raise AttemptLost(take.error)
        return take

    def is_reading(self, rank: int, attempt: str) -> bool:
        """Tells whether this rank has begun to read the attempt and has not ended that."""
        take = self._takes.get(attempt)
        return take is not None and take.error is None and rank in take.readers

    def end(self, rank: int, attempt: str, *, is_wrong: bool = False) -> None:
        """Notes that this rank reads the attempt no more. The last one gives its pages back.

        Raises what `Receiver.consumed` raises, and `AttemptLost` where nothing is being read.
        """
        take = self._takes.get(attempt)
        if take is None or rank not in take.readers:
            raise AttemptLost(f"attempt {attempt} is not being read by rank {rank}")
        take.is_wrong = take.is_wrong or is_wrong
        self.num_wrong_tags += bool(is_wrong and rank)
        self._leave(rank, attempt, take)

    def rank_lost(self, rank: int) -> None:
        """Notes that a rank's process is gone. It reads nothing any more, and nothing can be loaded."""
        self._ranks.discard(rank)
        self.lost = self.lost or TransferError(f"rank {rank} of this engine is gone")
        for attempt, take in list(self._takes.items()):
            if rank in take.readers:
                try:
                    self._leave(rank, attempt, take)
                except TransferError as error:
                    log.warning("attempt %s was lost while it was read: %s", attempt, error)

    def _take(self, attempt: str, num_tokens: int) -> list[int]:
        if self.lost is not None:
            raise self.lost
        reservation = self._receiver.reservations.get(attempt)
        if reservation is not None and reservation.num_tokens != num_tokens:
            raise AttemptLost(
                f"the request has {num_tokens} tokens to load, and the KV here is of {reservation.num_tokens}: the "
                "prefiller has read another prompt"
            )
        return self._receiver.take(attempt)

    def _leave(self, rank: int, attempt: str, take: Take) -> None:
        take.readers.discard(rank)
        if take.readers:
            return
        del self._takes[attempt]
        if take.error is None:
            self._receiver.consumed(attempt, is_wrong=take.is_wrong)
