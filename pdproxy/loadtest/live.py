"""The module tells how a run goes while it goes: counts, rates of the last seconds, and how long answers take to
begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.loadtest.latency import percentile
from pdproxy.loadtest.record import Record

WINDOW_S = 5.0
FIRST_GUESS_S = 0.05
_WEIGHT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress is the state of a run at one moment. Rates and latencies are those of requests that were sent or ended
    in the last `WINDOW_S` seconds."""

    at_s: float
    num_sent: int
    num_open: int
    num_ended: int
    num_failed: int
    num_aborted: int
    sent_per_s: float
    ended_per_s: float
    tokens_per_s: float
    """Holds the tokens of answers per second."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    e2e_p50_s: float | None
    num_expected: int | None
    """Holds the number of requests in all, where that is known."""
    duration_s: float | None
    """Holds the length of the schedule in seconds, where that is known."""


class Live:
    """Live counts the requests of a run while it goes on.

    Mutable state: counts; when the last requests were sent; the last ones that ended; a mean that forgets.
    """

    def __init__(
        self, now_s: Callable[[], float], *, num_expected: int | None = None, duration_s: float | None = None
    ) -> None:
        self._now_s = now_s
        self._num_expected = num_expected
        self._duration_s = duration_s
        self.num_sent = 0
        self.num_ended = 0
        self._num_failed = 0
        self._num_aborted = 0
        self._sent: deque[float] = deque()
        self._ended: deque[Record] = deque()
        self.typical_first_byte_s = FIRST_GUESS_S
        """Holds the seconds from sending a request to its answer's head, as a mean in which recent requests count
        most."""

    @property
    def num_open(self) -> int:
        return self.num_sent - self.num_ended

    def sent(self, at_s: float) -> None:
        self.num_sent += 1
        self._sent.append(at_s)
        while self._sent[0] < at_s - WINDOW_S:
            self._sent.popleft()

    def ended(self, record: Record) -> None:
        self.num_ended += 1
        self._num_failed += bool(record.error)
        self._num_aborted += bool(record.aborted)
        self._ended.append(record)
        self._forget(record.done_s - WINDOW_S)
        if record.first_byte_s is not None:
            self.typical_first_byte_s += _WEIGHT * (record.first_byte_s - record.sent_s - self.typical_first_byte_s)

    def progress(self) -> Progress:
        now_s = self._now_s()
        self._forget(now_s - WINDOW_S)
        window_s = max(1e-9, min(WINDOW_S, now_s))
        ttfts = sorted(record.ttft_s for record in self._ended if record.ttft_s is not None)
        e2es = sorted(record.e2e_s for record in self._ended)
        return Progress(
            at_s=now_s,
            num_sent=self.num_sent,
            num_open=self.num_open,
            num_ended=self.num_ended,
            num_failed=self._num_failed,
            num_aborted=self._num_aborted,
            sent_per_s=sum(at_s >= now_s - WINDOW_S for at_s in self._sent) / window_s,
            ended_per_s=len(self._ended) / window_s,
            tokens_per_s=sum(record.answer_tokens or 0 for record in self._ended) / window_s,
            ttft_p50_s=percentile(ttfts, 50),
            ttft_p95_s=percentile(ttfts, 95),
            e2e_p50_s=percentile(e2es, 50),
            num_expected=self._num_expected,
            duration_s=self._duration_s,
        )

    def _forget(self, before_s: float) -> None:
        while self._ended and self._ended[0].done_s < before_s:
            self._ended.popleft()
