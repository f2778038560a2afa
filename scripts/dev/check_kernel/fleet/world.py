"""A small fleet, the events that may happen in it, and what must hold after each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from pdproxy.admission.custody import Custody, Evidence
from pdproxy.fronts import messages
from scripts.dev.check_kernel.fleet.parts import (
    MAX_SILENT,
    QUEUED_S,
    STEP_S,
    TTL_S,
    Attempt,
    Beat,
    Engine,
    Front,
    Leader,
    Leg,
    Link,
    Loop,
)
from scripts.dev.check_kernel.rules import Violation

Event = tuple[str, str, str]
"""An event: its name, whom it happens to, and the manner in which it happens, where there are several."""

CALM_STEPS = 40
"""The steps after which nothing may be left when nothing disturbs any more. An engine's lease is over long before."""


@dataclass(frozen=True)
class Plan:
    """A `Plan` describes a fleet: the pages of each decoder; the pages that may be asked for; how many leaders there
    are in turn, and how often something fails that need not. `is_forgetful`: the store may lose what it knows.
    `knows_terms`: decoders keep out leaders that were replaced; where they do not, no leg is so late that another may
    lead. `prelude`: what has happened before anything else."""

    name: str
    capacities: tuple[int, ...] = (2,)
    asks: tuple[int, ...] = (2,)
    num_fronts: int = 2
    num_attempts: int = 2
    num_terms: int = 3
    num_faults: int = 4
    is_forgetful: bool = True
    knows_terms: bool = True
    ways: tuple[str, ...] = ("errand", "lease")
    without: frozenset[str] = frozenset()
    window_s: float = 2 * TTL_S
    prelude: str = ""


@contextmanager
def turning(loop: Loop) -> Iterator[None]:
    """Makes `loop` the running event loop while the block lasts."""
    asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, loop))
    try:
        yield
    finally:
        asyncio._set_running_loop(None)


