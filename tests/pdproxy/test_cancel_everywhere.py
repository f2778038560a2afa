"""A request is interrupted at its 1st, 2nd, 3rd … suspension, until it gets through; nothing may ever be left behind.

For every way through the proxy, and for every way of interrupting. The engines are scripted and in this process, so a
run takes a millisecond and always suspends at the same points.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pdproxy.engines.base import EngineClient, EngineUnreachable, Leg
from tests.fakes.fake_engine import BROKEN, WORDS, FakeEngine, FakeReply, error_reply
from tests.fakes.proxy_harness import Answer, Call, Harness, proxy_in_front_of, until
from tests.fakes.suspension import Suspensions, counting_children, num_timers

pytestmark = pytest.mark.cancellation

CHAT = "/v1/chat/completions"
TEXT = "".join(WORDS)
MAX_POINTS = 500
"""A request that suspends more often is one that never ends."""


# ── engines and connections that can be left at any point ───────────────────────────────────────────────────────────


class Fragile(FakeEngine):
    """Of the engines that share `faults`, the first to come to one meets it; after that all is well.

    A fault is named for its point; ``reply`` is answered instead of a generation, ``signals`` is what becomes of a
    push.
    """

    def __init__(self, role: str, faults: dict[str, Any], **options: Any) -> None:
        super().__init__(role, **options)
        self.faults = faults

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

    def receive(self, attempt: str, num_pages: int) -> None:
        self.signals = self.faults.pop("signals", "ready")
        super().receive(attempt, num_pages)


class Late(Fragile):
    """A decoder whose last rank is ready only when somebody waits for it."""

    is_awaited: Callable[[], bool] = staticmethod(lambda: True)

    def _say(self, what: str, attempt: str, rank: int, num_pages: int) -> None:
        if rank < self.num_ranks - 1 or self.is_awaited():
            super()._say(what, attempt, rank, num_pages)
        elif attempt in self.pages:
            asyncio.get_running_loop().call_soon(self._say, what, attempt, rank, num_pages)


class Connections:
    """Every leg opened through `house`'s clients and not yet closed. Opening and closing take a turn of the loop."""

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
    """Implements `engines.base.Leg`. Like a socket it is closed by the call, and gone a turn later."""

    def __init__(self, leg: Leg, closed: Callable[[], None]) -> None:
        self._leg = leg
        self._closed = closed

    @property
    def status(self) -> int:
        return self._leg.status

    def header(self, name: str) -> str | None:
        return self._leg.header(name)

    async def read(self) -> bytes:
        return await self._leg.read()

    async def read_chunk(self) -> bytes:
        return await self._leg.read_chunk()

    async def aclose(self) -> None:
        self._closed()
        await asyncio.sleep(0)
        await self._leg.aclose()


# ── ways through the proxy ──────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def nothing_else(house: Harness) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def full_buffer(house: Harness) -> AsyncIterator[None]:
    """Somebody holds all pages until the request waits for them, and somebody else waits behind it."""
    admission = house.proxy.pool.of_role("decode")[0].admission
    pages = house.decoder.num_pages
    holder = await admission.acquire(pages, deadline=1e12, attempt="holder")
    is_over = False

    async def neighbour() -> None:
        await until(lambda: admission.num_waiting > 0 or is_over)
        behind = asyncio.create_task(admission.acquire(pages, deadline=1e12, attempt="behind"))
        await asyncio.sleep(0)
        holder.release()
        async with asyncio.timeout(5):
            (await behind).release()

    waiting = asyncio.create_task(neighbour())
    try:
        yield
    finally:
        is_over = True
        await waiting


@dataclass(frozen=True, kw_only=True)
class Road:
    """One way through the proxy, and how it looks to a client that nobody interrupts."""

    name: str
    num_points: int
    """There are at least so many points at which it can be interrupted."""
    path: str | None = "disaggregated"
    status: int = 200
    attempts: int = 1
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

    def check(self, house: Harness, answer: Answer) -> None:
        """It went this way and no other."""
        record = house.proxy.recent.facts()[0]
        assert (answer.status, answer.headers.get("x-pdproxy-path")) == (self.status, self.path), answer.body
        assert record["attempts"] == self.attempts
        if self.status == 200 and self.body.get("stream"):
            last = answer.events()[-1]
            assert "error" in last if self.ends_by_error else last == "[DONE]"
            assert self.ends_by_error or answer.text() == (WORDS[0] if self.path == "prefill_only" else TEXT)


