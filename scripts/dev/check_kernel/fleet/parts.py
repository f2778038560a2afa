"""Fronts, leaders and engines without sockets or processes. The two ends are the real code; the engines are models that
really occupy pages, and the clock is everybody's.

Nobody runs by himself here: what waits for a time waits in a `Loop`, which the search turns.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

from pdproxy.admission.account import Lease
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.admission.grant import Grant
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.orphans import Job
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.values import Role
from pdproxy.engines.adapter import Call, ReleaseCall
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.factory import TAKE_IDS
from pdproxy.engines.http.base import EngineClient
from pdproxy.engines.info import EngineInfo, Receiver
from pdproxy.errors import ProxyError
from pdproxy.fleet.instance import Instance, Look
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.routing.candidate import NO_HINTS
from pdproxy.fleet.routing.policies import PolicyOptions, make_policy
from pdproxy.fleet.routing.router import Router
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fronts.front_admission import FrontAdmission
from pdproxy.fronts.hub import Hub, Session
from pdproxy.fronts.mirror import Mirror, MirroredInstance
from pdproxy.orchestrator.reaper import Reaper

TTL_S = 4.0
STEP_S = TTL_S / 2
LEASE_S = 30.0
"""The seconds after which an engine drops by itself, as its adapter says, what nobody has asked for."""
QUEUED_S = 12.0
"""The longest time in seconds that a prefill leg waits for its turn at the prefiller, before it makes itself known at
the decoder: longer than a change of leader takes."""
KEPT_S = LEASE_S - QUEUED_S - STEP_S
"""The seconds after which an engine really drops what it keeps. Its time begins when a leg arrives."""
PATIENCE_S = 3 * TTL_S
MAX_SILENT = 2
"""The number of ticks in a row without a sign of a front beyond which a leader takes it for gone."""


class Loop:
    """A `Loop` is as much of an event loop as the two ends need. Mutable state: what is to be called at once; what is
    to be called at a time."""

    def __init__(self) -> None:
        self.now = 100.0
        self._ready: deque[Timer] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._serial = itertools.count()

    def __call__(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def call_soon(self, function: Callable[..., object], *args: Any, context: Any = None) -> Timer:
        timer = Timer(function, args)
        self._ready.append(timer)
        return timer

    def call_later(self, delay_s: float, function: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(function, args)
        heapq.heappush(self._timers, (self.now + delay_s, next(self._serial), timer))
        return timer

    def turn(self) -> None:
        """Calls all that is due."""
        while self._timers and self._timers[0][0] <= self.now:
            self._ready.append(heapq.heappop(self._timers)[2])
        while self._ready:
            self._ready.popleft().call()


class Timer:
    """A `Timer` is a call that may be cancelled."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def call(self) -> None:
        if not self._is_cancelled:
            self._function(*self._args)


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Kept:
    """`Kept` is what an engine keeps for an attempt. `is_asked_for`: the decode leg has come, and will take it."""

    pages: int
    since: float
    is_asked_for: bool = False


class Overflow(Exception):
    """An engine was sent more than it has room for: admission has promised the same page twice."""


@dataclass
class Engine:
    """An `Engine` is a decoder. Mutable state: its process, what that one keeps for whom, whom it will refuse, and the
    highest term that it has heard of."""

    name: str
    capacity: int
    knows_terms: bool = True
    epoch: int = 1
    kept: dict[str, Kept] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    highest_term: int = 0

    def hears(self, term: int | None) -> None:
        """Refuses from now on what is of a lower term."""
        if self.knows_terms:
            self.highest_term = max(self.highest_term, term or 0)

    def would_take(self, leg: Leg) -> bool:
        """Tells whether it makes room for what the leg brings."""
        is_its = leg.process == self.process and leg.attempt not in self.dropped
        return is_its and leg.term >= self.highest_term

    @property
    def process(self) -> str:
        return f"{self.name} {self.epoch}"

    @property
    def occupied(self) -> int:
        return sum(one.pages for one in self.kept.values())

    def takes(self, leg: Leg, now: float) -> None:
        """Makes room for what a prefill leg brings. Raises `Overflow`."""
        if not self.would_take(leg):
            return
        self.hears(leg.term)
        if self.occupied + leg.pages > self.capacity:
            raise Overflow(
                f"{self.name} has {self.capacity} pages, keeps {self.occupied}, and {leg.attempt} brings {leg.pages}"
            )
        self.kept[leg.attempt] = Kept(leg.pages, now)

    def ages(self, now: float) -> None:
        """Drops what nobody has asked for in time."""
        for attempt in [name for name, kept in self.kept.items() if now >= kept.since + KEPT_S]:
            self.drops(attempt)

    def drops(self, attempt: str) -> None:
        self.dropped.add(attempt)
        self.kept.pop(attempt, None)

    def facts(self, occupied: int) -> EngineInfo:
        return EngineInfo(
            epoch=self.process,
            role="decode",
            num_pages=self.capacity,
            num_occupied=occupied,
            chunk_size=16,
            receivers=(Receiver(rank=0, host="127.0.0.1", port=1),),
        )


