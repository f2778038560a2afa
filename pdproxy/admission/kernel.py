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
account of its own.

Each account serves the demands in line that could use it: the more urgent first, and the oldest first among those which
are equally urgent. Two bounds keep every demand moving. Smaller demands may pass the one whose turn it is
`max_overtakes` times while it does not fit. Then the kernel saves up for it one account on each side, the one that will
fit it soonest, and all other demands go on elsewhere. More urgent demands may pass the oldest demand `max_passes`
times. Then it is the oldest one's turn.

Every function that changes state takes `now`, in seconds, and leaves what must follow in `effects`, in order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import merge
from math import inf
from operator import attrgetter

from pdproxy.admission.account import Account, Lease, Place
from pdproxy.admission.custody import STEPS_TO, Custody, Evidence, Way
from pdproxy.admission.grant import Chooser, Effect, Grant, Granted, Holders, OpenPlaces, Refused, Settled
from pdproxy.admission.line import Demand, Line
from pdproxy.admission.orphans import Orphans
from pdproxy.errors import IntegrityError, NeverFits, NotReady, ProxyError, QueueFull, QueueTimeout

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
RETRY_AFTER_UNKNOWN_S = 5.0
"""The `Retry-After`, in seconds, while no page has ever come back."""
SETTLE_S = 0.5
"""The seconds after the time for claims within which owners have to be looked at that should take part from the
beginning."""
MAX_MODELS = 1024
"""The most models of which the open places are remembered. Where engines tell no model names, clients may ask for any
name.
"""

_ORPHANED = Custody.ORPHANED
_ENDED = Evidence.INCARNATION_ENDED


def _fits_ever(demand: Demand, account: Account) -> bool:
    pages = demand.pages_at(account.place.shape)
    return pages is not None and (pages <= account.capacity or not account.is_limited)


