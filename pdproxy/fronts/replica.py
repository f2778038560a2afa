"""One replica of a proxy that runs on several machines: its fronts, its part in the election, and its terms as leader.

What must hold: a term is led with a proxy of its own, which knows nothing of the terms before; it grants nothing before
all who may hold pages have claimed them or have given up, and nothing after another may have been elected. A violation
would be seen as pages that were granted twice: in a decoder's own queue for room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from pdproxy.aio.since_boot import since_boot
from pdproxy.assemble import Signals, assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.coordination.election import Election
from pdproxy.coordination.factory import open_store, server_of
from pdproxy.coordination.store import Leader, Member, Store
from pdproxy.discovery.factory import make_discovery
from pdproxy.errors import ConfigError, StoreUnavailable
from pdproxy.fleet.pool import Pool
from pdproxy.fronts import messages
from pdproxy.fronts.forward import Forward
from pdproxy.fronts.front import ELSEWHERE, replica_tls
from pdproxy.fronts.handshake import Lead, Peer
from pdproxy.fronts.hub import Hub
from pdproxy.fronts.link_server import LinkServer
from pdproxy.fronts.operators_tunnel import OperatorsTunnel
from pdproxy.fronts.workers import FrontsServer, Workers
from pdproxy.ids import fresh_id
from pdproxy.kv_signals.board import KvBoard
from pdproxy.orchestrator.orchestrator import Orchestrator
from pdproxy.server.app import App
from pdproxy.telemetry.figures import Elsewhere
from transfer import wire

log = logging.getLogger(__name__)

PARTS = 3
"""A term's time has three equal parts: until a leader that was lost is known to be, until it has certainly stopped, and
until the fronts that it answered for have."""
END_S = 10.0
"""The longest time in seconds that a term may take to end, before the lead is given to others."""
EARLY_S = 0.01
"""Seconds by which a timer may come too early."""
LOOPBACK = "127.0.0.1"
EVERYWHERE = frozenset({"0.0.0.0", "::", "*"})
"""The addresses on which a socket can listen, but at which nobody can reach it."""
ASK_AGAIN_S = 1.0
"""The pause in seconds before the store is asked again that did not answer."""


def part_s(settings: Settings) -> float:
    """Returns the seconds for which a leader, and a front's leases, outlive the last that was heard of them."""
    return settings.term_s / PARTS


class Term:
    """Term is the time in which this replica leads: a whole proxy, made anew, to which the fronts of all replicas link.

    Mutable state: whether it is over.
    """

    def __init__(
        self,
        replica: Replica,
        leader: Leader,
        secret: str,
        fleet: Sequence[InstanceSettings],
        may_lead: Callable[[], bool],
    ) -> None:
        """Takes the instances that are given; those that were found are known to the replica's discovery."""
        settings, ttl_s = replica.settings, part_s(replica.settings)
        self.leader = leader
        self.is_over = False
        self._may_lead = may_lead
        self._claims_until = time.monotonic() + (PARTS - 1) * ttl_s
        self.proxy = proxy = assemble(
            settings.model_copy(update={"proxy_port": 0}),  # the replica has the port that engines know
            fleet=fleet,
            discovery=replica.discovery,
            notify=replica.notify,
            elsewhere=replica.elsewhere,
            term=leader.term,
            claims_until=self._claims_until,
        )
        self.hub = Hub(
            proxy.pool,
            proxy.pool.admission,
            proxy.reaper,
            proxy.counts,
            term=leader.term,
            may_grant=self.may_grant,
            on_newer_term=replica.note_term,
        )
        proxy.pool.admission.may_send = self.may_grant
        proxy.pool.on_membership = self.hub.follow
        proxy.board.pass_on = self.hub.pass_on
        self.links = LinkServer(
            messages.FromFront,
            term=leader.term,
            secret=secret,
            ttl_s=ttl_s,
            open_session=lambda peer, send: self.hub.open(send),
            may_lead=self.may_grant,
            operators=replica.operators,
            tls=replica.tls[0],
        )
        self._place = replica.place

    def may_grant(self) -> bool:
        """Tells whether this replica leads in this term at this moment."""
        return not self.is_over and self._may_lead()

    async def run(self) -> None:
        """Leads, until cancelled."""
        app = self.proxy.app
        async with app.router.lifespan_context(app):
            try:
                host, port = self._place
                await self.links.listen(host, port)
                log.info("this replica leads, in term %d", self.leader.term)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self.links.run)
                    await anyio.sleep(max(0.0, self._claims_until - time.monotonic()) + EARLY_S)
                    for instance in self.proxy.pool.instances:  # whose pages in use are known from this look on
                        instance.look_soon()
                    await anyio.sleep_forever()
            finally:
                self.end()

    def end(self) -> None:
        """Ends the term at once: from here on nothing is granted or said. Idempotent."""
        if not self.is_over:
            self.is_over = True
            log.warning("this replica leads no longer; term %d is over", self.leader.term)
            self.links.close()


