"""The module turns the words of a command line into what is asked: each choice is one plain function of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pdproxy.config import options as take
from pdproxy.config.options import option
from pdproxy.loadtest.arrivals import Pace
from pdproxy.loadtest.errors import LoadTestError
from pdproxy.loadtest.lengths import Drawn, Independent, Lengths, Sizes, parse_lengths
from pdproxy.loadtest.traces import SAMPLES, TraceRow, read_trace
from pdproxy.loadtest.workload import Aborts, Closed, Conversations, Departure, Open, Prefixes, Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceOptions:
    """PaceOptions are the options that say when requests are sent, unless a trace says it."""

    rate: take.Rate = None
    arrivals: take.Arrivals = "poisson"
    burstiness: take.Burstiness = 1.0
    ramp: Annotated[float, option("SECONDS", "Time in which the rate rises from --from-rate to --rate")] = 0.0
    from_rate: Annotated[float, option("RATE", "Requests per second at the start of --ramp")] = 0.0
    clients: take.Clients = None
    think: take.Think = 0.0

    def of(self, replay: Replay | None) -> Open | Closed | Replay:
        """Returns the one pace that is asked for. Raises `LoadTestError` unless it is exactly one."""
        ways = {"--rate": self.rate, "--clients": self.clients, "--trace": replay}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            instead = f", not {' and '.join(given)}" if given else ""
            raise LoadTestError(f"give one of --rate, --clients and --trace{instead}")
        if replay is not None:
            return replay
        if self.clients is not None:
            return Closed(num_clients=self.clients, think_s=self.think)
        assert self.rate is not None
        steady = Pace(rate=self.rate, ramp_s=self.ramp, from_rate=self.from_rate)
        return Open(pace=steady, process=self.arrivals, burstiness=self.burstiness)


def rows(trace: str, limit: int | None) -> list[TraceRow]:
    """Returns the rows of the sample with this name, or else of the file at this path. Raises `TraceError` and
    `OSError`."""
    return read_trace(SAMPLES.get(trace, Path(trace)), limit=limit)


def sizes(prompt: str, answer: str, drawn_from: str | None) -> Sizes:
    if drawn_from is not None:
        return Drawn([(row.prompt_tokens, row.answer_tokens) for row in rows(drawn_from, None)])
    return Independent(_lengths("--prompt", prompt), _lengths("--answer", answer))


def prefixes(groups: int | None, tokens: int) -> Prefixes | None:
    return None if groups is None else Prefixes(num_groups=groups, num_tokens=tokens)


def conversations(turns: str | None, message: str, think_s: float) -> Conversations | None:
    if turns is None:
        return None
    said = _lengths("--message", message)
    return Conversations(turns=_lengths("--turns", turns), message=said, think_s=think_s)


def _lengths(option: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except LoadTestError as error:
        raise LoadTestError(f"{option}: {error}") from None


def aborts(share: float, phases: str) -> Aborts | None:
    """Returns the aborts, or None for a share of 0. Raises `LoadTestError` for an unknown phase."""
    names = [name.strip() for name in phases.split(",") if name.strip()]
    unknown = [name for name in names if name not in set(Departure)]
    if unknown:
        raise LoadTestError(f"--abort-phases: there is no {unknown[0]!r}; there are {', '.join(Departure)}")
    if not share:
        return None
    return Aborts(share=share, phases=tuple(Departure(name) for name in names) or tuple(Departure))


def token_ids(text: str | None) -> range | None:
    """Returns the ids that ``FIRST:LAST`` names, both ends included. Raises `LoadTestError`."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise LoadTestError(f"--token-ids {text}: give FIRST:LAST, as 100:30000")
    return range(int(first), int(last) + 1)


def extra(text: str | None, usual: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the members of every request: the usual ones, changed by those of a JSON object; a null takes one away.
    Raises `LoadTestError`."""
    if text is None:
        return usual
    try:
        added = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise LoadTestError(f"--extra is not a JSON object: {error}") from None
    return {name: value for name, value in {**usual, **added}.items() if value is not None}


def headers(texts: Sequence[str]) -> dict[str, str]:
    """Returns the headers by name in lower case, from texts that are ``NAME: VALUE`` each. Raises `LoadTestError`."""
    pairs = [text.partition(":") for text in texts]
    for name, colon, _ in pairs:
        if not name.strip() or not colon:
            raise LoadTestError(f"--header {name}: give NAME:VALUE")
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
