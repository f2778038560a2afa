"""The module plays the clients: each asks, waits or leaves in the middle, has the answer judged, and asks again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from scripts.dev.common.events import data_in
from scripts.dev.soak.counters import Counters
from scripts.dev.soak.outages import Excuses, Outages
from scripts.dev.soak.plan import CLIENT_TIMEOUT_S, REQUEST_TIMEOUT_S
from scripts.dev.soak.questions import Question
from scripts.dev.soak.reply import Reply
from scripts.dev.soak.verdict import Verdict, judge, ran_out_of_time, what_is_wrong_so_far, what_is_wrong_with_an_error

MEAN_PAUSE_S = 0.3
MIN_LEAVE_S, MAX_LEAVE_S = 0.001, 6.0


class _LeftError(Exception):
    """_LeftError means that this client has seen enough."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """_Visit is one request, and how its client behaves."""

    question: Question
    stream: bool
    n: int = 1
    with_logprobs: bool = True
    leave_after_s: float | None = None
    leave_after_events: int | None = None
    leaves_in_body: bool = False

    @property
    def body(self) -> bytes:
        body = self.question.ask(stream=self.stream, n=self.n, with_logprobs=self.with_logprobs)
        return msgspec.json.encode(body)

    def __repr__(self) -> str:
        text = self.body.decode()
        return text if len(text) < 300 else f"{text[:200]}…{text[-90:]}"


class Clients:
    """Clients are `num_clients` clients of the proxy at `url`. They leave in the middle only while they are
    `is_unruly`.

    A client whose connection is lost in one of the proxy's `outages` asks something else a moment later.

    Mutable state: `_open`, whether they may ask; `_num_inside` and `_is_empty`, those between question and verdict;
    `_http`, their connections; the counters.
    """

    def __init__(
        self,
        url: str,
        questions: Sequence[Question],
        num_clients: int,
        seed: int,
        counters: Counters,
        outages: Outages,
        *,
        excuses: Excuses | None = None,
        slow: Excuses | None = None,
        limit_s: float = CLIENT_TIMEOUT_S,
        refusal_limit_s: float = CLIENT_TIMEOUT_S,
    ) -> None:
        """Makes the clients. With `excuses` an error for which there is none is wrong, but for a refusal in
        `refusal_limit_s`, and for a request that ran out of its time while an engine was `slow`. A request without an
        end after `limit_s` counts as hung."""
        self.is_unruly = False
        self._outages = outages
        self._excuses = excuses or Excuses()
        self._is_strict = excuses is not None
        self._slow = slow or Excuses()
        self._limit_s = limit_s
        self._refusal_limit_s = refusal_limit_s
        self._questions = questions
        self._num_clients = num_clients
        self._seed = seed
        self._counters = counters
        self._open = asyncio.Event()
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._url = url
        self._http = self._connect()

    async def run(self) -> None:
        """Lets the clients come and go until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._num_clients):
                    tasks.create_task(self._come_and_go(random.Random(f"{self._seed} client {index}")))
        finally:
            await self._http.aclose()

    def admit(self) -> None:
        self._open.set()

    async def send_home(self) -> None:
        """Stops the clients from asking; returns when every request has ended and no connection is left."""
        self._open.clear()
        await self._is_empty.wait()
        await self._http.aclose()
        self._http = self._connect()

    async def everything_once(self) -> int:
        """Asks every question once, from a few patient clients; returns how many were not answered rightly."""
        visits = iter([_Visit(question, stream=index % 2 == 0) for index, question in enumerate(self._questions)])
        before = self._counters.verdicts[Verdict.COMPLETED]
        num_refused = sum(question.answer is None for question in self._questions)

        async def work() -> None:
            for visit in visits:
                await self._count(visit)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(work())
        num_right = self._counters.verdicts[Verdict.COMPLETED] - before
        return len(self._questions) - num_refused - num_right

    def _connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        return httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=None, limits=limits)

    async def _come_and_go(self, dice: random.Random) -> None:
        while True:
            await self._open.wait()
            await asyncio.sleep(dice.expovariate(1 / MEAN_PAUSE_S))
            if not self._open.is_set():
                continue
            await self._count(self._draw(dice))

    def _draw(self, dice: random.Random) -> _Visit:
        """Returns a visit drawn by chance. The draws are always the same, so that a client asks the same whether or not
        it may leave."""
        visit = _Visit(
            dice.choice(self._questions),
            stream=dice.random() < 0.6,
            n=2 if dice.random() < 0.05 else 1,
            with_logprobs=dice.random() < 0.7,
        )
        mood, seconds = dice.random(), MIN_LEAVE_S * (MAX_LEAVE_S / MIN_LEAVE_S) ** dice.random()
        num_events = dice.randint(1, 12)
        if not self.is_unruly or mood > 0.3:
            return visit
        is_eventful = visit.stream and mood < 0.1
        return _Visit(
            visit.question,
            visit.stream,
            visit.n,
            visit.with_logprobs,
            leave_after_s=CLIENT_TIMEOUT_S if is_eventful else seconds,
            leave_after_events=num_events if is_eventful else None,
            leaves_in_body=mood > 0.28,
        )

    async def _count(self, visit: _Visit) -> None:
        """Asks, and counts how it ended."""
        self._num_inside += 1
        self._is_empty.clear()
        try:
            verdict, why, path = await self._judge(visit)
            self._counters.count(verdict, f"{why} ← {visit!r}" if verdict in _BAD else why, path=path)
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    async def _judge(self, visit: _Visit) -> tuple[Verdict, str, str]:
        """Asks, and returns the verdict, why, and the path of the answer."""
        reply, mark, began = Reply(), self._outages.mark(), time.monotonic()
        excuse, slow = self._excuses.mark(), self._slow.mark()
        try:
            async with asyncio.timeout(visit.leave_after_s or self._limit_s):
                await self._ask(visit, reply)
        except _LeftError:
            return Verdict.LEFT, "", ""
        except TimeoutError:
            if visit.leave_after_s is not None and visit.leave_after_events is None:
                return Verdict.LEFT, "", ""
            return Verdict.HUNG, self._how_it_hung(reply, mark), ""
        except (httpx.HTTPError, ValueError, LookupError) as error:
            if isinstance(error, httpx.TransportError) and self._outages.excuse(mark):
                wrong = what_is_wrong_so_far(visit.question, reply)
                return (Verdict.WRONG, wrong, "") if wrong else (Verdict.PROXY_KILLED, type(error).__name__, "")
            return Verdict.WRONG, f"the reply broke: {error!r}", ""
        verdict, why = judge(visit.question, visit.n, reply)
        took_s = time.monotonic() - began
        self._counters.timed(why if verdict is Verdict.TYPED_ERROR else verdict, took_s)
        is_refused = verdict is Verdict.TYPED_ERROR and reply.status != 400
        if is_refused and self._is_strict and not self._excuses.hold(excuse):
            if ran_out_of_time(reply, took_s) and self._slow.hold(slow):
                self._counters.num_too_slow += 1
            elif wrong := what_is_wrong_with_an_error(reply, took_s, limit_s=self._refusal_limit_s):
                verdict, why = Verdict.WRONG, wrong
        return verdict, why, reply.path

    def _how_it_hung(self, reply: Reply, mark: int) -> str:
        came = f"{reply.num_events} events of {reply.request_id} came" if reply.status else "no answer began"
        killed = f"the proxy was killed {self._outages.num_begun - mark} times meanwhile"
        return f"no end after {self._limit_s:g} s (the proxy's limit: {REQUEST_TIMEOUT_S:g} s); {came}, {killed}"

    async def _ask(self, visit: _Visit, reply: Reply) -> None:
        """Asks, and feeds the answer to `reply` as it comes."""
        content = _half(visit.body) if visit.leaves_in_body else visit.body
        headers = {"content-type": "application/json"}
        async with self._http.stream("POST", visit.question.path, content=content, headers=headers) as response:
            reply.path = response.headers.get("x-pdproxy-path", "").partition(";")[0]
            reply.status = response.status_code
            reply.request_id = response.headers.get("x-request-id", "")
            reply.retry_after = response.headers.get("retry-after")
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                reply.feed_body(await response.aread())
                return
            async for data in data_in(response):
                reply.feed_event(data)
                if visit.leave_after_events is not None and reply.num_events >= visit.leave_after_events:
                    raise _LeftError


_BAD = (Verdict.WRONG, Verdict.HUNG)


async def _half(body: bytes) -> AsyncIterator[bytes]:
    """Yields the first half of a body; the other half never comes."""
    yield body[: len(body) // 2]
    await asyncio.Event().wait()
