"""One engine process as the proxy knows it: where it is, what it said of itself, whether it may get requests.

Changes of health and facts are plain functions here; who looks and when is the probe's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import Any

from pdproxy.admission.base import Admission
from pdproxy.config import InstanceSettings
from pdproxy.engines.base import Adapter, EngineClient, Facts, Freed, KvReady, MalformedReply
from pdproxy.flag import Flag
from pdproxy.fleet.breaker import Breaker, BreakerLimits
from pdproxy.fleet.hysteresis import Hysteresis
from pdproxy.fleet.paging import check_groups, longest_prompt
from pdproxy.fleet.slow_start import SlowStart
from transfer.errors import GeometryError
from transfer.geometry import PageGroup

MakeAdmission = Callable[[str, int], Admission]
"""Instance name and pages of the memory that slots guard there → what grants them."""
OnGone = Callable[[str, str], object]
"""Is told the epoch of a process that has certainly gone, and how that is known. Must not raise."""

_FAULTS = frozenset({"failed", "timed_out"})


class Health(StrEnum):
    UNKNOWN = "unknown"
    """Has never answered."""
    ALIVE = "alive"
    """Answers, but no request has been seen to go through it."""
    READY = "ready"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """How patient the proxy is with an instance."""

    misses: int = 3
    """Looks in a row without an answer after which it is down; a refused connection is enough by itself."""
    successes: int = 2
    """Looks in a row with an answer after which it is up again."""
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    slow_start: SlowStart = field(default_factory=lambda: SlowStart(ramp_s=0.0))


class Prefilling:
    """``with instance.prefilling(num_tokens) as prefilled:`` as long as the block lasts, or until ``prefilled()``, so
    many prompt tokens count as queued there. To be entered once."""

    __slots__ = ("_instance", "_num_tokens")

    def __init__(self, instance: Instance, num_tokens: int) -> None:
        self._instance = instance
        self._num_tokens = num_tokens

    def __enter__(self) -> Prefilling:
        self._instance.queue(self._num_tokens)
        return self

    def __call__(self) -> None:
        """The prompt has been read. Idempotent."""
        num_tokens, self._num_tokens = self._num_tokens, 0
        self._instance.queue(-num_tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self()


class Instance:
    """The engine that `settings` name. `is_newcomer`: it joins others that are at work, so that it starts slowly.

    Implements `base.Candidate`.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        *,
        client: EngineClient,
        adapter: Adapter,
        make_admission: MakeAdmission,
        care: Care | None = None,
        on_gone: OnGone = lambda epoch, why: None,
        is_newcomer: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        care = care or Care()
        self.settings = settings
        self.name, self.role, self.url = settings.name, settings.role, settings.url
        self.client = client
        self.adapter = adapter
        self.is_keeper = adapter.manner.keeper == self.role
        """It is its memory that slots guard."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when it may serve others than before, though no time has passed; must not raise."""
        self.suspected = asyncio.Event()
        """Somebody has reason to doubt that it is well: look at it now."""
        self.breaker = Breaker(settings.name, settings.role, care.breaker, clock)
        """Of the leg that it serves."""
        self.breaker.on_change = self._changed
        self._make_admission = make_admission
        self._slow_start = care.slow_start
        self._on_gone = on_gone
        self._clock = clock
        # State: health and why, which process was proven, and how many there were; what it said of itself; the pages
        # of a keeper; legs under way, and prompt tokens on them that are not prefilled yet; who is told of load.
        self.health = Health.UNKNOWN
        self.why = "not asked yet"
        self.facts: Facts | None = None
        self.remarks: dict[str, Any] = {}
        """What others have to say of it on the status page."""
        self.models: frozenset[str] = frozenset()
        self.num_legs = 0
        self.queued_tokens = 0
        self._watched_by: tuple[dict[Any, None], ...] = ()
        self._admission: Admission | None = None
        self._proven_epoch: str | None = None
        self._num_lives = 1
        # State: whether it answers, all in all; whether its process is known to have gone; since when it is back;
        # whether it is being looked at because it is suspected; whether being ready would be a return; whether it
        # shall get no new attempts.
        self._answers = Hysteresis(misses=care.misses, successes=care.successes, is_up=True)
        self.gone = Flag()
        """Set when its process has certainly gone, or it was taken away; a new process gets a new event."""
        self._recovered_at: float | None = None
        self._is_examined = False
        self._is_return = is_newcomer
        self.is_draining = False

    @property
    def is_ready(self) -> bool:
        return self.health is Health.READY

    @property
    def is_routable(self) -> bool:
        """May a new attempt be sent to it now?"""
        return self.is_ready and not self.is_draining and self.breaker.allows()

    @property
    def is_doubted(self) -> bool:
        """The last look at it spoke against what it is taken for."""
        return self._answers.is_doubted

    @property
    def is_suspected(self) -> bool:
        """Somebody had reason to doubt that it is well, and no look has told yet."""
        return self.suspected.is_set() or self._is_examined

    @property
    def is_idle(self) -> bool:
        """Nothing is under way there, held there or waiting for it."""
        admission = self._admission
        return self.num_legs == 0 and (admission is None or admission.held == admission.num_waiting == 0)

    @property
    def weight(self) -> float:
        """0 to 1: how much of a full share it should get."""
        if self._recovered_at is None:
            return 1.0
        return self._slow_start.weight(self._recovered_at, self._clock())

    @property
    def epoch(self) -> str | None:
        return None if self.facts is None else self.facts.epoch

    @property
    def known_facts(self) -> Facts:
        """What it said of itself; only of an instance that has ever answered."""
        if self.facts is None:
            raise RuntimeError(f"{self!r} has told nothing yet")
        return self.facts

    @property
    def admission(self) -> Admission:
        """What grants a keeper's pages; only of one that has ever answered."""
        if self._admission is None:
            raise RuntimeError(f"{self!r} has no pages yet")
        return self._admission

    @property
    def has_admission(self) -> bool:
        return self._admission is not None

    def serves(self, model: str | None) -> bool:
        """An instance that names no models is taken to serve any."""
        return model is None or not self.models or model in self.models

    def is_known_for(self, model: str | None) -> bool:
        """It has served `model`, or is configured to."""
        return model is not None and (model in self.models or model == self.settings.model)

    def misfit(self, other: Instance) -> str | None:
        """Why KV of one of them means nothing to the other; None where nothing is known that speaks against it."""
        if self.facts is None or other.facts is None:
            return None
        if self.adapter.name != other.adapter.name:
            return f"it does not fit {other.name}: it is {self.adapter.name}, {other.name} is {other.adapter.name}"
        theirs = other.facts.agreement
        for what, value in self.facts.agreement.items():
            if theirs.get(what, value) != value:
                return f"it does not fit {other.name}: its {what} is {value}, {other.name}'s is {theirs[what]}"
        return None

    # ── load, as routing sees it ────────────────────────────────────────────────────────────────────────────────────

    @property
    def held(self) -> int:
        return 0 if self._admission is None else self._admission.held

    @property
    def queued_pages(self) -> int:
        return 0 if self._admission is None else self._admission.waiting_pages

    @property
    def capacity(self) -> int:
        return 0 if self.facts is None else self.facts.num_pages

    def watch(self, touched: dict[Any, None]) -> None:
        """From now on it puts itself into `touched` whenever its load changes."""
        self._watched_by += (touched,)
        if self._admission is not None:
            self._admission.on_change = self._touch

    def unwatch(self, touched: dict[Any, None]) -> None:
        """Not any more."""
        self._watched_by = tuple(other for other in self._watched_by if other is not touched)
        if self._admission is not None and not self._watched_by:
            self._admission.on_change = None

    def _touch(self) -> None:
        for touched in self._watched_by:
            touched[self] = None

    # ── health ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, facts: Facts) -> None:
        """It answered. A new epoch is a new process: its memory is empty, and it has to be proven anew.

        Raises `MalformedReply`, and changes nothing, where the facts do not fit the role or the configuration.
        """
        if facts.epoch is None:  # then a process ends where nobody listened for a while
            facts = replace(facts, epoch=f"{self.name}-{self._num_lives}")
        elif self.adapter.manner.freed is not Freed.SIGNALS:  # a time, as a rule: others may have started at the same
            facts = replace(facts, epoch=f"{self.name}-{facts.epoch}")
        self._check(facts)
        is_new = self.epoch != facts.epoch
        if is_new and self.epoch is not None:
            self._end_process("it was restarted")
            self.breaker.reset()
        if self.gone.is_set():
            self.gone = Flag()
        if self.is_keeper:
            self._resize(facts.num_pages)
        serves_others = self.models != facts.models
        self.facts, self.models = facts, facts.models
        if serves_others:
            self._changed()
        self._answers.succeeded()
        if not self._answers.is_up:
            self._become(Health.DOWN, "it answers again, and has to do so a few times in a row")
        elif self._proven_epoch == facts.epoch:
            self._become_ready()
        elif is_new or self.health is not Health.ALIVE:
            self._become(Health.ALIVE, "no canary has gone through it yet")

    def proven(self) -> None:
        """A request went through it: true as long as its process lives."""
        self._proven_epoch = self.epoch
        self._become_ready()

    def missed(self, why: str) -> None:
        """It did not answer in time. That happens; if it goes on, it is down."""
        if self._answers.missed():
            self._become(Health.DOWN, why)
        elif not self.is_ready:
            self.why = why

    def lost(self, why: str) -> None:
        """It does not answer, or not as it should: it is down."""
        self._answers.fell()
        self._become(Health.DOWN, why)

    def vanished(self, why: str) -> None:
        """Nobody listens there any more: what waits for this process waits in vain, and is told so."""
        self.lost(why)
        self._end_process(why)

    def suspect(self, why: str, *, is_lost: bool) -> None:
        """A leg met a fault: look at once. `is_lost`: nobody listens there any more."""
        if is_lost:
            self.vanished(why)
        self.suspected.set()

    def accuse(self, epoch: str | None, why: str) -> bool:
        """A peer met a fault with its process `epoch`, and either may be to blame. Returns whether this one is in doubt
        already; else it is suspected from now on.

        One in doubt is being looked at anyway. Were it suspected anew each time, the doubt might never end, and a peer
        that is at fault would never be blamed.
        """
        is_well = self.is_ready and not self.is_doubted and not self.is_suspected
        if not is_well or self.epoch != epoch:
            return True
        self.suspect(why, is_lost=False)
        return False

    def examine(self) -> None:
        """A look at it begins, which answers the suspicions there are."""
        self._is_examined = self.suspected.is_set()
        self.suspected.clear()

    def examined(self) -> None:
        """A look at it has ended. Idempotent."""
        self._is_examined = False

    def drain(self) -> None:
        """No new attempts; those under way go on."""
        self.is_draining = True
        self._changed()

    def forsake(self, why: str) -> None:
        """No new attempts, and those that wait for it are failed, to be tried elsewhere."""
        self.drain()
        self._end_process(why)

    # ── work ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def leg_started(self) -> int:
        """A leg is sent to it. Returns what `leg_finished` must be given."""
        self.num_legs += 1
        if self._watched_by:
            self._touch()
        return self.breaker.started()

    def leg_finished(self, era: int, outcome: str) -> None:
        """`outcome` as in `Observer.leg_finished`. Backpressure, 4xx, what we closed, and KV that did not reach a peer
        in doubt, say nothing of its health."""
        self.num_legs -= 1
        if self._watched_by:
            self._touch()
        if outcome == "ok":
            self.breaker.succeeded(era)
        elif outcome in _FAULTS:
            self.breaker.failed(era)

    def prefilling(self, num_tokens: int) -> Prefilling:
        """In a ``with``: as long as the block lasts, or until what it yields is called, so many prompt tokens count as
        queued here."""
        return Prefilling(self, num_tokens)

    def queue(self, num_tokens: int) -> None:
        """So many prompt tokens more, or fewer, are to be prefilled; for `Prefilling`."""
        self.queued_tokens += num_tokens
        if self._watched_by:
            self._touch()

    def status(self) -> dict[str, Any]:
        """For the status page."""
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
            "legs": self.num_legs,
            "queued_tokens": self.queued_tokens,
        }
        if facts is not None and self.is_keeper:
            told |= {
                "page_bytes": facts.page_bytes,
                "chunk_size": facts.chunk_size,
                "ranks": len(facts.receivers),
                "max_prompt_tokens": longest_prompt(facts),
                "windowed": facts.windowed,
                "page_groups": [_group_status(group) for group in facts.groups],
            }
        return told | self.remarks | self._pages_status()

    def _breaker_status(self) -> dict[str, Any]:
        statistics = asdict(self.breaker.statistics())
        return {name: value for name, value in statistics.items() if name != "instance"}

    def _pages_status(self) -> dict[str, Any]:
        if self._admission is None or self.facts is None:
            return {}
        statistics = self._admission.statistics()
        return {
            "capacity": self.facts.num_pages,
            "held": statistics.held,
            "free": self.facts.num_pages - statistics.held,
            "queue": statistics.num_waiting,
            "queued_pages": statistics.waiting_pages,
            "granted": statistics.granted_total,
            "returned": statistics.returned_total,
        }

    def _become_ready(self) -> None:
        if not self._answers.is_up:
            return
        if not self.is_ready and self._is_return:
            self._recovered_at = self._clock()
        self._is_return = True
        self._become(Health.READY, "")

    def _become(self, health: Health, why: str) -> None:
        self.why = why
        if health is not self.health:
            self.health = health
            self._changed()

    def _changed(self) -> None:
        self.on_change()

    def _end_process(self, why: str) -> None:
        if not self.gone.is_set():
            self.gone.set()
            self._num_lives += 1
            if self.epoch is not None:
                self._on_gone(self.epoch, f"{self.name}: {why}")

    def _resize(self, num_pages: int) -> None:
        if self._admission is None:
            self._admission = self._make_admission(self.name, num_pages)
        elif self.facts is None or self.facts.num_pages != num_pages:
            self._admission.resize(num_pages)
            self._touch()

    def _check(self, facts: Facts) -> None:
        settings, models = self.settings, facts.models
        if facts.role not in (None, self.role):
            raise MalformedReply(f"it is configured for {self.role} and says it is for {facts.role}")
        if settings.chunk_size is not None and facts.chunk_size not in (None, settings.chunk_size):
            raise MalformedReply(f"its chunk_size is {facts.chunk_size}, and {settings.chunk_size} is configured")
        if settings.model is not None and models and settings.model not in models:
            raise MalformedReply(f"its model is {', '.join(sorted(models))}, and {settings.model} is configured")
        if self.is_keeper:
            self._check_pages(facts)
        if self.role == "decode" and self.adapter.manner.ready is KvReady.SIGNALS:
            self._check_receivers(facts)

    def _check_pages(self, facts: Facts) -> None:
        if facts.num_pages < 1:
            raise MalformedReply(f"it has {facts.num_pages} pages for KV")
        try:
            check_groups(facts)
        except GeometryError as error:
            raise MalformedReply(f"its pages cannot be counted: {error}") from None

    def _check_receivers(self, facts: Facts) -> None:
        ports, expected = tuple(receiver.port for receiver in facts.receivers), self.settings.receiver_ports
        if not ports:
            raise MalformedReply("it has 0 receivers")
        if expected and sorted(expected) != sorted(ports):
            raise MalformedReply(f"its receivers listen on {ports}, and {expected} are configured")

    def __repr__(self) -> str:
        return f"<Instance {self.name} ({self.role}): {self.health}{', ' if self.why else ''}{self.why}>"


def _group_status(group: PageGroup) -> dict[str, Any]:
    """Without what does not apply to its kind of layer."""
    return {name: value for name, value in asdict(group).items() if name == "num_layers" or value}
