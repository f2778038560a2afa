"""The events of the world: which may happen in a state, and what each does to engines, requests and kernel.

A request does here what the proxy's coroutine does, step by step; a process does what an engine does with its pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from pdproxy.admission.custody import Custody, Evidence, Way
from pdproxy.admission.grant import Grant, Granted, Refused
from pdproxy.admission.line import Demand
from pdproxy.admission.room import Room
from pdproxy.errors import ProxyError
from scripts.dev.check_kernel.rules import Violation, check
from scripts.dev.check_kernel.world import (
    LONG_PAST,
    NOW,
    PAST,
    Hints,
    Plan,
    Process,
    Request,
    Size,
    World,
    fit,
    hear,
    letter,
    revision,
)

Event = tuple[str, int, int]
"""An event of the model: its name, the number of the request or process that it happens to, and the number of the way
in which it happens, where there are several.
"""

DISTURBING = frozenset(
    {
        "arrive",
        "cancel",
        "expire",
        "down",
        "restart",
        "upgrade",
        "freeze",
        "drain",
        "trip",
        "undrain",
        "remove",
        "refused",
        "trial_bad",
    }
)
"""The names of events that need not happen. All other events happen sooner or later, and must lead to a state in which
nothing is held.
"""


NEW = "B"
"""The revision to which places are upgraded."""


def _is_possible(fault: str, process: Process) -> bool:
    if fault == "down":
        return process.mode != "down"
    if fault == "freeze":
        return not process.is_frozen
    if fault == "upgrade":
        return process.letter != NEW
    return fault == "restart" or process.mode == "open"


class Model:
    """A `Model` has the rules of one world."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def start(self) -> World:
        return World(self.plan)

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────────────────

    def events(self, world: World) -> Iterator[Event]:
        for number, request in enumerate(world.requests):
            for event in self._of_request(world, request, number):
                if event[0] in self.plan.events:
                    yield event
        if "reap" in self.plan.events and world.kernel.orphans.next_due <= NOW:
            yield "reap", 0, 0
        for number, process in enumerate(world.processes):
            yield from self._of_place(world, process, number)

    def _of_request(self, world: World, request: Request, number: int) -> Iterator[Event]:
        phase = request.phase
        if phase == "idle":
            if any(other.phase == "idle" for other in world.requests[:number]):
                return  # they differ by name alone
            for variant in range(len(self.plan.asks)):
                yield "arrive", number, variant
            return
        if phase == "waiting":
            yield "cancel", number, 0
            yield "expire", number, 0
            if request.demand is not None and request.demand.tied_until > NOW:
                yield "untie", number, 0
            return
        owner, peer = world.processes[request.owner], world.processes[request.peer]
        ours, theirs = request.leases
        if phase == "granted":
            yield "cancel", number, 0
            yield "finish", number, 0
            yield "send", number, 0
            if peer.mode not in ("down", "gone") and world.faults_left:
                yield "refused", number, 0
        if phase in ("filling", "replied", "decoding"):
            for variant in range(len(self.plan.ways)):
                yield "abandon", number, variant
        if phase == "filling" and not peer.is_frozen and not request.peer_ended:
            yield "reply", number, 0
            if self.plan.shrinks and ours is not None and ours.pages > 1:
                yield "reply", number, 1
        if phase == "replied" and request.owner_page == "h" and ours is not None and not ours.is_returned:
            yield "ready", number, 0
        if request.is_writer and not owner.is_frozen and not peer.is_frozen:
            yield "write", number, 0
        if phase == "decoding" and request.owner_page == "h" and not owner.is_frozen:
            yield "take", number, 0
        if request.is_taken and ours is not None and not ours.is_returned:
            if phase == "decoding":
                yield "first", number, 0
            yield "said", number, 0
        if request.is_echoing:
            yield "echo", number, 0
        for page in (request.owner_page, request.peer_page):
            if page == "d":
                yield "letgo", number, 0 if page is request.owner_page else 1
        if request.is_asked:
            if owner.is_reachable:
                yield "errand", number, 0
                yield "errand", number, 1
            yield "errand", number, 2
        if ours is not None and ours.custody is Custody.ORPHANED:
            if NOW < ours.over_at < inf:
                yield "over", number, 0
            elif ours.over_at < NOW and owner.is_known and owner.mode not in ("down", "gone"):
                yield "stale", number, 0
        if theirs is not None and theirs.custody is Custody.ORPHANED and NOW < theirs.over_at < inf:
            yield "over_peer", number, 0

    def _of_place(self, world: World, process: Process, number: int) -> Iterator[Event]:
        mode = process.mode
        if mode == "gone":
            return
        if world.faults_left:
            for name in sorted(self.plan.faults):
                if _is_possible(name, process):
                    yield name, number, 0
        if process.is_frozen:
            yield "thaw", number, 0
        elif mode == "down":
            yield "up", number, 0
        elif not process.is_known or (self.plan.is_reporting and process.place.account is not None):
            yield "look", number, 0
        if mode == "drained":
            yield "undrain", number, 0
            if self._is_idle(world, number):
                yield "remove", number, 0
        elif mode == "tripped":
            yield "advance", number, 0
        elif mode == "tried":
            yield "trial_ok", number, 0
            yield "trial_bad", number, 0

    def _is_idle(self, world: World, number: int) -> bool:
        """Tells whether nobody uses the process, so that an operator may take it away."""
        account = world.processes[number].place.account
        is_used = any(request.is_alive and number in (request.owner, request.peer) for request in world.requests)
        return not is_used and (account is None or not account.leases)

    # ── what it does ────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, world: World, event: Event, script: tuple[int, ...] = ()) -> list[int]:
        """Lets the event happen. Returns among how many places each pick was made. Raises `Violation`, or what the
        kernel raises."""
        name, number, variant = event
        picker = world.kernel._chooser
        picker.script, picker.widths = script, []  # type: ignore[attr-defined]
        getattr(self, f"do_{name}")(world, number, variant)
        self._vacate(world)
        self._carry_out(world)
        for request in world.requests:
            self._settle(request)
        check(world, self.plan)
        return picker.widths  # type: ignore[attr-defined, no-any-return]

    def _vacate(self, world: World) -> None:
        """Unbinds the attempts of requests that are over from where their answers were written."""
        for process in world.processes:
            for attempt in list(process.place.residency.stays):
                if not any(
                    request.demand is not None
                    and request.demand.attempt == attempt
                    and (request.is_alive or request.phase == "waiting")
                    for request in world.requests
                ):
                    world.kernel.vacate(process.place, attempt, NOW)

    def _carry_out(self, world: World) -> None:
        for effect in world.kernel.effects:
            if isinstance(effect, Granted):
                self._granted(world, effect.grant)
            elif isinstance(effect, Refused):
                request = world.requests[effect.demand.hints.number]
                if request.phase != "waiting":
                    raise Violation(f"{effect.demand!r} was refused and did not wait")
                request.reset()
        world.kernel.effects.clear()
        for grant, is_open, is_complete, is_meant, robbed in world.kernel.bound:
            if not is_open:
                raise Violation(f"{grant.demand.attempt} was sent to a closed place")
            if not is_complete:
                raise Violation(f"{grant.demand.attempt} is served by one place, and there are two sides")
            if not is_meant:
                raise Violation(f"{grant.demand.attempt} may not go to {grant.owner.name} and {grant.peer.name} now")
            for place in robbed:
                raise Violation(f"{grant.demand.attempt} takes what is saved up at {place.name}")
        world.kernel.bound.clear()

    def _granted(self, world: World, grant: Grant) -> None:
        request = world.requests[grant.demand.hints.number]
        if not fit(grant.owner, grant.peer):
            raise Violation(f"{grant.demand.attempt} gets {grant.owner.name} and {grant.peer.name}, which do not fit")
        goes_on = grant.demand.hints.goes_on
        if goes_on and not letter(grant.owner) == letter(grant.peer) == goes_on:
            raise Violation(
                f"{grant.demand.attempt}, whose answer was begun by another revision, gets {grant.peer.name}"
            )
        if request.phase != "waiting":
            raise Violation(f"{grant.demand!r} was granted twice")
        numbers = [process.place for process in world.processes]
        request.phase = "granted"
        request.owner, request.peer = numbers.index(grant.owner), numbers.index(grant.peer)
        request.leases = (
            next((lease for lease in grant.leases if lease.account.place is grant.owner), None),
            next((lease for lease in grant.leases if lease.account.place is grant.peer), None),
        )
        for lease, place in zip(request.leases, (grant.owner, grant.peer), strict=True):
            takes_pages = place.account is not None and grant.owner is not grant.peer
            asked = grant.demand.pages_at(place.shape) if takes_pages else 0
            if (0 if lease is None else lease.pages) != asked:
                raise Violation(
                    f"{grant.demand.attempt} takes {asked} pages of {place.name}, and no such lease was made"
                )
        owner, peer = world.processes[request.owner], world.processes[request.peer]
        request.owner_ended = grant.owner_incarnation != str(owner.epoch)
        request.peer_ended = grant.peer_incarnation != str(peer.epoch)
        for process in dict.fromkeys((owner, peer)):
            if process.mode == "tried":
                raise Violation(f"{process.place.name} was to be tried once and got a second attempt")
            if process.mode == "half":
                process.mode = "tried"

    def _settle(self, request: Request) -> None:
        """Makes room for another request when an attempt is over and nothing is left of it."""
        if not self.plan.is_reporting:
            request.owner_page = "-" if request.owner_page == "d" else request.owner_page
            request.peer_page = "-" if request.peer_page == "d" else request.peer_page
        is_open = any(lease is not None and not lease.is_returned for lease in request.leases)
        is_seen = (
            request.is_writer
            or request.is_echoing
            or request.is_asked
            or request.owner_page != "-"
            or request.peer_page != "-"
        )
        if request.phase == "over" and not is_open and not is_seen:
            request.reset()

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def do_arrive(self, world: World, number: int, variant: int) -> None:
        ask = self.plan.asks[variant]
        request = world.requests[number]
        world.arrivals += 1
        names = [process.place.name for process in world.processes]
        demand = Demand(
            f"request {'ABCDEF'[number]}",
            None,
            Size(ask.pages, ask.peer_pages, ask.small_pages),
            age=float(-world.arrivals if ask.is_retry else world.arrivals),
            priority=ask.priority,
            avoid=frozenset(names[one] for one in ask.avoids),
            tied_until=-inf if ask.home is None else inf,
            hints=Hints(number, None if ask.home is None else names[ask.home], ask.goes_on),
            text_terms=revision(ask.goes_on).text_terms if ask.goes_on else None,
            room=Room(ask.tokens),
        )
        request.demand, request.phase = demand, "waiting"
        try:
            grant = world.kernel.arrive(demand, NOW)
        except ProxyError:
            request.reset()
            return
        if grant is not None:
            self._granted(world, grant)

    def do_cancel(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        if request.phase == "waiting":
            assert request.demand is not None
            world.kernel.cancel(request.demand, NOW)
        else:
            self.give_back(world, request, Evidence.NEVER_SENT)
        request.phase = "over"

    def do_finish(self, world: World, number: int, variant: int) -> None:
        """Goes the whole way of a request at once, in a world that is about the line alone."""
        self.do_cancel(world, number, variant)

    def give_back(self, world: World, request: Request, evidence: Evidence) -> None:
        for lease in request.leases:
            if lease is not None and not lease.is_returned:
                world.kernel.free(lease, evidence, NOW)

    def do_expire(self, world: World, number: int, variant: int) -> None:
        demand = world.requests[number].demand
        assert demand is not None
        world.kernel.expire(demand, NOW)

    def do_untie(self, world: World, number: int, variant: int) -> None:
        demand = world.requests[number].demand
        assert demand is not None
        world.kernel.untie(demand, NOW)

    def do_send(self, world: World, number: int, variant: int) -> None:
        """Sends the prefill leg, unless what was leased has ended meanwhile."""
        request = world.requests[number]
        if any(lease is not None and lease.is_returned for lease in request.leases):
            self.give_back(world, request, Evidence.NEVER_SENT)
            request.phase = "over"
            return
        self._step(request, Custody.FILLING)
        request.phase = "filling"
        # An engine refuses what is meant for the process before it.
        request.is_writer = not request.owner_ended and not request.peer_ended
        if request.leases[1] is not None and not request.peer_ended:
            request.peer_page = "h"

    def _step(self, request: Request, custody: Custody) -> None:
        for lease in request.leases:
            if lease is not None and not lease.is_returned:
                lease.step(custody)

    def do_refused(self, world: World, number: int, variant: int) -> None:
        """Lets the peer accept no connection, so that no engine has seen the attempt."""
        request = world.requests[number]
        world.faults_left -= 1
        self._step(request, Custody.FILLING)
        self.give_back(world, request, Evidence.NEVER_SENT)
        request.phase = "over"
        self._down(world, world.processes[request.peer])

    def do_reply(self, world: World, number: int, variant: int) -> None:
        """Ends the prefill leg: the peer has let go of its own pages. In variant 1 the prompt was shorter."""
        request = world.requests[number]
        ours, theirs = request.leases
        request.phase = "replied"
        if variant and ours is not None and not ours.is_returned:
            world.kernel.shrink(ours, ours.pages - 1, NOW)
        if request.peer_page == "h":
            request.peer_page = "d"
        if theirs is not None and not theirs.is_returned:
            world.kernel.free(theirs, Evidence.ENGINE_SAID, NOW)

    def do_write(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        request.is_writer = False
        if not request.is_refused:
            request.owner_page = "h"

    def do_ready(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        ours = request.leases[0]
        assert ours is not None
        ours.step(Custody.READY)
        request.phase = "decoding"

    def do_take(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        request.owner_page, request.is_taken = "d", True

    def do_first(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        assert request.leases[0] is not None
        world.kernel.free(request.leases[0], Evidence.FIRST_EVENT, NOW)
        request.phase = "over"

    def do_said(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        assert request.leases[0] is not None
        world.kernel.free(request.leases[0], Evidence.ENGINE_SAID, NOW)
        if request.phase == "decoding":
            request.phase = "over"
        request.is_echoing = "echo" in self.plan.events

    def do_echo(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        request.is_echoing = False
        assert request.leases[0] is not None
        if world.kernel.free(request.leases[0], Evidence.ENGINE_SAID, NOW):
            raise Violation(f"the pages of {request.leases[0].attempt} came back twice")

    def do_abandon(self, world: World, number: int, variant: int) -> None:
        """Ends the coroutine, as a cancel, a failed leg or a deadline does. What is at risk is left to the reaper."""
        request = world.requests[number]
        has_errand = self.plan.ways[variant] == "errand"
        owner = world.processes[request.owner].place
        ways = (
            Way(errand="drop" if has_errand else None, target=owner if has_errand else None, over_after_s=9.0),
            Way(over_after_s=1.0, is_closing=True),
        )
        for lease, way in zip(request.leases, ways, strict=True):
            if lease is not None and lease.is_at_risk:
                world.kernel.abandon(lease, way, NOW)
        request.phase = "over"

    # ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def do_letgo(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        if variant:
            request.peer_page = "-"
        else:
            request.owner_page = "-"

    def _drop(self, request: Request) -> None:
        """Lets the owner forget the attempt. It takes no more writes for it."""
        request.is_refused, request.is_writer = True, False
        if request.owner_page == "h":
            request.owner_page = "d"

    def do_reap(self, world: World, number: int, variant: int) -> None:
        """Begins whatever is due about orphans; a look is answered at once by the processes that can."""
        for job in world.kernel.orphans.take_due(NOW):
            if job.lease is None:
                process = next(one for one in world.processes if one.place is job.place)
                if process.is_reachable:
                    hear(world, self.plan, process)
            else:
                world.page(job.lease)[0].is_asked = True
        for lease in world.kernel.orphans:
            if lease.over_at < NOW:
                lease.look_at = PAST

    def do_errand(self, world: World, number: int, variant: int) -> None:
        """Ends an errand. Variant 0: it was done. 1: it was done, and the reply was lost. 2: it was not done."""
        request = world.requests[number]
        lease = request.leases[0]
        assert lease is not None
        request.is_asked = False
        if variant < 2 and not request.owner_ended:
            self._drop(request)
        world.kernel.errand_ended(lease, variant == 0, NOW)
        if NOW < lease.next_at < inf:
            lease.next_at = NOW  # the pause is over

    def do_over(self, world: World, number: int, variant: int) -> None:
        """Lets the time pass after which the owner drops the pages by itself, as soon as it can do anything."""
        request = world.requests[number]
        lease = request.leases[0]
        assert lease is not None
        lease.over_at = lease.look_at = PAST
        request.is_writer = False  # the peer has given up long ago
        if world.processes[request.owner].is_frozen:
            request.is_due = True
        else:
            self._drop(request)

    def do_over_peer(self, world: World, number: int, variant: int) -> None:
        request = world.requests[number]
        lease = request.leases[1]
        assert lease is not None
        lease.over_at = lease.look_at = PAST
        if request.peer_page == "h" and not world.processes[request.peer].is_frozen:
            request.peer_page = "d"

    def do_stale(self, world: World, number: int, variant: int) -> None:
        """Lets the answer come to a look that began before the lease was over."""
        hear(world, self.plan, world.processes[world.requests[number].owner], LONG_PAST)

    # ── places ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _down(self, world: World, process: Process) -> None:
        process.mode = "down"
        world.kernel.close(process.place, NOW)
        world.kernel.lost(process.place)

    def do_down(self, world: World, number: int, variant: int) -> None:
        """Lets the process accept no connections any more. It lives on."""
        world.faults_left -= 1
        self._down(world, world.processes[number])

    def do_up(self, world: World, number: int, variant: int) -> None:
        process = world.processes[number]
        self.do_look(world, number, variant)
        process.mode = "open"
        world.kernel.open(process.place, NOW)

    def do_look(self, world: World, number: int, variant: int) -> None:
        process = world.processes[number]
        hear(world, self.plan, process)
        if not process.is_known:
            raise Violation(f"{process.place.name} was heard, and another process is believed to be there")

    def do_restart(self, world: World, number: int, variant: int) -> None:
        """Puts another process in its place, whose memory is empty. The proxy has not heard of it."""
        world.faults_left -= 1
        process = world.processes[number]
        process.epoch += 1
        process.is_frozen = False
        for request in world.requests:
            if request.phase in ("idle", "waiting"):
                continue
            if request.owner == number:
                request.owner_ended, request.owner_page, request.is_writer = True, "-", False
                request.is_due = False
            if request.peer == number:
                request.peer_ended, request.peer_page, request.is_writer = True, "-", False

    def do_upgrade(self, world: World, number: int, variant: int) -> None:
        """Puts a process of the new revision in its place."""
        self.do_restart(world, number, variant)
        world.processes[number].letter = NEW

    def do_freeze(self, world: World, number: int, variant: int) -> None:
        world.faults_left -= 1
        world.processes[number].is_frozen = True

    def do_thaw(self, world: World, number: int, variant: int) -> None:
        """Lets the process go on. Its timers go off before it answers anybody."""
        world.processes[number].is_frozen = False
        for request in world.requests:
            if request.owner == number and request.is_due:
                request.is_due = False
                self._drop(request)
            theirs = request.leases[1]
            is_closed = theirs is not None and theirs.over_at < NOW
            if request.peer == number and is_closed and request.peer_page == "h":
                request.peer_page = "d"

    def do_drain(self, world: World, number: int, variant: int) -> None:
        world.faults_left -= 1
        world.processes[number].mode = "drained"
        world.kernel.close(world.processes[number].place, NOW)

    def do_undrain(self, world: World, number: int, variant: int) -> None:
        world.processes[number].mode = "open"
        world.kernel.open(world.processes[number].place, NOW)

    def do_remove(self, world: World, number: int, variant: int) -> None:
        world.processes[number].mode = "gone"
        world.kernel.discard(world.processes[number].place, NOW)

    def do_trip(self, world: World, number: int, variant: int) -> None:
        """Opens the breaker of the place. After a while one attempt may go there."""
        world.faults_left -= 1
        world.processes[number].mode = "tripped"
        world.kernel.close(world.processes[number].place, NOW, until=1.0, trials=1)

    def do_advance(self, world: World, number: int, variant: int) -> None:
        for process in world.processes:
            if process.mode == "tripped":
                process.mode = "half"
        world.kernel.advance(1.0)

    def do_trial_ok(self, world: World, number: int, variant: int) -> None:
        world.processes[number].mode = "open"
        world.kernel.open(world.processes[number].place, NOW)

    def do_trial_bad(self, world: World, number: int, variant: int) -> None:
        world.processes[number].mode = "tripped"
        world.kernel.close(world.processes[number].place, NOW, until=1.0, trials=1)
