"""Instance is one place where an engine runs, as the proxy knows it: what was said there, and whether it gets requests.

Being down is a judgement of its health. The proxy then sends no new attempts there and cuts the legs that say nothing.
That proves nothing about pages: the process may live on with all that it holds. A process has ended when another one
answers in its place. Changes of health and facts are plain functions here; the probe decides when to look at which
instance.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import Any, Final

from pdproxy.admission.account import Place
from pdproxy.admission.admission import Admission, AdmissionStatistics
from pdproxy.admission.revision import NAME, Revision, same
from pdproxy.aio.deadline import Deadline, MakeError
from pdproxy.config.instances import InstanceSettings
from pdproxy.engines.adapter import Adapter, MalformedReply
from pdproxy.engines.http.base import EngineClient
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.traits import KvReady, ReleaseSignal
from pdproxy.fleet.breaker import Breaker, BreakerLimits, BreakerState
from pdproxy.fleet.exchanges import Exchanges
from pdproxy.fleet.hysteresis import Hysteresis
from pdproxy.fleet.pace import Pace
from pdproxy.fleet.page_count import Shapes, check_groups, longest_prompt
from pdproxy.fleet.slow_start import SlowStart
from pdproxy.kv_events.index import KvIndex, PromptBlocks, Trust
from pdproxy.kv_events.subscriber import Subscriber
from transfer.errors import GeometryError
from transfer.geometry import PageGroup
from transfer.logs import printable

OnEnded = Callable[[str, str], object]
"""A function that is told the epoch of a process that has certainly ended, and how that is known. Must not raise."""

MAX_TOLD_CHARS: Final = 1024
"""The most characters of a name that an engine tells: of its model, say, or of its process."""
MAX_WHY_BYTES: Final = 4096
MARK: Final = "~"
"""The character before the mark of a process that was told from the one before by its counts."""
START_S = 60.0
"""Seconds for which an instance of a fleet that starts may be away before its counterparts serve alone."""
SILENT_S: Final = 1.0
"""Seconds without a sign of life after which work that relies on an instance that is down is cut short."""
ENGINE: Final = "engine"
"""The term of a revision that holds the kind of the engine."""
_FAULTS: Final = frozenset({"failed", "timed_out"})
_CLOSED: Final = BreakerState.CLOSED


class Health(StrEnum):
    UNKNOWN = "unknown"
    """The instance has never answered."""
    ALIVE = "alive"
    """The instance answers, but no request has been seen to go through it."""
    READY = "ready"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """HealthPolicy says how patient the proxy is with an instance."""

    misses: int = 3
    """Looks in a row without an answer after which the instance is down; a refused connection is enough by itself."""
    successes: int = 2
    """Looks in a row with an answer after which the instance is up again."""
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    slow_start: SlowStart = field(default_factory=lambda: SlowStart(ramp_s=0.0))


@dataclass(frozen=True, slots=True)
class Look:
    """Look notes when an instance was asked how it is, and how many pages had come back from it until then."""

    asked_at: float
    returned_before: int | None
    term: int | None = None
    """The term that the instance is told, if it knows terms; None for none."""


class Reliance:
    """``with instance.relied_on(limit, error):`` guards a block of work that relies on the instance.

    While the block lasts, `limit` raises `error` in it once the instance is down and says nothing for `SILENT_S`
    seconds. The block can be entered once.

    A refused connection makes an instance down too, though everything under way there may go on. So the block is not
    cut as long as it makes `limit` wait anew, nor where the instance has answered meanwhile.

    Mutable state: the timer, once the instance was found to be down.
    """

    __slots__ = ("_error", "_instance", "_limit", "_timer")

    def __init__(self, instance: Instance, limit: Deadline, error: MakeError) -> None:
        self._instance = instance
        self._limit = limit
        self._error = error
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._instance.reliances[self] = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._instance.reliances[self]
        if self._timer is not None:
            self._timer.cancel()

    def doubt(self) -> None:
        """Starts the timer: the instance was found to be down, perhaps not for the first time."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SILENT_S, self._look, self._limit.due_at)

    def cut(self, error: Exception) -> None:
        """Raises `error` in the block."""
        self._limit.wait(0.0, error)

    def _look(self, due_at: float) -> None:
        self._timer = None
        if self._instance.is_up:
            return
        if self._limit.due_at == due_at:
            self._limit.wait(0.0, self._error)
        else:
            self.doubt()