class World:
    """A `World` is one fleet. Mutable state: all of it; among that the store, which knows the term and until when its
    leader's key lives."""

    def __init__(self, plan: Plan, loop: Loop) -> None:
        """Takes the `loop`, which must be `turning`."""
        self.plan = plan
        self.loop = loop
        self.faults_left = plan.num_faults
        self.engines = {
            f"d{number}": Engine(f"d{number}", size, plan.knows_terms) for number, size in enumerate(plan.capacities)
        }
        self.queued_s = QUEUED_S if plan.knows_terms else STEP_S
        self.legs: dict[str, Leg] = {}
        self.leaders: list[Leader] = []
        self.links: list[Link] = []
        self.fronts: dict[str, Front] = {}
        self.key: tuple[int, float] | None = None
        self.do_elect("", "")
        for name in "abc"[: plan.num_fronts]:
            self.fronts[name] = Front(self.loop, name)
            self._follow(self.fronts[name])
        self.settle()
        for engine in self.engines:
            self.do_glance("1", engine)
        self.settle()
        for words in plan.prelude.split(","):
            if words:
                name, who, how, *_ = (*words.split(), "", "")
                self.apply((name, who, how))

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────────────────

    def events(self) -> list[Event]:
        """Returns what may happen now."""
        return [event for event in self._events() if event[0] not in self.plan.without]

    def _events(self) -> Iterator[Event]:
        can_fail = self.faults_left > 0
        for name, front in self.fronts.items():
            yield from self._of_front(name, front, can_fail)
        for due in self._due():
            yield *due, ""
        for attempt in self.legs:
            yield "arrive", attempt, ""
        for leader in self.leaders:
            yield from self._of_leader(str(leader.term), leader, can_fail)
        for name, engine in self.engines.items():
            for attempt, kept in engine.kept.items():
                if kept.is_asked_for:
                    yield "take", name, attempt
            if can_fail:
                yield "restart", name, ""
        if self.key is not None and self.plan.is_forgetful and can_fail:
            yield "forget", "", ""
        if self._is_vacant and len(self.leaders) < self.plan.num_terms:
            yield "elect", "", ""
        if any(True for _ in self._due()):
            yield "settle", "", ""
        yield "tick", "", ""

    def _of_front(self, name: str, front: Front, can_fail: bool) -> Iterator[Event]:
        if front.is_dead:
            yield "begin", name, ""
            return
        if can_fail:
            yield "die", name, ""
        if front.is_stopped:
            yield "go", name, ""
            return
        if can_fail:
            yield "stop", name, ""
        if self._whom(front) is not None:
            yield "follow", name, ""
        if len(front.attempts) < self.plan.num_attempts:
            for pages in self.plan.asks:
                yield "ask", name, str(pages)
        for attempt in front.attempts.values():
            yield from self._of_attempt(attempt)

    def _of_attempt(self, attempt: Attempt) -> Iterator[Event]:
        name, stage = attempt.name, attempt.stage
        if stage == "granted":
            yield "send", name, ""
        if stage in ("sent", "ready"):
            for way in self.plan.ways:
                yield "leave", name, way
        elif stage in ("waiting", "granted"):
            yield "leave", name, ""
        if stage == "sent" and name in self.legs:
            yield "refused", name, ""
        kept = self._kept(name)
        if stage == "sent" and kept is not None:
            yield "ready", name, ""
        if stage == "ready" and kept is None and name not in self.legs:
            yield "first", name, ""

    def _of_leader(self, name: str, leader: Leader, can_fail: bool) -> Iterator[Event]:
        if leader.is_dead:
            return
        if can_fail:
            yield "end", name, ""
        if leader.is_stopped:
            yield "wake", name, ""
            return
        if can_fail:
            yield "halt", name, ""
        for engine in self.engines:
            if engine not in leader.looks:
                yield "look", name, engine
                yield "glance", name, engine
            elif leader.looks[engine][1] is None:
                yield "told", name, engine
            else:
                yield "heard", name, engine
        for number in range(len(leader.errands)):
            yield "errand", name, str(number)
            yield "unanswered", name, str(number)

    def _whom(self, front: Front) -> Leader | None:
        """Returns the leader with which the front may begin a session now; None where there is none."""
        leader = self.leaders[-1]
        if not leader.acts or not leader.leads:
            return None
        is_over = front.link is None or front.link.is_closed
        return leader if leader.term > front.term or is_over else None

    @property
    def _is_vacant(self) -> bool:
        return self.key is None or self.key[1] <= self.loop.now

    def _kept(self, attempt: str) -> Any:
        return next((engine.kept[attempt] for engine in self.engines.values() if attempt in engine.kept), None)

    def attempt(self, name: str) -> tuple[Front, Attempt]:
        front = self.fronts[name[0]]
        return front, front.attempts[name]

    # ── what it does ────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, event: Event) -> None:
        """Lets the event happen. Raises `Violation`, `Overflow`, or what the code raises."""
        name, who, how = event
        do: Callable[[str, str], None] = getattr(self, f"do_{name}")
        do(who, how)
        self._turn()
        self.check()

    def _turn(self) -> None:
        self.loop.turn()
        for leader in self.leaders:
            if leader.acts:
                jobs, _ = leader.admission.take_due()
                leader.errands += [job for job in jobs if job.lease is not None]

    def settle(self) -> None:
        """Delivers all that was said, and what is said because of it."""
        self._turn()
        while due := list(self._due()):
            for name, number in due:
                getattr(self, f"do_{name}")(number, "")
            self._turn()

    def _due(self) -> Iterator[tuple[str, str]]:
        """Returns which links have something to deliver, to the leader (up) or to the front (down)."""
        for number, link in enumerate(self.links):
            if link.up and link.leader.acts and not link.is_closed:
                yield "up", str(number)
            if link.down and link.front.acts and link.front.link is link:
                yield "down", str(number)

    def do_settle(self, who: str, how: str) -> None:
        self.settle()

    # fronts

    def do_ask(self, who: str, how: str) -> None:
        self.fronts[who].asks(int(how))

    def do_send(self, who: str, how: str) -> None:
        front, attempt = self.attempt(who)
        assert attempt.grant is not None
        engine = self.engines[attempt.grant.owner.name]
        process = attempt.grant.owner_incarnation or ""
        if front.sends(attempt):
            process = process if "-" not in process else process.split("-", 1)[1]
            self.legs[who] = Leg(who, engine, process, attempt.pages, self.loop.now, front.term)

    def do_refused(self, who: str, how: str) -> None:
        """The leg reaches nobody, and the front hears of that."""
        front, attempt = self.attempt(who)
        del self.legs[who]
        front.frees(attempt, Evidence.NEVER_SENT)

    def do_ready(self, who: str, how: str) -> None:
        """The front hears that the KV is there, and asks for it."""
        _, attempt = self.attempt(who)
        if attempt.lease.custody is Custody.FILLING:
            attempt.lease.step(Custody.READY)
        attempt.stage = "ready"
        self._kept(who).is_asked_for = True

    def do_first(self, who: str, how: str) -> None:
        front, attempt = self.attempt(who)
        front.frees(attempt, Evidence.FIRST_EVENT)

    def do_leave(self, who: str, how: str) -> None:
        front, attempt = self.attempt(who)
        front.leaves(attempt, how)

    def do_die(self, who: str, how: str) -> None:
        self.faults_left -= 1
        self.fronts[who].is_dead = True

    def do_begin(self, who: str, how: str) -> None:
        """Another front takes its place, of which nobody knows."""
        front = Front(self.loop, who)
        front.num_asked = self.fronts[who].num_asked
        self.fronts[who] = front

    def do_stop(self, who: str, how: str) -> None:
        self.faults_left -= 1
        self.fronts[who].is_stopped = True

    def do_go(self, who: str, how: str) -> None:
        self.fronts[who].is_stopped = False

    def do_follow(self, who: str, how: str) -> None:
        self._follow(self.fronts[who])

    def _follow(self, front: Front) -> None:
        """Begins a session. The link takes the lease of one that the leader has closed for over."""
        leader = self._whom(front)
        assert leader is not None
        if front.link is not None and front.link.leader is leader:
            front.until = -1.0
        front.notes_lapse()
        front.follows(leader)
        front.answered(Beat(self.loop.now))  # the handshake counts as a beat
        assert front.link is not None
        self.links.append(front.link)

    # messages

    def do_up(self, who: str, how: str) -> None:
        link = self.links[int(who)]
        said_at, message = link.up.popleft()
        link.num_heard += 1
        link.num_silent = 0
        if isinstance(message, Beat):
            if link.leader.leads:
                link.down.append(message)
            return
        link.session.handlers[type(message)](message)
        if isinstance(message, messages.Ask):
            self._check_age(link, message, said_at)

    def do_down(self, who: str, how: str) -> None:
        link = self.links[int(who)]
        front = link.front
        front.notes_lapse()
        message = link.down.popleft()
        if isinstance(message, Beat):
            front.answered(message)
            return
        if isinstance(message, messages.Settled):
            self._check_settled(link, message)
        front.mirror.handlers[type(message)](message)

    # engines

    def do_arrive(self, who: str, how: str) -> None:
        leg = self.legs.pop(who)
        leg.engine.takes(leg, self.loop.now)

    def do_take(self, who: str, how: str) -> None:
        self.engines[who].kept.pop(how)

    def do_restart(self, who: str, how: str) -> None:
        self.faults_left -= 1
        engine = self.engines[who]
        engine.epoch += 1
        engine.kept.clear()
        engine.highest_term = 0

    # leaders

    def _leader(self, who: str) -> Leader:
        return self.leaders[int(who) - 1]

    def do_end(self, who: str, how: str) -> None:
        self.faults_left -= 1
        self._leader(who).is_dead = True

    def do_halt(self, who: str, how: str) -> None:
        self.faults_left -= 1
        self._leader(who).is_stopped = True

    def do_wake(self, who: str, how: str) -> None:
        self._leader(who).is_stopped = False

    def do_look(self, who: str, how: str) -> None:
        leader = self._leader(who)
        leader.looks[how] = (leader.decoders[how].asked(), None)

    def do_told(self, who: str, how: str) -> None:
        leader, engine = self._leader(who), self.engines[how]
        look = leader.looks[how][0]
        engine.hears(look.term)
        leader.looks[how] = (look, engine.facts(engine.occupied))

    def do_heard(self, who: str, how: str) -> None:
        self._leader(who).hears(how)

    def do_glance(self, who: str, how: str) -> None:
        """A look that takes no time."""
        for do in (self.do_look, self.do_told, self.do_heard):
            do(who, how)

    def do_errand(self, who: str, how: str) -> None:
        """The engine does what the reaper asks for."""
        self._run_errand(who, how, is_answered=True)

    def do_unanswered(self, who: str, how: str) -> None:
        """The engine does it, and its answer is lost."""
        self._run_errand(who, how, is_answered=False)

    def _run_errand(self, who: str, how: str, *, is_answered: bool) -> None:
        leader = self._leader(who)
        job = leader.errands.pop(int(how))
        lease = job.lease
        assert lease is not None
        errand = None if lease.way is None else lease.way.errand
        if errand is not None:
            self.engines[job.place.name].drops(errand.call.body.decode())
        if errand is not None or not is_answered:
            leader.admission.errand_ended(lease, is_answered)

    # the store and the time

    def do_forget(self, who: str, how: str) -> None:
        self.faults_left -= 1
        self.key = None

    def do_elect(self, who: str, how: str) -> None:
        """Another leads from now on. The first one of all claims nothing."""
        term, now = len(self.leaders) + 1, self.loop.now
        self.key = (term, now + TTL_S)
        window = now + self.plan.window_s if self.leaders else -1.0
        self.leaders.append(Leader(self.loop, list(self.engines.values()), term, window))

    def do_tick(self, who: str, how: str) -> None:
        for leg in [leg for leg in self.legs.values() if self.loop.now >= leg.sent_at + self.queued_s]:
            self.do_arrive(leg.attempt, "")
        self.loop.now += STEP_S
        now = self.loop.now
        for engine in self.engines.values():
            engine.ages(now)
        for leader in self.leaders:
            if leader.acts:
                self._renew(leader)
        for front in self.fronts.values():
            if front.acts:
                front.notes_lapse()
                if front.link is not None and not any(isinstance(one, Beat) for _, one in front.link.up):
                    front.send(Beat(now))

    def _renew(self, leader: Leader) -> None:
        now = self.loop.now
        if leader.leads and self.key is not None and self.key[0] == leader.term:
            leader.until = now + TTL_S
            self.key = (leader.term, now + TTL_S)
        if not leader.leads:
            return
        for link in self.links:
            if link.leader is leader and not link.is_closed:
                link.num_silent += 1
                if link.num_silent > MAX_SILENT:
                    link.is_closed = True
                    link.front.was_closed = True
                    link.session.close()

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        for leader in self.leaders:
            if not leader.leads:
                continue
            leader.admission.check_integrity()
            for name, instance in leader.decoders.items():
                account, engine = instance.account, self.engines[name]
                if account is None or not account.is_sure or instance.incarnation != engine.process:
                    continue
                coming = [leg.pages for leg in self.legs.values() if leg.engine is engine and engine.would_take(leg)]
                used = engine.occupied + sum(coming)
                if used > account.held + account.foreign:
                    raise Violation(
                        f"{name} keeps {engine.occupied} pages and {sum(coming)} more are coming, of which leader "
                        f"{leader.term} takes only {account.held + account.foreign} for used"
                    )

    def _check_age(self, link: Link, message: messages.Ask, said_at: float) -> None:
        attempt = link.front.attempts.get(message.attempt)
        known = link.session._attempts.get(message.attempt)
        if attempt is None or known is None:
            return
        age = self.loop.now - (said_at - attempt.asked_at)
        if abs(known.demand.age - age) > 1e-6:
            raise Violation(
                f"{attempt.name} has lost its turn: it came at {attempt.asked_at:g}, as of {known.demand.age:g}"
            )

    def _check_settled(self, link: Link, message: messages.Settled) -> None:
        """Checks that a live attempt keeps its pages unless its process has ended or its front was taken for gone."""
        attempt = link.front.attempts.get(message.attempt)
        if attempt is None or attempt.grant is None or link.front.was_closed or attempt.lease.is_returned:
            return
        if attempt.stage in ("sent", "ready") and self._kept(attempt.name) is not None:
            raise Violation(f"{attempt.name} goes on, and its pages were taken from it")

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def calm_down(self) -> None:
        """Lets all go on that can, and nothing fail any more. Raises `Violation` where something is left then."""
        for leader in self.leaders:
            leader.is_stopped = False
        for front in self.fronts.values():
            front.is_stopped = False
        for name, front in list(self.fronts.items()):
            if front.is_dead:
                self.do_begin(name, "")
        for _ in range(CALM_STEPS):
            self._calm_step()
        self._check_nothing_is_left()

    def _calm_step(self) -> None:
        if self._is_vacant:
            self.do_elect("", "")
        for front in self.fronts.values():
            if self._whom(front) is not None:
                self._follow(front)
        self.settle()
        leader = self.leaders[-1]
        for _ in range(2):
            for engine in self.engines:
                if leader.acts and leader.leads:
                    leader.looks.pop(engine, None)
                    self.do_glance(str(leader.term), engine)
            for one in self.leaders:
                while one.errands and one.acts:
                    self.do_errand(str(one.term), "0")
            self.settle()
        for name in list(self.legs):
            self.do_arrive(name, "")
        for front in self.fronts.values():
            for attempt in list(front.attempts.values()):
                self._goes_on(attempt)
        self.check()
        self.apply(("tick", "", ""))
        self.settle()

    def _goes_on(self, attempt: Attempt) -> None:
        """Lets an attempt take its next step, if there is one."""
        name, kept = attempt.name, self._kept(attempt.name)
        if attempt.stage == "granted":
            self.do_send(name, "")
        elif attempt.stage == "sent" and kept is not None:
            self.do_ready(name, "")
        elif attempt.stage == "ready" and kept is not None:
            next(engine for engine in self.engines.values() if name in engine.kept).kept.pop(name)
        elif attempt.stage == "ready":
            self.do_first(name, "")
        elif attempt.stage == "sent" and name not in self.legs:
            self.do_leave(name, "errand")

    def _check_nothing_is_left(self) -> None:
        leader = self.leaders[-1]
        leader.admission.check_integrity()
        for front in self.fronts.values():
            if front.attempts:
                raise Violation(f"{', '.join(front.attempts)} are left, and nothing disturbs any more")
            if front.admission.num_held or front.admission.num_waiting:
                raise Violation(f"front {front.name} holds {[*front.admission._held]} for nobody")
            for place in front.pool.instances:
                if place.held:
                    raise Violation(f"front {front.name} holds {place.held} pages of {place.name} for nobody")
        for engine in self.engines.values():
            if engine.kept:
                raise Violation(f"{engine.name} keeps {[*engine.kept]} for ever")
        for instance in (leader.prefiller, *leader.decoders.values()):
            if instance.num_attempts or instance.held:
                raise Violation(
                    f"leader {leader.term} has {instance.num_attempts} attempts at {instance.name} "
                    f"and {instance.held} of its pages held, for nobody"
                )
            if instance.account is not None and instance.account.foreign:
                raise Violation(f"leader {leader.term} takes {instance.account.foreign} pages for somebody else's")
        for link in self.links:
            if link.leader is leader and not link.is_closed and link.session.num_attempts:
                raise Violation(f"leader {leader.term} has attempts of front {link.front.name} for nobody")
