"""Fronts under simulated time: the proxy's own fronts, each with its own mirror of the fleet, on a link to the leader
that takes time.

What must hold: whatever is granted on the leader's word alone has room at the engine, however late fronts and leader
hear of each other. A violation would be seen as a transfer for which a decoder has no room (`num_without_room`).
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
from pdproxy.fronts.front_admission import FrontAdmission, no_leader
from pdproxy.fronts.hub import Hub, Session, refused_by
from pdproxy.fronts.mirror import Mirror, MirroredInstance
from pdproxy.kv_signals.board import KvBoard
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.simulate.adapter import SimulatedAdapter
from pdproxy.telemetry.record import Observers, Outcome, RequestRecord
from pdproxy.tokens.prompt_sizer import ByteSizer

RESEND_S = 0.2
"""The seconds after which what was lost is sent again, as TCP does it."""
FRONT_DIED = "front_died"
"""The error of the requests of a front that was killed."""
GONE_AFTER = 1.25
"""The terms of a lease after which a leader takes a silent front for gone: later than that front does itself."""


class Line:
    """`Line` is one direction of a link: what is sent arrives `delay_s` seconds later, in order, at `handlers`.
    Messages of one moment travel together, as on a real link. A share `loss` of the batches, drawn with `dice`, has to
    be sent again; what was sent behind them waits for them.

    Mutable state: whether messages take no time, and do not count, as in the beginning; what is to be sent; how many
    messages and batches of them were sent, and how many batches are under way; when the last of them arrives; which of
    its lives the line is in; what has arrived while it stands still.
    """

    def __init__(self, delay_s: float, loss: float, dice: random.Random) -> None:
        self.handlers: Handlers = {}
        self.num_messages = self.num_batches = self.num_under_way = 0
        self.is_instant = True
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._loss, self._dice = loss, dice
        self._outbox = Outbox(self._carry)
        self._free_at = 0.0
        self._life = 0
        self._late: list[list[Any]] | None = None
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
        takes_s = self._delay_s
        while self._loss and self._dice.random() < self._loss:
            takes_s += RESEND_S
        self._free_at = max(self._free_at, self._loop.time() + takes_s)
        self._loop.call_at(self._free_at, self._arrive, batch, self._life)

    def _arrive(self, batch: list[Any], life: int) -> None:
        if life != self._life:
            return
        if self._late is not None:
            self._late.append(batch)
        else:
            self.num_under_way -= 1
            self._take(batch)

    def _take(self, batch: list[Any]) -> None:
        handlers = self.handlers
        for message in batch:
            handlers[type(message)](message)

    def hold(self) -> None:
        """Lets nothing arrive until `go_on`."""
        self._late = [] if self._late is None else self._late

    def go_on(self) -> None:
        """Lets arrive what was held up."""
        late, self._late = self._late or [], None
        for batch in late:
            self._arrive(batch, self._life)

    def lose_all(self) -> None:
        """Loses all that has not arrived."""
        self._outbox.clear()
        self._life += 1
        self.num_under_way = 0
        self._late = None


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
        loss: float,
        seed: int,
    ) -> None:
        clock = asyncio.get_running_loop().time
        settings = settings.model_copy(update={"retry_min_per_s": part_of(settings.retry_min_per_s, num_fronts)})
        dice = random.Random(f"{seed} link of front {number}")
        self.up, self.down = Line(delay_s, loss, dice), Line(delay_s, loss, dice)
        self._hub, self._lease_s = hub, settings.term_s / 3
        self._is_held = self.is_alive = True
        self._is_over = False
        self._timers: list[asyncio.TimerHandle] = []
        self.serving: dict[asyncio.Timeout, None] = {}
        self.board = KvBoard(clock=clock)
        router = make_router(settings, random.Random(f"{seed} routing at front {number}"))
        self.admission = FrontAdmission(
            Kernel(router, is_limited=False),
            router,
            self.up.send,
            send_soon=self.up.send_soon,
            is_held=lambda: self._is_held,
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
        self.session = self._begin()
        for line in (self.down, self.up):  # it has been there for long
            line.flush()
            line.is_instant = False

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

    def _begin(self) -> Session:
        """Begins a session, in which the fleet is told first."""
        assert self._hub.term is not None
        self.mirror.begin()
        self.admission.begin(self._hub.term)
        session = self._hub.open(self.down.send)
        self.up.handlers = session.handlers
        return session

    def _listed(self) -> None:
        self.mirror.listed()
        self.admission.listed()

    # ── what happens to it ──────────────────────────────────────────────────────────────────────────────────────────

    async def serve(self, served: Coroutine[Any, Any, None], record: RequestRecord) -> None:
        """Serves a request to its end, or to that of the front, by which it has failed."""
        try:
            async with asyncio.timeout(None) as serving:
                self.serving[serving] = None
                try:
                    await served
                finally:
                    del self.serving[serving]
        except TimeoutError:
            record.outcome, record.error = Outcome.FAILED, FRONT_DIED

    def kill(self) -> None:
        """Ends the front with all its requests. The leader takes it for gone when its lease is over. Idempotent."""
        if self.is_alive:
            self.is_alive = False
            self._cancel_timers()
            self._mute()
            for serving in self.serving:
                serving.reschedule(0.0)
            self._after(GONE_AFTER * self._lease_s, self.session.close)

    def freeze(self, *, is_leader_well: bool = True) -> None:
        """Makes the link carry nothing until `thaw`. After a while the front knows that its lease is over, and the
        leader, where it is well, takes it for gone. Idempotent."""
        if self.is_alive and not self._timers:
            self.up.hold()
            self.down.hold()
            self._after(self._lease_s, self._lapse)
            if is_leader_well:
                self._after(GONE_AFTER * self._lease_s, self._lose_session)

    def thaw(self) -> None:
        """Lets the link carry again what it held up; nothing of it where the session is over, and another begins."""
        if not self._timers or not self.is_alive:
            return
        self._cancel_timers()
        self._is_held = True
        if self._is_over:
            self._is_over = False
            self.up.lose_all()
            self.down.lose_all()
            self.session = self._begin()
        else:
            self.up.go_on()
            self.down.go_on()

    def _lapse(self) -> None:
        self._is_held = False
        self.mirror.lapse(no_leader())
        self.admission.lapse()

    def _lose_session(self) -> None:
        self._is_over = True
        self.session.close()

    def _mute(self) -> None:
        """Lets nothing be said or heard here any more."""
        for line in (self.up, self.down):
            line.lose_all()
            line.handlers = defaultdict(lambda: _ignore)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, do))

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_messages(self) -> int:
        """Returns how many messages there were, in both directions."""
        return self.up.num_messages + self.down.num_messages

    @property
    def num_batches(self) -> int:
        """Returns how many batches of messages there were, in both directions."""
        return self.up.num_batches + self.down.num_batches

    def left(self) -> dict[str, int]:
        """Returns what is not over yet, by what it is. What a front had that has ended is the leader's to settle."""
        if not self.is_alive:
            return {"attempts at the leader": self.session.num_attempts}
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
        if not self.is_alive:
            return self.session.num_attempts == 0
        is_under_way = self.up.num_under_way or self.down.num_under_way
        return not (is_under_way or self.admission.num_held or self.session.num_attempts)


class Fronts:
    """`Fronts` stands for what happens to the leader of all these `fronts`: it may stand still."""

    def __init__(self, fronts: Sequence[SimulatedFront]) -> None:
        self._fronts = fronts

    def freeze(self) -> None:
        """Lets no link carry anything until `thaw`. Who stands still takes nobody for gone."""
        for front in self._fronts:
            front.freeze(is_leader_well=False)

    def thaw(self) -> None:
        """Lets all links carry again what they held up."""
        for front in self._fronts:
            front.thaw()


def _ignore(message: Any) -> None: ...


def _make_none(one: InstanceSettings) -> Instance:
    raise RuntimeError("instances join at the leader")


async def _look(instance: Instance) -> None:
    """Does nothing: the leader looks at instances."""