LONG = {"prompt": "a-long-word " * 200, "stream": True}
WAYS_THROUGH = [
    Road(name="disaggregated", num_points=14),
    Road(name="disaggregated, streamed", num_points=30, body={"stream": True}),
    Road(
        name="chat, streamed",
        num_points=30,
        endpoint=CHAT,
        body={"messages": [{"role": "user", "content": "tell me"}], "stream": True},
    ),
    Road(name="prompt counted in a thread", num_points=30, body=LONG, has_tokenizer=True),
    Road(name="KV signals after the reply", num_points=30, is_late=True, body={"stream": True}),
    Road(name="queued", num_points=14, body={"prompt": [1] * 64}, num_pages=4, arrange=full_buffer),
    Road(
        name="queued, streamed",
        num_points=30,
        body={"prompt": [1] * 64, "stream": True},
        num_pages=4,
        arrange=full_buffer,
    ),
    Road(name="local", num_points=9, path="local", body={"n": 2}),
    Road(name="local, streamed", num_points=25, path="local", body={"n": 2, "stream": True}),
    Road(name="one token", num_points=8, path="prefill_only", body={"max_tokens": 1}),
    Road(name="one token, streamed", num_points=8, path="prefill_only", body={"max_tokens": 1, "stream": True}),
    Road(name="ends at its first token", num_points=10, path="prefill_only", finish_at_first="stop"),
    Road(name="failover: prefiller unreachable", num_points=15, attempts=2, faults={"prefill": EngineUnreachable("")}),
    Road(name="failover: prefill broke", num_points=20, attempts=2, faults={"prefill_done": BROKEN}),
    Road(
        name="failover: prefiller busy", num_points=20, attempts=2, faults={"prefill reply": error_reply(503, "busy")}
    ),
    Road(name="failover: KV failed", num_points=18, attempts=2, faults={"signals": "failed"}),
    Road(name="failover: decoder unreachable", num_points=24, attempts=2, faults={"decode": EngineUnreachable("")}),
    Road(
        name="failover: decode broke before its first byte",
        num_points=38,
        attempts=2,
        faults={"first": BROKEN},
        body={"stream": True},
    ),
    Road(
        name="goes on elsewhere after its first byte",
        num_points=45,
        attempts=2,
        faults={"middle": BROKEN},
        body={"stream": True},
    ),
    Road(
        name="chat goes on elsewhere after its first byte",
        num_points=45,
        attempts=2,
        faults={"middle": BROKEN},
        endpoint=CHAT,
        body={"messages": [{"role": "user", "content": "tell me"}], "stream": True},
    ),
    Road(
        name="ends by an error after its first byte",
        num_points=22,
        faults={"middle": BROKEN},
        body={"stream": True},
        options={"continue_streams": False},
        ends_by_error=True,
    ),
    Road(
        name="refused by the engine",
        num_points=10,
        status=422,
        faults={"prefill reply": error_reply(422, "temperature must be below 2")},
    ),
    Road(name="refused by the proxy", num_points=5, status=400, path=None, attempts=0, body={"prompt": [1] * 5000}),
]


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


