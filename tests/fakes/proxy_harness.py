"""A whole proxy in one process, in front of scripted engines.

There are two ways through it: `awaited`, on which the client is at the other end of ASGI messages and all that an
engine says is awaited; and `relay`, on which the client is on a connection of the proxy's own, and streams go from the
engines to it by callbacks. Leaving the harness checks that nothing was left behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from pdproxy.admission.admission import Admission
from pdproxy.assemble import Proxy, assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.token_counts import TokenizerReport
from pdproxy.fronts import messages
from pdproxy.fronts.channel import Channel
from pdproxy.fronts.front import assemble_front
from pdproxy.fronts.hub import Hub, Session
from pdproxy.openai.apis import PASSED
from pdproxy.openai.request import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from pdproxy.tokens.tokenizer import FILE, FastTokenizer
from tests.fakes.calls import LIMIT_S, Answer, AsgiCall, Call, Sent, Watch, as_it_is, until
from tests.fakes.connected_call import ConnectedCall, Entrance
from tests.fakes.fake_engine import FakeClient, FakeEngine, ScriptedEngine
from transfer.wire import AnySignal

__all__ = ["LIMIT_S", "WAYS", "Answer", "Call", "Harness", "Way", "proxy_in_front_of", "until"]

Way = Literal["awaited", "relay"]
WAYS: tuple[Way, ...] = ("awaited", "relay")
CLOSING_S = 0.01
NOT_COMPARED = TokenizerReport(None).status()
IS_BY_FRONT = bool(os.environ.get("PDPROXY_TEST_BY_FRONT"))
"""Whether all requests go through fronts."""
USUAL: dict[str, Way] = {"way": "awaited"}
"""For tests that name none."""


@dataclass
class Harness:
    proxy: Proxy
    """The proxy; where the requests go through a front, that front, which has most of the same parts."""
    prefillers: Sequence[Any]
    """Scripted engines of whatever kinds the test gave."""
    decoders: Sequence[Any]
    clients: list[FakeClient] = field(default_factory=list)
    way: Way = "awaited"
    by_url: dict[str, FakeClient] = field(default_factory=dict)
    cut: Callable[[], None] = lambda: None
    """Cuts the connection between the front and its leader, as the end of either does."""
    leader: Proxy | None = None
    """Whom the front asks, where there is one."""

    def __post_init__(self) -> None:
        self.entrance = Entrance(self.proxy.app, self.proxy.memory)

    @property
    def prefiller(self) -> Any:
        return self.prefillers[0]

    @property
    def decoder(self) -> Any:
        return self.decoders[0]

    @property
    def admission(self) -> Admission:
        return self.proxy.pool.admission

    @property
    def held(self) -> int:
        return sum(instance.held for instance in self.proxy.pool.instances)

    def client_of(self, engine: ScriptedEngine) -> FakeClient:
        return next(client for client in self.clients if client.engine is engine)

    def limit(self, **seconds: float) -> None:
        """Other time limits from now on: for a fleet that could not have come up with them."""
        orchestrator = self.proxy.orchestrator
        parts = orchestrator.options, orchestrator._disaggregated, orchestrator._legs
        for name, value in seconds.items():
            setattr(next(part for part in parts if hasattr(part, name)), name, value)

    def call(self, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **body: Any) -> Call:
        body = {"model": "tiny", "max_tokens": 8} | body
        if path == COMPLETIONS:
            body.setdefault("prompt", "a b c")
        return self.call_raw(path, json.dumps(body).encode(), headers)

    def call_raw(
        self,
        path: str,
        body: bytes | None,
        headers: dict[str, str] | None = None,
        method: str = "POST",
        *,
        watch: Watch = as_it_is,
        is_slow: bool = False,
    ) -> Call:
        """`body` None: it never comes. `is_slow`: the client's line. `watch` is put around what serves it."""
        sent = Sent(path, body, headers or {}, method)
        if self.way == "relay" and method == "POST" and path in (COMPLETIONS, CHAT, MESSAGES, RESPONSES, *PASSED):
            return ConnectedCall(self.entrance, sent, watch=watch, is_slow=is_slow)
        return AsgiCall(self.proxy.app, sent, watch=watch, is_slow=is_slow)

    async def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Answer:
        return await self.call(path, headers, **body).answer()

    async def get(self, path: str) -> Answer:
        call = self.call_raw(path, b"", method="GET")
        return await call.answer()

    async def settled(self) -> None:
        """Until the reaper has nothing to do."""
        async with asyncio.timeout(LIMIT_S):
            await self.proxy.reaper.idle()

    async def is_ready(self) -> None:
        await until(lambda: all(one.is_ready and _is_compared(one) for one in self.proxy.pool.instances))

    async def check_nothing_left(self) -> None:
        await self.settled()
        assert self.proxy.orchestrator.num_requests == 0
        assert self.held == 0
        assert self.proxy.board.statistics().num_open == 0
        assert all(instance.num_legs == 0 for instance in self.proxy.pool.instances)
        assert all(instance.num_attempts == 0 for instance in self.proxy.pool.instances)
        assert all(not instance.reliances for instance in self.proxy.pool.instances)
        assert all(_has_no_answers(instance) for instance in self.proxy.pool.instances)
        self.proxy.check_integrity()
        if self.leader is not None:
            await _check_leader(self.leader)
        await until(lambda: not self.entrance.state.tasks and not self.entrance.state.connections)
        await until(lambda: not self.proxy.memory.num_bytes)  # a request's end is a moment after its answer's


