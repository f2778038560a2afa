"""Pace is how fast an instance reads prompts, gets on with KV, and gives back the memory of answers. It is measured
from what the instance did lately. No I/O."""

from __future__ import annotations

from math import inf
from typing import Final

from pdproxy.admission.drain import DrainRate

HALF_LIFE_S: Final = 15.0
"""Seconds of reading after which what was measured counts half."""
FRESH_S = 60.0
"""Seconds for which an estimate is good that nothing renews. Afterwards nothing is known, as in the beginning, so that
no old estimate keeps requests from an instance, or at it, for ever."""


class Pace:
    """Pace holds the running estimates of one process: prompt tokens read per second, seconds for a handoff, and tokens
    of its KV cache that answers give back per second.

    The speed is the tokens that were read over the time in which there were any to read. So it does not matter whether
    prompts are read one after the other or several at once. A prompt that was not read to its end costs time and adds
    no tokens, and an instance that is stuck gets slower with every second.

    Mutable state: both sums of that quotient, each fading with the time that was spent reading; whether there is
    anything to read, and since when that time is not counted yet; the mean of the handoffs; when either was measured
    last, in seconds on the caller's clock; how fast answers give memory back, once one was there, and what they have.
    """

    __slots__ = (
        "_busy_s",
        "_drain",
        "_handed_at",
        "_handoff_s",
        "_is_busy",
        "_read_at",
        "_resident",
        "_since",
        "_tokens",
    )

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets everything, because another process is there."""
        self._tokens = self._busy_s = self._handoff_s = 0.0
        self._since = self._read_at = self._handed_at = -inf
        self._is_busy = False
        self._drain: DrainRate | None = None
        self._resident = 0

    def queue_changed(self, num_queued: int, num_read: int, now: float) -> None:
        """Takes note that `num_queued` prompt tokens are to be read from now on, and `num_read` have just been read."""
        is_stale = now - self._read_at > FRESH_S
        if self._is_busy:
            busy_s = now - self._since
            kept = 0.5 ** (busy_s / HALF_LIFE_S)
            self._tokens, self._busy_s = self._tokens * kept, self._busy_s * kept + busy_s
        elif is_stale:  # what was known before counts no longer
            self._tokens = self._busy_s = 0.0
        self._is_busy, self._since = num_queued > 0, now
        if num_read > 0:
            if is_stale and self._busy_s > FRESH_S:  # it stood still, which says nothing of how fast it goes on
                self._tokens = self._busy_s = 0.0
            else:
                self._tokens += num_read
            self._read_at = now

    def handed_over(self, num: int, seconds: float, now: float) -> None:
        """Takes note of `num` handoffs, which took so many seconds together: from the end of the prefill to the first
        token of the decoder."""
        kept = 0.0 if now - self._handed_at > FRESH_S else 0.9**num
        self._handoff_s = kept * self._handoff_s + (1.0 - kept) * seconds / num
        self._handed_at = now

    def residents_changed(self, num_tokens: int, now: float, num_freed: int = 0) -> None:
        """Takes note that answers have `num_tokens` of the KV cache from now on, because one came, or one went and has
        given `num_freed` back. What answers have also grows while they are written, which nobody tells."""
        if self._drain is None:
            self._drain = DrainRate(now)
        self._drain.measure(self._resident, now)
        self._drain.count(num_freed)
        self._resident = num_tokens

    def freed_per_s(self, now: float) -> float:
        """Returns the tokens of the KV cache that answers give back per second; 0 where nobody knows. Where none has
        ended for long, this gets less with every second."""
        if self._drain is None:
            return 0.0
        self._drain.measure(self._resident, now)
        return self._drain.per_second(self._resident)

    def tokens_per_s(self, now: float) -> float | None:
        """Returns the tokens that are read per second; None where nobody knows."""
        if now - self._read_at > FRESH_S:
            return None
        busy_s = self._busy_s + (now - self._since if self._is_busy else 0.0)
        return self._tokens / busy_s if busy_s > 0.0 and self._tokens > 0.0 else None

    def handoff_s(self, now: float) -> float | None:
        """Returns the seconds of a handoff; None where nobody knows."""
        return None if now - self._handed_at > FRESH_S else self._handoff_s