class InterruptedCall(Call):
    """A client on a slow line, whose request is struck at its n-th suspension."""

    def __init__(self, house: Harness, road: Road, interruption: Interruption, n: int) -> None:
        body = {"model": "tiny", "max_tokens": 8} | road.body
        if road.endpoint != CHAT:
            body.setdefault("prompt", "a b c")
        super().__init__(house.proxy, road.endpoint, json.dumps(body).encode(), {})
        self._house = house
        self._interruption = interruption
        self.suspensions = Suspensions(n, self._strike, as_it_wakes=interruption.as_it_wakes)
        self.is_struck = False

    async def _run(self, *arguments: Any) -> None:
        await self.suspensions.watch(super()._run(*arguments))

    async def _receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        return await super()._receive()

    async def _send(self, message: Any) -> None:
        """A head always fits into the server's buffer; a body may have to wait."""
        if message["type"] == "http.response.body":
            await asyncio.sleep(0)
        await super()._send(message)

    def _strike(self) -> None:
        self.is_struck = not self.task.done()
        self._interruption.strike(self._house, self)

    async def over(self) -> None:
        """Until its task has ended, in the way that the interruption asks for. Raises what the request raised."""
        async with asyncio.timeout(5):
            await asyncio.wait([self.task])
        if self.is_struck and self._interruption.ends_cancelled:
            assert self.task.cancelled(), "the cancellation was swallowed"
            return
        self.task.result()
        if self.is_struck and self._interruption.ends_answered:
            check_told(self.so_far(), has_end=self.messages[-1].get("more_body") is False)


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
async def a_house(road: Road, tokenizer: Path) -> AsyncIterator[Harness]:
    """Two of each role; ready, and nothing under way."""
    faults: dict[str, Any] = {}
    prefillers: list[FakeEngine] = [Fragile("prefill", faults) for _ in range(2)]
    decoders = [
        (Late if road.is_late else Fragile)("decode", faults, num_pages=road.num_pages, num_ranks=2)
        for _ in range(1 if road.arrange is full_buffer else 2)
    ]
    options = FORBEARING | road.options | ({"model": tokenizer} if road.has_tokenizer else {})
    async with proxy_in_front_of(prefillers, list(decoders), **options) as house:
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
            self._road.check(self._house, call.so_far())
        return call

    async def _check_nothing_left(self) -> None:
        """Waits for what the reaper has to say to the decoders, and for the probes' look at whom they suspect."""
        house = self._house
        await house.settled()
        await until(self._is_quiet)
        await house.check_nothing_left()
        for instance in house.proxy.pool.of_role("decode"):
            books = instance.admission.statistics()
            assert (books.held, books.num_waiting, books.granted_total) == (0, 0, books.returned_total)
        assert self._connections.open == set()
        assert [decoder.pages for decoder in house.decoders] == [{} for _ in house.decoders]

    def _is_quiet(self) -> bool:
        """No task and no timer more than before, but for the one that `until` has itself."""
        return not asyncio.all_tasks() - self._tasks and num_timers() <= self._num_timers + 1


async def interrupt_everywhere(road: Road, interruption: Interruption, tokenizer: Path) -> list[InterruptedCall]:
    """The calls: one for each suspension, and last the one that got through."""
    calls: list[InterruptedCall] = []
    async with a_house(road, tokenizer) as house:
        trial = Trial(house, road, interruption)
        while len(calls) < MAX_POINTS and all(call.suspensions.is_reached for call in calls[-1:]):
            try:
                calls.append(await trial.interrupt(len(calls) + 1))
            except BaseException as error:
                error.add_note(f"{road.name}: {interruption.name} at suspension {len(calls) + 1}")
                raise
    return calls


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with nothing but a tokenizer, one token per word."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def points(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, int]]]:
    """Cancellation points by road and interruption; printed when all roads have been gone."""
    counts: dict[str, dict[str, int]] = {}
    yield counts
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        num_all = sum(sum(by_way.values()) for by_way in counts.values())
        print(f"\n{num_all} cancellation points ({', '.join(one.name for one in INTERRUPTIONS)}):")
        for road, by_way in counts.items():
            print(f"  {road:<46} {' + '.join(str(num) for num in by_way.values())}")


@pytest.mark.parametrize("interruption", INTERRUPTIONS, ids=lambda interruption: interruption.name)
@pytest.mark.parametrize("road", WAYS_THROUGH, ids=lambda road: road.name)
async def test_interrupted_anywhere_nothing_is_left(
    road: Road, interruption: Interruption, tokenizer: Path, points: dict[str, dict[str, int]]
) -> None:
    calls = await interrupt_everywhere(road, interruption, tokenizer)
    assert not calls[-1].suspensions.is_reached, f"still not through after {MAX_POINTS} suspensions"
    num_struck = sum(call.is_struck for call in calls)
    points.setdefault(road.name, {})[interruption.name] = num_struck
    assert num_struck >= road.num_points
