"""The module holds what a run leaves behind: one record per request, what was seen meanwhile, and how well the
generator itself kept up.

The half that asks and the half that reports have only this file in common; on disk it is JSON Lines. All times are
seconds since the run began, on one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdproxy.loadtest.log_histogram import LogHistogram

FORMAT = 1
"""The number of the files' format; readers of one number do not understand files with another."""

Setting = str | int | float | bool | None


class RunFileError(Exception):
    """RunFileError means that a file is no run's file; the message says which file, and where in it."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="request"):
    """Record is what is known of one request.

    Latencies count from `due_s`: if the generator was late, or the requests before this one, the wait is part of this
    request's latency. (A client of a closed loop, and a conversation's next turn, are due when they want to ask.)
    """

    index: int
    """Holds the request's number in the workload: with the same workload and seed, the same number means the same
    question."""
    due_s: float
    sent_s: float
    done_s: float
    """Holds the time of the end, whatever ended it: the last byte, the error, the moment at which the client left."""
    first_byte_s: float | None = None
    """Holds the time at which the answer's head had come."""
    first_token_s: float | None = None
    """Holds the time of the first piece of a stream that holds any part of an answer. It is None where the answer is
    not streamed, because then the time cannot be told."""
    last_token_s: float | None = None

    is_stream: bool = True
    is_warmup: bool = False
    """True for requests that were due in the warm-up, before anything counts."""
    prompt_tokens_asked: int
    answer_tokens_asked: int
    prompt_tokens: int | None = None
    """Counts the prompt's tokens as the answer's `usage` tells them."""
    answer_tokens: int | None = None
    """Counts the answer's tokens as its `usage` tells them; without a `usage`, it counts the answer's pieces. It is
    None where there is no piece either."""
    cached_tokens: int | None = None
    """Counts the tokens of the prompt which the engine says that it had kept."""
    num_chunks: int = 0
    """Counts a stream's pieces that hold any part of an answer."""
    gaps: LogHistogram | None = None
    """Holds the times between one piece and the next; pieces that one read of the socket brought are 0 s apart."""

    status: int = 0
    """Holds HTTP's status; 0 where there was no answer."""
    error: str = ""
    """Holds the reason of a failure; empty for a whole answer, or one that the client left on purpose. It is the error
    object's `code`, or its `type`, or ``http_503``. Or it is one of our words: ``refused``, ``unreachable``, ``broken``
    (the connection), ``cut`` (a stream that ended without its end), ``malformed`` (no JSON, or no choice in it),
    ``short`` (fewer tokens than asked for, and it says that it ended by length), ``timeout``, ``interrupted`` (the run
    was stopped meanwhile)."""
    complaint: str = ""
    """Holds the beginning of the error's message."""
    finish_reason: str = ""
    answer_digest: str = ""
    """Holds the digest of a whole answer's text; it does not depend on how the text was cut into pieces. So two runs
    with the same seed at temperature 0 can be compared, request by request."""
    aborted: str = ""
    """Holds the phase in which the client left on purpose: ``queued``, ``prefill``, ``first_token``, ``mid_stream``. It
    is empty if the client was answered before it wanted to leave."""

    phases: dict[str, float] = {}
    """Holds the seconds by the proxy's ``Server-Timing``, in order: tokenize, slot_wait, prefill, kv_wait,
    first_byte, decode; they are those of the last attempt. A stream's ``decode`` is from its head to its end, as it
    was seen here."""
    path: str = ""
    """Holds the way that the request went: ``disaggregated``, ``local``, ``prefill_only``. This field and the following
    ones are what the proxy's headers say."""
    prefiller: str = ""
    decoder: str = ""
    attempt: str = ""
    num_pages: int | None = None
    num_kv_bytes: int | None = None
    transfer_s: float | None = None

    question: int = 0
    """Holds the number of the question: requests with the same number asked exactly the same. It is `index` where no
    two requests do."""
    group: int | None = None
    """Holds the number of the group; requests of one group share a prefix."""
    conversation: int | None = None
    turn: int = 0

    @property
    def is_ok(self) -> bool:
        """Tells whether the request got a whole answer."""
        return not self.error and not self.aborted

    @property
    def lateness_s(self) -> float:
        """Returns how many seconds late the generator sent the request."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.done_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Returns the seconds per token after the first, or None for fewer than two tokens."""
        if self.first_token_s is None or self.last_token_s is None or not self.answer_tokens or self.answer_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.answer_tokens - 1)


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="moment"):
    """Moment holds what could be seen at one time; there are a few a second. The mappings by instance's name are filled
    where the target is a proxy of ours."""

    at_s: float
    num_open: int
    """Counts the requests which this generator had under way."""
    in_flight: int | None = None
    """Counts the requests which the proxy had under way; None where it did not tell."""
    by_phase: dict[str, int] = {}
    """Counts the requests which the proxy had under way, by the phase they are in."""
    waiting: dict[str, int] = {}
    """Counts the requests that wait for slots, by instance."""
    held: dict[str, int] = {}
    """Counts the slots held, by instance."""
    capacity: dict[str, int] = {}
    """Counts all slots, held or free, by instance."""
    states: dict[str, str] = {}
    """Holds the state of each instance as on the proxy's status page (``ready``, ``down``, …), or ``draining``."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="event"):
    """Event is something that was done to the target, or that somebody wants marked in the pictures."""

    at_s: float
    what: str
    """Holds the kind of event: ``kill``, ``stop``, ``start``, ``up`` (the instance answers again), ``lost`` (it does
    not), ``freeze``, ``thaw``, ``note``."""
    whom: str = ""
    note: str = ""


class GeneratorHealth(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="generator"):
    """GeneratorHealth says how well the generator kept up. If it did not keep up, the run's figures describe the
    generator and not the target."""

    cpu_share: float
    """Holds the share of one core that the generator used, while the run lasted."""
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    """Holds the longest time, in seconds, from when a request was due to when it was sent; the two fields above are
    percentiles of the same."""
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    """Holds the longest time, in seconds, from when the generator's event loop should have looked to when it did; the
    two fields above are percentiles of the same. Whatever came in that time was seen that much later."""
    limit_s: float
    """Holds the limit in seconds for both ninety-ninth percentiles."""

    @property
    def is_trusted(self) -> bool:
        return self.late_p99_s <= self.limit_s and self.lag_p99_s <= self.limit_s

    @property
    def delay_s(self) -> float:
        """Returns the seconds by which the generator was late, sends and reads together (99th percentiles)."""
        return self.late_p99_s + self.lag_p99_s


class Head(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="run"):
    """Head is the first line of a run's file."""

    format: int
    target: str
    """Holds the address that was asked."""
    model: str
    seed: int
    started_at: float
    """Holds the time at which the run began, in seconds since 1970."""
    wall_s: float
    """Holds the seconds from the start of the schedule to the last answer."""
    warmup_s: float
    is_interrupted: bool
    """True for a run that was stopped before its end."""
    settings: dict[str, Setting]
    """Holds all other settings that say what was asked, by the options' names."""


