"""A front is put together here, and run as a process of its own.

``python -m pdproxy.fronts CHANNEL LISTENER...`` runs it; its arguments are descriptors. It is the proxy without its
judgement: requests are served by the same orchestrator, with the leader's admission and the leader's fleet. The end of
the connection to the leader is the end of the front, after what is under way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
from fastapi import FastAPI

from pdproxy import assemble as parts
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.retry_budget import part_of
from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.aio.loop_lag import LoopLag
from pdproxy.aio.since_boot import since_boot
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.dashboard.traffic import Traffic
from pdproxy.engines.factory import TAKE_IDS
from pdproxy.engines.traits import KvReady
from pdproxy.errors import ConfigError
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fronts import messages
from pdproxy.fronts.channel import LENGTH, Channel, Handlers, Line
from pdproxy.fronts.forward import Forward
from pdproxy.fronts.front_admission import FrontAdmission
from pdproxy.fronts.handshake import Lead, Peer, tls_contexts
from pdproxy.fronts.link import Link
from pdproxy.fronts.mirror import Mirror, MirroredInstance
from pdproxy.ids import fresh_id
from pdproxy.kv_signals.board import KvBoard
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.serve import Server
from pdproxy.server.app import App, Status, build_app
from pdproxy.telemetry.collectors import Sources
from pdproxy.telemetry.figures import Figures
from pdproxy.telemetry.log import RequestLog, configure, leg_logs
from pdproxy.telemetry.metrics import Metrics
from pdproxy.telemetry.observer import Observers, Recent
from pdproxy.telemetry.trace import make_tracing
from pdproxy.tokens.prompt_sizer import make_sizer
from transfer.memory_budget import MemoryBudget
from transfer.wire import decode_signal
from transfer.without_torch import leave_torch_out

log = logging.getLogger(__name__)

ELSEWHERE = "elsewhere"
"""The name of the socket, beside the leader's own, by which a replica reaches the pages of another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Front holds a front's parts. Implements `serve.Program`."""

    app: App
    settings: Settings
    pool: Pool
    board: KvBoard
    orchestrator: Orchestrator
    reaper: Reaper
    admission: FrontAdmission
    recent: Recent
    descriptors: DescriptorBudget
    memory: MemoryBudget
    listen: Callable[[], None]
    hurry: Callable[[], None]
    reload: None
    channel: Channel
    link: Link | None
    """The connection to a leader in another process than the one that has started this one; None where that leads."""
    server: list[Server]
    """The server, once there is one."""

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when pages or expectations do not add up."""
        self.pool.check_integrity()
        self.board.check_integrity()