@dataclass
class Leg:
    """A `Leg` is a prefill leg on its way. It arrives some time until `QUEUED_S` after it was sent, or never."""

    attempt: str
    engine: Engine
    process: str
    pages: int
    sent_at: float
    term: int


# ── the two ends ────────────────────────────────────────────────────────────────────────────────────────────────────


def _router() -> Router:
    policy = make_policy("round_robin", PolicyOptions(rng=random.Random(0)))
    return Router(prefill_policy=policy, decode_policy=policy, session_header="x-session-id")


def _settings(name: str, role: Role) -> InstanceSettings:
    return InstanceSettings(name=name, role=role, url=f"http://{name}:1")


class _AtOnce:
    """Starts nothing: the search carries out what the reaper is to do."""

    def start_soon(self, *args: Any) -> None:
        pass


async def _look(instance: Instance) -> None:
    """Does nothing: the search looks."""


class Leader:
    """A `Leader` leads in one term, until its clock says otherwise. Mutable state: the time until which it leads;
    whether it stands still or has ended; looks under way, and what was answered; errands under way."""

    def __init__(self, loop: Loop, engines: list[Engine], term: int, claims_until: float) -> None:
        self.term = term
        self.clock = loop
        self.until = loop.now + TTL_S
        self.is_stopped = self.is_dead = False
        self.looks: dict[str, tuple[Look, EngineInfo | None]] = {}
        self.errands: list[Job] = []
        self.admission = Admission(Kernel(_router(), claims_until=claims_until), clock=loop)
        self.admission.term = term
        self.pool = Pool(self.admission)
        self.reaper = Reaper(self.admission, call_timeout_s=1.0, look=_look)
        self.reaper._tasks = cast(Any, _AtOnce())
        counts = TokenCounts(self.pool, take_ids=TAKE_IDS)
        self.hub = Hub(self.pool, self.admission, self.reaper, counts, term=term, may_grant=lambda: self.leads)
        self.pool.on_membership = self.hub.follow
        prefiller = self._join("p0", "prefill")
        self.decoders = {engine.name: self._join(engine.name, "decode") for engine in engines}
        prefiller.heard(EngineInfo(epoch="p0 1", role="prefill", chunk_size=16))
        prefiller.proven()
        self.prefiller = prefiller

    def _join(self, name: str, role: Role) -> Instance:
        instance = Instance(
            _settings(name, role),
            client=cast(EngineClient, None),
            adapter=BuiltinAdapter(lease_s=LEASE_S),
            admission=self.admission,
            clock=self.clock,
        )
        self.pool.add(instance)
        return instance

    @property
    def leads(self) -> bool:
        return not self.is_dead and self.clock() < self.until

    @property
    def acts(self) -> bool:
        return not self.is_dead and not self.is_stopped

    def hears(self, engine: str) -> None:
        """Takes the answer to a look."""
        look, told = self.looks.pop(engine)
        assert told is not None
        instance = self.decoders[engine]
        instance.heard(told, look)
        instance.proven()


@dataclass(frozen=True)
class Beat:
    """A `Beat` is a front's sign of life, or the answer to it. `sent_at` is the time by the front's clock."""

    sent_at: float


class Link:
    """A `Link` is one session between a front and a leader: what is said is heard once, in order, some time. Mutable
    state: what is on its way; what the leader has heard, and how often it has ticked without hearing anything; whether
    it was closed there."""

    def __init__(self, front: Front, leader: Leader) -> None:
        self.front = front
        self.leader = leader
        self.up: deque[tuple[float, Any]] = deque()
        self.down: deque[Any] = deque()
        self.num_silent = self.num_heard = 0
        self.is_closed = False
        self.session: Session = leader.hub.open(self.down.append)


class Attempt:
    """An `Attempt` is one request at a front. `stage`: waiting, granted, sent, ready, taken or over."""

    def __init__(self, name: str, pages: int, asked_at: float) -> None:
        self.name = name
        self.pages = pages
        self.asked_at = asked_at
        self.stage = "waiting"
        self.demand: Demand | None = None
        self.grant: Grant | None = None

    @property
    def lease(self) -> Lease:
        assert self.grant is not None
        lease: Lease = self.grant.leases[0]
        return lease


