"""Interrupts a request at its 1st, 2nd, 3rd … suspension, until it gets through, and looks at what is left each time.

Roads are ways through the proxy; whose engines stand there is said by the road. The engines are scripted and in this
process, so a run takes a millisecond and always suspends at the same points.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from pdproxy.engines.http.base import REPLY, CheckSize, EngineClient, Leg, Source
from tests.fakes.fake_engine import WORDS, FakeEngine, FakeReply, ScriptedEngine
from tests.fakes.fleet import Held
from tests.fakes.proxy_harness import Answer, Call, Harness, Way, proxy_in_front_of, until
from tests.fakes.suspension import Suspensions, counting_children, num_timers

CHAT = "/v1/chat/completions"
TEXT = "".join(WORDS)
MAX_POINTS = 500
"""A request that suspends more often is one that never ends."""


# ── engines and connections that can be left at any point ───────────────────────────────────────────────────────────


class Fragile(ScriptedEngine):
    """Of the engines that share `faults`, the first to come to one meets it; after that all is well.

    A fault is named for its point; ``reply`` is answered instead of a generation.
    """

    faults: dict[str, Any]

    async def handle(self, path: str, raw: bytes, headers: Mapping[str, str]) -> FakeReply:
        if path.endswith("completions") and (reply := self.faults.pop(f"{self.role} reply", None)) is not None:
            await asyncio.sleep(0)
            return reply  # type: ignore[no-any-return]
        return await super().handle(path, raw, headers)

    async def pass_point(self, point: str) -> None:
        await asyncio.sleep(0)
        await super().pass_point(point)
        if (fault := self.faults.pop(point, None)) is not None:
            raise fault


class FragileEngine(Fragile, FakeEngine):
    """Another fault: ``signals``, which is what becomes of a push."""

    def receive(self, attempt: str, num_pages: int) -> None:
        self.signals = self.faults.pop("signals", "ready")
        super().receive(attempt, num_pages)


class Late(FragileEngine):
    """A decoder whose last rank is ready only when somebody waits for it."""

    is_awaited: Callable[[], bool] = staticmethod(lambda: True)

    def _say(self, what: str, attempt: str, rank: int, num_pages: int) -> None:
        if rank < self.num_ranks - 1 or self.is_awaited():
            super()._say(what, attempt, rank, num_pages)
        elif attempt in self.pages:
            asyncio.get_running_loop().call_soon(self._say, what, attempt, rank, num_pages)


class Connections:
    """Every leg opened through `house`'s clients and not yet closed. Opening one takes a turn of the loop."""

    def __init__(self, house: Harness) -> None:
        self.open: set[object] = set()
        for client in house.clients:
            client.post = self._post_through(client)  # type: ignore[method-assign]

    def _post_through(self, client: EngineClient) -> Any:
        post = client.post

        async def tracked(path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
            connection = object()
            self.open.add(connection)
            try:
                await asyncio.sleep(0)
                return TrackedLeg(await post(path, body, headers), lambda: self.open.discard(connection))
            except BaseException:
                self.open.discard(connection)
                raise

        return tracked


class TrackedLeg:
    """Implements `engines.http.base.Leg`, and tells when it is closed."""

    def __init__(self, leg: Leg, closed: Callable[[], None]) -> None:
        self._leg = leg
        self._closed = closed

    @property
    def status(self) -> int:
        return self._leg.status

    def header(self, name: str) -> str | None:
        return self._leg.header(name)

    async def read(self, check: CheckSize = REPLY) -> bytes:
        return await self._leg.read(check)

    def read_now(self, check: CheckSize = REPLY) -> bytes | None:
        return self._leg.read_now(check)

    async def read_chunk(self) -> bytes:
        return await self._leg.read_chunk()

    @property
    def source(self) -> Source | None:
        return self._leg.source

    def close(self) -> None:
        self._closed()
        self._leg.close()


# ── ways through the proxy ──────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def nothing_else(house: Harness) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def full_buffer(house: Harness) -> AsyncIterator[None]:
    """Somebody holds all pages until the request waits for them, and somebody else waits behind it."""
    keeper = next(instance for instance in house.proxy.pool.instances if instance.is_owner)
    admission, pages = keeper.admission, keeper.known_facts.num_pages
    holder = await Held(keeper, pages).wait()
    is_over = False

    async def neighbour() -> None:
        await until(lambda: admission.num_waiting > 0 or is_over)
        behind = Held(keeper, pages, age=inf)
        holder.release()
        async with asyncio.timeout(5):
            (await behind.wait()).release()

    waiting = asyncio.create_task(neighbour())
    try:
        yield
    finally:
        is_over = True
        await waiting


Fleet = tuple[Sequence[Fragile], Sequence[Fragile]]


def builtin_fleet(road: Road) -> Fleet:
    """Two of each role, or a single decoder that is full."""
    prefillers = [FragileEngine("prefill") for _ in range(2)]
    one = Late if road.is_late else FragileEngine
    decoders = [
        one("decode", num_pages=road.num_pages, num_ranks=2) for _ in range(1 if road.arrange is full_buffer else 2)
    ]
    return prefillers, decoders


@dataclass(frozen=True, kw_only=True)
class Road:
    """One way through the proxy, and how it looks to a client that nobody interrupts."""

    name: str
    num_points: int
    """There are at least so many points at which it can be interrupted."""
    path: str | None = "disaggregated"
    status: int = 200
    attempts: int = 1
    num_choices: int = 1
    endpoint: str = "/v1/completions"
    body: dict[str, Any] = field(default_factory=dict)
    num_pages: int = 64
    finish_at_first: str | None = None
    is_late: bool = False
    faults: dict[str, Any] = field(default_factory=dict)
    ends_by_error: bool = False
    arrange: Callable[[Harness], AbstractAsyncContextManager[None]] = nothing_else
    has_tokenizer: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    fleet: Callable[[Road], Fleet] = builtin_fleet

    def check(self, house: Harness, answer: Answer) -> None:
        """It went this way and no other."""
        record = house.proxy.recent.facts()[0]
        assert (answer.status, answer.headers.get("x-pdproxy-path")) == (self.status, self.path), answer.body
        assert record["attempts"] == self.attempts
        if self.status == 200 and self.body.get("stream"):
            last = answer.events()[-1]
            assert "error" in last if self.ends_by_error else last == "[DONE]"
            assert self.ends_by_error or self._said(answer.events()[:-1]) == self._expected
        elif self.status == 200:
            assert self._said([answer.json()]) == self._expected

    @property
    def _expected(self) -> dict[int, str]:
        """The text of each choice."""
        text = WORDS[0] if self.path == "prefill_only" else TEXT
        return dict.fromkeys(range(self.num_choices), text)

    @staticmethod
    def _said(chunks: list[dict[str, Any]]) -> dict[int, str]:
        said: dict[int, str] = {}
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            part = choice.get("delta") or choice.get("message")
            text = choice.get("text") if part is None else part.get("content")
            said[choice["index"]] = said.get(choice["index"], "") + (text or "")
        return said


# ── ways of interrupting ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """`strike` does it. How the request's task must end: cancelled, with a whole answer, or in any way."""

    name: str
    strike: Callable[[Harness, Call], object]
    as_it_wakes: bool = False
    ends_cancelled: bool = False
    """A cancellation swallowed is a task that its server cannot end."""
    ends_answered: bool = False
    """The client is still there and must be told."""


def cancel_task(house: Harness, call: Call) -> None:
    call.task.cancel()


def leave(house: Harness, call: Call) -> None:
    call.leave()


def shut_down(house: Harness, call: Call) -> None:
    house.proxy.orchestrator.abort_all()


INTERRUPTIONS = [
    Interruption(name="task cancelled", strike=cancel_task, ends_cancelled=True),
    Interruption(name="task cancelled as it wakes", strike=cancel_task, as_it_wakes=True, ends_cancelled=True),
    Interruption(name="client gone", strike=leave),
    Interruption(name="client gone as it wakes", strike=leave, as_it_wakes=True),
    Interruption(name="shutdown", strike=shut_down, ends_answered=True),
]


class InterruptedCall:
    """A client on a slow line, whose request is struck at its n-th suspension."""

    def __init__(self, house: Harness, road: Road, interruption: Interruption, n: int) -> None:
        body = {"model": "tiny", "max_tokens": 8} | road.body
        if road.endpoint != CHAT:
            body.setdefault("prompt", "a b c")
        self._house = house
        self._interruption = interruption
        self.suspensions = Suspensions(n, self._strike, as_it_wakes=interruption.as_it_wakes)
        self.is_struck = False
        raw = json.dumps(body).encode()
        self._call = house.call_raw(road.endpoint, raw, watch=self.suspensions.watch, is_slow=True)

    def _strike(self) -> None:
        self.is_struck = not self._call.task.done()
        self._interruption.strike(self._house, self._call)

    async def over(self) -> None:
        """Until its task has ended, in the way that the interruption asks for. Raises what the request raised."""
        await self._call.ended()
        if self.is_struck and self._interruption.ends_cancelled:
            assert self._call.task.cancelled(), "the cancellation was swallowed"
            return
        self._call.task.result()
        if self.is_struck and self._interruption.ends_answered:
            check_told(self._call.so_far(), has_end=self._call.is_whole)

    def answer(self) -> Answer:
        return self._call.so_far()


def check_told(answer: Answer, *, has_end: bool) -> None:
    """An answer cut short says so: by its status, by its last event, or by having no end where its length is known."""
    num_missing = int(answer.headers.get("content-length", len(answer.body))) - len(answer.body)
    assert num_missing >= 0, "something was added to a whole answer"
    assert num_missing == 0 or not has_end
    if answer.status != 200:
        assert answer.error["code"]
    if "content-length" not in answer.headers:
        assert has_end
        assert answer.events()[-1] == "[DONE]" or "error" in answer.events()[-1]


# ── the proof ───────────────────────────────────────────────────────────────────────────────────────────────────────


FORBEARING = {"retry_min_per_s": 1e6, "breaker_cool_off_s": 1e-6, "slow_start_s": 0.0}
"""A fleet that meets the same fault in every request, and is to treat each like the first."""


@asynccontextmanager
async def a_house(road: Road, tokenizer: Path, way: Way) -> AsyncIterator[Harness]:
    """Ready, and nothing under way."""
    faults: dict[str, Any] = {}
    prefillers, decoders = road.fleet(road)
    for engine in (*prefillers, *decoders):
        engine.faults = faults
    options = FORBEARING | road.options | ({"model": tokenizer} if road.has_tokenizer else {})
    async with proxy_in_front_of(prefillers, decoders, way=way, **options) as house:
        for decoder in decoders:
            if isinstance(decoder, Late):
                decoder.is_awaited = lambda: house.proxy.board.statistics().num_waiting > 0
        for prefiller in prefillers:
            prefiller.finish_at_first = road.finish_at_first
        await asyncio.sleep(0.001)  # the probes go to rest
        with counting_children():
            yield house


class Trial:
    """One proxy on one road. Knows what there was before any request, and so what is left of one."""

    def __init__(self, house: Harness, road: Road, interruption: Interruption) -> None:
        self._house = house
        self._road = road
        self._interruption = interruption
        self._connections = Connections(house)
        self._tasks = asyncio.all_tasks()
        self._num_timers = num_timers()

    async def interrupt(self, n: int) -> InterruptedCall:
        """One request, struck at its n-th suspension if it has one."""
        await self._house.is_ready()
        assert isinstance(self._house.prefiller, Fragile)
        self._house.prefiller.faults.update(self._road.faults)
        async with self._road.arrange(self._house):
            call = InterruptedCall(self._house, self._road, self._interruption, n)
            await call.over()
        self._house.prefiller.faults.clear()
        await self._check_nothing_left()
        if not call.is_struck:
            self._road.check(self._house, call.answer())
        return call

    async def _check_nothing_left(self) -> None:
        """Waits for what the reaper has to say to the engines, for the probes' look at whom they suspect, and for what
        an engine itself drops after its lease."""
        house = self._house
        await house.settled()
        await until(self._is_quiet)
        await house.check_nothing_left()
        for instance in house.proxy.pool.instances:
            books = instance.pages
            if books is None:
                continue
            assert (books.held, books.num_waiting, books.granted_total) == (0, 0, books.returned_total)
        assert self._connections.open == set()
        await until(lambda: not any(engine.pages or engine.running for engine in (*house.prefillers, *house.decoders)))

    def _is_quiet(self) -> bool:
        """No task and no timer more than before, but for the one that `until` has itself."""
        return not asyncio.all_tasks() - self._tasks and num_timers() <= self._num_timers + 1


async def interrupt_everywhere(
    road: Road, interruption: Interruption, tokenizer: Path, way: Way
) -> list[InterruptedCall]:
    """The calls: one for each suspension, and last the one that got through."""
    calls: list[InterruptedCall] = []
    async with a_house(road, tokenizer, way) as house:
        trial = Trial(house, road, interruption)
        while len(calls) < MAX_POINTS and all(call.suspensions.is_reached for call in calls[-1:]):
            try:
                calls.append(await trial.interrupt(len(calls) + 1))
            except BaseException as error:
                error.add_note(f"{road.name}: {interruption.name} at suspension {len(calls) + 1}")
                raise
    return calls
