"""The module counts while a soak runs; a report can be made of the counts at any moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scripts.dev.soak.verdict import Verdict

MAX_FAILURES = 50
"""The number of failures of which the text is kept; all are counted."""


@dataclass(slots=True)
class Counters:
    """Counters counts how requests ended.

    Mutable state: everything here only grows.
    """

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Holds the typed errors by status and code."""
    lost: Counter[str] = field(default_factory=Counter)
    """Holds the connections lost while the proxy was dead, by how that showed: refused, or broken off in the middle."""
    paths: Counter[str] = field(default_factory=Counter)
    """Holds the completed answers by the way they came."""
    num_too_slow: int = 0
    """Counts the requests that ran out of their time while a decoder was too slow, and nothing else was wrong."""
    failures: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)
    """Holds the most seconds that a request took, by how it ended: its status and code."""

    @property
    def num_requests(self) -> int:
        return self.verdicts.total()

    def timed(self, kind: str, took_s: float) -> None:
        """Notes how long a request took that ended so."""
        self.slowest_s[kind] = max(self.slowest_s.get(kind, 0.0), round(took_s, 1))

    def count(self, verdict: Verdict, why: str = "", *, path: str = "") -> None:
        """Counts one request that has ended."""
        self.verdicts[verdict] += 1
        if verdict is Verdict.COMPLETED:
            self.paths[path] += 1
        elif verdict is Verdict.TYPED_ERROR:
            self.errors[why] += 1
        elif verdict is Verdict.PROXY_KILLED:
            self.lost[why] += 1
        elif verdict in (Verdict.WRONG, Verdict.HUNG) and len(self.failures) < MAX_FAILURES:
            self.failures.append(f"{verdict}: {why}")