class Front:
    """A `Front` is a front and the attempts there. Mutable state: its lease; whether it stands still or has ended; its
    link; its attempts."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.clock = loop
        self.name = name
        self.until = -inf
        self.has_lapsed = True
        self.is_stopped = self.is_dead = False
        self.was_closed = False
        self.link: Link | None = None
        self.term = 0
        self.attempts: dict[str, Attempt] = {}
        self.num_asked = 0
        self.admission = FrontAdmission(
            Kernel(_router(), is_limited=False),
            _router(),
            self,
            is_held=lambda: self.is_held,
            patience_s=PATIENCE_S,
            clock=loop,
        )
        self.pool = Pool(self.admission)
        counts = TokenCounts(self.pool, take_ids=TAKE_IDS)
        membership = Membership(self.pool, make_instance=cast(Any, None), check=lambda fleet: None)
        self.mirror = Mirror(self.pool, self.admission, counts, self._make, membership)

    @property
    def is_held(self) -> bool:
        return self.clock() < self.until

    @property
    def acts(self) -> bool:
        return not self.is_dead and not self.is_stopped

    # ── the line to the leader, as in `channel.Line` ────────────────────────────────────────────────────────────────

    def send(self, message: Any) -> None:
        if self.link is not None and not self.is_dead:
            self.link.up.append((self.clock(), message))

    send_soon = send
    num_unsent_bytes = 0

    @property
    def frame(self) -> object:
        """The identity of a frame to which all belongs that was said since the leader heard something."""
        return (self.link, None if self.link is None else self.link.num_heard)

    def _make(self, one: InstanceSettings, place: int) -> MirroredInstance:
        instance = MirroredInstance(
            one,
            client=cast(EngineClient, _NoClient()),
            adapter=BuiltinAdapter(lease_s=LEASE_S),
            admission=self.admission,
            clock=self.clock,
        )
        instance.mirrored_by(place, self.admission)
        return instance

    # ── the lease ───────────────────────────────────────────────────────────────────────────────────────────────────

    def notes_lapse(self) -> None:
        """Takes note, once, that the lease is over. What was sent and has no KV yet is cut."""
        if self.is_held or self.has_lapsed:
            return
        self.has_lapsed = True
        self.admission.lapse()
        for attempt in list(self.attempts.values()):
            if attempt.stage == "sent":
                self.leaves(attempt, "errand")

    def answered(self, beat: Beat) -> None:
        self.notes_lapse()
        self.until = max(self.until, beat.sent_at + TTL_S)
        if self.is_held:
            self.has_lapsed = False

    def follows(self, leader: Leader) -> None:
        """Begins a session. One that was before is over here."""
        self.term = leader.term
        self.mirror.begin(leader.term)
        self.link = Link(self, leader)

    # ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def asks(self, pages: int) -> None:
        self.num_asked += 1
        name = f"{self.name}{self.num_asked}"
        attempt = self.attempts[name] = Attempt(name, pages, self.clock())
        attempt.demand = Demand(
            name, None, lambda shape: pages, age=self.clock(), deadline=inf, priority=0, hints=NO_HINTS
        )

        def told(grant: Grant | None, error: ProxyError | None) -> None:
            if grant is not None:
                attempt.grant, attempt.stage = grant, "granted"
            else:
                self.ends(attempt)

        self.admission.ask(attempt.demand, told)

    def sends(self, attempt: Attempt) -> bool:
        """Does what an attempt does just before its prefill leg. Returns False where nothing may be sent, so that it
        has ended."""
        lease = attempt.lease
        try:
            if lease.is_returned:
                raise ProxyError("the pages have gone")
            self.admission.sent(lease, lambda: errand(attempt.name))
        except ProxyError:
            self.leaves(attempt, "")
            return False
        lease.step(Custody.FILLING)
        attempt.stage = "sent"
        return True

    def leaves(self, attempt: Attempt, how: str) -> None:
        """Ends the attempt early: its pages come back at once, or by an errand, or when the engine's lease is over."""
        if attempt.grant is None:
            assert attempt.demand is not None
            self.admission.leave(attempt.demand)
        elif attempt.lease.is_at_risk:
            call = errand(attempt.name) if how == "errand" else None
            target = attempt.grant.owner if call is not None else None
            self.admission.abandon(attempt.lease, Way(errand=call, target=target, over_after_s=LEASE_S))
        elif not attempt.lease.is_returned:
            self.admission.free(attempt.lease, Evidence.NEVER_SENT)
        self.ends(attempt)

    def frees(self, attempt: Attempt, evidence: Evidence) -> None:
        self.admission.free(attempt.lease, evidence)
        self.ends(attempt)

    def ends(self, attempt: Attempt) -> None:
        attempt.stage = "over"
        self.attempts.pop(attempt.name, None)
        if attempt.grant is not None:
            for place in (attempt.grant.owner, attempt.grant.peer):
                place.unbound(attempt.name)


class _NoClient:
    async def aclose(self) -> None:
        pass


def errand(attempt: str) -> ReleaseCall:
    """Returns the call that makes a decoder drop what it keeps for an attempt."""
    return ReleaseCall("decode", Call("/drop", attempt.encode()))
