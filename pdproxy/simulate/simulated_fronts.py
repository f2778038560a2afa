"""Fronts under simulated time: the proxy's own fronts, each with its own mirror of the fleet, on a link to the leader
that takes time.

What must hold: whatever is granted on the leader's word alone has room at the engine, however late fronts and leader
hear of each other. A violation would be seen as a transfer for which a decoder has no room (`num_without_room`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

from pdproxy.admission.custody import Evidence
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
from pdproxy.fronts.channel import Handlers, Outbox
from pdproxy.fronts.front_admission import FrontAdmission
from pdproxy.fronts.hub import Hub, Session, refused_by
from pdproxy.fronts.mirror import Mirror, MirroredInstance
from pdproxy.kv_signals.board import KvBoard
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.simulate.adapter import SimulatedAdapter
from pdproxy.telemetry.record import Observers
from pdproxy.tokens.prompt_sizer import ByteSizer


class Line:
    """`Line` is one direction of a link: what is sent arrives `delay_s` seconds later, in order, at `handlers`.
    Messages of one moment travel together, as on a real link.

    Mutable state: whether messages take no time, and do not count, as in the beginning; what is to be sent; how many
    messages and batches of them were sent, and how many batches are under way; when the last of them arrives.
    """

    def __init__(self, delay_s: float) -> None:
        self.handlers: Handlers = {}
        self.num_messages = self.num_batches = self.num_under_way = 0
        self.is_instant = True
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._outbox = Outbox(self._carry)
        self._free_at = 0.0
        self.send: Callable[[Any], None] = self._outbox.send
        self.send_soon: Callable[[Any], None] = self._outbox.send_soon
        self.flush = self._outbox.flush

    def _carry(self, batch: list[Any]) -> None:
        if self.is_instant:
            self._take(batch)
            return
        self.num_messages += len(batch)
        self.num_batches += 1
        self.num_under_way += 1
        self._free_at = max(self._free_at, self._loop.time() + self._delay_s)
        self._loop.call_at(self._free_at, self._arrive, batch)

    def _arrive(self, batch: list[Any]) -> None:
        self.num_under_way -= 1
        self._take(batch)

    def _take(self, batch: list[Any]) -> None:
        handlers = self.handlers
        for message in batch:
            handlers[type(message)](message)


class SimulatedFront:
    """`SimulatedFront` is one of `num_fronts` fronts, the one with this `number`, in front of the simulated engines
    `clients`. It has a session at `hub` from the first moment on. It has to be made within the loop whose time it goes
    by.

    `adapter` and `known`, the instances' settings, are the leader's own: a thousand instances behind each of many
    fronts should not be there in full for each of them.
    """

    def __init__(
        self,
        settings: Settings,
        hub: Hub,
        *,
        number: int,
        num_fronts: int,
        clients: Mapping[str, EngineClient],
        known: Mapping[str, InstanceSettings],
        adapter: SimulatedAdapter,
        delay_s: float,
        seed: int,
    ) -> None:
        clock = asyncio.get_running_loop().time
        settings = settings.model_copy(update={"retry_min_per_s": part_of(settings.retry_min_per_s, num_fronts)})
        self.up, self.down = Line(delay_s), Line(delay_s)
        self.board = KvBoard(clock=clock)
        router = make_router(settings, random.Random(f"{seed} routing at front {number}"))
        self.admission = FrontAdmission(
            Kernel(router, is_limited=False),
            router,
            self.up.send,
            send_soon=self.up.send_soon,
            patience_s=settings.term_s,
            max_waiting=settings.max_queue,
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
            instance.mirrored_by(place, self.up.send, self.admission)
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
            observer=Observers(()),
            notify=str,
            clock=clock,
        )
        self.down.handlers = self._handlers()
        self.session = self._begin(hub)

    def _handlers(self) -> Handlers:
        mirror, admission = self.mirror, self.admission
        return {
            messages.Joined: mirror.joined,
            messages.Listed: lambda message: self._listed(),
            messages.Left: mirror.left,
            messages.Facts: mirror.facts,
            messages.State: mirror.state,
            messages.Tokenizer: mirror.tokenizer,
            messages.Granted: mirror.granted,
            messages.Scarce: lambda message: admission.scarce(),
            messages.Refused: lambda message: admission.refused(message.attempt, refused_by(message)),
            messages.Settled: lambda message: admission.settled(message.attempt, Evidence(message.evidence)),
        }

    def _begin(self, hub: Hub) -> Session:
        """Begins a session, as of a proxy that has been there for long: the fleet is told in no time."""
        assert hub.term is not None
        self.mirror.begin()
        self.admission.begin(hub.term)
        session = hub.open(self.down.send)
        self.up.handlers = session.handlers
        for line in (self.down, self.up):
            line.flush()
        self.up.is_instant = self.down.is_instant = False
        return session

    def _listed(self) -> None:
        self.mirror.listed()
        self.admission.listed()

    @property
    def num_messages(self) -> int:
        """Returns how many messages there were, in both directions."""
        return self.up.num_messages + self.down.num_messages

    @property
    def num_batches(self) -> int:
        """Returns how many batches of messages there were, in both directions."""
        return self.up.num_batches + self.down.num_batches

    def left(self) -> dict[str, int]:
        """Returns what is not over yet, by what it is."""
        return {
            "attempts held": self.admission.num_held,
            "attempts waiting": self.admission.num_waiting,
            "attempts at the leader": self.session.num_attempts,
            "signals expected": self.board.statistics().num_open,
            "legs": sum(instance.num_legs for instance in self.pool.instances),
            "tokens queued": sum(instance.queued_tokens for instance in self.pool.instances),
            "requests": self.orchestrator.num_requests,
        }

    @property
    def is_settled(self) -> bool:
        """Tells whether nothing is held here or at the leader, and no message on its way."""
        is_under_way = self.up.num_under_way or self.down.num_under_way
        return not (is_under_way or self.admission.num_held or self.session.num_attempts)


def _make_none(one: InstanceSettings) -> Instance:
    raise RuntimeError("instances join at the leader")


async def _look(instance: Instance) -> None:
    """Does nothing: the leader looks at instances."""