async def _check_leader(leader: Proxy) -> None:
    """Nothing is held for a front any more that has nothing left."""
    kernel, instances = leader.pool.admission.kernel, leader.pool.instances
    await until(lambda: not sum(instance.held + instance.num_legs + instance.num_attempts for instance in instances))
    await until(lambda: not leader.reaper.statistics()["open"] and not kernel.num_waiting)
    assert all(not instance.queued_tokens for instance in instances)
    assert all(_has_no_answers(instance) for instance in instances)
    leader.check_integrity()


def _has_no_answers(instance: Instance) -> bool:
    """Whether nothing counts in its KV cache any more."""
    residency = instance.residency
    return not residency.stays and residency.tokens == residency.shared == 0


class _Bugs(logging.Handler):
    """What the proxy says that it did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.met: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "met a bug" in record.getMessage():
            self.met.append(self.format(record))


@contextmanager
def no_bugs() -> Iterator[None]:
    """Bugs are answered by the proxy like anything else, and what is raised in the event loop's callbacks is only
    logged; here both are the test's failure."""
    bugs, log, loop = _Bugs(), logging.getLogger("pdproxy"), asyncio.get_running_loop()
    log.addHandler(bugs)
    loop.set_exception_handler(lambda _, context: bugs.met.append(str(context)))
    try:
        yield
    finally:
        loop.set_exception_handler(None)
        log.removeHandler(bugs)
    assert not bugs.met, "\n".join(bugs.met)


@asynccontextmanager
async def proxy_in_front_of(
    prefillers: Sequence[ScriptedEngine] = (),
    decoders: Sequence[ScriptedEngine] = (),
    *,
    wait: bool = True,
    way: Way | None = None,
    by_front: bool | None = None,
    **options: Any,
) -> AsyncIterator[Harness]:
    """A running, ready proxy. On the way out nothing may be held, expected or running any more. `by_front`: requests
    go through a front, and the proxy is its leader."""
    before = asyncio.all_tasks()
    prefillers = prefillers or [FakeEngine("prefill")]
    decoders = decoders or [FakeEngine("decode")]
    harness = _build(prefillers, decoders, way or USUAL["way"], options)
    with no_bugs():
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(harness.proxy.app.router.lifespan_context(harness.proxy.app))
            if by_front or (by_front is None and IS_BY_FRONT):
                await stack.enter_async_context(_behind_a_front(harness))
            if wait:
                await harness.is_ready()
                for engine in (*prefillers, *decoders):
                    engine.forget()
            yield harness
            await harness.check_nothing_left()
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not left, left


