"""What a run leaves behind: one record per request, what was seen meanwhile, and how well the generator itself kept up.

The one file that the half which asks and the half which reports have in common; on disk it is JSON Lines. All times are
seconds since the run began, on one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdproxy.loadtest.gaps import Gaps

FORMAT = 1
"""Of the files; another number, and older readers do not understand them."""

Setting = str | int | float | bool | None


class RunFileError(Exception):
    """A file is no run's; the message says which, and where in it."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="request"):
    """One request.

    Latencies count from `due_s`: what a request waits for because the generator, or the requests before it, were late
    is its latency too. (A client of a closed loop, and a conversation's next turn, are due when they want to ask.)
    """

    index: int
    """In the workload: with the same workload and seed, the same number asks the same."""
    due_s: float
    sent_s: float
    done_s: float
    """The end, whichever it was: the last byte, the error, the moment at which the client left."""
    first_byte_s: float | None = None
    """The answer's head was here."""
    first_token_s: float | None = None
    """The first piece of a stream with anything of an answer in it. None for what is not streamed: nobody can tell."""
    last_token_s: float | None = None

    is_stream: bool = True
    is_warmup: bool = False
    """Of the time before anything counts."""
    prompt_tokens_asked: int
    answer_tokens_asked: int
    prompt_tokens: int | None = None
    """By the answer's `usage`."""
    answer_tokens: int | None = None
    """By the answer's `usage`; where a whole stream has none, the number of its pieces."""
    cached_tokens: int | None = None
    """Of the prompt, that the engine says it had kept."""
    num_chunks: int = 0
    """Pieces of a stream with anything of an answer in them."""
    gaps: Gaps | None = None
    """Between one piece and the next; pieces that one read of the socket brought are 0 s apart."""

    status: int = 0
    """HTTP's; 0 where there was no answer."""
    error: str = ""
    """``""``: a whole answer, or one that the client left on purpose. Else the error object's `code`, or its `type`, or
    ``http_503``; or ours: ``refused``, ``unreachable``, ``broken`` (the connection), ``cut`` (a stream that ended
    without its end), ``malformed`` (nobody's JSON, or without a choice), ``short`` (fewer tokens than asked for, and it
    says that it ended by length), ``timeout``, ``interrupted`` (the run was stopped meanwhile)."""
    complaint: str = ""
    """The error's message, its beginning."""
    finish_reason: str = ""
    answer_digest: str = ""
    """Of a whole answer's text, however it was cut into pieces: two runs with the same seed at temperature 0 can be
    held against each other, request by request."""
    aborted: str = ""
    """The phase in which the client left on purpose: ``queued``, ``prefill``, ``first_token``, ``mid_stream``. One that
    was answered before it wanted to leave has left in none."""

    phases: dict[str, float] = {}
    """Seconds by the proxy's ``Server-Timing``, in order: tokenize, slot_wait, prefill, kv_wait, first_byte, decode;
    of the last attempt. A stream's ``decode`` is from its head to its end, as it was seen here."""
    path: str = ""
    """``disaggregated``, ``local``, ``prefill_only``; this and the following as the proxy's headers say."""
    prefiller: str = ""
    decoder: str = ""
    attempt: str = ""
    num_pages: int | None = None
    num_kv_bytes: int | None = None
    transfer_s: float | None = None

    question: int = 0
    """Requests with the same one asked exactly the same; `index`, where no two do."""
    group: int | None = None
    """Of those that share a prefix."""
    conversation: int | None = None
    turn: int = 0

    @property
    def is_ok(self) -> bool:
        """A whole answer."""
        return not self.error and not self.aborted

    @property
    def lateness_s(self) -> float:
        """The generator's own."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.done_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first."""
        if self.first_token_s is None or self.last_token_s is None or not self.answer_tokens or self.answer_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.answer_tokens - 1)


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="moment"):
    """What could be seen at one time, a few times a second. By instance's name, where the target is a proxy of ours."""

    at_s: float
    num_open: int
    """Requests that this generator had under way."""
    in_flight: int | None = None
    """Requests that the proxy had under way; None where it did not tell."""
    by_phase: dict[str, int] = {}
    """The same, by the phase they are in."""
    waiting: dict[str, int] = {}
    """Requests that wait for slots."""
    held: dict[str, int] = {}
    """Slots."""
    capacity: dict[str, int] = {}
    """Slots there are."""
    states: dict[str, str] = {}
    """``ready``, ``down``, …: as on the proxy's status page; ``draining`` where it is."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="event"):
    """Something that was done to the target, or that somebody wants marked in the pictures."""

    at_s: float
    what: str
    """``kill``, ``stop``, ``start``, ``up`` (it answers again), ``lost`` (it does not), ``freeze``, ``thaw``,
    ``note``."""
    whom: str = ""
    note: str = ""


class GeneratorHealth(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="generator"):
    """How well the generator kept up. Where it did not, the figures are its own and not the target's."""

    cpu_share: float
    """Of one core, while the run lasted."""
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    """From when a request was due to when it was sent."""
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    """From when its event loop should have looked to when it did: what came in that time was seen so much later."""
    limit_s: float
    """For both ninety-ninth percentiles."""

    @property
    def is_trusted(self) -> bool:
        return self.late_p99_s <= self.limit_s and self.lag_p99_s <= self.limit_s


class Head(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="run"):
    """A file's first line."""

    format: int
    target: str
    """The address that was asked."""
    model: str
    seed: int
    started_at: float
    """Seconds since 1970."""
    wall_s: float
    """From the first second of the schedule to the last answer."""
    warmup_s: float
    is_interrupted: bool
    """It was stopped before its end."""
    settings: dict[str, Setting]
    """All else that says what was asked, by the options' names."""


class Run(msgspec.Struct, kw_only=True):
    """All of it. Records in the order in which they were due; moments and events in that of time."""

    head: Head
    health: GeneratorHealth
    records: list[Record]
    moments: list[Moment] = []
    events: list[Event] = []

    @property
    def measured(self) -> list[Record]:
        """Those that count: the warm-up's do not."""
        return [record for record in self.records if not record.is_warmup]

    @property
    def measured_s(self) -> float:
        """How long they took, all together."""
        return max(0.0, self.head.wall_s - self.head.warmup_s)


Line = Head | GeneratorHealth | Record | Moment | Event

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def write_run(run: Run, path: Path) -> None:
    """One JSON object per line, its `type` in each: run, generator, events, moments, requests."""
    with path.open("wb") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in _lines(run))


def read_run(path: Path) -> Run:
    """Raises `RunFileError`, and `OSError`."""
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
