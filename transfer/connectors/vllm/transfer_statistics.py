"""The counts of this engine's part of the transfer, for vLLM's ``/metrics`` (see `metrics`).

Each rank says when its part of a push is over. The scheduler's half adds the ranks up, and counts a push once, when all
of them have said so: bytes are a sum, and a wait is that of the slowest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from transfer.errors import AttemptLost, HandshakeRefused, PeerLost, ReservationRefused, TransferError

_KINDS: tuple[tuple[type[TransferError], str], ...] = (
    (HandshakeRefused, "unlike_engines"),
    (PeerLost, "peer_lost"),
    (ReservationRefused, "refused"),
    (AttemptLost, "withdrawn"),
)
PUSH_FAILURES = (*(kind for _, kind in _KINDS), "preempted", "given_up", "not_awaited", "error")
"""The kinds of pushes that fail: see docs/engines.md."""
_FOLLOWS = "withdrawn"
"""The kind of a rank's failure where another rank of the push has failed before it."""
LOAD_FAILURES = ("other_prompt", "lost", "wrong_pages", "error")
"""The kinds of loads that fail."""
PAGES = ("free", "reserved", "quarantined")
"""The states of the PD buffer's pages that are counted. Pages of none of them hold KV that waits to be read, or is."""


def push_failure(error: TransferError | None) -> str:
    """Returns the kind of a push's failure."""
    return next((kind for type_, kind in _KINDS if isinstance(error, type_)), "error")


@dataclass(slots=True)
class Pushed:
    """`Pushed` says how one rank's part of a push has gone, or that of several ranks added up."""

    num_bytes: int = 0
    num_present: int | None = None
    """Counts the blocks that were not sent because the decoder had them. None where none were granted. To a rank that
    writes nothing all seem to be there."""
    wait_s: float | None = None
    """The seconds from the request for pages to their grant. None where none were granted."""
    tail_s: float | None = None
    """The seconds from the prompt's last layer to the end of its writes. None where one of them did not come."""
    failure: str | None = None
    """The kind of the failure, of `PUSH_FAILURES`."""

    def add(self, other: Pushed) -> None:
        """Adds another rank's part."""
        self.num_bytes += other.num_bytes
        told = [count for count in (self.num_present, other.num_present) if count is not None]
        self.num_present = min(told, default=None)
        self.wait_s = _later(self.wait_s, other.wait_s)
        self.tail_s = _later(self.tail_s, other.tail_s)
        if self.failure in (None, _FOLLOWS):
            self.failure = other.failure or self.failure


@dataclass(slots=True)
class TransferStatistics:
    """`TransferStatistics` are the counts of one interval. They are plain values, because vLLM sends them between
    processes."""

    num_pushes: int = 0
    """Counts the pushes that have succeeded."""
    failed_pushes: Counter[str] = field(default_factory=Counter)
    num_loads: int = 0
    """Counts the loads that have succeeded."""
    failed_loads: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    present_blocks: int = 0
    page_waits_s: list[float] = field(default_factory=list)
    send_tails_s: list[float] = field(default_factory=list)
    pages: dict[str, int] = field(default_factory=dict)
    """The pages of the PD buffer by state, as they were last. Empty where nothing has changed."""

    @property
    def has_events(self) -> bool:
        """Tells whether anything has happened; that pages are in another state than before does not count."""
        return bool(self.num_pushes or self.failed_pushes or self.num_loads or self.failed_loads)

    def count_push(self, pushed: Pushed, failure: str | None) -> None:
        """Counts a push that is over on all ranks. `failure` goes before what the ranks say."""
        failure = failure or pushed.failure
        if failure is None:
            self.num_pushes += 1
            self.present_blocks += pushed.num_present or 0
            self.send_tails_s += [] if pushed.tail_s is None else [pushed.tail_s]
        else:
            self.failed_pushes[failure] += 1
        self.sent_bytes += pushed.num_bytes
        self.page_waits_s += [] if pushed.wait_s is None else [pushed.wait_s]

    def count_load(self, failure: str | None) -> None:
        """Counts a load that is over."""
        if failure is None:
            self.num_loads += 1
        else:
            self.failed_loads[failure] += 1

    def add(self, other: TransferStatistics) -> None:
        """Adds what another process, or a later interval, has counted."""
        self.num_pushes += other.num_pushes
        self.failed_pushes.update(other.failed_pushes)
        self.num_loads += other.num_loads
        self.failed_loads.update(other.failed_loads)
        self.sent_bytes += other.sent_bytes
        self.present_blocks += other.present_blocks
        self.page_waits_s += other.page_waits_s
        self.send_tails_s += other.send_tails_s
        self.pages = other.pages or self.pages

    def as_data(self) -> dict[str, Any]:
        """Returns what `of` reads."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {"failed_pushes": dict(self.failed_pushes), "failed_loads": dict(self.failed_loads)}

    @classmethod
    def of(cls, data: dict[str, Any]) -> TransferStatistics:
        """Returns the statistics that `as_data` was asked of."""
        both = {name: Counter(data[name]) for name in ("failed_pushes", "failed_loads")}
        return cls(**data | both | {name: list(data[name]) for name in ("page_waits_s", "send_tails_s")})

    def summary(self) -> dict[str, int | float]:
        """Returns the interval in a few figures, for vLLM's log."""
        return {
            "Num pushes": self.num_pushes,
            "Num failed pushes": self.failed_pushes.total(),
            "Num loads": self.num_loads,
            "Num failed loads": self.failed_loads.total(),
            "MB sent": round(self.sent_bytes / 2**20, 3),
            "Avg wait for pages (ms)": _mean_ms(self.page_waits_s),
            "Avg time from last layer to last write (ms)": _mean_ms(self.send_tails_s),
        }


def _later(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else max(one, other)


def _mean_ms(seconds: list[float]) -> float:
    return round(1000 * sum(seconds) / len(seconds), 3) if seconds else 0.0
