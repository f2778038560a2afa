"""The module handles one request, from the moment at which it is due to its record, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pdproxy.engines.http.base import EngineBroken, EngineClient, EngineRefused, EngineUnreachable, Leg
from pdproxy.loadtest.answer import Answer
from pdproxy.loadtest.clock import Clock
from pdproxy.loadtest.generator_health import Meter
from pdproxy.loadtest.headers import NOWHERE, Way, read_way
from pdproxy.loadtest.live import Live
from pdproxy.loadtest.record import Record
from pdproxy.loadtest.target import Target
from pdproxy.loadtest.workload import Ask, Departure, Leave, Session

SOON = 0.25
"""The share of the usual time until an answer begins by which a client that leaves while it is queued has gone. A
client that leaves during prefill goes between this share and `LATE`."""
LATE = 0.95
MIN_STAY_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call is a request that is ready to be sent."""

    session: Session
    turn: int
    body: bytes

    @property
    def ask(self) -> Ask:
        return self.session.asks[self.turn]

    @property
    def has_next(self) -> bool:
        return self.turn + 1 < len(self.session.asks)


class RequestRunner:
    """RequestRunner sends requests and keeps their records.

    Mutable state: the records so far, in the order in which the requests ended.
    """

    def __init__(
        self,
        client: EngineClient,
        target: Target,
        clock: Clock,
        *,
        live: Live,
        meter: Meter,
        is_warmup: Callable[[float], bool] = lambda due_s: False,
    ) -> None:
        self.records: list[Record] = []
        self._client = client
        self._target = target
        self._clock = clock
        self._live = live
        self._meter = meter
        self._is_warmup = is_warmup

    async def ask(self, call: Call, due_s: float) -> tuple[Record, str]:
        """Sends a request, and returns its record and the answer's text (empty unless a next turn needs it). A request
        that is cancelled here leaves a record as well."""
        leave = call.ask.leave
        over = asyncio.get_running_loop().create_future()
        leaves_at = None if leave is None else _chunks_before(leave)
        visit = _Visit(call, Answer(self._clock.now_s, over, keeps_text=call.has_next, leaves_at=leaves_at), due_s)
        visit.sent_s = self._clock.now_s()
        self._live.sent(visit.sent_s)
        self._meter.sent(visit.sent_s - due_s)
        try:
            await self._stay(visit)
        except asyncio.CancelledError:
            visit.error = "interrupted"
            raise
        finally:
            record = visit.record(self._clock.now_s(), is_warmup=self._is_warmup(due_s))
            self.records.append(record)
            self._live.ended(record)
        return record, visit.answer.text

    async def _stay(self, visit: _Visit) -> None:
        """Stays until the answer's end, or for as long as this client has patience."""
        try:
            async with asyncio.timeout(self._patience_s(visit.call.ask.leave)):
                await self._exchange(visit)
        except TimeoutError:
            visit.lost_patience()
        except EngineRefused as error:
            visit.error, visit.complaint = "refused", str(error)
        except EngineUnreachable as error:
            visit.error, visit.complaint = "unreachable", str(error)
        except EngineBroken as error:
            visit.error, visit.complaint = "broken", str(error)

    async def _exchange(self, visit: _Visit) -> None:
        leg = await self._client.post(self._target.path, visit.call.body, self._target.headers)
        try:
            visit.head(leg, self._clock.now_s())
            if leg.status == 200 and (leg.header("content-type") or "").startswith("text/event-stream"):
                await _take_stream(leg, visit.answer)
            else:
                visit.answer.take_whole(leg.status, await leg.read())
        finally:
            leg.close()

    def _patience_s(self, leave: Leave | None) -> float:
        typical_s = self._live.typical_first_byte_s
        if leave is None or _chunks_before(leave) is not None:
            return self._target.timeout_s
        if leave.phase is Departure.QUEUED:
            return max(MIN_STAY_S, typical_s * SOON * leave.share)
        return max(MIN_STAY_S, typical_s * (SOON + (LATE - SOON) * leave.share))


