"""The record of what one sender has open at its receivers, and what it said last, over all of its connections.

A connection can be lost with messages in it. So the last word about an attempt is kept until the receiver is known to
have it, and said again, over whichever connection there is then.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

from transfer import wire

MAX_LAST_WORDS = 10_000
"""The most last words that are kept. For a forgotten one the receiver is told that the attempt has ended."""

LastWord = wire.WritesDone | wire.WritesEnded


class Standing:
    """`Standing` holds the attempts of one sender, by receiver (its epoch) and name.

    What must hold: an attempt is open from before pages are asked for until no write to that receiver can be under way,
    whatever becomes of the connections. A violation would be seen as pages that are given away under a write.

    Mutable state: `_open` (how many connections have it open: two while one takes over from another), `_last_words`
    (each with the number of the connection that said it), `_num_connections`.
    """

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()
        self._last_words: OrderedDict[tuple[str, str], tuple[int, LastWord]] = OrderedDict()
        self._num_connections = 0

    def __repr__(self) -> str:
        return f"<Standing {len(self._open)} open, {len(self._last_words)} last words>"

    def next_serial(self) -> int:
        """Returns the number of a new connection."""
        self._num_connections += 1
        return self._num_connections

    def opened(self, receiver: str, attempt: str) -> None:
        self._open[receiver, attempt] += 1

    def closed(self, receiver: str, attempt: str) -> None:
        """Notes that a connection on which the attempt was open has nothing under way for it any more."""
        self._open[receiver, attempt] -= 1
        if self._open[receiver, attempt] <= 0:
            del self._open[receiver, attempt]

    def said(self, receiver: str, word: LastWord, serial: int) -> None:
        """Notes that this last word about a closed attempt is on its way over connection `serial`."""
        self._last_words[receiver, word.attempt] = serial, word
        if len(self._last_words) > MAX_LAST_WORDS:
            self._last_words.popitem(last=False)

    def arrived(self, receiver: str, attempt: str, serial: int) -> None:
        """Notes that the receiver has the last word about the attempt, as far as connection `serial` can know. A word
        of a later connection, for an attempt that was begun anew, is kept."""
        if self._last_words.get((receiver, attempt), (math.inf,))[0] <= serial:
            del self._last_words[receiver, attempt]

    def has_unsettled(self, receiver: str) -> bool:
        """Returns whether anything is open at that receiver, or a last word to it is not known to have arrived."""
        return bool(self.open_at(receiver) or self.said_to(receiver))

    def said_to(self, receiver: str) -> list[str]:
        """Returns the attempts whose last word was told to that receiver and is not known to have arrived."""
        return [attempt for where, attempt in self._last_words if where == receiver]

    def open_at(self, receiver: str) -> list[str]:
        return [attempt for where, attempt in self._open if where == receiver]

    def last_word(self, receiver: str, attempt: str) -> LastWord | None:
        """Returns what the receiver is to be told about the attempt now, or None while a write to it may be under
        way."""
        if (receiver, attempt) in self._open:
            return None
        ended = wire.WritesEnded(attempt=attempt, reason="the attempt is over")
        return self._last_words.get((receiver, attempt), (0, ended))[1]
