"""The module says what pdproxy aims at beside its peers, and how far a run finds it.

Each goal is checked in the scenarios that it is about, against the peers that answered every request there. What was
not measured, or went wrong, is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.dev.bench_proxy.plan import BESIDE, CALM, SOAK
from scripts.dev.bench_proxy.samples import ADDED
from scripts.dev.bench_proxy.targets import EARLIER, INTERPRETED, OTHER_PYTHON, OURS, WORKERS

BEST_KNOWN = "vllm-router"
_NO_PEERS = (INTERPRETED, EARLIER, OTHER_PYTHON, WORKERS)
"""The targets that are pdproxy once more."""
EQUAL = 1.05
"""The ratio up to which latencies count as equal: no run can tell apart those that differ by less than a twentieth."""
DELAY_MS = 5.0
GROWTH = 0.02

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Goal is one aim, as a run has found it."""

    what: str
    aim: str
    found: str
    holds: bool
    is_noisy: bool
    """True where other processes were busy meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """_Share is the aim to need no more than `most` of what peers need; `peers` are all that are measured where none
    are named."""

    what: str
    scenarios: tuple[str, ...]
    figure: str
    most: float
    peers: tuple[str, ...] = ()

    @property
    def whose(self) -> str:
        return f"of {self.peers[0]}'s" if self.peers else "of every peer's"


_BEST = (BEST_KNOWN,)
_SHORT = ("short-32",)
_MANY_STREAMS = ("staggered-512",)
_SHARES = (
    _Share(what="CPU per short request", scenarios=_SHORT, figure="cpu_ms_per_req", most=0.65, peers=_BEST),
    _Share(what="CPU per short request", scenarios=_SHORT, figure="cpu_ms_per_req", most=1.0),
    _Share(what="CPU per token, no delay", scenarios=("stream-32",), figure="cpu_us_per_token", most=0.65, peers=_BEST),
    _Share(
        what="CPU per token, 512 streams", scenarios=_MANY_STREAMS, figure="cpu_us_per_token", most=0.75, peers=_BEST
    ),
    _Share(what="CPU per token, 512 streams", scenarios=_MANY_STREAMS, figure="cpu_us_per_token", most=1.0),
    *(
        _Share(
            what=f"CPU per prompt of {kib} KiB",
            scenarios=(f"prompt-{kib}k-1", f"prompt-{kib}k-4"),
            figure="cpu_ms_per_req",
            most=0.6,
            peers=_BEST,
        )
        for kib in (32, 512)
    ),
    _Share(what="memory with 1,000 streams open", scenarios=("held-1000",), figure="rss_mb", most=1.0),
)
_LATENCIES = dict(zip(ADDED, ("TTFT p50", "TTFT p99", "token transit p50", "token transit p99"), strict=True))


def check_goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the goals as plain values, checked against a report's ``rows``."""
    ours = [row for row in rows if row["target"] == OURS and not row["errors"] and not row["is_disqualified"]]
    goals = (
        *(goal for share in _SHARES for goal in _check_share(share, ours)),
        *(goal for figure in ADDED for goal in _check_latency(figure, ours)),
        *_check_memory(ours),
        *_check_delay(ours),
    )
    return [asdict(goal) for goal in goals]


def _check_share(share: _Share, ours: Sequence[Row]) -> Iterator[Goal]:
    there = [row for row in ours if row["scenario"] in share.scenarios]
    yield from _worst(there, share.figure, share.peers, f"{share.what}, {share.whose}", share.most)


def _check_latency(figure: str, ours: Sequence[Row]) -> Iterator[Goal]:
    alike = [row for row in ours if row["scenario"] not in (CALM.name, BESIDE.name)]  # there peers do less
    yield from _worst(alike, figure, (), f"{_LATENCIES[figure]}, of the best peer's, in every scenario", EQUAL)


def _check_memory(ours: Sequence[Row]) -> Iterator[Goal]:
    for row in ours:
        if row["scenario"] == SOAK.name and (along := row["rss_mb_along"]):
            growth = along[-1] / along[1] - 1
            yield Goal(
                what="memory's growth in a million requests, after the first tenth",
                aim=f"at most {GROWTH:.0%}",
                found=f"{growth:.1%}",
                holds=growth <= GROWTH,
                is_noisy=False,
            )


def _check_delay(ours: Sequence[Row]) -> Iterator[Goal]:
    by_scenario = {row["scenario"]: row for row in ours}
    calm, beside = by_scenario.get(CALM.name), by_scenario.get(BESIDE.name)
    if calm and beside and None not in (calm["transit_p99_us"], beside["transit_p99_us"]):
        delay_ms = (beside["transit_p99_us"] - calm["transit_p99_us"]) / 1e3
        yield Goal(
            what="tokens of other streams, p99, later beside prompts of 128,000 tokens by",
            aim=f"at most {DELAY_MS:g} ms",
            found=f"{delay_ms:.2f} ms",
            holds=delay_ms <= DELAY_MS,
            is_noisy=calm["is_noisy"] or beside["is_noisy"],
        )


def _worst(rows: Sequence[Row], figure: str, peers: Sequence[str], what: str, most: float) -> Iterator[Goal]:
    """Yields the goal with the worst ratio to any of these peers (all peers where none are named)."""
    found = [
        (ratios[figure], row, peer)
        for row in rows
        for peer, ratios in row["ratios"].items()
        if ratios[figure] is not None and peer not in _NO_PEERS and (not peers or peer in peers)
    ]
    if found:
        ratio, row, peer = max(found, key=lambda each: each[0])
        yield Goal(
            what=what,
            aim=f"at most {most:.2f}",
            found=f"{ratio:.2f} ({row['scenario']}, {peer})",
            holds=ratio <= most,
            is_noisy=row["is_noisy"],
        )