class _Visit:
    """_Visit keeps what is known of one request.

    Mutable state: all of that, until `record` writes it down.
    """

    def __init__(self, call: Call, answer: Answer, due_s: float) -> None:
        self.call = call
        self.answer = answer
        self.sent_s = due_s
        self.error = ""
        self.complaint = ""
        self._due_s = due_s
        self._status = 0
        self._first_byte_s: float | None = None
        self._way: Way = NOWHERE
        self._aborted = ""

    def head(self, leg: Leg, at_s: float) -> None:
        self._status = leg.status
        self._first_byte_s = at_s
        self._way = read_way(leg.header)

    def lost_patience(self) -> None:
        """Notes that the patience ended: the client meant to leave, or the request timed out. A client that has already
        seen something leaves in a later phase than it meant to."""
        leave = self.call.ask.leave
        if leave is None or _chunks_before(leave) is not None:
            self.error, self.complaint = "timeout", "no end in time"
        elif self._first_byte_s is None:
            self._aborted = leave.phase
        else:
            self._aborted = Departure.MID_STREAM if self.answer.num_chunks > 1 else Departure.FIRST_TOKEN

    def record(self, now_s: float, *, is_warmup: bool) -> Record:
        answer, ask, session, way = self.answer, self.call.ask, self.call.session, self._way
        done_s = now_s if answer.over_s is None else answer.over_s
        usage = answer.usage
        if answer.has_left and ask.leave is not None:
            self._aborted = ask.leave.phase
        error, complaint = self._how_it_ended()
        return Record(
            index=session.first_index + self.call.turn,
            due_s=self._due_s,
            sent_s=self.sent_s,
            done_s=done_s,
            first_byte_s=self._first_byte_s,
            first_token_s=answer.first_token_s,
            last_token_s=answer.last_token_s,
            is_stream=ask.is_stream,
            is_warmup=is_warmup,
            prompt_tokens_asked=ask.prompt_tokens,
            answer_tokens_asked=ask.answer_tokens,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            answer_tokens=self._num_answer_tokens(),
            cached_tokens=None if usage is None else usage.cached_tokens,
            num_chunks=answer.num_chunks,
            gaps=answer.gaps,
            status=self._status,
            error=error,
            complaint=complaint,
            finish_reason=answer.finish_reason,
            answer_digest="" if error or self._aborted else answer.digest,
            aborted=self._aborted,
            phases=self._phases(done_s),
            path=way.path,
            prefiller=way.prefiller,
            decoder=way.decoder,
            attempt=way.attempt,
            num_pages=way.num_pages,
            num_kv_bytes=way.num_kv_bytes,
            transfer_s=way.transfer_s,
            question=session.question,
            group=session.group,
            conversation=session.first_index if len(session.asks) > 1 else None,
            turn=self.call.turn,
        )

    def _how_it_ended(self) -> tuple[str, str]:
        """Returns the record's `error` and `complaint`. An answer that says it ended by length, but is shorter than was
        asked for, has lost something."""
        if self._aborted:
            return "", ""
        if self.error or self.answer.error:
            return self.error or self.answer.error, self.complaint or self.answer.complaint
        usage, asked = self.answer.usage, self.call.ask.answer_tokens
        told = None if usage is None else usage.completion_tokens
        if self.answer.finish_reason == "length" and told is not None and told < asked:
            return "short", f"{told} tokens of {asked}, and it says that it ended by length"
        return "", ""

    def _num_answer_tokens(self) -> int | None:
        usage = self.answer.usage
        if usage is not None and usage.completion_tokens is not None:
            return usage.completion_tokens
        return self.answer.num_chunks or None

    def _phases(self, done_s: float) -> dict[str, float]:
        """Returns the proxy's phases, with the decoding of a stream as it was seen here. The proxy writes a stream's
        head before its decoding ends, or even begins."""
        phases = self._way.phases
        if self.answer.first_token_s is None or self._first_byte_s is None or "first_byte" not in phases:
            return phases
        return {**phases, "decode": done_s - self._first_byte_s}


def _chunks_before(leave: Leave) -> int | None:
    """Returns after how many pieces the client leaves, or None if it leaves by time."""
    if leave.phase is Departure.FIRST_TOKEN:
        return 1
    return leave.num_chunks if leave.phase is Departure.MID_STREAM else None


async def _take_stream(leg: Leg, answer: Answer) -> None:
    """Reads a stream to its end, or until the client has seen enough."""
    source = leg.source
    if source is not None:
        source.pour(answer)
        await answer.over
        return
    while chunk := await leg.read_chunk():
        answer.feed(chunk)
        if answer.over.done():
            return
    answer.end()