@asynccontextmanager
async def _behind_a_front(harness: Harness) -> AsyncIterator[None]:
    """Puts a front before the proxy, over a real connection."""
    leader, clients = harness.proxy, harness.by_url
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(False)
    given = leader.settings.model_dump(mode="json", exclude_unset=True, exclude={"instances"})
    welcome = messages.Welcome(messages.PROTOCOL, given, 1, "nowhere")
    front = assemble_front(welcome, theirs, make_client=lambda one: clients[one.url])
    hub = Hub(leader.pool, leader.pool.admission, leader.reaper, leader.counts)
    leader.pool.on_membership = hub.follow
    sessions: list[Session] = []
    channel = Channel(messages.FromFront, lambda why: sessions[0].close())

    def hello(message: messages.Hello) -> None:
        sessions.append(hub.open(channel.send))
        channel.handlers = sessions[0].handlers

    def pass_on(signal: AnySignal) -> bool:
        front.board.deliver(signal)
        return True

    channel.handlers = {messages.Hello: hello}
    leader.board.pass_on = pass_on
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
    async with front.app.router.lifespan_context(front.app):
        await until(lambda: len(front.pool.instances) == len(leader.pool.instances))
        harness.leader, harness.proxy = leader, cast(Proxy, front)
        harness.entrance = Entrance(front.app, front.memory)
        harness.cut = lambda: cast(asyncio.Transport, front.channel._transport).abort()
        for instance in front.pool.instances:
            _close_at_once(instance)
        yield
    await until(lambda: channel.is_over)


def _close_at_once(instance: Instance) -> None:
    """Scripted engines notice a closed leg at once."""
    adapter: Any = instance.adapter
    adapter.traits = replace(adapter.traits, closing_s=CLOSING_S)


def _is_compared(instance: Instance) -> bool:
    return instance.remarks.get("tokenizer", NOT_COMPARED) != NOT_COMPARED


def _tokenizer(options: dict[str, Any]) -> FastTokenizer | None:
    """The engines have the model that the proxy is told of."""
    folder = options.get("model")
    return FastTokenizer(folder) if folder is not None and (folder / FILE).exists() else None


def _build(
    prefillers: Sequence[ScriptedEngine], decoders: Sequence[ScriptedEngine], way: Way, options: dict[str, Any]
) -> Harness:
    engines = {
        f"http://{role}{i}:1": engine
        for role, group in (("p", prefillers), ("d", decoders))
        for i, engine in enumerate(group)
    }
    for number, engine in enumerate(decoders):
        engine.port = 7300 + 10 * number
        engine.prefillers = prefillers
    for engine in prefillers:
        engine.decoders = decoders
    for engine in engines.values():
        engine.is_poured = way == "relay"
        engine.tokenizer = engine.tokenizer or _tokenizer(options)
    for group in (prefillers, decoders):
        for number, engine in enumerate(group):
            engine.epoch += f"-{number}" if number else ""  # no two processes have the same
    clients = {url: FakeClient(engine) for url, engine in engines.items()}
    instances = tuple(
        InstanceSettings(name=f"{engine.role}-{url[8]}", role=engine.role, url=url, **engine.settings)
        for url, engine in engines.items()
    )
    defaults: dict[str, Any] = {
        "proxy_port": 0,
        "assemble_min_tokens": 0,
        "probe_interval_s": 60.0,
        "port": 0,
        "instances": instances,
    }
    proxy = assemble(Settings(**(defaults | options)), make_client=lambda one: clients[one.url])
    for engine in decoders:
        engine.sink = proxy.board.deliver
    for instance in proxy.pool.instances:
        _close_at_once(instance)
    return Harness(proxy, prefillers, decoders, list(clients.values()), way, clients)