def assemble_front(
    welcome: messages.Welcome, channel_socket: socket.socket, *, make_client: parts.MakeClient | None = None
) -> Front:
    """Builds a front and starts nothing. Raises `ConfigError` where an option cannot be met. `make_client` replaces
    HTTP, for tests."""
    given = Settings(**welcome.settings)
    retry_min_per_s = part_of(given.retry_min_per_s, welcome.num_fronts)
    settings = given.model_copy(update={"proxy_port": 0, "retry_min_per_s": retry_min_per_s})
    descriptors = DescriptorBudget()
    make_client = make_client or parts.http_client(settings, descriptors)
    board = KvBoard()
    router = parts.make_router(settings, random.Random())
    end = _End(Path(welcome.operators))
    channel = Channel(messages.FromLeader, end.lost)
    link: Link | None = None
    if welcome.replica is not None:
        peer = Peer(fresh_id(), welcome.replica, os.getpid())
        link = Link(
            messages.FromLeader,
            front=peer,
            on_begin=lambda term: mirror.begin(term),
            on_lapse=lambda: mirror.lapse(),
            tls=replica_tls(settings)[1],
            clock=since_boot,
        )
    to_leader: Line = channel if link is None else link
    admission = FrontAdmission(
        Kernel(router, is_limited=False),
        router,
        to_leader,
        is_held=(lambda: True) if link is None else lambda: link.is_held,
        patience_s=None if link is None else settings.term_s,
        max_waiting=settings.max_queue,
    )
    pool = Pool(admission)
    signals = parts.Signals(board, settings, pool)

    make_instance = parts.instance_maker(settings, admission, board.fail_epoch, make_client, kind=MirroredInstance)

    def make(one: InstanceSettings, place: int) -> MirroredInstance:
        instance = cast(MirroredInstance, make_instance(one, False))
        instance.mirrored_by(place, admission)
        if instance.adapter.traits.ready is KvReady.ENGINES:  # then both legs are sent at once
            descriptors.legs_per_request = 2
        signals.hear(instance)
        return instance

    def make_none(one: InstanceSettings) -> Instance:
        raise RuntimeError("instances join at the leader")

    async def look(instance: Instance) -> None:
        """Does nothing: the leader looks at instances."""

    membership = Membership(pool, make_instance=make_none, check=settings.check_instances)
    reaper = Reaper(admission, call_timeout_s=settings.probe_timeout_s, look=look)
    retries = parts.make_retries(settings)
    memory = MemoryBudget(parts.memory_budget(settings, welcome.num_fronts))
    sources = Sources(
        pool=pool,
        board=board,
        reaper=reaper.statistics,
        num_in_flight=lambda: len(orchestrator.records()),
        retries=retries.statistics,
        num_continued=lambda: orchestrator.num_continued,
        num_malformed=lambda: signals.num_malformed,
        descriptors=descriptors,
        memory=memory,
    )
    keys, usage = parts.make_keys(settings, welcome.num_fronts)
    metrics, recent = Metrics(sources, usage=usage, is_front=True), Recent()
    lag = LoopLag(metrics.loop_lagged)
    tracing = make_tracing(settings.otlp_endpoint)
    of_requests = [*parts.observers_of(keys, usage, settings), metrics, RequestLog(), recent, tracing]
    observer = Observers([metrics, *leg_logs()], of_requests)
    counts = TokenCounts(pool, take_ids=TAKE_IDS)
    sizer = make_sizer(settings, counts)
    orchestrator = parts.make_orchestrator(
        settings,
        admission=admission,
        pool=pool,
        board=board,
        router=router,
        sizer=sizer,
        reaper=reaper,
        retries=retries,
        observer=observer,
        descriptors=descriptors,
        notify=cache(partial(parts.signal_address, given, given.proxy_port)) if given.proxy_port else signals.address,
    )
    mirror = Mirror(pool, admission, counts, make, membership)
    followers: list[parts.Runner] = [membership.run, lag.run, descriptors.run]
    if link is not None:
        followers.append(link.run)
    running = parts.Running(signals, reaper, orchestrator, pool, sizer, tracing, followers)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=channel_socket)
        channel.send(messages.Hello(messages.PROTOCOL, os.getpid()))
        async with running.lifespan(app):
            yield
            if link is not None:
                link.say_goodbye()
        channel.send(messages.Report(messages.LAST, figures()))
        channel.close("the front has ended")

    app = build_app(
        generation_routes=parts.generation_routes(settings, orchestrator, observer, keys, tracing, memory),
        pool=pool,
        orchestrator=orchestrator,
        keys=keys,
        cors_origins=parts.cors_origins(settings),
        lifespan=lifespan,
        elsewhere=Forward(welcome.operators),
    )
    front = Front(
        app=app,
        settings=settings,
        pool=pool,
        board=board,
        orchestrator=orchestrator,
        reaper=reaper,
        admission=admission,
        recent=recent,
        descriptors=descriptors,
        memory=memory,
        listen=signals.open,
        hurry=running.hurry,
        reload=None,
        channel=channel,
        link=link,
        server=[],
    )
    status = Status(pool, board, orchestrator, reaper, recent, descriptors, memory)
    traffic = Traffic(orchestrator, metrics, recent)

    def figures() -> Figures:
        return Figures(
            counted={"status": status.counted(), "traffic": traffic.counted(), "metrics": metrics.counted()},
            present={"status": status.present(), "traffic": traffic.present(), "metrics": metrics.present()},
        )

    def signalled(message: messages.Signal) -> None:
        signal = decode_signal(message.frame)
        if board.knows(signal):
            board.deliver(signal)
        elif message.is_to_be_told:
            to_leader.send(messages.Heard(message.frame))

    end.front = front
    from_leader: Handlers = {**mirror.handlers, messages.Signal: signalled}
    from_parent: dict[type, Callable[[Any], object]] = {
        messages.ReportNow: lambda message: channel.send(messages.Report(message.number, figures())),
        messages.Leave: lambda message: orchestrator.leave(),
        messages.Retire: lambda message: end.retire(),
        messages.Signal: signalled,
    }
    if link is None:
        channel.handlers = {**from_parent, **from_leader}
    else:
        link.handlers = from_leader

        def follow(message: messages.Lead) -> None:
            link.follow(Lead(message.term, message.address, message.secret, message.ttl_s))

        channel.handlers = from_parent | {messages.Lead: follow}
    return front