class Prefilling:
    """``with instance.prefilling(num_tokens) as prefilled:`` counts that many prompt tokens as queued at the instance.

    They count as long as the block lasts, or until ``prefilled()`` is called. Either says that the prompt was read; a
    block that ends with an error does not. The block can be entered once. Tokens that count because `attempt` was bound
    to the instance are among them.
    """

    __slots__ = ("_attempt", "_instance", "_num_tokens")

    def __init__(self, instance: Instance, num_tokens: int, attempt: str) -> None:
        self._instance = instance
        self._num_tokens = num_tokens
        self._attempt = attempt

    def __enter__(self) -> Prefilling:
        if further := self._num_tokens - self._instance.hand_over(self._attempt):
            self._instance.queue(further)
        return self

    def __call__(self) -> None:
        """Takes the tokens off the queue: the prompt has been read. Idempotent."""
        num_tokens, self._num_tokens = self._num_tokens, 0
        self._instance.queue(-num_tokens, num_tokens)

    def drop(self) -> None:
        """Takes the tokens off the queue: the prompt has not been read, as far as is known. Idempotent."""
        num_tokens, self._num_tokens = self._num_tokens, 0
        self._instance.queue(-num_tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self()
        else:
            self.drop()


class UnlikeConfigured(MalformedReply):
    """`UnlikeConfigured` says that an instance is not what the configuration says of it. `field` is the name of the
    field which differs."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Instance(Place):
    """Instance is the engine that `settings` name. `is_newcomer`: it joins others that are at work, so that it starts
    slowly. `serves_alone`: requests may be answered by it alone while no instance of the other role is there.

    Implements `candidate.Candidate`.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        *,
        client: EngineClient,
        adapter: Adapter,
        admission: Admission,
        shapes: Shapes | None = None,
        care: HealthPolicy | None = None,
        on_ended: OnEnded = lambda epoch, why: None,
        is_newcomer: bool = False,
        serves_alone: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        care = care or HealthPolicy()
        is_owner = adapter.traits.page_owner == settings.role
        super().__init__(settings.name, is_owner=is_owner, is_writer=settings.role == "decode")
        self.serves_alone = serves_alone
        self.is_expected = not is_newcomer
        self.settings = settings
        self.role, self.url = settings.role, settings.url
        self.client = client
        self.adapter = adapter
        self.revision = self.revision_of(None)
        self.admission = admission
        self._shapes = shapes or Shapes()
        self.on_change: Callable[[], object] = lambda: None
        """Called when the instance may serve others than before, though no time has passed; must not raise."""
        self.on_news: Callable[[], object] = lambda: None
        """Called when anything may have changed that requests go by: facts, health, doubts, the breaker; must not
        raise."""
        self.look_lock = asyncio.Lock()
        """Lets one look happen at a time: an answer of an ended process must not be heard after its successor's
        answer."""
        self.suspected = asyncio.Event()
        """Set when the instance is to be looked at now."""
        self.kv_events: Subscriber | None = None
        """The subscriber to its KV events, which knows what is in its prefix cache; None where it publishes none."""
        self.breaker = Breaker(settings.name, settings.role, care.breaker, clock)
        """The circuit breaker of the leg that the instance serves."""
        self.breaker.on_change = self._changed
        self.exchanges = Exchanges(settings.name)
        """Tells with which peers KV cannot be exchanged, and which side that speaks against."""
        self.pace: Pace | None = None
        """Tells how fast the process reads prompts, and what a handoff to it takes; None where nobody asks for that."""
        self._slow_start = care.slow_start
        self._on_ended = on_ended
        self._clock = clock
        # State: health and why, which process was proven; what it said of itself, and when it was last heard; attempts
        # bound to it, legs under way, and prompt tokens on them that are not prefilled yet; who relies on it.
        self.health = Health.UNKNOWN
        self.why = "not asked yet"
        self.facts: EngineInfo | None = None
        self.remarks: dict[str, Any] = {}
        """The facts about the instance that other parts of the proxy add to the status page."""
        self.heard_at = self._since = clock()
        self.num_attempts = 0
        self.num_legs = 0
        self.queued_tokens = 0
        self._bound_tokens: dict[str, int] = {}
        self.reliances: dict[Reliance, None] = {}
        self._proven_epoch: str | None = None
        self.is_proven_alone = False
        """Tells that the process was proven by a request that it answered alone, and by none that brought KV."""
        self._counts: tuple[float, ...] = ()
        # State: whether it answers, all in all; since when it is back; whether somebody has reason to doubt that it is
        # well, and whether it is being looked at because of that; whether being ready would be a return; whether it
        # shall get no new attempts.
        self._answers = Hysteresis(misses=care.misses, successes=care.successes, is_up=True)
        self._recovered_at: float | None = None
        self._is_doubtful = False
        self._is_examined = False
        self._is_return = is_newcomer
        self._is_returning = False
        self.is_draining = False

    @property
    def is_ready(self) -> bool:
        return self.health is Health.READY

    @property
    def _is_starting(self) -> bool:
        """Tells whether the instance may still be starting together with the proxy."""
        return not self._is_return and self._clock() - self._since < START_S

    @property
    def is_routable(self) -> bool:
        """Tells whether a new attempt may be sent to the instance now."""
        return self.is_ready and not self.is_draining and self.breaker.allows()

    @property
    def is_doubted(self) -> bool:
        """Tells whether the last look at the instance spoke against its present state."""
        return self._answers.is_doubted

    @property
    def is_suspected(self) -> bool:
        """Tells whether somebody had reason to doubt that the instance is well, and no look has told yet."""
        return self._is_doubtful or self._is_examined

    @property
    def is_idle(self) -> bool:
        """Tells whether nothing is bound to the instance, under way there or held there."""
        return self.num_attempts == self.num_legs == self.held == 0

    @property
    def is_silent(self) -> bool:
        """Tells whether the instance has been down for so long that its process, if it lives, has dropped by itself
        what it held."""
        return self.health is Health.DOWN and self._clock() - self.heard_at > self.adapter.traits.lease_s

    @property
    def weight(self) -> float:
        """The part of a full share of requests, 0 to 1, that the instance should get."""
        if self._recovered_at is None:
            return 1.0
        return self._slow_start.weight(self._recovered_at, self._clock())

    @property
    def epoch(self) -> str | None:
        return None if self.facts is None else self.facts.epoch

    @property
    def known_facts(self) -> EngineInfo:
        """The facts that the instance told of itself. Raises `RuntimeError` where it has never answered."""
        if self.facts is None:
            raise RuntimeError(f"{self!r} has told nothing yet")
        return self.facts

    @property
    def num_unnamed_ranks(self) -> int:
        """The number of data-parallel ranks among which the engine itself chooses."""
        return 1 if self.facts is None or self.settings.data_parallel_rank is not None else self.facts.num_ranks

    def is_same_kind(self, other: Instance) -> bool:
        """Tells whether KV pages mean the same at both: they play the same role with the same kind of engine."""
        return self.role == other.role and self.adapter.name == other.adapter.name

    def is_known_for(self, model: str | None) -> bool:
        """Tells whether the instance named `model` in its last answer, or is configured for it."""
        return model is not None and (model in self.models or model == self.settings.model)

    def misfit(self, other: Instance) -> str | None:
        """Returns why KV of one of them means nothing to the other; None where nothing is known that speaks against
        it."""
        what = self.revision.difference(other.revision)
        if what is None:
            return None
        ours, theirs = self.revision.terms[what], other.revision.terms[what]
        if what == ENGINE:
            return f"it does not fit {other.name}: it is {ours}, {other.name} is {theirs}"
        return f"it does not fit {other.name}: its {what} is {ours or 'none'}, {other.name}'s is {theirs or 'none'}"

    def revision_of(self, facts: EngineInfo | None) -> Revision:
        """Returns what a process with these facts must have in common with its counterparts. Before it has told any,
        that is the kind of its engine and the operator's name of its revision."""
        agreement = {} if facts is None else facts.agreement
        return same(Revision({ENGINE: self.adapter.name, NAME: self.settings.revision or "", **agreement}))

    # ── load, as routing sees it ────────────────────────────────────────────────────────────────────────────────────

    @property
    def held(self) -> int:
        """Number of pages held by leases; 0 where no slots guard the instance's memory."""
        return 0 if self.account is None else self.account.held

    @property
    def capacity(self) -> int:
        return 0 if self.facts is None else self.facts.num_pages

    @property
    def resident_share(self) -> float:
        """The share of the KV cache that is in use or promised; where its size is not known, the number of tokens."""
        residency = self.residency
        return residency.used / residency.capacity if residency.capacity else residency.used

    def cached_tokens(self, prompt: PromptBlocks) -> int | None:
        """Returns how many tokens of `prompt` the instance has in its prefix cache; None where that is not known
        exactly."""
        index = self._exact_index
        return None if index is None else index.cached_tokens(prompt, self._adapter_of(prompt.model))

    def has_cached(self, prompt: PromptBlocks) -> bool:
        """Tells whether the instance is known to have all of `prompt` in its prefix cache but the last block."""
        index = self._exact_index
        return index is not None and index.has_all(prompt, self._adapter_of(prompt.model))

    @property
    def _exact_index(self) -> KvIndex | None:
        """The index of the instance's prefix cache; None where that does not tell exactly what a request finds."""
        if self.kv_events is None or not self.kv_events.index.is_exact or self.num_unnamed_ranks > 1:
            return None
        return self.kv_events.index

    def _adapter_of(self, model: str | None) -> str:
        """Returns the LoRA adapter that requests for `model` use; empty where they use none."""
        cards = () if self.facts is None or model is None else self.facts.cards
        return next((card.id for card in cards if card.id == model and card.parent is not None), "")

    @property
    def has_foreign_pages(self) -> bool:
        """Tells whether pages are in use there that no lease explains. They lower the limit until a look finds them
        gone."""
        return self.account is not None and self.account.foreign > 0

    @property
    def grants(self) -> bool:
        """Tells whether pages there are granted at all by now. They are not, while others may claim them."""
        return self.account is None or self.account.is_sure or not self.account.is_limited

    @property
    def pages(self) -> AdmissionStatistics | None:
        """The numbers of the instance's slots; None where it has no slots, or was never heard."""
        return None if self.account is None else self.admission.statistics(self)

    def watch(self, touched: dict[Any, None]) -> None:
        """Makes the instance put itself into `touched` whenever its load changes, from now on."""
        self.watched_by += (touched,)

    def unwatch(self, touched: dict[Any, None]) -> None:
        """Stops what `watch` began: the instance no longer puts itself into `touched`."""
        self.watched_by = tuple(other for other in self.watched_by if other is not touched)

    # ── health ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def asked(self) -> Look:
        """Begins a look at the instance. Returns its time and the pages that have come back until now."""
        returned_before = None if self.account is None else self.account.returned_total
        return Look(self.admission.now(), returned_before, self.admission.told_term)

    def heard(self, facts: EngineInfo, look: Look | None = None) -> None:
        """Takes in the answer to the `look` (one that has just begun, where none is given).

        A new epoch is a new process: its memory is empty, and it has to be proven anew. Raises `MalformedReply`, and
        changes nothing, where the facts do not fit the role or the configuration.
        """
        counts = facts.counts if facts.epoch is None else ()
        if facts.epoch is None:
            facts = replace(facts, epoch=self._epoch_by(counts))
        elif self.adapter.traits.freed is not ReleaseSignal.SIGNALS:
            # As a rule such an epoch is a start time, which the process of another instance may share.
            facts = replace(facts, epoch=f"{self._address}-{facts.epoch}")
        self._check(facts)
        self._counts = counts
        is_new = self.epoch != facts.epoch
        if is_new and self.is_ready:  # so that nothing is bound to an unproven process
            self._is_returning = True
            self._become(Health.ALIVE, "it was restarted, and no canary has gone through it yet")
            self._is_returning = False
        if is_new and self.epoch is not None:
            self._on_ended(self.epoch, f"{self.name}: it was restarted")
            if self.kv_events is not None:
                self.kv_events.restarted()
            self.breaker.reset()
            self.exchanges.forget()
            if self.pace is not None:
                self.pace.forget()
        serves_others = self.models != facts.models
        is_resized = self.capacity != facts.num_pages
        self.facts, self.heard_at = facts, self._clock()
        if is_resized:
            self.touch()
        self.admission.serve(self, facts.models)
        self._tell_admission(facts, look or self.asked())
        if serves_others:
            self._changed()
        self._answers.succeeded()
        if not self._answers.is_up:
            self._become(Health.DOWN, "it answers again, and has to do so a few times in a row")
        elif self._proven_epoch == facts.epoch:
            self._become_ready()
        elif is_new or self.health is not Health.ALIVE:
            self._become(Health.ALIVE, "no canary has gone through it yet")
        self.on_news()

    @property
    def _address(self) -> str:
        """The part of an epoch that no instance elsewhere shares."""
        return "#".join(str(part) for part in self.settings.place if part is not None)

    def _epoch_by(self, counts: tuple[float, ...]) -> str:
        """Returns an epoch for the process that has counted so far, and says nothing else that tells it from others.

        It is the process of before, unless all that had been counted is less now. (After a restart it is nothing at
        all, until the first request. One count alone might have been read while it was written.) The first process
        that an observer sees has no mark, so that all observers have one epoch for it.
        """
        before = zip(self._counts, counts, strict=False)
        fell = [now < then for then, now in before if then > 0]
        if fell and all(fell):
            return f"{self._address}{MARK}{secrets.token_hex(4)}"
        known = self.epoch or self.incarnation
        return known if known is not None and self._is_marked(known) else self._address

    def _is_marked(self, epoch: str) -> bool:
        return epoch.startswith(self._address + MARK)

    def is_another(self, now: str | None, then: str | None) -> bool:
        """Tells whether the process `now`, of an observer's last word, is certainly not the process `then`, of which
        this observer or one before it has told. An observer cannot tell of the first process that it sees whether one
        before it had seen that process already."""
        return now != then and not (now == self._address and then is not None and self._is_marked(then))

    def _tell_admission(self, facts: EngineInfo, look: Look) -> None:
        assert facts.epoch is not None
        self.admission.heard(
            self,
            facts.epoch,
            shape=self._shapes.of(facts, self.adapter),
            capacity=facts.num_pages if self.is_owner else 0,
            occupied=facts.num_occupied,
            asked_at=look.asked_at,
            returned_before=look.returned_before,
            lease_s=self.adapter.traits.lease_s,
            cache=facts.cache,
            revision=self.revision_of(facts),
        )

    def proven(self, *, is_alone: bool = False) -> None:
        """Notes that a request went through the instance, which stays true as long as its process lives. `is_alone`:
        without a counterpart, so that nothing is known of its KV's way."""
        self._proven_epoch, self.is_proven_alone = self.epoch, is_alone
        self._become_ready()
        self.on_news()

    def disproven(self, why: str) -> None:
        """Notes that the instance, which was proven alone, cannot exchange KV with a counterpart that can with
        others."""
        self._proven_epoch = None
        self._become(Health.ALIVE, why)

    def proven_before(self, epoch: str, *, is_alone: bool = False) -> None:
        """Notes that another proxy has seen a request go through the process `epoch`, which may be there now. For
        `is_alone`, see `proven`."""
        if not self.is_ready:
            self._proven_epoch, self.is_proven_alone = epoch, is_alone
            if self.epoch == epoch and self.health is Health.ALIVE:
                self._become_ready()

    def no_longer_expected(self) -> None:
        """Notes that the instance has had its time to become ready. While it is not, its counterparts may serve
        alone."""
        if self.is_expected and not self.is_ready and not self._is_starting:
            self.admission.close(self)
            self.on_news()

    def missed(self, why: str) -> None:
        """Notes that the instance did not answer in time. That happens; if it goes on, the instance is down."""
        if self._answers.missed():
            self._go_down(why)
        elif self.health is Health.DOWN:
            self._go_down(self.why)
        elif not self.is_ready:
            self.why = why
        self.on_news()

    def lost(self, why: str) -> None:
        """Notes that the instance does not answer, or not as it should, and is down."""
        self._answers.fell()
        self._go_down(why)

    def _go_down(self, why: str) -> None:
        self.admission.kernel.lost(self)
        self._become(Health.DOWN, why)
        for reliance in list(self.reliances):
            reliance.doubt()

    def suspect(self, why: str, *, is_lost: bool) -> None:
        """Asks for a look at once, because a leg met a fault. `is_lost`: nobody listens there, so the instance is down
        already."""
        if is_lost:
            self.lost(why)
        self._is_doubtful = True
        self.look_soon()
        self.on_news()

    def look_soon(self) -> None:
        """Asks for a look at once, which need not mean that anything is wrong."""
        self.suspected.set()

    def relied_on(self, limit: Deadline, error: MakeError) -> Reliance:
        """Returns a block for a ``with``: `limit` cuts it short, with `error`, where this instance is down and says
        nothing for `SILENT_S` seconds."""
        return Reliance(self, limit, error)

    def accuse(self, epoch: str | None, why: str) -> bool:
        """Notes that a peer met a fault with this instance's process `epoch`, and either of the two may be to blame.
        Returns whether this instance is in doubt already; else it is suspected from now on.

        An instance in doubt is being looked at anyway. If it were suspected anew each time, the doubt might never end,
        and a peer that is at fault would never be blamed.
        """
        is_well = self.is_ready and not self.is_doubted and not self.is_suspected
        if not is_well or self.epoch != epoch:
            return True
        self.suspect(why, is_lost=False)
        return False

    def blame(self, epoch: str | None, era: int, attempt: str, why: str) -> None:
        """Counts a fault of this instance's process `epoch` that a peer met before any leg of `attempt` was sent here.
        `era` is the breaker's when the attempt was begun."""
        if self.epoch != epoch:
            return
        self.on_trial.pop(attempt, None)  # from here on the breaker counts it
        self.breaker.blamed(era)
        if not self.is_suspected:
            self.suspect(why, is_lost=False)

    def examine(self) -> None:
        """Notes that a look at the instance begins, which answers the suspicions there are."""
        self._is_examined, self._is_doubtful = self._is_doubtful, False
        self.suspected.clear()
        self.on_news()

    def examined(self) -> None:
        """Notes that a look at the instance has ended. Idempotent."""
        self._is_examined = False
        self.on_news()

    def drain(self) -> None:
        """Ends the sending of new attempts; those under way go on."""
        self.is_draining = True
        self._changed()

    def resume(self) -> None:
        """Undoes `drain`."""
        self.is_draining = False
        self._changed()

    # ── work ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def bound(self, attempt: str, num_tokens: int) -> None:
        """Counts an attempt that was bound to the instance and will call `unbound`. The tokens that it is to read there
        count as queued from now on, so that not all who are granted at once go to one: until its leg, which counts them
        itself, or its end."""
        self.num_attempts += 1
        if self.pace is not None:
            self.pace.residents_changed(self.residency.tokens, self._clock())
        if num_tokens:
            self._bound_tokens[attempt] = num_tokens
            self.loaded(0, num_tokens)

    def hand_over(self, attempt: str) -> int:
        """Returns the tokens that are queued because the attempt was bound. Whoever calls this answers for them."""
        return self._bound_tokens.pop(attempt, 0)

    def _unqueue(self, attempt: str) -> None:
        """Takes off the queue what was put there because the attempt was bound. Idempotent."""
        if num_tokens := self._bound_tokens.pop(attempt, 0):
            self.queue(-num_tokens)

    def unbound(self, attempt: str) -> None:
        """Notes that `attempt` is over; the reaper takes care of what it has left behind."""
        self.num_attempts -= 1
        self._unqueue(attempt)
        if self.pace is not None and (stay := self.residency.stays.get(attempt)) is not None:
            # Before another answer gets that room at once.
            self.pace.residents_changed(self.residency.tokens - stay.tokens, self._clock(), stay.tokens)
        self.admission.vacate(self, attempt)
        super().unbound(attempt)
        if self.trials is not None:
            self._refresh()

    def leg_started(self, attempt: str = "") -> int:
        """Notes that a leg of `attempt` is sent to the instance. Returns what `leg_finished` must be given."""
        self.num_legs += 1
        self._unqueue(attempt)
        self.on_trial.pop(attempt, None)  # from here on the breaker counts it
        if self.watched_by:
            self.touch()
        return self.breaker.started()

    def leg_finished(self, era: int, outcome: str) -> None:
        """Notes the end of a leg; `outcome` is as in `LegObserver.leg_finished`. Some outcomes say nothing of the
        instance's health: backpressure, 4xx, what the proxy closed, what came of a leader that was replaced, and KV
        that did not reach a peer in doubt."""
        self.num_legs -= 1
        if self.watched_by:
            self.touch()
        if outcome == "ok":
            self.breaker.succeeded(era)
        elif outcome in _FAULTS:
            self.breaker.failed(era)
        elif outcome == "not_tried":
            self.breaker.not_tried(era)

    def prefilling(self, num_tokens: int, attempt: str = "") -> Prefilling:
        """Returns a block for a ``with``: so many prompt tokens of `attempt` count as queued here as long as it lasts,
        or until what it yields is called."""
        return Prefilling(self, num_tokens, attempt)

    def queue(self, num_tokens: int, num_read: int = 0) -> None:
        """Adds `num_tokens` prompt tokens, or takes them off where negative, to those that wait for prefill; `num_read`
        of them have been read. `Prefilling` calls it."""
        self.loaded(0, num_tokens, num_read)

    def loaded(self, num_legs: int, num_tokens: int, num_read: int = 0) -> None:
        """Adds legs, and prompt tokens that wait for prefill, or takes them off where negative; `num_read` of them have
        been read. The breaker is told of legs by whoever counts them so."""
        self.num_legs += num_legs
        self.queued_tokens += num_tokens
        if self.pace is not None and (num_tokens or num_read):
            self.pace.queue_changed(self.queued_tokens, num_read, self._clock())
        if self.watched_by:
            self.touch()

    @property
    def read_tokens_per_s(self) -> float | None:
        """The prompt tokens that the process reads per second, as measured; None where nobody knows."""
        return None if self.pace is None else self.pace.tokens_per_s(self._clock())

    @property
    def handoff_s(self) -> float | None:
        """The seconds from a prefill's end to this decoder's first token, as measured; None where nobody knows."""
        return None if self.pace is None else self.pace.handoff_s(self._clock())

    def handed_over(self, num: int, seconds: float) -> None:
        """Notes `num` handoffs to this decoder, which took so many seconds together; `Pace` explains them."""
        if self.pace is not None:
            self.pace.handed_over(num, seconds, self._clock())

    def status(self) -> dict[str, Any]:
        """Returns what the status page shows of the instance."""
        facts = self.facts
        told: dict[str, Any] = {
            "name": self.name,
            "role": self.role,
            "url": self.url,
            "engine": self.adapter.name,
            "state": self.health.value,
            "why": self.why,
            "draining": self.is_draining,
            "routable": self.is_routable,
            "weight": round(self.weight, 3),
            "breaker": self._breaker_status(),
            "epoch": self.epoch,
            "models": sorted(self.models),
            "revision": self.revision.label,
            "legs": self.num_legs,
            "queued_tokens": self.queued_tokens,
        }
        if self.settings.data_parallel_rank is not None:
            told["data_parallel_rank"] = self.settings.data_parallel_rank
        if facts is not None and self.is_owner:
            told |= {
                "page_bytes": facts.page_bytes,
                "chunk_size": facts.chunk_size,
                "ranks": len(facts.receivers),
                "max_prompt_tokens": longest_prompt(facts),
                "windowed": facts.windowed,
                "page_groups": [_group_status(group) for group in facts.groups],
            }
        if self.is_writer:
            told |= self._residency_status()
        return (
            told | self._pace_status() | {"kv_events": self._kv_events_status()} | self.remarks | self._pages_status()
        )

    def _pace_status(self) -> dict[str, Any]:
        """Returns what was measured of its speed, as far as that is known."""
        tokens_per_s, handoff_s = self.read_tokens_per_s, self.handoff_s
        told: dict[str, Any] = {}
        if tokens_per_s is not None:
            told["read_tokens_per_s"] = round(tokens_per_s, 1)
        if handoff_s is not None:
            told["handoff_s"] = round(handoff_s, 4)
        return told

    def _kv_events_status(self) -> dict[str, Any]:
        if self.kv_events is None:
            return {"state": Trust.OFF.value, "why": "no kv_events address is configured"}
        status = self.kv_events.index.status()
        if self.num_unnamed_ranks > 1 and status["state"] == Trust.EXACT.value:
            why = f"{self.num_unnamed_ranks} data-parallel ranks are behind its address, and the engine chooses one"
            status |= {"state": Trust.APPROXIMATE.value, "why": why}
        return status | {"why": printable(status["why"], MAX_WHY_BYTES)}

    def _residency_status(self) -> dict[str, Any]:
        residency = self.residency
        told: dict[str, Any] = {
            "resident_tokens": residency.used,
            "shared_tokens": residency.shared,
            "foreign_tokens": residency.foreign,
        }
        if residency.capacity is not None:
            told["kv_cache_tokens"] = residency.capacity
        return told

    def _breaker_status(self) -> dict[str, Any]:
        statistics = asdict(self.breaker.statistics())
        return {name: value for name, value in statistics.items() if name != "instance"}

    def _pages_status(self) -> dict[str, Any]:
        pages = self.pages
        if pages is None or self.facts is None:
            return {}
        told: dict[str, Any] = {
            "capacity": self.facts.num_pages,
            "held": pages.held,
            "free": max(0, self.facts.num_pages - pages.held - pages.foreign),
            "queue": pages.num_waiting,
            "queued_pages": pages.waiting_pages,
            "granted": pages.granted_total,
            "returned": pages.returned_total,
            "foreign": pages.foreign,
            "orphaned": pages.orphaned,
        }
        return told if pages.occupied is None else told | {"occupied": pages.occupied}

    def _become_ready(self) -> None:
        if not self._answers.is_up:
            return
        if not self.is_ready and self._is_return:
            self._recovered_at = self._clock()
        self._is_return = True
        self._become(Health.READY, "")

    @property
    def why(self) -> str:
        """The reason for the instance's health, which may be the engine's own words."""
        return self._why

    @why.setter
    def why(self, why: str) -> None:
        self._why = printable(why, MAX_WHY_BYTES)

    def _become(self, health: Health, why: str) -> None:
        self.why = why
        if health is not self.health:
            self.health = health
            self._changed()

    def _changed(self) -> None:
        self.on_news()  # which must be known where somebody is bound because of it
        self._refresh()
        self.on_change()
        self.on_news()

    def _refresh(self) -> None:
        """Tells the admission whether new attempts may come here."""
        breaker = self.breaker
        if not self.is_ready or self.is_draining:
            may_come = self.health in (Health.UNKNOWN, Health.ALIVE) or self._is_starting
            is_expected = (self.is_expected or self._is_returning) and may_come and not self.is_draining
            self.admission.close(self, is_expected=is_expected)
        elif breaker.state is _CLOSED:
            self.on_trial.clear()  # whose legs vote in no later era
            self.admission.open(self)
        elif breaker.allows():
            if (trials := breaker.trials_left - len(self.on_trial)) > 0:
                self.admission.open(self, trials=trials)
            else:
                # All that may pass are bound and have sent nothing yet. `unbound` looks again, because `trials` is set.
                self.trials = 0
                self.admission.close(self)
        else:
            self.admission.close(self, until=breaker.allows_at, trials=breaker.max_trials)

    def _check(self, facts: EngineInfo) -> None:
        settings, models = self.settings, facts.models
        for told in (facts.epoch, facts.bootstrap, *models, *facts.agreement, *facts.agreement.values()):
            if told is not None and not (told.isprintable() and len(told) <= MAX_TOLD_CHARS):
                raise MalformedReply(f"it tells a name that is too long or cannot be printed: {told[:40]!r}")
        if facts.role not in (None, self.role):
            raise UnlikeConfigured("role", f"it is configured for {self.role} and says it is for {facts.role}")
        if settings.chunk_size is not None and facts.chunk_size not in (None, settings.chunk_size):
            raise UnlikeConfigured(
                "chunk_size", f"its chunk_size is {facts.chunk_size}, and {settings.chunk_size} is configured"
            )
        if settings.model is not None and models and settings.model not in models:
            raise UnlikeConfigured(
                "model", f"its model is {', '.join(sorted(models))}, and {settings.model} is configured"
            )
        if self.is_owner:
            self._check_pages(facts)
        if self.role == "decode" and self.adapter.traits.ready is KvReady.SIGNALS:
            self._check_receivers(facts)

    def _check_pages(self, facts: EngineInfo) -> None:
        if facts.num_pages < 1:
            raise MalformedReply(f"it has {facts.num_pages} pages for KV")
        try:
            check_groups(facts)
        except GeometryError as error:
            raise MalformedReply(f"its pages cannot be counted: {error}") from None

    def _check_receivers(self, facts: EngineInfo) -> None:
        """Checks the receivers and their ports. Ranks may share a receiver, and with it a port. Raises
        `MalformedReply`."""
        ports = tuple(dict.fromkeys(receiver.port for receiver in facts.receivers))
        expected = self.settings.receiver_ports
        if not ports:
            raise MalformedReply("it has 0 receivers")
        if expected and sorted(expected) != sorted(ports):
            raise UnlikeConfigured("receiver_ports", f"its receivers listen on {ports}, and {expected} are configured")

    def __repr__(self) -> str:
        return f"<Instance {self.name} ({self.role}): {self.health}{', ' if self.why else ''}{self.why}>"


def _group_status(group: PageGroup) -> dict[str, Any]:
    """Returns the fields of a page group for the status page, without those that do not apply to its kind of layer."""
    return {name: value for name, value in asdict(group).items() if name == "num_layers" or value}