def _could_fit(demand: Demand, account: Account) -> bool:
    """Tells whether `demand` fits once all leased pages have come back."""
    pages = demand.pages_at(account.place.shape)
    return pages is not None and (pages <= account.capacity - account.foreign or not account.is_limited)


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
        claims_until: float = -inf,
    ) -> None:
        """Grants no pages before the time `claims_until`, until which others may claim what they hold, and then only
        when all owners that answer have been looked at, or `SETTLE_S` later: else those who have waited until then
        would all go to whichever owner was looked at first."""
        self._chooser = chooser
        self._max_overtakes = max_overtakes
        self._max_passes = max_passes
        self._max_queue = max_queue
        self._concurrent_pages = concurrent_pages
        self._is_limited = is_limited
        self.claims_until = claims_until
        """The time until which others may claim pages."""
        # State: whether nothing is granted yet, and the owners that are awaited; the places; which of them are open for
        # each model asked for and which have an account, as long as nothing about that changes; those that open by
        # themselves, and when; who waits, by model; who has been passed often enough, and the accounts that are saved
        # up for them; places that have to be looked at before the function ends; what must follow; how many demands
        # have come; how many leases came back, by evidence.
        self._is_settling = claims_until > -inf
        self._awaited: set[Place] | None = None
        self.places: dict[Place, None] = {}
        self._open: dict[str | None, OpenPlaces] = {}
        self._holders: dict[str | None, Holders] = {}
        self._shut_until: dict[Place, float] = {}
        self._lines: dict[str | None, Line] = {}
        self._exhausted: dict[Demand, None] = {}
        self._saved: dict[Account, Demand] = {}
        self._changed: dict[Place, None] = {}
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
        if self._changed:
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
        for shape in found.shapes:
            pages, least = demand.pages_at(shape), line.least(shape)
            if pages is not None and (least is None or least > pages):
                return False
        return True

    def _join(self, demand: Demand, now: float) -> None:
        if (error := self._hopeless(demand)) is not None:
            raise error
        owners = [place for place in self.places if place.is_owner and place.serves(demand.model)]
        line = self._lines.get(demand.model)
        num_waiting = 0 if line is None else len(line)
        if not demand.is_again and num_waiting >= self._max_queue * max(1, len(owners)):
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
            places = (place for place in self.places if place.is_open and place.serves(model))
            found = self._open[model] = OpenPlaces(places, self._chooser)
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

        One of the two places is `at`, where that is given.
        """
        owner = self._choose(demand, True, at, now)
        if owner is None:
            return None
        peer = self._choose(demand, False, at, now)
        if peer is None:
            return None
        if self._lines:
            self._count_passing(demand, owner, peer)
        leases = tuple(self._issue(demand, owner, now) + self._issue(demand, peer, now))
        for place in (owner, peer):
            if place.trials is not None and demand.pair is None:  # a canary names its pair, and is no trial
                place.trials -= 1
                place.on_trial[demand.attempt] = None
                if place.trials <= 0 and place.is_open:
                    self._shut(place)
            place.bound(demand.attempt, demand.num_tokens)
        if demand.is_waiting:
            self._leave(demand)
        return Grant(demand, owner, peer, leases)

    def _issue(self, demand: Demand, place: Place, now: float) -> list[Lease]:
        account = place.account
        pages = demand.pages_at(place.shape) if account is not None else 0
        return [account.issue(demand.attempt, pages, now)] if account is not None and pages else []

    def _choose(self, demand: Demand, is_owner: bool, at: Place | None, now: float) -> Place | None:
        """Returns a place with room for one half of `demand`, owner or peer; None where there is none."""
        if at is not None and at.is_owner is is_owner:
            return at if self._could_use(demand, at, now) and self._has_room(demand, at) else None
        if demand.pair is not None:
            place: Place = demand.pair[0 if is_owner else 1]
            return place if self._has_room(demand, place) else None
        found = self.open_places(demand.model)
        places = found.of(is_owner)
        if not places:
            return None
        picked: Place
        if not demand.avoid:
            picked = self._chooser.pick(found.lineup(is_owner), demand)
            if self._has_room(demand, picked):
                return picked
        options = [place for place in places if self._has_room(demand, place) and self._could_use(demand, place, now)]
        if not options:
            return None
        if len(options) == len(places):
            picked = self._chooser.pick(found.lineup(is_owner), demand)
        else:
            picked = self._chooser.pick(self._chooser.line_up(options, is_lasting=False), demand)
        return picked

    def _could_use(self, demand: Demand, place: Place, now: float) -> bool:
        """Tells whether `demand` may be bound to `place` if there is room."""
        if demand.pair is not None:
            return place in demand.pair
        if not place.is_open or not place.serves(demand.model):
            return False
        if not demand.avoid and demand.tied_until <= now:
            return True
        found = self.open_places(demand.model)
        if place.name in demand.avoid and any(one.name not in demand.avoid for one in found.of(place.is_owner)):
            return False
        if demand.tied_until <= now:
            return True
        home = self._chooser.home(found.lineup(place.is_owner), demand)
        return home is None or home is place

    def _has_room(self, demand: Demand, place: Place) -> bool:
        account = place.account
        if account is None:
            return not place.is_owner
        pages = demand.pages_at(place.shape)
        if not pages:
            return pages == 0
        if self._is_settling or not account.fits(pages):
            return False
        return not self._saved or self._saved.get(account, demand) is demand

    # ── whose turn it is ────────────────────────────────────────────────────────────────────────────────────────────

    def _lines_at(self, place: Place) -> list[Line]:
        return [line for model, line in self._lines.items() if place.serves(model)]

    def _in_line_for(self, place: Place, now: float) -> Iterator[Demand]:
        """Returns the demands that wait and could use `place`, in order."""
        lines = self._lines_at(place)
        demands = iter(lines[0]) if len(lines) == 1 else merge(*lines, key=attrgetter("order"))
        return (demand for demand in demands if self._could_use(demand, place, now))

    def _longest(self, place: Place, now: float) -> Demand | None:
        """Returns the oldest of the waiting demands that could use `place`; None where there is none."""
        ages = [line.by_age() for line in self._lines_at(place)]
        by_age = ages[0] if len(ages) == 1 else merge(*ages, key=lambda demand: (demand.age, demand.serial))
        return next((demand for demand in by_age if self._could_use(demand, place, now)), None)

    def _count_passing(self, going: Demand, owner: Place, peer: Place) -> None:
        """Counts whom `going` passes as it takes pages now: at each of its accounts the demand whose turn it is, and
        the oldest.
        """
        # The time is -inf here, so that every tie holds: a demand that waits for its home is not passed elsewhere.
        turns: dict[Demand, Account] = {}
        waited: dict[Demand, Account] = {}
        for place in (owner, peer):
            account = place.account
            if account is None or not going.pages_at(place.shape):
                continue
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
            account.num_overtakes += 1
            if turn.overtakes >= self._max_overtakes:
                self._exhausted[turn] = None
        for longest, account in waited.items():
            longest.passes += 1
            account.num_passes += 1
        if self._exhausted and (turns or waited):
            self._save_up()

    def _save_up(self) -> None:
        """Gives each demand that has been passed often enough one account on each side, which is saved up for it.

        Goes in the order of their turns. A demand that does not get all accounts it needs gets none, so that no two
        demands wait for each other. A demand keeps the accounts that it has already.
        """
        before, self._saved = self._saved, {}
        for demand in sorted(self._exhausted, key=lambda one: (one.passes < self._max_passes, one.order)):
            accounts = [self._account_to_save(demand, is_owner) for is_owner in (True, False)]
            demand.saves = ()
            if None not in accounts:
                demand.saves = tuple(account for account in accounts if isinstance(account, Account))
                self._saved |= dict.fromkeys(demand.saves, demand)
        for demand in before.values():
            if not demand.is_waiting:
                demand.saves = ()
        for account in (*before, *self._saved):
            self._changed[account.place] = None

    def _account_to_save(self, demand: Demand, is_owner: bool) -> Account | bool | None:
        """Returns the account of one side that will fit `demand` soonest. Returns True where it needs none there, None
        where there is none to be had.
        """
        found = self.open_places(demand.model).of(is_owner) if demand.pair is None else [demand.pair[not is_owner]]
        places = [place for place in found if self._could_use(demand, place, -inf)]
        if any(place.account is None or demand.pages_at(place.shape) == 0 for place in places if not place.is_owner):
            return True
        accounts = [
            place.account
            for place in places
            if place.account is not None and place.account not in self._saved and _could_fit(demand, place.account)
        ]
        for account in accounts:
            if account in demand.saves:
                return account
        return min(accounts, key=lambda one: one.excess(demand.pages_at(one.place.shape) or 0), default=None)

    # ── granting ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _consider_all(self, model: str | None) -> None:
        self._changed |= {place: None for place in self.places if place.account is not None and place.serves(model)}

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
        while changed:
            place = next(iter(changed))
            is_granted = self._lines and self._grant_one(place, now)
            changed.pop(place, None)
            if is_granted:
                changed[place] = None

    def _grant_one(self, place: Place, now: float) -> bool:
        """Grants pages at `place` to one demand that may go there. Returns whether there was one."""
        account = place.account
        if account is None:
            return False
        saved = self._saved.get(account)
        if saved is not None:  # all other demands go on elsewhere
            return self._grant(saved, place, now)
        longest = self._longest(place, now)
        if longest is None:
            return False
        # The oldest demand goes before more urgent ones once these have passed it often enough.
        if longest.passes >= self._max_passes and self._grant(longest, place, now):
            return True
        if not any(self._might_fit(line, account) for line in self._lines_at(place)):
            return False
        return any(self._grant(demand, place, now) for demand in self._in_line_for(place, now))

    def _might_fit(self, line: Line, account: Account) -> bool:
        """Tells whether a demand in `line` may fit. This quick look spares a long one: False is certain, True is
        not.
        """
        least = line.least(account.place.shape)
        return line.num_special > 0 or (least is not None and account.fits(least))

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
        place.is_open = True
        self._forget_open()
        self._consider_all_of(place)
        self._pump(now)

    def close(self, place: Place, now: float, *, until: float = inf, trials: int | None = None) -> None:
        """Keeps new attempts from `place` until the time `until`. From then on `trials` of them may go. Its account and
        its leases stay.
        """
        self._shut_until.pop(place, None)
        if until < inf:
            self._shut_until[place] = until
            place.trials = trials
        for found in self._open.values():
            found.is_checked = False
        if place.is_open:
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
        new.shape = old.shape
        old.is_moved, new.is_moved = True, False
        if new.account is not None:
            new.account.place = new
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
    ) -> None:
        """Takes note that the process `incarnation` answered a look that began at `asked_at`.

        `capacity` is in pages, and 0 where no slots guard the place. `returned_before` and `lease_s` mean the same as
        in `Account.heard`. A process which is not the one of before proves that the one of before has ended.
        """
        if place.is_moved:
            place.is_up = True
            return
        is_resized = place.shape != shape
        if place.incarnation != incarnation:
            self._end(place, now)
            place.incarnation = incarnation
            is_resized, returned_before = True, None
        place.shape, place.is_up = shape, True
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
        if is_resized:
            self._forget_open()
            self._consider_all_of(place)
            self._refuse_hopeless()
        if self._is_settling:
            self._await_looks(place, now)
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
        places = [place for place in among if place.serves(demand.model)]
        for is_owner in (True, False):
            side = [place for place in places if place.is_owner is is_owner]
            if not side:
                return NotReady("no instance of this model is left", retry_after_s=RETRY_AFTER_UNKNOWN_S)
            accounts = [place.account for place in side if place.account is not None]
            if len(accounts) == len(side) and not any(_fits_ever(demand, account) for account in accounts):
                most = max(accounts, key=lambda account: account.capacity)
                most.num_never_fits += 1
                return NeverFits(demand.pages_at(most.place.shape) or 0, most.capacity)
        return None

    def _refuse_hopeless(self) -> None:
        """Refuses the demands that no place can serve any more."""
        for model, line in list(self._lines.items()):
            shapes, hopeless = self._hopeless_kinds(model, line)
            if not hopeless and not line.num_special:
                continue
            for demand in list(line):
                is_doubtful = demand.pair is not None or (bool(hopeless) and demand.kind(shapes) in hopeless)
                if is_doubtful and (error := self._hopeless(demand)) is not None:
                    self._refuse(demand, error)

    def _hopeless_kinds(
        self, model: str | None, line: Line
    ) -> tuple[tuple[Hashable, ...], set[tuple[int | None, ...]]]:
        """Returns shapes, and the kinds of demands in `line` that `_hopeless` refuses unless they have a pair.

        A kind is the pages that a demand takes at each of these shapes.
        """
        places = [place for place in self.places if place.serves(model)]
        sides: list[dict[Hashable, float]] = []
        for is_owner in (True, False):
            most: dict[Hashable, float] = {}
            for place in places:
                if place.is_owner is is_owner:
                    if place.account is None:
                        break  # it may have room for anybody
                    room = place.account.capacity if place.account.is_limited else inf
                    most[place.shape] = max(most.get(place.shape, 0), room)
            else:
                sides.append(most)
        if not sides:
            return (), set()
        shapes = tuple(dict.fromkeys(shape for most in sides for shape in most))
        hopeless = set()
        for kind in line.kinds(shapes):
            pages = {shape: num for shape, num in zip(shapes, kind, strict=True) if num is not None}
            if not all(any(num <= most.get(shape, -1) for shape, num in pages.items()) for most in sides):
                hopeless.add(kind)
        return shapes, hopeless

    def _end(self, place: Place, now: float) -> None:
        """Frees what the process at `place` held. It has certainly ended, and its memory with it."""
        account, place.account, place.incarnation = place.account, None, None
        if account is not None:
            for lease in list(account.leases):
                self._free(lease, _ENDED, now)
            if account in self._saved:
                self._save_up()
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
        return sum(len(line) for line in self._lines.values())

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
            if place.account is not None and place.is_open and (demand := self._stuck(place, now)) is not None:
                raise IntegrityError(f"{demand!r} could go to {place.account!r} and was not woken")

    def _stuck(self, place: Place, now: float) -> Demand | None:
        """Returns a demand in line that could be bound to `place` this instant; None where there is none."""
        for demand in self._in_line_for(place, now):
            if not self._has_room(demand, place):
                continue
            others = demand.pair if demand.pair is not None else self.open_places(demand.model).of(not place.is_owner)
            sides = [other for other in others if other.is_owner is not place.is_owner]
            if any(self._has_room(demand, other) and self._could_use(demand, other, now) for other in sides):
                return demand
        return None
