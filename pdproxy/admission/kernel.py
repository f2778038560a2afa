"""The kernel makes every decision of admission: whose pages they are, and whose turn it is.

It does no I/O and reads no clock. Two things must always hold:

* Safety: the pages that an engine process may still hold for this proxy's attempts are among those that its account
  holds.
* Liveness: no demand waits while a place that could serve it has room and it is its turn; no demand is passed more
  often than the bounds say; pages that an engine has given up come back.

A safety violation would show as a free page that an engine still writes to. A liveness violation would show as a demand
which is in line although `check_integrity` finds a place for it.

A demand that waits does not name a place. Whenever something changes, each demand that may go is bound to an owner and
a peer in that instant. The chooser picks among the places that are open and have room. Then the pages of both are
leased, or none. An *owner* is a place whose memory the KV goes through. A *peer* is its counterpart, which may have an
account of its own. The one of the two that writes the answer must also have room for it in its KV cache, as far as that
is known; `residency` counts this, without leases. The two always fit each other: while a fleet is upgraded, not every
owner fits every peer (`revision`).

While there is nobody on one side, places of the other one that can do so serve demands alone. Such a place is the owner
and the peer of a demand, and no pages are leased. The same becomes of a demand for which a forecaster says that the one
of its two places that writes its answer would be sooner alone, or the other one while no such place has room for it.

Each place serves the demands in line that could use it: the more urgent first, and the oldest first among those which
are equally urgent. Two bounds keep every demand moving. Smaller demands may pass the one whose turn it is
`max_overtakes` times while it does not fit. Then the kernel saves up for it one place on each side, the one that will
fit it soonest. All other demands go on elsewhere, or there if it would fit still. More urgent demands may pass the
oldest demand `max_passes` times. Then it is the oldest one's turn.

Every function that changes state takes `now`, in seconds, and leaves what must follow in `effects`, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import merge
from math import inf
from operator import attrgetter
from typing import Any

from pdproxy.admission.account import Account, Lease, Place
from pdproxy.admission.custody import STEPS_TO, Custody, Evidence, Way
from pdproxy.admission.grant import (
    Chooser,
    Effect,
    Forecast,
    Forecaster,
    Grant,
    Granted,
    Holders,
    OpenPlaces,
    Refused,
    Settled,
    Side,
    sides_of,
)
from pdproxy.admission.line import Demand, Line
from pdproxy.admission.orphans import Orphans
from pdproxy.admission.revision import ANY, Revision
from pdproxy.admission.room import UNKNOWN_CACHE, KvCache, Room
from pdproxy.errors import IntegrityError, NeverFits, NotReady, ProxyError, QueueFull, QueueTimeout

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
RETRY_AFTER_UNKNOWN_S = 5.0
"""The `Retry-After`, in seconds, while no page has ever come back."""
SETTLE_S = 0.5
"""The seconds after the time for claims within which owners have to be looked at that should take part from the
beginning."""
PLACES_PER_LOOK = 64
"""The places at which the forecaster looks for each change of anything: where there are more, it is asked after several
changes only. Else it would be most of what a large fleet's decisions cost."""
MAX_MODELS = 1024
"""The most models of which the open places are remembered. Where engines tell no model names, clients may ask for any
name.
"""

_ORPHANED = Custody.ORPHANED
_ENDED = Evidence.INCARNATION_ENDED


def _fits_ever(demand: Demand, account: Account) -> bool:
    pages = demand.pages_at(account.place.shape)
    return pages is not None and (pages <= account.capacity or not account.is_limited)


def _is_smaller(one: Demand, other: Demand, shapes: Iterable[Hashable]) -> bool:
    """Tells whether `one`, which any place may serve, takes no more than `other` of anything, at owners of `shapes`."""
    if not one.is_plain or one.room.tokens > other.room.tokens:
        return False
    return all(_is_no_less(other.pages_at(shape), one.pages_at(shape)) for shape in shapes)


def _is_no_less(pages: int | None, least: int | None) -> bool:
    """Tells whether a demand of `pages` at some shape fits no owner of it at which another one, of `least`, does not.
    One that takes no pages there may wait for an owner that takes its KV."""
    return pages is None or (least is not None and least <= pages and (least > 0 or pages == 0))


def _writing(sides: list[Side], text_terms: tuple[tuple[str, str], ...]) -> list[Side]:
    """Returns the places of revisions with these very terms that have a counterpart."""
    kept = []
    for side in sides:
        owners, peers = ([place for place in half if place.revision.text_terms == text_terms] for half in side)
        if owners and peers:
            kept.append((owners, peers))
    return kept


def _without(sides: list[Side], avoid: frozenset[str]) -> list[Side]:
    """Returns the places whose names are not in `avoid`, and those in it where there are no others. What counts is a
    whole pair: nobody is sent back to a place that failed if there is a pair of another revision without one."""
    kept: list[Side] = []
    least = 3
    for owners, peers in sides:
        others = (
            [place for place in owners if place.name not in avoid],
            [place for place in peers if place.name not in avoid],
        )
        num_avoided = (not others[0]) + (not others[1])
        if num_avoided < least:
            kept, least = [], num_avoided
        if num_avoided == least:
            kept.append((others[0] or owners, others[1] or peers))
    return kept


def _taking_kv(demand: Demand, sides: list[Side]) -> list[Side]:
    """Returns the owners that take the KV of `demand`, with their peers; all of `sides` where none does."""
    kept: list[Side] = []
    for owners, peers in sides:
        if owners := [place for place in owners if demand.pages_at(place.shape)]:
            kept.append((owners, peers))
    return kept or sides


def _at(side: Side, place: Place) -> Side:
    """Returns `side` with `place` alone in its half."""
    return ([place], side[1]) if place.is_owner else (side[0], [place])


def _largest_too_small(demand: Demand, places: list[Place]) -> Account | None:
    """Returns the largest account of `places` where none of them could ever hold `demand`; None where one could, or
    may."""
    accounts = [place.account for place in places if place.account is not None]
    if len(accounts) < len(places) or any(_fits_ever(demand, account) for account in accounts):
        return None
    return max(accounts, key=lambda account: account.capacity, default=None)


def _most_pages(places: list[Place]) -> dict[Hashable, float] | None:
    """Returns the pages of the largest account by shape; None where one of `places` may have room for anybody."""
    most: dict[Hashable, float] = {}
    for place in places:
        if place.account is None:
            return None
        room = place.account.capacity if place.account.is_limited else inf
        most[place.shape] = max(most.get(place.shape, 0), room)
    return most


def _holds(rooms: dict[Hashable, float], pages_at: Callable[[Hashable], int | None]) -> bool:
    """Tells whether one of `rooms`, in pages by shape, is large enough for what takes `pages_at` a shape."""
    return any((pages := pages_at(shape)) is not None and pages <= room for shape, room in rooms.items())