class Run(msgspec.Struct, kw_only=True):
    """Run is all that one run left behind. Records are in the order in which they were due; moments and events are in
    the order of time."""

    head: Head
    health: GeneratorHealth
    records: list[Record]
    moments: list[Moment] = []
    events: list[Event] = []

    @property
    def measured(self) -> list[Record]:
        """Returns the records that count: those of the warm-up do not."""
        return [record for record in self.records if not record.is_warmup]

    @property
    def measured_s(self) -> float:
        """Returns the seconds of the run after the warm-up."""
        return max(0.0, self.head.wall_s - self.head.warmup_s)


Line = Head | GeneratorHealth | Record | Moment | Event

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def write_run(run: Run, path: Path) -> None:
    """Writes a run as one JSON object per line, with its `type` in each: run, generator, events, moments, requests."""
    with path.open("wb") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in _lines(run))


def read_run(path: Path) -> Run:
    """Returns the run that a file holds. Raises `RunFileError`, and `OSError`."""
    with path.open("rb") as file:
        return _run_of(_decoded(file, path), path)


def _lines(run: Run) -> Iterator[Line]:
    yield run.head
    yield run.health
    yield from run.events
    yield from run.moments
    yield from run.records


def _decoded(lines: Iterable[bytes], path: Path) -> Iterator[Line]:
    for number, line in enumerate(lines, start=1):
        try:
            yield _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RunFileError(f"{path}, line {number}: {error}") from None


def _run_of(lines: Iterator[Line], path: Path) -> Run:
    by_type: dict[type[Any], list[Any]] = {kind: [] for kind in (Head, GeneratorHealth, Record, Moment, Event)}
    for line in lines:
        by_type[type(line)].append(line)
    heads, healths = by_type[Head], by_type[GeneratorHealth]
    if len(heads) != 1 or len(healths) != 1:
        raise RunFileError(f"{path}: it has {len(heads)} lines of type run and {len(healths)} of type generator")
    if heads[0].format != FORMAT:
        raise RunFileError(f"{path}: it is in format {heads[0].format}, and this reads {FORMAT}")
    return Run(
        head=heads[0],
        health=healths[0],
        records=by_type[Record],
        moments=by_type[Moment],
        events=by_type[Event],
    )
