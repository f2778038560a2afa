"""Fronts and leaders without processes or sockets: what one says waits in a list until it is delivered to the other."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any

from pdproxy.admission.account import Lease
from pdproxy.admission.admission import Admission
from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.admission.grant import Grant
from pdproxy.admission.kernel import Kernel
from pdproxy.admission.line import Demand
from pdproxy.admission.room import NO_ROOM, Room
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.values import Role
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.factory import TAKE_IDS
from pdproxy.errors import ProxyError
from pdproxy.fleet.instance import Instance
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
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fleet import Clock, ClosableClient, facts, make_admission, make_instance


async def look(instance: Instance) -> None:
    """Nobody is looked at here."""


class LeaderEnd:
    """A leader in front of one prefiller and decoders of these sizes, with a clock that everybody shares."""

    def __init__(
        self,
        clock: Clock,
        sizes: Sequence[int] = (4,),
        *,
        term: int | None = None,
        claims_until: float = -inf,
        num_cache_pages: int = 0,
        **options: Any,
    ) -> None:
        self.clock = clock
        self.leads = True
        self.num_cache_pages = num_cache_pages
        """Of the decoders' own KV caches, of 16 tokens each; 0: they do not say."""
        self.admission: Admission = make_admission(clock, claims_until=claims_until, **options)
        self.pool = Pool(self.admission)
        self.reaper = Reaper(self.admission, call_timeout_s=1.0, look=look)
        counts = TokenCounts(self.pool, take_ids=TAKE_IDS)
        self.hub = Hub(self.pool, self.admission, self.reaper, counts, term=term, may_grant=lambda: self.leads)
        self.pool.on_membership = self.hub.follow
        self.sizes = dict(zip((f"d{n}" for n in range(len(sizes))), sizes, strict=True))
        self.running = asyncio.get_running_loop().create_task(self.reaper.run())
        self.prefiller = self.join("p0", "prefill")
        self.decoders = [self.join(name) for name in self.sizes]

    def join(self, name: str, role: Role = "decode") -> Instance:
        instance = make_instance(name, role, admission=self.admission, clock=self.clock)
        self.pool.add(instance)
        return instance

    def look_at_all(self, **occupied: int) -> None:
        """All engines answer a look that begins now. `occupied` is what decoders say of their pages, by name."""
        for one in (self.prefiller, *self.decoders):
            different: dict[str, Any] = {"epoch": f"{one.name} 1"}
            if one.role == "decode":
                size = self.sizes[one.name]
                different |= {"num_pages": size, "num_free": size - occupied.get(one.name, 0)}
                different |= {"num_cache_pages": self.num_cache_pages, "num_cache_free": self.num_cache_pages}
                different |= {"num_cache_waiting": 1}  # else what fronts have there would seem to be shared
            one.heard(facts(one.role, **different), one.asked())
            one.proven()


class FrontEnd:
    """A front's admission and its mirror of the fleet, and their line to the leader. `connect` begins a session with a
    leader; `deliver` hands over what has been said, in order, and `cut` loses what has not been delivered."""

    def __init__(self, clock: Clock, *, patience_s: float | None = 12.0) -> None:
        self.clock = clock
        self.is_held = True
        self.to_leader: deque[Any] = deque()
        self.from_leader: deque[Any] = deque()
        self.session: Session | None = None
        self.num_delivered = 0
        self.grants: dict[str, Grant] = {}
        self.errors: dict[str, ProxyError] = {}
        policy = make_policy("round_robin", PolicyOptions(rng=random.Random(0)))
        router = Router(prefill_policy=policy, decode_policy=policy, session_header="x-session-id")
        self.admission = FrontAdmission(
            Kernel(router, is_limited=False),
            router,
            self,
            is_held=lambda: self.is_held,
            patience_s=patience_s,
            clock=clock,
        )
        self.pool = Pool(self.admission)
        membership = Membership(self.pool, make_instance=self._make_none, check=lambda fleet: None)
        self.mirror = Mirror(
            self.pool, self.admission, TokenCounts(self.pool, take_ids=TAKE_IDS), self._make, membership
        )

    def send(self, message: Any) -> None:
        if self.session is not None:
            self.to_leader.append(message)

    send_soon = send
    num_unsent_bytes = 0

    @property
    def frame(self) -> object:
        return (self.session, self.num_delivered)

    def _make(self, one: InstanceSettings, place: int) -> MirroredInstance:
        instance = MirroredInstance(
            one,
            client=ClosableClient(FakeEngine(one.role)),
            adapter=BuiltinAdapter(),
            admission=self.admission,
            clock=self.clock,
        )
        instance.mirrored_by(place, self.admission)
        return instance

    def _make_none(self, one: InstanceSettings) -> Instance:
        raise AssertionError("instances join at the leader")

    # ── the wire ────────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, leader: LeaderEnd, term: int) -> None:
        """Begins a session. What was said to the leader before is lost."""
        self.cut()
        self.mirror.begin(term)
        self.session = leader.hub.open(self.from_leader.append)

    def cut(self) -> None:
        self.to_leader.clear()
        self.from_leader = deque()
        self.session = None

    def deliver(self) -> None:
        """Hands over all that was said, and what is said because of it."""
        while self.to_leader or self.from_leader:
            if self.from_leader:
                message = self.from_leader.popleft()
                self.mirror.handlers[type(message)](message)
            else:
                self.deliver_to_leader()

    def deliver_to_leader(self) -> None:
        """Hands over the first of what was said to the leader."""
        self.num_delivered += 1
        message = self.to_leader.popleft()
        assert self.session is not None
        self.session.handlers[type(message)](message)

    # ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(
        self,
        attempt: str,
        pages: int,
        *,
        deadline: float = inf,
        priority: int = 0,
        num_tokens: int = 0,
        room: Room = NO_ROOM,
    ) -> Demand:
        """An attempt asks for its turn. What comes of it is in `grants` or `errors`."""
        demand = Demand(
            attempt,
            None,
            lambda shape: pages,
            age=self.clock(),
            deadline=deadline,
            priority=priority,
            hints=NO_HINTS,
            num_tokens=num_tokens,
            room=room,
        )

        def told(grant: Grant | None, error: ProxyError | None) -> None:
            if grant is not None:
                self.grants[attempt] = grant
            elif error is not None:
                self.errors[attempt] = error

        assert self.admission.ask(demand, told) is None
        return demand

    def lease_of(self, attempt: str) -> Lease:
        (lease,) = self.grants[attempt].leases
        return lease

    def send_prefill(self, attempt: str) -> None:
        """What an attempt does before its prefill leg. Raises `NotReady` where nothing may be sent."""
        lease = self.lease_of(attempt)
        self.admission.sent(lease, lambda: None)
        lease.step(Custody.FILLING)

    def end(self, attempt: str, *, way: Way | None = None, evidence: Evidence | None = None) -> None:
        """What an attempt does at its end: it gives its lease back by `evidence`, or abandons it by `way`."""
        grant = self.grants.pop(attempt)
        for lease in grant.leases:
            if way is not None:
                self.admission.abandon(lease, way)
            elif evidence is not None:
                self.admission.free(lease, evidence)
        for place in (grant.owner, grant.peer):
            place.unbound(attempt)