class Kernel:
    """The `Kernel` holds all places, all demands that wait, and every lease. `max_queue` requests may wait per owner of
    their model.
    """

    def __init__(
        self,
        chooser: Chooser,
        *,
        max_overtakes: int = 16,
        max_passes: int = 32,
        max_queue: int = 1024,
        concurrent_pages: int | None = None,
        is_limited: bool = True,
        oversubscribe: float = 1.0,
        claims_until: float = -inf,
        forecaster: Forecaster | None = None,
    ) -> None:
        """Grants no pages before the time `claims_until`, until which others may claim what they hold, and then only
        when all owners that answer have been looked at, or `SETTLE_S` later: else those who have waited until then
        would all go to whichever owner was looked at first. Promises the KV caches of those who write answers
        `oversubscribe` times. Without a `forecaster` no demand is served alone while there are two sides."""
        self._chooser = chooser
        self._forecaster = forecaster
        self._max_overtakes = max_overtakes
        self._max_passes = max_passes
        self._max_queue = max_queue
        self._concurrent_pages = concurrent_pages
        self._is_limited = is_limited
        self._oversubscribe = oversubscribe if is_limited else inf
        self.claims_until = claims_until
        """The time until which others may claim pages."""
        # State: whether nothing is granted yet, and the owners that are awaited; the places; which of them are open for
        # each model asked for and which have an account, as long as nothing about that changes; those that open by
        # themselves, and when; who waits, by model; who has been passed often enough, and the places that are saved up
        # for them; places that have to be looked at before the function ends; what must follow; how many demands
        # have come; how many leases came back, by evidence.
        self._is_settling = claims_until > -inf
        self._awaited: set[Place] | None = None
        self.places: dict[Place, None] = {}
        self._open: dict[str | None, OpenPlaces] = {}
        self._holders: dict[str | None, Holders] = {}
        self._shut_until: dict[Place, float] = {}
        self._lines: dict[str | None, Line] = {}
        self._exhausted: dict[Demand, None] = {}
        self._saved: dict[Place, Demand] = {}
        self._changed: dict[Place, None] = {}
        self._roomiest: dict[tuple[str | None, bool], tuple[float, dict[Hashable, float] | None]] = {}
        """The most room that there is, as long as `_pump` has granted nothing more."""
        self._num_unasked = 0
        """The changes after which the forecaster is not asked who could be relieved."""
        self.orphans = Orphans()
        self.effects: list[Effect] = []
        self._serial = 0
        self.freed: dict[Evidence, int] = dict.fromkeys(Evidence, 0)

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, demand: Demand, now: float) -> Grant | None:
        """Returns the grant where it can be had at this instant without breaking the order; else None.

        With None, `demand` waits until an effect names it, or its owner cancels it. Raises `QueueFull`, `QueueTimeout`,
        `NotReady` where no place of its model is left, and `NeverFits` where no known place could ever serve it.
        """
        self._serial += 1
        demand.serial = self._serial
        if self._shut_until:
            self._reopen(now)
        grant = None if self._is_behind(demand) else self._bind(demand, None, now)
        if grant is None:
            grant = self._line_up(demand, now)
        if self._changed or (grant is None and self._forecaster is not None):
            self._pump(now)
        return grant

    def _line_up(self, demand: Demand, now: float) -> Grant | None:
        """Puts `demand` in line. Where it may not wait, and is still tied to its home, binds it to another place if
        possible.

        Returns the grant of such a demand, else None. Raises the same errors as `arrive`.
        """
        try:
            self._join(demand, now)
        except (QueueFull, QueueTimeout):
            if demand.tied_until <= now:
                raise
            demand.tied_until = -inf
            grant = self._bind(demand, None, now)
            if grant is None:
                raise
            return grant
        return None

    def cancel(self, demand: Demand, now: float) -> None:
        """Takes `demand` out of the line, because nobody waits with it any more. Does nothing where it does not
        wait.
        """
        if demand.is_waiting:
            if (account := self._soonest(demand)) is not None:
                account.num_abandoned += 1
            self._leave(demand)
            self._pump(now)

    def expire(self, demand: Demand, now: float) -> None:
        """Refuses `demand`, whose deadline has come, if it still waits."""
        if demand.is_waiting:
            self._refuse(demand, self._timeout(demand, now))
            self._pump(now)

    def untie(self, demand: Demand, now: float) -> None:
        """Lets any place serve `demand`, which has waited for its home long enough. Does nothing where it does not
        wait.
        """
        if demand.is_waiting:
            line = self._lines[demand.model]
            line.remove(demand)
            demand.tied_until = -inf
            line.add(demand)
            self._consider_all(demand.model)
            if demand in self._exhausted:
                self._save_up()
            self._pump(now)

    def resize(self, demand: Demand, now: float) -> None:
        """Asks anew how many pages `demand` takes, because that is known better by now. Does nothing where it does not
        wait.
        """
        if demand.is_waiting:
            line = self._lines[demand.model]
            line.remove(demand)
            demand.forget_sizes()
            line.add(demand)
            self._consider_all(demand.model)
            if demand in self._exhausted:
                self._save_up()
            self._refuse_hopeless()
            self._pump(now)

    def _is_behind(self, demand: Demand) -> bool:
        """Tells whether, for every shape, a waiting demand takes no more pages than `demand`. Then `demand` cannot fit
        where that one does not.
        """
        line = self._lines.get(demand.model)
        if line is None or not demand.is_plain:
            return False
        found = self.open_places(demand.model)
        if any(place.account is not None for place in found.peers):
            return False  # the one that waits may take less of the owner and more of the peer
        if found.is_guarded:
            return _is_smaller(line.smallest, demand, () if found.alone else found.shapes)
        if found.alone:
            return False
        return all(_is_no_less(demand.pages_at(shape), line.least(shape)) for shape in found.shapes)

    def _join(self, demand: Demand, now: float) -> None:
        if (error := self._hopeless(demand)) is not None:
            raise error
        line = self._lines.get(demand.model)
        num_waiting = 0 if line is None else len(line)
        if not demand.is_again and num_waiting >= self._max_queue and self._is_full(demand.model, num_waiting):
            if (account := self._soonest(demand)) is not None:
                account.num_queue_full += 1
            message = f"{num_waiting} requests already wait for room; try again later"
            raise QueueFull(message, retry_after_s=self._retry_after_s(demand, now))
        if demand.deadline <= now:
            raise self._timeout(demand, now)
        if line is None:
            line = self._lines[demand.model] = Line()
        if len(line) and demand.order < (head := line.head).order:
            # Where pages are being saved up for the head, they are saved up for the one before it from now on.
            demand.overtakes = min(head.overtakes, self._max_overtakes)
        if demand.overtakes >= self._max_overtakes:
            self._exhausted[demand] = None
            self._save_up()
        line.add(demand)
        demand.is_waiting = True
        demand.lacks = self._missing(demand)

    def _is_full(self, model: str | None, num_waiting: int) -> bool:
        """Tells whether no more than `num_waiting` demands may wait for `model`."""
        owners = [place for place in self.places if place.is_owner and place.serves(model)]
        return num_waiting >= self._max_queue * max(1, len(owners))

    def _missing(self, demand: Demand) -> str:
        """Returns in a word what there is none of for `demand` at this instant; `Demand.lacks` has the words."""
        places: Iterable[Place] = self.places if demand.pair is None else demand.pair
        there = [place for place in places if place.is_open and place.serves(demand.model)]
        owners = [place for place in there if place.is_owner]
        if len(owners) in (0, len(there)):
            return "instance"
        if not any(self._has_pages(demand, place) for place in owners):
            return "slots"
        tokens = demand.room.tokens
        has_room = any(place.residency.fits(tokens) for place in there if place.is_writer)
        return "turn" if has_room or not tokens else "kv_cache"

    def _leave(self, demand: Demand) -> None:
        """Takes `demand` out of the line. The demands which could not go because of it are looked at again."""
        line = self._lines[demand.model]
        line.remove(demand)
        if not len(line):
            del self._lines[demand.model]
        demand.is_waiting = False
        if demand in self._exhausted:
            del self._exhausted[demand]
            self._save_up()

    def _refuse(self, demand: Demand, error: ProxyError) -> None:
        self._leave(demand)
        self.effects.append(Refused(demand, error))

    def _timeout(self, demand: Demand, now: float) -> QueueTimeout:
        if (account := self._soonest(demand)) is not None:
            account.num_queue_timeouts += 1
        message = "there was no room for this request in time; try again later"
        return QueueTimeout(message, retry_after_s=self._retry_after_s(demand, now))

    def _soonest(self, demand: Demand) -> Account | None:
        """Returns the account that would fit `demand` soonest, open or not. The counters of that account count what
        becomes of it.
        """
        holders = self.holders(demand.model).places
        accounts = [place.account for place in holders if place.is_owner and place.account is not None]
        return min(accounts, key=lambda one: one.excess(demand.pages_at(one.place.shape) or 0), default=None)

    def _retry_after_s(self, demand: Demand, now: float) -> float:
        """Returns in how many seconds the same demand would get its pages if it came back. It assumes that all demands
        which wait now go first.
        """
        rate, pages = 0.0, 0
        for place in self.open_places(demand.model).owners:
            account = place.account
            if account is not None:
                account.drain.measure(account.held, now)
                rate += account.drain.per_second(max(1, account.held))
                pages = max(pages, demand.pages_at(place.shape) or 0)
        if rate <= 0.0:
            return RETRY_AFTER_UNKNOWN_S
        wait_s = (self.waiting(demand.model)[1] + pages) / rate
        return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    # ── binding ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_places(self, model: str | None) -> OpenPlaces:
        """Returns the places that can be asked for `model` now: the same object until anything about that changes."""
        found = self._open.get(model)
        if found is None:
            if len(self._open) >= MAX_MODELS:
                self._forget_open()
            serving = [place for place in self.places if place.serves(model)]
            is_all = not any(place.is_expected for place in serving)
            found = OpenPlaces((place for place in serving if place.is_open), self._chooser, is_all=is_all)
            self._open[model] = found
        return found

    def holders(self, model: str | None) -> Holders:
        """Returns the places that have an account and serve `model`: the same object until that changes."""
        found = self._holders.get(model)
        if found is None:
            if len(self._holders) >= MAX_MODELS:
                self._holders.clear()
            places = [place for place in self.places if place.account is not None and place.serves(model)]
            found = self._holders[model] = Holders(
                {place: number for number, place in enumerate(places)},
                frozenset(place.shape for place in places if place.is_owner),
            )
        return found

    def _forget_open(self) -> None:
        self._holders.clear()
        for found in self._open.values():
            found.end()
        self._open.clear()

    def _bind(self, demand: Demand, at: Place | None, now: float) -> Grant | None:
        """Binds `demand` to two places and leases all its pages. Returns None, and changes nothing, where that is not
        possible.

        One of the two places is `at`, where that is given, unless the other one serves the demand alone.
        """
        pair = self._pair(demand, at, now)
        if pair is None:
            return None
        owner, peer = pair
        forecast = None
        if self._forecaster is not None and owner is not peer:
            forecast = self._foresee(self._forecaster, demand, owner, peer, now)
            if forecast is not None and forecast.is_alone:
                owner = peer = owner if owner.is_writer else peer
        return self._take(demand, owner, peer, forecast, now)

    def _take(self, demand: Demand, owner: Place, peer: Place, forecast: Forecast | None, now: float) -> Grant:
        """Binds `demand` to two places that have room for it, or to the one that serves it alone."""
        if self._lines:
            self._count_passing(demand, owner, peer)
        is_alone = owner is peer
        places = (owner,) if is_alone else (owner, peer)
        leases = () if is_alone else tuple(self._issue(demand, owner, now) + self._issue(demand, peer, now))
        grant = Grant(demand, owner, peer, leases, forecast)
        for place in places:
            if place.trials is not None and demand.pair is None:  # a canary names its pair, and is no trial
                place.trials -= 1
                place.on_trial[demand.attempt] = None
                if place.trials <= 0 and place.is_open:
                    self._shut(place)
            if place is grant.writer:
                place.residency.enter(demand.attempt, demand.room)
                place.touch()
            place.bound(demand.attempt, demand.num_tokens if is_alone or not place.is_writer else 0)
        if demand.is_waiting:
            self._leave(demand)
        return grant

    @staticmethod
    def _foresee(forecaster: Forecaster, demand: Demand, owner: Place, peer: Place, now: float) -> Forecast | None:
        """Returns the forecast for a demand that has room at `owner` and `peer` at this instant; None where there is
        none, or no choice.

        What must hold: a guess changes only what a demand takes that goes at this instant anyway, and what it takes
        alone is a part of what it would take of the pair. So nobody is refused or waits because of a guess, and no
        memory is given twice. A violation would be seen as a demand that is served alone where there is no room for
        it, where that is not allowed, or without having had a pair.
        """
        writer = owner if owner.is_writer else peer
        if not writer.serves_alone or demand.pair is not None or demand.text_terms is not None:
            return None
        if owner.trials is not None or peer.trials is not None:
            return None  # that a place is tried is how anybody learns what it is like now
        return forecaster.foresee(demand, owner, peer, now) if demand.pages_at(owner.shape) else None

    def _relieve(self, now: float) -> bool:
        """Binds a demand that waits for room where its answer is written to a place of the other side alone, where the
        forecaster says that this is sooner. Returns whether there was one.

        What must hold: such a demand is the first in its line, nobody who writes answers has room for it, and it takes
        nothing that anybody else waits for: only memory of which the engine itself has told that it is free. So no
        demand is passed because of a guess, and one for which no guess is made waits as before. A violation would be
        seen as a demand that is served alone by one who usually writes no answers, in any other case.
        """
        if self._forecaster is None:
            return False
        if self._num_unasked:
            self._num_unasked -= 1
            return False
        num_seen = 0
        for line in self._lines.values():
            demand = line.head
            found = self.open_places(demand.model)
            is_bound = demand.pair is not None or demand.text_terms is not None or demand.tied_until > now
            if is_bound or not found.has_pair:
                continue
            writers, readers = found.owners, found.peers
            if not writers[0].is_writer:
                writers, readers = readers, writers
            num_seen += len(writers) + len(readers)
            if demand.room.tokens <= self._room_at(demand.model, writers is found.owners)[0]:
                continue
            options = [place for place in readers if self._could_write(demand, place, found)]
            advice = self._forecaster.relieve(demand, len(line) - 1, options, writers, now) if options else None
            if advice is not None:
                place, forecast = advice
                self.effects.append(Granted(self._take(demand, place, place, forecast, now)))
                return True
        self._num_unasked = num_seen // PLACES_PER_LOOK
        return False

    @staticmethod
    def _could_write(demand: Demand, place: Place, found: OpenPlaces) -> bool:
        """Tells whether `place`, which usually writes no answers, has room for that of `demand`."""
        return (
            place.serves_alone
            and place.name not in demand.avoid
            and place.trials is None
            and place.residency.limit < inf
            and place.residency.fits(demand.room.tokens)
            and any(demand.pages_at(shape) for shape in found.shapes)
        )

    def _issue(self, demand: Demand, place: Place, now: float) -> list[Lease]:
        account = place.account
        pages = demand.pages_at(place.shape) if account is not None else 0
        return [account.issue(demand.attempt, pages, now)] if account is not None and pages else []

    def _alone(self, demand: Demand) -> list[Place]:
        """Returns the places of which one would serve `demand` alone; none where it takes an owner and a peer."""
        if demand.pair is None:
            return self.open_places(demand.model).alone
        return [demand.pair[0]] if demand.pair[0] is demand.pair[1] else []

    def _pages(self, demand: Demand, place: Place) -> int | None:
        """Returns the pages that `demand` takes at `place`; None where it cannot be served there."""
        if place.account is None and not place.is_owner:
            return 0
        if self._alone(demand):
            return 0
        return None if place.account is None else demand.pages_at(place.shape)

    def _pair(self, demand: Demand, at: Place | None, now: float) -> tuple[Place, Place] | None:
        """Returns an owner and a peer that fit each other and have room for `demand`, or one place as both where it
        serves alone; None where there are none."""
        if at is not None and not self._could_use(demand, at, now):
            return None
        if demand.pair is not None:
            return demand.pair if all(self._has_room(demand, place) for place in demand.pair) else None
        found = self.open_places(demand.model)
        if found.alone:
            return self._one_alone(demand, found, at, now)
        if not found.owners or not found.peers:
            return None
        picked: Any = None
        if not demand.avoid and demand.text_terms is None and (demand.tied_until <= now or not found.is_mixed):
            is_owner_given = at is not None and at.is_owner
            picked = at if is_owner_given else self._chooser.pick(found.lineup(True, at), demand)
            if not self._is_beneath(demand, picked, found) and self._has_room(demand, picked):
                is_free = at is None or is_owner_given
                other: Any = self._chooser.pick(found.lineup(False, picked), demand) if is_free else at
                if self._has_room(demand, other):
                    return picked, other
        return self._pair_with_room(demand, found, at, picked, now)

    def _one_alone(self, demand: Demand, found: OpenPlaces, at: Place | None, now: float) -> tuple[Place, Place] | None:
        if at is not None:
            return (at, at) if at in found.alone and self._has_room(demand, at) else None
        is_owner = found.alone[0].is_owner
        if demand.is_plain:
            picked: Any = self._chooser.pick(found.lineup(is_owner), demand)
            if self._has_room(demand, picked):
                return picked, picked
        halves = [side[not is_owner] for side in self._sides(demand, now)]
        options = [place for half in halves for place in half if self._has_room(demand, place)]
        if not options:
            return None
        place = self._pick(demand, options, found, None)
        return place, place

    def _pair_with_room(
        self, demand: Demand, found: OpenPlaces, at: Place | None, picked: Any, now: float
    ) -> tuple[Place, Place] | None:
        """Looks at all places that `demand` could use. Returns an owner (`picked`, where it is one of them) and a peer,
        as `_pair` does."""
        sides: list[Side] = []
        for side in self._sides(demand, now):
            if at is not None:
                if at not in side[not at.is_owner]:
                    continue
                side = _at(side, at)
            owners, peers = ([place for place in half if self._has_room(demand, place)] for half in side)
            if owners and peers:
                sides.append((owners, peers))
        if not sides:
            return None
        owners = [owner for side in sides for owner in side[0]]
        if picked not in owners:
            picked = at if at in owners else self._pick(demand, owners, found, None)
        peers = next(side[1] for side in sides if picked in side[0])
        return picked, at if at is not None and at in peers else self._pick(demand, peers, found, picked)

    def _pick(self, demand: Demand, options: list[Place], found: OpenPlaces, beside: Place | None) -> Any:
        """Returns the one of `options` that the chooser picks. They are on one side, and fit `beside`."""
        is_owner = options[0].is_owner
        if len(options) == len(found.of(is_owner, beside)):
            return self._chooser.pick(found.lineup(is_owner, beside), demand)
        return self._chooser.pick(self._chooser.line_up(options, is_lasting=False), demand)

    def _could_use(self, demand: Demand, place: Place, now: float) -> bool:
        """Tells whether `demand` may be bound to `place` if there is room."""
        if demand.pair is not None:
            return place in demand.pair
        if not place.is_open or not place.serves(demand.model):
            return False
        found = self.open_places(demand.model)
        is_split, is_tied = self._is_split(demand, found), demand.tied_until > now
        if found.is_mixed or demand.text_terms is not None or (demand.avoid and (is_split or is_tied)):
            is_plain = not (demand.text_terms is not None or demand.avoid or is_split or is_tied)
            sides = found.sides if is_plain else self._sides(demand, now)
            return any(place in side[not place.is_owner] for side in sides)
        # The same, without a look at all the others.
        if is_split and place.is_owner and demand.pages_at(place.shape) == 0:
            return False
        if place.name in demand.avoid and any(one.name not in demand.avoid for one in found.of(place.is_owner)):
            return False
        if not is_tied:
            return True
        home: Any = self._chooser.home(found.lineup(place.is_owner), demand)
        return home is None or home is place or self._is_beneath(demand, home, found)

    def _sides(self, demand: Demand, now: float) -> list[Side]:
        """Returns the owners and peers that `demand` may be bound to if there is room: any owner of a side with any
        peer of it."""
        if demand.pair is not None:
            return [([demand.pair[0]], [demand.pair[1]])]
        found = self.open_places(demand.model)
        sides = found.sides
        if demand.text_terms is not None:
            sides = _writing(sides, demand.text_terms)
        if demand.avoid:
            sides = _without(sides, demand.avoid)
        if self._is_split(demand, found):
            sides = _taking_kv(demand, sides)
        for home in self._homes(demand, found) if demand.tied_until > now else ():
            # A home that cannot be used now ties nobody.
            sides = [_at(side, home) for side in sides if home in side[not home.is_owner]] or sides
        return sides

    def _is_split(self, demand: Demand, found: OpenPlaces) -> bool:
        """Tells whether some of the open owners take the KV of `demand`, and others would serve it without a transfer
        because they are too small. It goes to the former, also where it has to wait for them: the work that the latter
        would have with it is not limited by pages."""
        if len(found.shapes) < 2 or found.alone:
            return False
        return len({pages > 0 for shape in found.shapes if (pages := demand.pages_at(shape)) is not None}) > 1

    def _is_beneath(self, demand: Demand, place: Place, found: OpenPlaces) -> bool:
        """Tells whether `place` is an owner which is too small for the KV of `demand`, while others take it."""
        return (
            len(found.shapes) > 1
            and place.is_owner
            and demand.pages_at(place.shape) == 0
            and self._is_split(demand, found)
        )

    def _homes(self, demand: Demand, found: OpenPlaces) -> list[Place]:
        """Returns the places that `demand` is tied to, one on a side at most; the peer is one that fits the owner."""
        owner = self._chooser.home(found.lineup(True), demand) if found.owners else None
        peer = self._chooser.home(found.lineup(False, owner), demand) if found.peers else None
        return [home for home in (owner, peer) if home is not None]

    def _has_room(self, demand: Demand, place: Place) -> bool:
        tokens = demand.room.tokens if place.is_writer else 0
        if tokens and not place.residency.fits(tokens):
            return False
        if not self._has_pages(demand, place):
            return False
        saved = self._saved.get(place, demand) if self._saved else demand
        if saved is demand:
            return True
        pages = self._pages(demand, place)
        if tokens and not place.residency.fits_beside(tokens, saved.room.tokens):
            return False
        account = place.account
        return account is None or not pages or account.fits_beside(pages, self._pages(saved, place) or 0)

    def _has_pages(self, demand: Demand, place: Place) -> bool:
        """Tells whether there are pages for `demand` at `place`, whoever they are saved up for."""
        account = place.account
        if account is None:
            return not place.is_owner or bool(self._alone(demand))
        pages = demand.pages_at(place.shape)
        if pages is not None and (not pages or (not self._is_settling and account.fits(pages))):
            return True
        return bool(self._alone(demand))

    def _takes(self, demand: Demand, place: Place, *, is_alone: bool = False) -> bool:
        """Tells whether `demand` takes anything of `place` that may be scarce. Where `is_alone`, it takes no pages."""
        if place.is_guarded and demand.room.tokens:
            return True
        return not is_alone and bool(self._pages(demand, place))

    def _could_have_room(self, demand: Demand, place: Place) -> bool:
        """Tells whether `demand` fits at `place` once all that is leased there has come back."""
        account, pages = place.account, self._pages(demand, place)
        if account is None or not pages:
            return pages is not None
        return pages <= account.capacity - account.foreign or not account.is_limited

    def _lacks(self, demand: Demand, place: Place) -> tuple[float, int]:
        """Returns what must become free before `demand` fits at `place`: the share of its KV cache, and pages."""
        account, tokens = place.account, demand.room.tokens if place.is_writer else 0
        return (
            place.residency.excess(tokens) if tokens else 0.0,
            0 if account is None else account.excess(self._pages(demand, place) or 0),
        )

    # ── whose turn it is ────────────────────────────────────────────────────────────────────────────────────────────

    def _lines_at(self, place: Place) -> list[Line]:
        return [line for model, line in self._lines.items() if place.serves(model)]

    def _in_line_for(self, place: Place, now: float) -> Iterator[Demand]:
        """Returns the demands that wait and could use `place`, in order."""
        lines = self._lines_at(place)
        demands = iter(lines[0]) if len(lines) == 1 else merge(*lines, key=attrgetter("order"))
        for demand in demands:  # a generator expression would look at all of them, compiled
            if self._could_use(demand, place, now):
                yield demand

    def _longest(self, place: Place, now: float) -> Demand | None:
        """Returns the oldest of the waiting demands that could use `place`; None where there is none."""
        ages = [line.by_age() for line in self._lines_at(place)]
        by_age = ages[0] if len(ages) == 1 else merge(*ages, key=lambda demand: (demand.age, demand.serial))
        for demand in by_age:
            if self._could_use(demand, place, now):
                return demand
        return None

    def _count_passing(self, going: Demand, owner: Place, peer: Place) -> None:
        """Counts whom `going` passes as it takes room now: at each of its places the demand whose turn it is, and the
        oldest.
        """
        # The time is -inf here, so that every tie holds: a demand that waits for its home is not passed elsewhere.
        turns: dict[Demand, Account | None] = {}
        waited: dict[Demand, Account | None] = {}
        for place in (owner, peer):
            if not self._takes(going, place, is_alone=owner is peer):
                continue
            account = place.account
            longest = self._longest(place, -inf)
            if longest is None:
                continue
            if (going.age, going.serial) < (longest.age, longest.serial):
                longest = going
            turn = longest
            if longest.passes < self._max_passes:
                turn = min(next(self._in_line_for(place, -inf)), going, key=attrgetter("order"))
            if turn is not going and not turn.saves:
                turns[turn] = account
            if longest is not going and longest is not turn:
                waited[longest] = account
        for turn, account in turns.items():
            turn.overtakes += 1
            if account is not None:
                account.num_overtakes += 1
            if turn.overtakes >= self._max_overtakes:
                self._exhausted[turn] = None
        for longest, account in waited.items():
            longest.passes += 1
            if account is not None:
                account.num_passes += 1
        if self._exhausted and (turns or waited):
            self._save_up()

    def _save_up(self) -> None:
        """Gives each demand that has been passed often enough one place on each side, which is saved up for it.

        Goes in the order of their turns. A demand that does not get all places it needs gets none, so that no two
        demands wait for each other. A demand keeps the places that it has already.
        """
        before, self._saved = self._saved, {}
        for demand in sorted(self._exhausted, key=lambda one: (one.passes < self._max_passes, one.order)):
            demand.saves = self._places_to_save(demand)
            self._saved |= dict.fromkeys(demand.saves, demand)
        for demand in before.values():
            if not demand.is_waiting:
                demand.saves = ()
        for place in (*before, *self._saved):
            self._changed[place] = None

    def _places_to_save(self, demand: Demand) -> tuple[Place, ...]:
        """Returns the owner and the peer that will fit `demand` soonest, out of those that fit each other; the owner
        alone where some peer has always room, and one place where it serves alone. Returns nothing where there is no
        such pair to be had."""
        best: tuple[Place, ...] = ()
        alone = self._alone(demand)
        for owners, peers in self._sides(demand, -inf):
            owner = self._place_to_save(demand, owners)
            if owner is None or not peers:
                continue
            places: tuple[Place, ...] = (owner,)
            if not alone and all(self._takes(demand, place) for place in peers):
                peer = self._place_to_save(demand, peers)
                if peer is None:
                    continue
                places = owner, peer
            if not best or self._rank(demand, places) < self._rank(demand, best):
                best = places
        return best

    def _rank(self, demand: Demand, places: tuple[Place, ...]) -> tuple[int, list[tuple[float, int]]]:
        """Returns the key by which the places to be saved up are chosen: those that are kept, then those that lack
        least."""
        return -sum(place in demand.saves for place in places), [self._lacks(demand, place) for place in places]

    def _place_to_save(self, demand: Demand, places: list[Place]) -> Place | None:
        """Returns the one of `places` that is saved up for `demand` already, else the one that will fit it soonest."""
        options = [place for place in places if place not in self._saved and self._could_have_room(demand, place)]
        for place in options:
            if place in demand.saves:
                return place
        return min(options, key=lambda place: self._lacks(demand, place), default=None)

    # ── granting ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _consider_all(self, model: str | None) -> None:
        self._changed |= {place: None for place in self.places if place.is_scarce and place.serves(model)}
        self._changed |= dict.fromkeys(self.open_places(model).alone)

    def _consider_all_of(self, place: Place) -> None:
        """Has all places looked at again that serve a waiting model of `place`, because `place` opened or closed."""
        if self._lines:
            for model in self._lines:
                if place.serves(model):
                    self._consider_all(model)
            if self._exhausted:
                self._save_up()

    def _pump(self, now: float) -> None:
        """Grants pages to the demands that may go, until none may. Places take turns, so that many demands which may go
        at once do not all go to one place."""
        changed = self._changed
        self._roomiest.clear()
        while True:
            while changed:
                place = next(iter(changed))
                is_granted = self._lines and self._grant_one(place, now)
                changed.pop(place, None)
                if is_granted:
                    self._roomiest.clear()
                    changed[place] = None
            if not self._lines or not self._relieve(now):
                return

    def _grant_one(self, place: Place, now: float) -> bool:
        """Grants room at `place` to one demand that may go there. Returns whether there was one."""
        if not self._is_waited_for(place):
            return False
        if not place.is_open and not any(line.num_pairs for line in self._lines_at(place)):
            return False
        saved = self._saved.get(place)
        if saved is not None:
            if self._grant(saved, place, now):
                return True
            if not self._has_room(saved, place):  # all other demands go on elsewhere
                return False
        longest = self._longest(place, now)
        if longest is None:
            return False
        # The oldest demand goes before more urgent ones once these have passed it often enough.
        if longest.passes >= self._max_passes and self._grant(longest, place, now):
            return True
        if not any(self._might_fit(line, place) for line in self._lines_at(place)):
            return False
        return any(
            self._grant(demand, place, now)
            for demand in self._in_line_for(place, now)
            if self._has_room(demand, place) and self._might_fit_beyond(demand, place)
        )

    def _room_at(self, model: str | None, is_owner: bool) -> tuple[float, dict[Hashable, float] | None]:
        """Returns the most tokens and, by shape, the most pages for which one of the open owners or peers may have
        room; None instead of pages where one of them has no account. It is looked up once for all demands in line."""
        found = self._roomiest.get((model, is_owner))
        if found is None:
            tokens, pages, is_free = 0.0, dict[Hashable, float](), False
            for place in self.open_places(model).of(is_owner):
                tokens = max(tokens, place.residency.room if place.is_writer else inf)
                account = place.account
                if account is None:
                    is_free = True
                else:
                    room = 0.0 if self._is_settling else account.room
                    pages[place.shape] = max(pages.get(place.shape, 0.0), room)
            found = self._roomiest[model, is_owner] = tokens, None if is_free else pages
        return found

    def _might_fit_beyond(self, demand: Demand, place: Place) -> bool:
        """Tells whether any counterpart of `place` may have room for `demand`. This spares a look at all of them: False
        is certain, True is not.
        """
        if demand.pair is not None or self._alone(demand):
            return True
        tokens, pages = self._room_at(demand.model, not place.is_owner)
        return demand.room.tokens <= tokens and (pages is None or _holds(pages, demand.pages_at))

    def _might_fit(self, line: Line, place: Place) -> bool:
        """Tells whether a demand in `line` may fit. This quick look spares a long one: False is certain, True is
        not.
        """
        if place.is_guarded and (tokens := line.smallest.room.tokens) and not place.residency.fits(tokens):
            return False
        if line.num_pairs == 0 and not self._alone(line.head):
            most, rooms = self._room_at(line.head.model, not place.is_owner)
            if line.smallest.room.tokens > most:
                return False
            if rooms is not None and line.num_special == 0 and not line.might_fit(rooms):
                return False
        if place.account is None or line.num_special > 0 or self._alone(line.head):
            return True
        least = line.least(place.shape)
        return least is not None and place.account.fits(least)

    def _is_waited_for(self, place: Place) -> bool:
        """Tells whether a demand in line may be let go by room at `place`."""
        return place.is_scarce or (
            place.serves_alone and any(place in self.open_places(model).alone for model in self._lines)
        )

    def _grant(self, demand: Demand, place: Place, now: float) -> bool:
        if not self._has_room(demand, place):
            return False
        grant = self._bind(demand, place, now)
        if grant is None:
            return False
        self.effects.append(Granted(grant))
        return True

    # ── places ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, place: Place) -> None:
        """Takes `place` into the fleet. It stays closed until it is opened."""
        self.places[place] = None
        place.residency.oversubscribe = self._oversubscribe
        self._holders.clear()

    def discard(self, place: Place, now: float) -> None:
        """Removes `place` for good, with all that its process held. Refuses the demands that no place can serve any
        more.
        """
        self.close(place, now)
        self.places.pop(place, None)
        self._holders.clear()
        self.lost(place)
        self._end(place, now)
        self._refuse_hopeless()
        self._pump(now)

    def open(self, place: Place, now: float, *, trials: int | None = None) -> None:
        """Lets new attempts go to `place`. Where `trials` is given, so many may go before it closes by itself."""
        place.trials = trials
        self._shut_until.pop(place, None)
        if place.is_open:
            return
        was_unpaired = place.serves_alone and any(
            place.serves(model) and not self.open_places(model).has_pair for model in self._lines
        )
        place.is_open = True
        place.is_expected = False
        self._forget_open()
        self._consider_all_of(place)
        if was_unpaired:  # who waited for one place may fit no pair
            self._refuse_hopeless()
        self._pump(now)

    def close(
        self, place: Place, now: float, *, until: float = inf, trials: int | None = None, is_expected: bool = False
    ) -> None:
        """Keeps new attempts from `place` until the time `until`. From then on `trials` of them may go. Its account and
        its leases stay. `is_expected` says that it may open in a moment, so that nobody takes it for lost yet.
        """
        self._shut_until.pop(place, None)
        if until < inf:
            self._shut_until[place] = until
            place.trials = trials
        for found in self._open.values():
            found.is_checked = False
        was_expected, place.is_expected = place.is_expected, is_expected
        if place.is_open or was_expected is not is_expected:
            self._shut(place)
            self._pump(now)

    def _shut(self, place: Place) -> None:
        place.is_open = False
        self._forget_open()
        self._consider_all_of(place)  # whoever avoided others because of it may go to them now

    def _reopen(self, now: float) -> None:
        for place in [place for place, until in self._shut_until.items() if until <= now]:
            self.open(place, now, trials=place.trials)

    @property
    def reopens_at(self) -> float:
        """Returns the time at which `advance` has something to do; infinite where it has nothing to do."""
        if not self._lines:
            return inf
        settles_at = self.claims_until + SETTLE_S if self._is_settling else inf
        return min(self._shut_until.values(), default=inf) if settles_at == inf else settles_at

    def advance(self, now: float) -> None:
        """Opens the places whose time has come."""
        self._reopen(now)
        if self._is_settling and now >= self.claims_until + SETTLE_S:
            self._settle(now)

    def _await_looks(self, place: Place, now: float) -> None:
        """Takes note of the answer to a look, of those that are awaited before anything is granted."""
        if now < self.claims_until:
            return
        if self._awaited is None:
            self._awaited = {one for one in self.places if one.is_up and one.account is not None}
        if place.account is None or place.account.is_sure:
            self._awaited.discard(place)
        if not self._awaited or now >= self.claims_until + SETTLE_S:
            self._settle(now)

    def _settle(self, now: float) -> None:
        self._is_settling, self._awaited = False, None
        for model in self._lines:
            self._consider_all(model)
        self._pump(now)

    def serve(self, place: Place, models: frozenset[str], now: float) -> None:
        """Takes note that `place` serves these models from now on."""
        if place.models != models:
            self._consider_all_of(place)
            place.models = models
            self._forget_open()
            self._consider_all_of(place)
            self._refuse_hopeless()
            self._pump(now)

    def move(self, old: Place, new: Place, now: float) -> None:
        """Gives the process at `old`, with its account and leases, to the place `new`."""
        new.incarnation, old.incarnation = old.incarnation, None
        new.account, old.account = old.account, None
        new.shape, new.revision = old.shape, old.revision
        old.is_moved, new.is_moved = True, False
        new.residency = old.residency  # both have it: what is bound to the old place leaves there
        if new.account is not None:
            new.account.place = new
        if old in self._saved or new in self._saved:
            self._save_up()
        self.orphans.moved(old, new)
        self._forget_open()
        self._consider_all_of(new)
        self._pump(now)

    # ── what engines say ────────────────────────────────────────────────────────────────────────────────────────────

    def heard(
        self,
        place: Place,
        incarnation: str,
        *,
        shape: Hashable,
        capacity: int,
        occupied: int | None,
        asked_at: float,
        now: float,
        returned_before: int | None = None,
        lease_s: float = 0.0,
        cache: KvCache = UNKNOWN_CACHE,
        revision: Revision = ANY,
    ) -> None:
        """Takes note that the process `incarnation` answered a look that began at `asked_at`.

        `capacity` is in pages, and 0 where no slots guard the place. `returned_before` and `lease_s` mean the same as
        in `Account.heard`. `cache` is what it tells of its own KV cache. A process which is not the one of before
        proves that the one of before has ended.
        """
        if place.is_moved:
            place.is_up = True
            return
        is_resized = place.shape != shape or place.revision != revision
        if place.incarnation != incarnation:
            self._end(place, now)
            place.incarnation = incarnation
            is_resized, returned_before = True, None
        place.shape, place.revision, place.is_up = shape, revision, True
        if capacity:
            if place.account is None:
                place.account = Account(
                    place,
                    capacity,
                    now,
                    concurrent=self._concurrent_pages,
                    is_limited=self._is_limited,
                    sure_at=self.claims_until,
                )
                is_resized = True
            is_resized = place.account.heard(capacity, occupied, now, returned_before, lease_s, asked_at) or is_resized
        if place.account is not None:
            self._expire_orphans(place.account, asked_at, now)
        self.orphans.heard(place, now)
        if place.is_writer or place.serves_alone:
            is_resized = self._heard_cache(place, cache) or is_resized
        if is_resized:
            self._forget_open()
            self._consider_all_of(place)
            self._refuse_hopeless()
        if self._is_settling:
            self._await_looks(place, now)
        self._pump(now)

    def _heard_cache(self, place: Place, cache: KvCache) -> bool:
        """Takes the numbers of the KV cache in which `place` writes answers. Returns whether its size is another."""
        residency = place.residency
        limit, used = residency.limit, residency.used
        residency.heard(cache)
        if residency.used != used:
            place.touch()
            if self._lines and residency.used < used:
                self._changed[place] = None
        return residency.limit != limit

    def reside(self, place: Place, attempt: str, room: Room) -> None:
        """Takes note of an attempt which another kernel has sent to `place`, where its answer is written."""
        place.residency.enter(attempt, room)
        place.touch()

    def vacate(self, place: Place, attempt: str, now: float) -> None:
        """Takes note that an attempt has no use any more for `place`, where its answer was written. Idempotent."""
        residency = place.residency
        if not residency.leave(attempt):
            return
        place.touch()
        if self._lines and residency.limit < inf:
            for one in [place] if not place.is_moved else self.places:
                if one.residency is residency:
                    self._changed[one] = None
            self._pump(now)

    def is_needed(self, place: Place, now: float) -> bool:
        """Tells whether an errand has to be done at `place`, or its engine may still hold an orphan's pages."""
        if self.orphans.is_target(place):
            return True
        return place.account is not None and any(lease.over_at > now for lease in place.account.orphans)

    def lost(self, place: Place) -> None:
        """Takes note that `place` does not answer. That frees nothing: no errand is tried until it is heard again."""
        place.is_up = False

    def _expire_orphans(self, account: Account, asked_at: float, now: float) -> None:
        for lease in [lease for lease in account.leases if lease.custody is _ORPHANED and lease.over_at <= asked_at]:
            is_closing = lease.way is not None and lease.way.is_closing
            self._free(lease, Evidence.ERRAND_DONE if is_closing else Evidence.LEASE_OVER, now)

    def _hopeless(self, demand: Demand) -> ProxyError | None:
        """Returns the error which says why no known place could ever serve `demand`; None where one could, or may."""
        among = self.places if demand.pair is None else [place for place in demand.pair if place in self.places]
        known = [place for place in among if place.serves(demand.model)]
        if known and any(demand.text_terms in (None, place.revision.text_terms) for place in self._alone(demand)):
            return None
        sides = sides_of(known) if demand.text_terms is None else _writing(sides_of(known), demand.text_terms)
        too_small: Account | None = None
        for owners, peers in sides:
            if not owners:
                continue
            largest = _largest_too_small(demand, owners) or _largest_too_small(demand, peers)
            if largest is None and peers:
                return None
            too_small = largest or too_small
        if too_small is None:
            return NotReady("no instance of this model is left", retry_after_s=RETRY_AFTER_UNKNOWN_S)
        too_small.num_never_fits += 1
        return NeverFits(demand.pages_at(too_small.place.shape) or 0, too_small.capacity)

    def _refuse_hopeless(self) -> None:
        """Refuses the demands that no place can serve any more."""
        for model, line in list(self._lines.items()):
            shapes, hopeless = self._hopeless_kinds(model, line)
            if not hopeless and not line.num_special:
                continue
            for demand in list(line):
                is_named = demand.pair is not None or demand.text_terms is not None
                is_doubtful = is_named or (bool(hopeless) and demand.kind(shapes) in hopeless)
                if is_doubtful and (error := self._hopeless(demand)) is not None:
                    self._refuse(demand, error)

    def _hopeless_kinds(
        self, model: str | None, line: Line
    ) -> tuple[tuple[Hashable, ...], set[tuple[int | None, ...]]]:
        """Returns shapes, and the kinds of demands in `line` that `_hopeless` refuses unless they have a pair.

        A kind is the pages that a demand takes at each of these shapes.
        """
        sides = [
            [room for half in side if (room := _most_pages(half)) is not None]
            for side in sides_of(place for place in self.places if place.serves(model))
        ]
        if not all(sides):
            return (), set()
        shapes = tuple(dict.fromkeys(shape for side in sides for most in side for shape in most))
        hopeless = set()
        for kind in line.kinds(shapes):
            pages = {shape: num for shape, num in zip(shapes, kind, strict=True) if num is not None}
            if not any(all(_holds(most, pages.get) for most in side) for side in sides):
                hopeless.add(kind)
        return shapes, hopeless

    def _end(self, place: Place, now: float) -> None:
        """Frees what the process at `place` held. It has certainly ended, and its memory with it."""
        account, place.account, place.incarnation = place.account, None, None
        if not place.is_moved:
            place.residency.clear()
        if account is not None:
            for lease in list(account.leases):
                self._free(lease, _ENDED, now)
        if place in self._saved:
            self._save_up()
        if account is not None:
            self._changed.pop(place, None)

    # ── custody ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, place: Place, attempt: str, pages: int, custody: Custody, now: float) -> Lease:
        """Returns a lease of the pages that `attempt` holds at the process there, in the state `custody`, since another
        kernel granted them. Raises `ValueError` where no account is kept there."""
        if place.account is None:
            raise ValueError(f"no account is kept of the pages of {place.name}")
        lease = place.account.claim(attempt, pages, now)
        for step in STEPS_TO[custody]:
            lease.step(step)
        return lease

    def free(self, lease: Lease, evidence: Evidence, now: float) -> bool:
        """Frees the lease's pages; this is their only way back. Returns False, and changes nothing, where they came
        back before.

        Raises `IllegalTransition` where `evidence` proves nothing about pages in their state.
        """
        is_freed = self._free(lease, evidence, now)
        self._pump(now)
        return is_freed

    def _free(self, lease: Lease, evidence: Evidence, now: float) -> bool:
        account = lease.account
        if not account.take_back(lease, evidence, now):
            return False
        self.freed[evidence] += 1
        if self.orphans.remove(lease):
            self.effects.append(Settled(lease))
        self._changed[account.place] = None
        return True

    def shrink(self, lease: Lease, pages: int, now: float) -> None:
        """Keeps only `pages` of the lease, because the engine said that the attempt takes no more. Does nothing where
        no more than that are held.
        """
        if lease.account.shrink(lease, pages, now):
            self._changed[lease.account.place] = None
            self._pump(now)

    def abandon(self, lease: Lease, way: Way, now: float) -> None:
        """Hands the lease of a request that is over to the reaper, which answers for it from here and frees its pages
        by `way`.

        Raises `IllegalTransition` where the lease's pages are not at risk.
        """
        lease.step(_ORPHANED)
        self.orphans.add(lease, way, now)

    def errand_ended(self, lease: Lease, is_done: bool, now: float) -> None:
        """Takes note that an errand which `Orphans.take_due` handed out has ended. Frees the pages where
        `Orphans.errand_ended` says that this proves them free.
        """
        if self.orphans.errand_ended(lease, is_done, now):
            self.free(lease, Evidence.ERRAND_DONE, now)

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._lines.values()) if self._lines else 0

    def waiting(self, model: str | None) -> tuple[int, int]:
        """Returns how many demands wait for `model`, and how many pages they need. Each counts at the shape where it
        takes the fewest.
        """
        line = self._lines.get(model)
        return (0, 0) if line is None else (len(line), line.fewest(self.holders(model).owner_shapes))

    def waiting_models(self) -> list[str | None]:
        return list(self._lines)

    def check_integrity(self, now: float) -> None:
        """Raises `IntegrityError` unless the ledgers balance, the limits hold and no demand waits that could go."""
        for place in self.places:
            place.residency.check_integrity()
            if place.account is not None:
                place.account.check_integrity()
                if place.account.place is not place:
                    raise IntegrityError(f"{place.account!r} is not that of {place.name}")
                for lease in place.account.leases:
                    if lease.custody is _ORPHANED and lease not in self.orphans:
                        raise IntegrityError(f"nobody answers for {lease!r}")
        for lease in self.orphans:
            if lease.custody is not _ORPHANED or lease not in lease.account.leases:
                raise IntegrityError(f"the reaper has {lease!r}, which is no orphan")
        if self._changed:
            raise IntegrityError("places were left unserved")
        for place in self.places:
            if place.is_open and self._is_waited_for(place) and (demand := self._stuck(place, now)) is not None:
                raise IntegrityError(f"{demand!r} could go to {place.name} and was not woken")

    def _stuck(self, place: Place, now: float) -> Demand | None:
        """Returns a demand in line that could be bound to `place` this instant; None where there is none."""
        for demand in self._in_line_for(place, now):
            if not self._has_room(demand, place):
                continue
            for side in self._sides(demand, now):
                if place in side[not place.is_owner] and any(
                    self._has_room(demand, other) for other in side[place.is_owner]
                ):
                    return demand
        return None