def replica_tls(settings: Settings) -> tuple[Any, Any]:
    """Returns the TLS contexts for a leader's end and a front's end of a link; two Nones where the options name no
    certificates. Raises `ConfigError`."""
    files = (settings.replica_certfile, settings.replica_keyfile, settings.replica_cafile)
    if not any(files):
        return None, None
    if not all(files):
        raise ConfigError(
            "replica_certfile, replica_keyfile, replica_cafile: give all three, which encrypt what replicas say to "
            "each other, or none"
        )
    certfile, keyfile, cafile = map(str, files)
    return tls_contexts(certfile, keyfile, cafile)


class _End:
    """_End ends the front when it has to. Mutable state: the front, once it is put together."""

    def __init__(self, operators: Path) -> None:
        """Takes the leader's Unix socket, which nobody else removes where the leader was killed."""
        self.front: Front | None = None
        self._operators = operators

    def lost(self, why: str) -> None:
        """Takes no new requests, because the process that started this one has gone; what is under way goes on to its
        end."""
        front = self.front
        if front is None:
            return
        if front.link is None:
            front.admission.lose_leader()
        for server in front.server:
            if not server.should_exit:
                log.warning("the parent has gone (%s): this front ends when its requests have ended", why)
                server.should_exit = True
                with suppress(OSError):  # another front was faster
                    self._operators.unlink(missing_ok=True)
                    self._operators.with_name(ELSEWHERE).unlink(missing_ok=True)
                    self._operators.parent.rmdir()

    def retire(self) -> None:
        """Ends the front when its clients have gone."""
        assert self.front is not None
        for server in self.front.server:
            server.retire()


class FrontServer(Server):
    """FrontServer says to the leader when it takes clients, and nothing to the log."""

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._channel = front.channel
        self._is_ended = False
        front.server.append(self)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._channel.send(messages.Serving())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes the signals while the block runs. Later ones are ignored: the process has all but ended."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with super().capture_signals():
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal. The first SIGINT is how the leader ends a front, and it counts as the first signal, because
        process managers tell all processes of a service to end, fronts too, while the leader still waits."""
        if sig == signal.SIGINT and not self._is_ended:
            self._is_ended, self._asked_at = True, math.inf
        super().handle_exit(sig, frame)

    def tell_address(self, sockets: list[socket.socket]) -> None:
        """Says nothing: the leader tells the address, which all fronts share."""


def _read_welcome(channel: socket.socket) -> messages.Welcome:
    """Returns the leader's first message, which is a frame of its own."""

    def exactly(num_bytes: int) -> bytes:
        got = b""
        while len(got) < num_bytes:
            piece = channel.recv(num_bytes - len(got))
            if not piece:
                raise ConnectionError("the leader has gone")
            got += piece
        return got

    (length,) = LENGTH.unpack(exactly(LENGTH.size))
    [welcome] = msgspec.msgpack.decode(exactly(length), type=list[messages.Welcome])
    if welcome.protocol != messages.PROTOCOL:
        raise ConfigError(f"the leader speaks protocol {welcome.protocol}, and this front {messages.PROTOCOL}")
    return welcome


def main(arguments: list[str]) -> int:
    """Runs a front in this process, and returns its exit status. `arguments` are descriptors: of the connection to the
    leader, and of the sockets to take clients from."""
    with suppress(OSError):
        os.setpgid(0, 0)  # a Ctrl-C in the terminal is for the leader, which tells its fronts
    channel, *listeners = (socket.socket(fileno=int(one)) for one in arguments)
    try:
        welcome = _read_welcome(channel)
    except ConnectionError:
        return 0
    channel.setblocking(False)
    written = configure(welcome.settings.get("log_level", "info"), welcome.settings.get("log_format", "text"))
    try:
        FrontServer(assemble_front(welcome, channel)).run(list(listeners))
    except ConfigError as error:
        log.error("a front cannot start: %s", error)
        return 1
    finally:
        written.flush()
    return 0


def run_as_program() -> None:
    """Runs a front with the arguments of the command line."""
    leave_torch_out()
    sys.exit(main(sys.argv[1:]))
