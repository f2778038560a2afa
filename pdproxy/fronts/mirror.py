"""The fleet as a front knows it: the leader's judgement of each instance, and a way to tell the leader what legs met.

What must hold: a front sends nothing to an instance that the leader has taken out, judged down or is draining, from the
moment in which it hears of that; and everything that speaks for or against an instance reaches the leader. A violation
would be seen as attempts at an instance that is down, or as a breaker that does not open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pdproxy.admission.custody import Evidence
from pdproxy.admission.grant import Forecast
from pdproxy.config.instances import InstanceSettings
from pdproxy.engines.info import EngineInfo
from pdproxy.fleet.breaker import BreakerState
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.page_count import Shape
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.token_counts import TokenCounts, TokenizerReport
from pdproxy.fronts import messages
from pdproxy.fronts.channel import Handlers
from pdproxy.fronts.front_admission import FrontAdmission, no_leader
from pdproxy.fronts.hub import refused_by
from pdproxy.tokens.bounds import ChatFrame

_CLOSED: Final = BreakerState.CLOSED
_NO_ERA: Final = -1
"""An era in which no breaker ever is."""
_ERAS: Final = 1 << 32
"""More eras than a breaker sees."""

MakeMirrored = Callable[[InstanceSettings, int], "MirroredInstance"]
"""A function that makes an instance for a place."""


class MirroredInstance(Instance):
    """`MirroredInstance` is an instance that the leader judges, which is told what its legs meet.

    Mutable state, besides that of `Instance`: the number of its place, which is another one at each leader; the number
    of the last trial, and the breaker's first era under the present leader; what was last said of the load, and in
    which frame; whether it is as another leader than the present one has judged it.
    """

    number: int
    """The instance's place; 0 while no leader knows the instance."""

    def mirrored_by(self, number: int, front: FrontAdmission) -> None:
        """Begins the mirroring of the place `number`. To be called once, before anything else."""
        self.number = number
        self._front = front
        self._line = front.line
        self._send = front.line.send
        self._num_trials = 0
        self._first_era = 0
        self._told: tuple[object, messages.Load] | None = None
        self._is_former = False

    # ── what the leader says ────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Forgets the number that the leader gave. Where the instance is ready, requests may ask the next leader for it
        before that one has looked at it: then they wait there."""
        self.number = 0
        self._first_era += _ERAS
        self._told = None
        self.residency.begin_anew()
        self._is_former = self.is_ready

    def told_facts(self, facts: EngineInfo, shape: Shape) -> None:
        """Takes what the process there has said of itself. Another process than before proves that the one before has
        ended, with all that it held."""
        is_new, serves_others = self.is_another(facts.epoch, self.epoch), self.models != facts.models
        self._is_former = self._is_former and not is_new
        if is_new and self.epoch is not None:
            self._on_ended(self.epoch, f"{self.name}: it was restarted")
            self.exchanges.forget()
        elif (
            not is_new and facts.epoch != self.epoch
        ):  # this leader tells the same process by another mark than the one before
            self.incarnation = facts.epoch
        self.facts = facts
        self.admission.serve(self, facts.models)
        assert facts.epoch is not None
        self.admission.heard(
            self,
            facts.epoch,
            shape=shape,
            capacity=facts.num_pages if self.is_owner else 0,
            occupied=None,
            asked_at=float("-inf"),
            revision=self.revision_of(facts),
        )
        if written := self.residency.news():
            self._send(messages.Written(self.number, written))
        if is_new:
            self._front.forget_ended()
        if serves_others:
            self._changed()

    def told_state(self, state: messages.State) -> None:
        """Takes the leader's judgement."""
        self.is_draining = state.is_draining
        self._is_told_doubted, self._is_doubtful = state.is_doubted, state.is_suspected
        self.is_up = state.is_up
        self.breaker.mirror(state.era, BreakerState(state.breaker), state.opened_s, state.num_probes, state.probes_s)
        health = Health(state.health)
        self._is_former = self._is_former and health in (Health.UNKNOWN, Health.ALIVE)
        if not self._is_former:  # else this leader does not know yet what the one before knew
            self.why = state.why
            self.health = health
            self.is_proven_alone = state.is_proven_alone
        self._changed()
        if not self.is_ready and self.is_expected is not state.is_expected:
            self.admission.close(self, is_expected=state.is_expected)
        if self.health is Health.DOWN:
            for reliance in list(self.reliances):
                reliance.doubt()

    _is_told_doubted: bool = False

    @property
    def is_doubted(self) -> bool:
        return self._is_told_doubted

    # ── what the leader is told ─────────────────────────────────────────────────────────────────────────────────────

    def decline(self, num_tokens: int) -> None:
        """Tells the leader that tokens which it has counted because of a grant wait for nothing."""
        if num_tokens:
            self._load().num_tokens -= num_tokens

    def unbound(self, attempt: str) -> None:
        super().unbound(attempt)
        self._front.unbound(attempt, is_owner=self.is_owner)

    def leg_started(self, attempt: str = "") -> int:
        """Notes that a leg of `attempt` is sent to the instance. Returns what `leg_finished` must be given: the
        breaker's era, or the number of a trial below 0."""
        self.num_legs += 1
        self._unqueue(attempt)
        breaker = self.breaker
        if breaker.state is _CLOSED:
            self._load().num_sent += 1
            return self._first_era + breaker.era
        self._num_trials += 1
        self._front.part(attempt)
        self._line.send_soon(messages.Trial(self.number, self._num_trials, attempt))
        return -self._num_trials

    def leg_finished(self, era: int, outcome: str) -> None:
        """Notes the end of a leg; `era` is what `leg_started` returned."""
        self.num_legs -= 1
        if era < 0:
            self._send(messages.LegFinished(self.number, -era, 0, outcome))
            return
        era = max(era - self._first_era, _NO_ERA)  # that of a leader before is none of the present one's
        breaker = self.breaker
        if outcome == "ok" and era == breaker.era and breaker.state is _CLOSED:
            self._load().num_ok += 1
        else:
            self._send(messages.LegFinished(self.number, 0, era, outcome))
            self._told = None  # else a success of later would be heard before this

    def _load(self) -> messages.Load:
        """Returns the sum for the leader to which more may be added now."""
        frame, told, era = self._line.frame, self._told, self.breaker.era
        if told is not None and told[0] == frame and told[1].era == era:
            return told[1]
        load = messages.Load(self.number, era, 0, 0, 0)
        self._told = (frame, load)
        self._line.send_soon(load)
        return load

    def tell_load(self) -> None:
        """Tells a leader that knows nothing of it what is under way here, and that the instance is well as far as is
        known."""
        if self.is_ready and self.epoch is not None:
            self._send(messages.Proven(self.number, self.epoch, self.is_proven_alone))
        self._told = None
        self._first_era += _ERAS
        if self.num_legs or self.queued_tokens:
            self._send(messages.Load(self.number, _NO_ERA, self.num_legs, 0, self.queued_tokens))

    def cut_prefills(self, error: Exception) -> None:
        """Ends with `error` what waits for a prefill here, because nobody answers for its pages any more."""
        for reliance in list(self.reliances):
            reliance.cut(error)

    def queue(self, num_tokens: int, num_read: int = 0) -> None:
        self.queued_tokens += num_tokens
        if num_tokens:
            load = self._load()
            load.num_tokens += num_tokens
            load.num_read += num_read

    def handed_over(self, num: int, seconds: float) -> None:
        load = self._load()
        load.num_handed += num
        load.handed_s += seconds

    def look_soon(self) -> None:
        self._send(messages.Suspect(self.number, self.epoch, None, False))

    def suspect(self, why: str, *, is_lost: bool) -> None:
        self._is_doubtful = True
        self._send(messages.Suspect(self.number, self.epoch, why, is_lost))

    def blame(self, epoch: str | None, era: int, attempt: str, why: str) -> None:
        if self.epoch == epoch:
            self._send(messages.Blame(self.number, epoch, era, attempt, why))

    def status(self) -> dict[str, Any]:
        return {**super().status(), "place": self.number}