class Replica:
    """Replica takes part in the election, tells its fronts who leads, and leads while it is elected. Implements
    `serve.Program`; its pool is empty.

    Mutable state: the term that it leads, if it does; who leads; the fleet's secret.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises `ConfigError`."""
        self._fleet: Sequence[InstanceSettings] = settings.fleet()
        assert settings.coordinator is not None
        self.settings = settings
        self.discovery = make_discovery(settings)
        """The discovery of instances. It runs whoever leads, so that the next leader knows them at once."""
        self.elsewhere = Elsewhere()
        self.elsewhere.replica = self.status
        self.tls = replica_tls(settings)
        ttl_s = part_s(settings)
        self._store: Store = open_store(settings.coordinator, settings.fleet_name, timeout_s=ttl_s / PARTS)
        self._held = _hold_place(settings)
        self.place: tuple[str, int] = self._held.getsockname()[:2]
        """The address on which this replica listens while it leads."""
        host, port = self.place
        self._own_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = settings.replica_advertise or self._own_address
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self._election = Election(
            self._store,
            Member(fresh_id(), self.address, self.name),
            ttl_s=ttl_s,
            on_elected=self._elected,
            on_lapsed=self._lapsed,
            on_leader=self._led_by,
            clock=since_boot,
        )
        self._idle = assemble(settings, fleet=(), elsewhere=self.elsewhere)
        self.app: App = _ReplicaApp(self)
        self._board = KvBoard()
        self._board.pass_on = self._pass_on
        self._signals: Signals | None = None
        self.operators = ""
        self.elsewhere_at = ""
        self.workers: Workers | None = None
        self._term: Term | None = None
        self._running: asyncio.Task[None] | None = None
        self._leader: Leader | None = None
        self._secret = secrets.token_hex(32)
        self._complaint = ""
        self._is_news = asyncio.Event()
        self._has_failed = asyncio.Event()
        self._tunnel: OperatorsTunnel | None = None
        self._forward: Forward | None = None

    # ── as a program ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def notify(self) -> Callable[[], str] | None:
        """The address of this replica's own socket for KV signals; None where it has none."""
        return None if self._signals is None else self._signals.address

    @property
    def pool(self) -> Pool:
        return self._idle.pool

    @property
    def orchestrator(self) -> Orchestrator:
        return self._idle.orchestrator

    @property
    def descriptors(self) -> Any:
        return self._idle.descriptors

    @property
    def memory(self) -> Any:
        return self._idle.memory

    def listen(self) -> None:
        """Binds the socket for KV signals, where engines know one address of this replica. Raises `ConfigError`."""
        port = self.settings.signal_port(self.settings.expected())
        if port:
            self._signals = Signals(self._board, self.settings, self.pool, port)
            self._signals.open()

    def _pass_on(self, told: wire.AnySignal) -> bool:
        """Passes on a KV signal, for a canary of the leader's or a front of any replica."""
        if self._term is not None and self._term.proxy.board.knows(told):
            self._term.proxy.board.deliver(told)
        elif self.workers is not None:
            self.workers.tell_signal(msgspec.msgpack.encode(told))
        return True

    def hurry(self) -> None:
        """Makes the end a quick one."""
        if self._term is not None:
            self._term.proxy.hurry()

    @property
    def reload(self) -> Callable[[], None] | None:
        return None if self._term is None else self._term.proxy.reload

    def app_for(self, path: str) -> ASGIApp:
        """Returns who answers what the fronts do not: this replica's leader, the leader's replica, or, for its own
        figures, this replica."""
        if self._term is not None and not self._term.is_over:
            return self._term.proxy.app
        if path == "/metrics" or self._forward is None:
            return self._idle.app
        return self._forward

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Takes part in the election while the block runs, and gives the lead to others at its end."""
        peer = Peer(fresh_id(), self.name, os.getpid())
        self._tunnel = OperatorsTunnel(self.elsewhere_at, front=peer, tls=self.tls[1])
        self._forward = Forward(self.elsewhere_at)
        async with anyio.create_task_group() as tasks:
            for runner in (self._tunnel.run, self._take_part):
                tasks.start_soon(runner)
            if self._signals is not None:
                tasks.start_soon(self._signals.run)
            if self.discovery is not None:
                tasks.start_soon(self.discovery.run)
            yield
            running = self._running
            tasks.cancel_scope.cancel()  # which ends the election, and with it the term
        if running is not None:
            await asyncio.wait([running], timeout=END_S)
        await self._election.resign()
        await self._store.aclose()
        self._held.close()
        if self._signals is not None:
            self._signals.close()

    def status(self) -> dict[str, Any]:
        """Returns what the status page shows."""
        election, leader = self._election, self._leader
        told: dict[str, Any] = {
            "name": self.name,
            "address": self.address,
            "leads": election.is_leading,
            "term": None if leader is None else leader.term,
            "leader": None if leader is None else leader.address,
            "store_answered_s": election.last_answer_age_s,
            "store_error": election.why,
        }
        if self._term is not None:
            told["fronts"] = [
                {
                    "replica": one.peer.replica,
                    "pid": one.peer.pid,
                    "connected": one.is_connected,
                    "silent_s": one.silent_s,
                }
                for one in self._term.links.peers
            ]
        return told

    # ── the election ────────────────────────────────────────────────────────────────────────────────────────────────

    def _elected(self, leader: Leader) -> None:
        """Begins a term. One that this replica led before is over by then."""
        self._end_term()
        self._fleet = self._present_fleet()
        try:
            self._term = term = Term(self, leader, self._secret, self._fleet, lambda: self._election.is_leading)
        except Exception:  # the model's folder has gone, say
            log.exception("this replica cannot lead")
            self._has_failed.set()
        else:
            self._running = asyncio.get_running_loop().create_task(self._lead(term))

    async def _lead(self, term: Term) -> None:
        try:
            await term.run()
        except Exception:
            log.exception("this replica cannot lead")
            term.end()
            self._has_failed.set()

    async def _stand_back(self) -> None:
        """Leaves the lead to others, for a while, each time that this replica cannot lead."""
        while True:
            await self._has_failed.wait()
            self._has_failed.clear()
            self._election.is_candidate = False
            await self._election.resign()
            await anyio.sleep(self.settings.term_s)
            self._election.is_candidate = True

    def _present_fleet(self) -> Sequence[InstanceSettings]:
        """Returns the instances as the file has them by now, or as it had them where it cannot be read."""
        if self.settings.config is None:
            return self._fleet
        try:
            return self.settings.reread().fleet()
        except ConfigError as error:
            log.error("the instances stay as they were: %s", error)
            return self._fleet

    def note_term(self, term: int) -> None:
        """Takes note that an engine has heard of a higher term than this replica's: the store has forgotten it."""
        log.error("an engine has heard of term %d, which the store has forgotten: another term begins", term)
        asyncio.get_running_loop().call_soon(self._election.note_term, term)

    def _lapsed(self, leader: Leader) -> None:
        self._end_term()

    def _end_term(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.end()
        if self._running is not None:
            self._running.cancel()
            self._running = None

    def _led_by(self, leader: Leader | None) -> None:
        self._leader = leader
        self._is_news.set()

    async def _take_part(self) -> None:
        """Takes part in the election. Whoever leads has to know the fleet's secret, so that is asked for before."""
        while True:
            if await self._learn_secret():
                break
            await anyio.sleep(ASK_AGAIN_S)
        async with anyio.create_task_group() as tasks:
            for runner in (self._election.run, self._follow, self._stand_back):
                tasks.start_soon(runner)

    async def _learn_secret(self) -> bool:
        """Asks the store for the fleet's secret. Returns False, and says why in the log, where it does not answer."""
        try:
            self._secret = await self._store.secret(self._secret)
        except StoreUnavailable as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("%s", error)
            return False
        self._complaint = ""
        return True

    async def _follow(self) -> None:
        """Tells the fronts who leads, with the fleet's secret, which is another one where the store began anew."""
        while True:
            self._is_news.clear()
            leader = self._leader
            if not await self._learn_secret():
                await anyio.sleep(ASK_AGAIN_S)
                self._is_news.set()
            if self._term is not None:
                self._term.links.secret = self._secret
            if leader is not None:
                self._tell(leader)
            await self._is_news.wait()

    def _tell(self, leader: Leader) -> None:
        ttl_s = part_s(self.settings)
        is_own = leader.address == self.address
        if self.workers is not None:
            # What is advertised may lead back to this machine for others only.
            address = self._own_address if is_own else leader.address
            self.workers.follow(messages.Lead(leader.term, address, self._secret, ttl_s))
        if self._tunnel is not None:
            self._tunnel.follow(None if is_own else Lead(leader.term, leader.address, self._secret, ttl_s))


class _ReplicaApp(App):
    """_ReplicaApp passes each request on to whoever answers it at this moment."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica._idle.app.direct, lifespan=replica.lifespan)
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._replica.app_for(scope["path"])(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class ReplicaServer(FrontsServer):
    """ReplicaServer is the server of one replica."""

    def __init__(self, replica: Replica, num_workers: int) -> None:
        super().__init__(replica, num_workers)
        self._replica = replica

    def _make_workers(self, operators: str) -> Workers:
        replica = self._replica
        replica.operators = operators
        replica.elsewhere_at = str(Path(operators).with_name(ELSEWHERE))
        workers = Workers(replica.settings, replica.elsewhere, self._ends, operators, replica=replica.name)
        replica.elsewhere.workers = workers.status
        replica.elsewhere.refresh = workers.refresh
        replica.workers = workers
        return workers


def _hold_place(settings: Settings) -> socket.socket:
    """Returns a socket that keeps a port for this replica, at the address at which others reach it. It takes no
    connections: those that lead in turn do. Raises `ConfigError`."""
    host = settings.replica_host or _own_address(str(settings.coordinator))
    if host in EVERYWHERE:
        raise ConfigError(f"replica_host: others cannot reach this replica at {host}; give one of its addresses")
    if settings.replica_host is None and host == LOOPBACK:
        log.warning("replica_host: replicas on other machines cannot reach this one at %s, where its store is", host)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, settings.replica_port, type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(address)
        except BaseException:
            held.close()
            raise
    except OSError as error:
        message = f"replica_host, replica_port: cannot listen on {host}:{settings.replica_port}: {error.strerror}"
        raise ConfigError(message) from None
    return held


def _own_address(coordinator: str) -> str:
    """Returns the address that this machine has towards the store. Nothing is sent. Raises `ConfigError`."""
    url = urlsplit(server_of(coordinator))
    if not url.hostname:
        return LOOPBACK  # a Unix socket
    try:
        family, kind, _, _, address = socket.getaddrinfo(url.hostname, url.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"coordinator: {url.hostname} has no address that this machine reaches: {error.strerror}; correct the "
            "host, or give replica_host, for which it is not looked up at the start"
        ) from None
