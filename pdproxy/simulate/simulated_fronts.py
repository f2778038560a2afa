"""Fronts under simulated time: the proxy's own, each with a mirror of the fleet of its own, on a link to whoever leads.

What must hold: whatever a leader has granted has room at the engine, however late fronts and leaders hear of each
other, whoever stands still or ends. A violation would be seen as a transfer for which a decoder has no room
(`Decoder.num_without_room`), or as something that is left when everybody has settled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from math import inf
from typing import Any, cast

from pdproxy.admission.kernel import Kernel
from pdproxy.admission.retry_budget import part_of
from pdproxy.assemble import instance_maker, make_orchestrator, make_retries, make_router
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.engines.factory import TAKE_IDS
from pdproxy.engines.http.base import EngineClient
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fronts import messages
from pdproxy.fronts.channel import Handlers
from pdproxy.fronts.front_admission import FrontAdmission
from pdproxy.fronts.mirror import Mirror, MirroredInstance
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.request import GenerationRequest
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.simulate.adapter import SimulatedAdapter
from pdproxy.simulate.client import SimulatedClient
from pdproxy.simulate.process import Process
from pdproxy.simulate.simulated_leader import BEATS, SimulatedLeader
from pdproxy.simulate.simulated_link import Beat, Gone, Link, Network
from pdproxy.telemetry.observer import Observers
from pdproxy.telemetry.record import Outcome, RequestRecord
from pdproxy.tokens.prompt_sizer import ByteSizer

FRONT_DIED = "front_died"
"""The error of a request whose front was killed, or to which no front was left."""


class SimulatedFront:
    """SimulatedFront is one of `num_fronts` fronts, the one of this `name`, in a process of its own. It reaches
    whoever leads over `network`, and the engines as `clients`. It has to be made within the loop whose time it goes by.

    `adapter` and `known`, the instances' settings, are shared by all fronts: a thousand instances behind each of many
    should not be there in full for each of them. With `ttl_s`, its leases outlive the last sign of life that a leader
    has answered for so many seconds; without, nobody can be lost.

    Mutable state: the link and whoever is at its other end; until when a leader answers for its leases, and whether it
    has noted the end of that time; the requests under way, with the tasks that serve them; whether it was killed.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        num_fronts: int,
        clients: Mapping[str, EngineClient],
        known: Mapping[str, InstanceSettings],
        adapter: SimulatedAdapter,
        network: Network,
        ttl_s: float | None,
        seed: int,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        clock = loop.time
        settings = settings.model_copy(update={"retry_min_per_s": part_of(settings.retry_min_per_s, num_fronts)})
        self.name = name
        self.process = Process()
        self.network = network
        self.link: Link | None = None
        self._leader: SimulatedLeader | None = None
        self._ttl_s = ttl_s
        self._held_until = inf if ttl_s is None else -inf
        self._has_lapsed = False
        self._serving: dict[asyncio.Task[None], RequestRecord] = {}
        self.is_alive = True
        self.board = KvBoard(clock=clock)
        router = make_router(settings, random.Random(f"{seed} routing at {name}"))
        self.admission = FrontAdmission(
            Kernel(router, is_limited=False),
            router,
            _ToLeader(self),
            max_waiting=settings.max_queue,
            is_held=lambda: clock() < self._held_until,
            patience_s=settings.term_s,
            clock=clock,
        )
        self.pool = Pool(self.admission)
        make_instance = instance_maker(
            settings,
            self.admission,
            self.board.fail_epoch,
            lambda one: clients[one.name],
            make_adapter=lambda one, settings: adapter,
            clock=clock,
            kind=MirroredInstance,
        )

        def make(one: InstanceSettings, place: int) -> MirroredInstance:
            instance = cast(MirroredInstance, make_instance(known[one.name], False))
            instance.mirrored_by(place, self.admission)
            return instance

        membership = Membership(self.pool, make_instance=_make_none, check=settings.check_instances)
        counts = TokenCounts(self.pool, take_ids=TAKE_IDS)
        self.mirror = Mirror(self.pool, self.admission, counts, make, membership)
        self.reaper = Reaper(self.admission, call_timeout_s=settings.probe_timeout_s, look=_look)
        self.orchestrator = make_orchestrator(
            settings,
            admission=self.admission,
            pool=self.pool,
            board=self.board,
            router=router,
            sizer=ByteSizer(),
            reaper=self.reaper,
            retries=make_retries(settings, clock),
            observer=Observers(),
            notify=str,
            clock=clock,
        )
        self._handlers: Handlers = {
            **self.mirror.handlers,
            Beat: self._answered,
            Gone: lambda message: self._begin_anew(),
        }

    # ── the leader ──────────────────────────────────────────────────────────────────────────────────────────────────

    def know(self, leader: SimulatedLeader) -> None:
        """Begins a session as a proxy has it that was there long before: the fleet is told in no time."""
        link = self._reach(leader)
        leader.open(link)
        link.down.hand_over()

    def follow(self, leader: SimulatedLeader) -> None:
        """Begins a session with whoever leads from now on."""
        if self.is_alive and not leader.is_over:
            self._reach(leader).up.send(messages.Hello(messages.PROTOCOL, 0))
            self._beat()

    def _reach(self, leader: SimulatedLeader) -> Link:
        if self.link is not None:
            self.link.end()
        self._leader = leader
        self.link = link = Link(self.network, self.process.context, leader.process.context)
        link.down.handlers = self._handlers
        leader.take(link)
        self.mirror.begin(leader.hub.term or 0)
        return link

    def _begin_anew(self) -> None:
        assert self._leader is not None
        self.follow(self._leader)

    def _beat(self) -> None:
        if self._ttl_s is not None:
            self.admission.line.send(Beat(self._loop.time()))

    def _answered(self, beat: Beat) -> None:
        assert self._ttl_s is not None
        self._held_until = max(self._held_until, beat.sent_at + self._ttl_s)
        self._has_lapsed = False

    async def _keep_lease(self, ttl_s: float) -> None:
        """Says that it lives, and notes when no leader has answered that in time."""
        beat_at = 0.0
        while True:
            now = self._loop.time()
            if now >= beat_at:
                self._beat()
                beat_at = now + ttl_s / BEATS
            if now >= self._held_until and not self._has_lapsed:
                self._has_lapsed = True
                self.mirror.lapse()
            lapses_in_s = self._held_until - now
            await asyncio.sleep(min(beat_at - now, lapses_in_s) if lapses_in_s > 0.0 else beat_at - now)

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Begins what goes on behind requests."""
        self.process.begin(self.reaper.run())
        if self._ttl_s is not None:
            self._held_until = max(self._held_until, self._loop.time() + self._ttl_s)
            self.process.begin(self._keep_lease(self._ttl_s))

    async def serve(self, request: GenerationRequest, client: SimulatedClient, record: RequestRecord) -> None:
        """Serves a request in the front's own process, which may stand still or be killed meanwhile."""
        serving = self.process.begin(self.orchestrator.serve(request, client, record))
        self._serving[serving] = record
        try:
            await serving
        except asyncio.CancelledError:
            if self.is_alive:
                record.end(Outcome.CLIENT_GONE)  # perhaps before the front, which stood still, had seen it at all
                raise
        finally:
            del self._serving[serving]

    def kill(self) -> None:
        """Ends the process: its clients see their answers break off. Idempotent."""
        if not self.is_alive:
            return
        self.is_alive = False
        if self.link is not None:
            self.link.end()
        for record in self._serving.values():
            lose(record)
        self.process.kill()

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def left(self) -> dict[str, int]:
        """Returns what is not over yet, by what it is."""
        return {
            "attempts held": self.admission.num_held,
            "attempts waiting": self.admission.num_waiting,
            "signals expected": self.board.statistics().num_open,
            "legs": sum(instance.num_legs for instance in self.pool.instances),
            "tokens queued": sum(instance.queued_tokens for instance in self.pool.instances),
            "tokens resident": sum(instance.residency.tokens for instance in self.pool.instances),
            "requests": self.orchestrator.num_requests,
        }

    @property
    def is_settled(self) -> bool:
        """Tells whether nothing is held here, and no message on its way."""
        if not self.is_alive:
            return True
        is_quiet = self._ttl_s is not None or self.link is None or self.link.is_quiet
        return is_quiet and not self.admission.num_held

    def __repr__(self) -> str:
        return f"<SimulatedFront {self.name}{'' if self.is_alive else ', dead'}>"


class _ToLeader:
    """_ToLeader is the line of a front to whoever leads at the moment. Implements `channel.Line`."""

    num_unsent_bytes = 0

    def __init__(self, front: SimulatedFront) -> None:
        self._front = front

    def send(self, message: Any) -> None:
        if self._front.link is not None:
            self._front.link.up.send(message)

    def send_soon(self, message: Any) -> None:
        if self._front.link is not None:
            self._front.link.up.send_soon(message)

    @property
    def frame(self) -> object:
        link = self._front.link
        return object() if link is None else (link, link.up.frame)


def lose(record: RequestRecord) -> None:
    """Notes that nobody serves a request any more."""
    record.error = FRONT_DIED
    record.end(Outcome.FAILED)


def _make_none(one: InstanceSettings) -> Instance:
    raise RuntimeError("instances join at the leader")


async def _look(instance: Instance) -> None:
    """Does nothing: the leader looks at instances."""