class Mirror:
    """`Mirror` keeps a front's `pool` as the leader's is.

    Mutable state: the instances by their places; those that a leader before knew and the present one has not told of,
    by name; the shapes by their numbers, which several instances share.
    """

    def __init__(
        self, pool: Pool, admission: FrontAdmission, counts: TokenCounts, make: MakeMirrored, membership: Membership
    ) -> None:
        self._pool = pool
        self._admission = admission
        self._counts = counts
        self._make = make
        self._membership = membership
        self._places: dict[int, MirroredInstance] = {}
        self._former: dict[str, MirroredInstance] = {}
        self._shapes: dict[int, Shape] = {}
        self.handlers: Handlers = {
            messages.Joined: self.joined,
            messages.Listed: lambda message: self.listed(),
            messages.Left: self.left,
            messages.Facts: self.facts,
            messages.State: self.state,
            messages.Tokenizer: self.tokenizer,
            messages.Granted: self.granted,
            messages.Scarce: lambda message: admission.scarce(),
            messages.Refused: lambda message: admission.refused(message.attempt, refused_by(message)),
            messages.Settled: lambda message: admission.settled(message.attempt, Evidence(message.evidence)),
        }
        """The functions that take what the leader says of the fleet and of this front's attempts."""

    def begin(self, term: int) -> None:
        """Begins a session with the leader of a term, which knows nothing of this front, and numbers instances anew.
        Until it has told of an instance, that one is as it was judged last."""
        for instance in self._places.values():
            instance.begin()
        self._former = {**self._former, **{one.name: one for one in self._places.values()}}
        self._places = {}
        self._shapes.clear()
        self._admission.begin(term)

    def joined(self, message: messages.Joined) -> None:
        """Takes in an instance, or the number that another leader has given to one that is known."""
        settings = InstanceSettings.model_validate_json(message.settings)
        instance = self._former.pop(settings.name, None)
        if instance is not None and (instance.settings != settings or self._pool.find(settings.name) is not instance):
            self._retire(instance)
            instance = None
        if instance is None:
            instance = self._make(settings, message.place)
            self._pool.add(instance)
        self._places[message.place] = instance

    def listed(self) -> None:
        """Takes out the instances that the present leader does not know, and tells it what is under way."""
        for instance in self._former.values():
            self._retire(instance)
        self._former = {}
        for place, instance in self._places.items():
            instance.number = place  # only now, so that the leader hears of the load as a whole
            instance.tell_load()
        self._admission.listed()

    def _retire(self, instance: MirroredInstance) -> None:
        if self._pool.find(instance.name) is instance:
            self._membership.retire(instance.name)

    def lapse(self) -> None:
        """Takes note that no leader has answered for so long that this front may be taken for gone. What has no KV yet
        ends, because nobody answers for its pages any more."""
        error = no_leader()
        for instance in (*self._pool.instances, *self._pool.leaving):
            if instance.role == "prefill" and isinstance(instance, MirroredInstance):
                instance.cut_prefills(error)
        self._admission.lapse()

    def left(self, message: messages.Left) -> None:
        """Takes out an instance. What is under way there goes on, and the leader goes on to judge it."""
        present = {*self._pool.instances, *self._pool.leaving}
        self._places = {place: one for place, one in self._places.items() if one in present}
        self._retire(self._places[message.place])

    def facts(self, message: messages.Facts) -> None:
        """Takes what an engine has said."""
        instance = self._places.get(message.place)
        if instance is None:
            return
        shape = self._shapes.get(message.shape)
        if shape is None:
            shape = self._shapes[message.shape] = Shape(message.facts, instance.adapter)
        instance.told_facts(message.facts, shape)
        if instance.is_owner and self._admission.shapes.get(message.shape) is not shape:
            self._forget_shapes()
            self._admission.learned(message.shape, shape)

    def _forget_shapes(self) -> None:
        """Forgets the shapes that no instance has any more: attempts need not be counted for them."""
        alive = {one.shape for one in self._places.values()}
        for shapes in (self._shapes, self._admission.shapes):
            for number in [number for number, shape in shapes.items() if shape not in alive]:
                del shapes[number]

    def state(self, message: messages.State) -> None:
        """Takes how the leader judges an instance."""
        if (instance := self._places.get(message.place)) is not None:
            instance.told_state(message)

    def tokenizer(self, message: messages.Tokenizer) -> None:
        """Takes what was seen of an engine's tokenizer."""
        if (instance := self._places.get(message.place)) is not None:
            frame = None if message.frame is None else ChatFrame(*message.frame)
            report = TokenizerReport(message.epoch, message.agrees, message.why, frame)
            self._counts.report(instance, report)

    def granted(self, message: messages.Granted) -> None:
        """Takes a grant."""
        owner, peer = self._places[message.owner], self._places[message.peer]
        forecast = None if message.forecast is None else Forecast(*message.forecast)
        if not self._admission.granted(
            message.attempt, owner, peer, message.pages, message.is_scarce, message.lacked, forecast
        ):
            (owner if owner.role == "prefill" else peer).decline(message.num_tokens)
