"""Leaders under simulated time: whoever leads renews its claim at a store, as replicas do, and another follows where it
does not.

What must hold: no two leaders grant at the same time, and none grants what a front still holds of a leader before. A
violation would be seen as a transfer for which a decoder has no room.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

import anyio

from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.engines.factory import TAKE_IDS
from pdproxy.engines.http.base import EngineClient
from pdproxy.fleet.token_counts import TokenCounts
from pdproxy.fronts import messages
from pdproxy.fronts.channel import Handlers
from pdproxy.fronts.hub import Hub, Session
from pdproxy.kv_signals.board import KvBoard
from pdproxy.simulate.process import Process
from pdproxy.simulate.simulated_link import Beat, Gone, Link
from pdproxy.simulate.simulated_proxy import SimulatedProxy

PARTS = 3
"""The parts of a term's time: until a leader that was lost is known to be, until it has certainly stopped, and until
the fronts that it answered for have."""
BEATS = 6
"""The signs of life of a front in one of these parts."""
MAX_SILENT_TICKS = BEATS + 2
"""The ticks, as long as from one sign of life to the next, without any after which a front is taken for gone."""
EARLY_S = 1e-3
"""Seconds after the end of the claims, so that what is asked then was certainly asked after it."""


class Store:
    """Store holds the key of whoever leads, for `ttl_s` seconds at a time.

    Mutable state: whose the key is, and until when.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.holder: object = None
        self.until = -inf

    def renew(self, who: object, now: float) -> bool:
        """Returns whether the key is this leader's for as long again."""
        if self.holder is not who:
            return False
        self.until = now + self.ttl_s
        return True


class SimulatedLeader:
    """SimulatedLeader is a proxy that admits the requests of fronts, in a process of its own. It leads in the term
    `term`, and grants nothing before `claims_until`. With a `store` it leads only as long as it holds the key there,
    and takes a front for gone that says nothing.

    Mutable state: all links that there were; the fronts' sessions, by their links, and for how many ticks each has been
    silent; until when it leads; whether it is over.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Mapping[str, EngineClient],
        known: Mapping[str, InstanceSettings],
        seed: int,
        *,
        term: int,
        claims_until: float = -inf,
        store: Store | None = None,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.process = Process()
        self.board = KvBoard(clock=loop.time)
        self.proxy = SimulatedProxy(
            settings, lambda one: engines[one.name], known, self.board, seed, claims_until=claims_until
        )
        self._claims_until = claims_until
        self._store = store
        self._leads_until = inf if store is None else -inf
        self.is_over = False
        self._links: list[Link] = []
        self._silent_ticks: dict[Link, int] = {}
        self._sessions: dict[Link, Session] = {}
        pool = self.proxy.pool
        counts = TokenCounts(pool, take_ids=TAKE_IDS)
        self.hub = Hub(pool, pool.admission, self.proxy.reaper, counts, term=term, may_grant=self.may_grant)
        pool.admission.may_send = self.may_grant
        pool.on_membership = self.hub.follow

    def may_grant(self) -> bool:
        """Tells whether this one leads at this moment."""
        return not self.is_over and self._loop.time() < self._leads_until

    # ── leading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, *, is_probed: bool) -> None:
        """Begins to lead."""
        self.process.begin(self._run(is_probed=is_probed))

    async def _run(self, *, is_probed: bool) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.proxy.reaper.run)
            if self._store is not None:
                tasks.start_soon(self._renew, self._store)
                tasks.start_soon(self._listen, self._store.ttl_s)
            if is_probed:
                tasks.start_soon(self.proxy.probe.run)
            if self._claims_until > self._loop.time():
                await anyio.sleep(self._claims_until - self._loop.time() + EARLY_S)
                for instance in self.proxy.pool.instances:  # whose pages in use are known from this look on
                    instance.look_soon()

    async def _renew(self, store: Store) -> None:
        while True:
            now = self._loop.time()
            if not store.renew(self, now):
                self.kill()
                return
            self._leads_until = now + store.ttl_s
            await anyio.sleep(store.ttl_s / 3)

    async def _listen(self, ttl_s: float) -> None:
        """Takes fronts for gone that say nothing. It counts ticks, so that a leader that stood still blames nobody."""
        while True:
            await anyio.sleep(ttl_s / BEATS)
            for link, session in list(self._sessions.items()):
                self._silent_ticks[link] += 1
                if self._silent_ticks[link] > MAX_SILENT_TICKS:
                    del self._sessions[link], self._silent_ticks[link]
                    link.up.handlers = self._handlers(link, {})
                    session.close()

    def kill(self) -> None:
        """Ends the process. Its fronts hear nothing more of it. Idempotent."""
        if not self.is_over:
            self.is_over = True
            for link in self._links:
                link.end()
            self.process.kill()

    # ── fronts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, link: Link) -> None:
        """Takes the connection of a front, which says hello first."""
        if self.is_over:
            link.end()
            return
        self._links.append(link)
        link.up.handlers = self._handlers(link, {messages.Hello: lambda message: self.open(link)})

    def open(self, link: Link) -> None:
        """Opens the session of a front, which is told of the fleet."""
        session = self.hub.open(link.down.send)
        link.up.handlers = self._handlers(link, session.handlers)
        self._sessions[link] = session
        self._silent_ticks[link] = 0

    def _handlers(self, link: Link, handlers: Handlers) -> Handlers:
        ignored: Callable[[Any], object] = _ignore
        return defaultdict(lambda: ignored, {**handlers, Beat: partial(self._beat, link)})

    def _beat(self, link: Link, beat: Beat) -> None:
        if not self.may_grant():
            return  # it cannot answer for a lease
        if link in self._sessions:
            self._silent_ticks[link] = 0
            link.down.send(beat)
        else:
            link.down.send(Gone())

    @property
    def num_attempts(self) -> int:
        """Returns how many attempts of fronts are not over."""
        return sum(session.num_attempts for session in self._sessions.values())

    def __repr__(self) -> str:
        return f"<SimulatedLeader of term {self.hub.term}: {len(self._sessions)} fronts>"


def _ignore(message: Any) -> None:
    """Does nothing: the session to which the message belongs is over."""
