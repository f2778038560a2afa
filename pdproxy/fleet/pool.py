"""Pool holds every instance there is, and says which of them can be asked right now."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from pdproxy.admission.admission import Admission
from pdproxy.admission.grant import OpenPlaces
from pdproxy.admission.revision import Revision
from pdproxy.config.values import Role
from pdproxy.errors import InvalidRequest, ModelNotFound, NotReady
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.wanted import Wanted
from pdproxy.openai.answer import ModelCard

log = logging.getLogger(__name__)

MAX_MODELS: Final = 1024
"""The most models of which it is kept who serves them; clients may make up any names."""
MAX_LOGGED: Final = 100
"""The most models of which the log says that one role answers alone."""
MAX_NAMED: Final = 3
"""The most instances that an error names."""
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
MIN_RETRY_AFTER_S: Final = 1.0
RETRY_AFTER_S: Final = 5.0


class Pool:
    """Pool holds the instances, in the order in which they came. All of them have the same `admission`.

    Mutable state: those that belong to the fleet, by name; those taken out of it that still have work under way (a name
    may be used again by then); who serves a model, as long as nothing changes; the models that one role answers alone,
    for the log.
    """

    def __init__(self, admission: Admission, instances: Iterable[Instance] = ()) -> None:
        self.admission = admission
        self._members: dict[str, Instance] = {}
        self._leaving: list[Instance] = []
        self._serving: dict[str | None, tuple[OpenPlaces, list[Instance]]] = {}
        self._alone: set[str | None] = set()
        self.knows_caches = False
        """Tells that what some instance has in its prefix cache is followed."""
        self.wanted = Wanted(admission.now)
        """The models for which requests found too few instances."""
        self.changed = asyncio.Event()
        """Set when an instance came or went. The one task that waits for it clears it."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when an instance came or went, or may serve others than before, though no time has passed; must not
        raise."""
        self.on_membership: Callable[[], object] = lambda: None
        """Called when an instance came, was taken out or was let go; must not raise."""
        for instance in instances:
            self._take_in(instance)

    @property
    def instances(self) -> Sequence[Instance]:
        """The instances that belong to the fleet."""
        return tuple(self._members.values())

    @property
    def leaving(self) -> Sequence[Instance]:
        """The instances that were taken out of the fleet and still have work under way."""
        return tuple(self._leaving)

    def of_role(self, role: Role) -> list[Instance]:
        return [instance for instance in self._members.values() if instance.role == role]

    def find(self, name: str) -> Instance | None:
        return self._members.get(name)

    # ── coming and going ────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, instance: Instance) -> None:
        """Adds an instance to the fleet. Raises `ValueError` where the name is taken."""
        if instance.name in self._members:
            raise ValueError(f"there is an instance {instance.name!r} already")
        self._take_in(instance)
        self.changed.set()
        self.on_membership()

    def _take_in(self, instance: Instance) -> None:
        self._members[instance.name] = instance
        self.admission.add(instance)
        for old in self._leaving:
            # The same engine has another name now, or other settings.
            if old.settings.place == instance.settings.place and old.is_same_kind(instance):
                self.admission.move(old, instance)
        instance.on_change = self._has_changed
        self._has_changed()

    def take_out(self, name: str) -> Instance:
        """Takes the instance out of the fleet: it gets no new attempts, and is `leaving` until `let_go`. Raises
        `KeyError`."""
        instance = self._members.pop(name)
        instance.drain()
        self._leaving.append(instance)
        self._has_changed()
        self.changed.set()
        self.on_membership()
        return instance

    def let_go(self) -> list[Instance]:
        """Forgets those of the leaving that have nothing under way any more, and returns them. The caller closes their
        clients.

        An instance may have been silent until the leases of its orphans were over. Those orphans belong to nobody any
        more: if its process lives, it has dropped them, or will before it answers anybody.
        """
        idle = [one for one in self._leaving if self.is_over(one)]
        if idle:
            self._leaving = [instance for instance in self._leaving if instance not in idle]
            for instance in idle:
                self.admission.discard(instance)
            self.on_change()
            self.changed.set()
            self.on_membership()
        return idle

    def is_over(self, instance: Instance) -> bool:
        """Tells whether nothing is under way or held at the instance, and nobody needs it to get pages back."""
        is_idle = instance.is_idle or (instance.is_silent and instance.num_attempts == 0)
        return is_idle and not self.admission.is_needed(instance)

    def _has_changed(self) -> None:
        self._serving.clear()
        self.on_change()

    def serving(self, model: str | None) -> Sequence[Instance]:
        """Returns the instances of the fleet that serve `model`, whether they can be asked now or not."""
        found = self.admission.open_places(model)  # which is another object once an instance serves other models
        known = self._serving.get(model)
        if known is None or known[0] is not found:
            if len(self._serving) >= MAX_MODELS:
                self._serving.clear()
            known = found, [one for one in self._members.values() if one.serves(model)]
            self._serving[model] = known
        return known[1]

    # ── who may be asked ────────────────────────────────────────────────────────────────────────────────────────────

    def open_places(self, model: str | None) -> OpenPlaces:
        """Returns the instances that can take a request for `model` now, after a check that there are some in each
        role.

        Raises `NotReady`, `ModelNotFound`; `InvalidRequest` where a model must be named.
        """
        found = self.admission.open_places(model)
        if found.is_checked:
            return found
        try:
            self.check_named(model)
            if not found.alone:
                prefillers, decoders = (self.ready(role, model) for role in ROLES)
                if not _have_pair(prefillers, decoders):
                    message = "no prefill and decode instance that fit each other are ready"
                    raise NotReady(message, retry_after_s=RETRY_AFTER_S)
        except (NotReady, ModelNotFound):  # an instance that has not answered yet may serve any model
            self.wanted.note(model)
            raise
        found.is_checked = True
        self._tell_alone(model, found)
        return found

    def _tell_alone(self, model: str | None, found: OpenPlaces) -> None:
        """Logs that instances of one role answer alone from now on, or no longer, when a request meets it."""
        is_alone = bool(found.alone)
        if is_alone is (model in self._alone):
            return
        about = "requests" if model is None else f"requests for {model!r}"
        if not is_alone:
            self._alone.discard(model)
            log.warning("%s go through both roles again", about)
        elif len(self._alone) < MAX_LOGGED:
            self._alone.add(model)
            log.warning("%s are answered by %s and others of its role alone", about, found.alone[0].name)

    def ready(self, role: Role, model: str | None = None) -> list[Instance]:
        """Returns the instances of `role` that can take a request for `model`. Raises `ModelNotFound`, `NotReady`."""
        all_ready = [instance for instance in self.of_role(role) if instance.is_ready and not instance.is_draining]
        if not all_ready:
            raise NotReady(f"no {role} instance is ready", retry_after_s=RETRY_AFTER_S)
        serving = [instance for instance in all_ready if instance.serves(model)]
        if not serving:
            if any(instance.is_known_for(model) for instance in self._members.values()):
                raise NotReady(f"no {role} instance of {model!r} is ready", retry_after_s=RETRY_AFTER_S)
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")
        closed = [instance for instance in serving if instance.breaker.allows()]
        if not closed:
            left_s = min(instance.breaker.statistics().cool_off_left_s for instance in serving)
            names = ", ".join(instance.name for instance in serving[:MAX_NAMED]) + ", …" * (len(serving) > MAX_NAMED)
            message = (
                f"every {role} instance ({names}) has failed several times in a row and is left alone for a moment"
            )
            raise NotReady(message, retry_after_s=max(MIN_RETRY_AFTER_S, left_s))
        return closed

    def has_other(
        self,
        name: str,
        model: str | None,
        avoid: frozenset[str],
        text_terms: tuple[tuple[str, str], ...] | None = None,
    ) -> bool:
        """Tells whether an instance of the same role that is not in `avoid` could take over from `name`, together with
        a counterpart that fits it. With `text_terms`, only one of a revision with these terms could."""
        asked = self.find(name)
        if asked is None:
            return False
        able = self._able(model, text_terms)
        others = [one for one in able if one.role == asked.role and one.name not in avoid]
        if alone := self.admission.open_places(model).alone:
            return any(one in alone for one in others)
        return _have_pair(others, [one for one in able if one.role != asked.role])

    def goes_on(self, model: str | None, text_terms: tuple[tuple[str, str], ...] | None) -> bool:
        """Tells whether there is a pair that could go on with an answer which a revision with these terms began, or
        one that serves alone now."""
        able = self._able(model, text_terms)
        if alone := self.admission.open_places(model).alone:
            return any(one in alone for one in able)
        return _have_pair(*([one for one in able if one.role == role] for role in ROLES))

    def _able(self, model: str | None, text_terms: tuple[tuple[str, str], ...] | None) -> list[Instance]:
        return [
            one
            for one in self._members.values()
            if one.is_routable and one.serves(model) and text_terms in (None, one.revision.text_terms)
        ]

    @property
    def is_ready(self) -> bool:
        """Tells whether a request would find an instance for each of its halves, and somebody who admits it."""
        if not self.admission.has_leader:
            return False
        prefillers, decoders = ([one for one in self.of_role(role) if one.is_routable] for role in ROLES)
        if _have_pair(prefillers, decoders):
            return True
        models = frozenset[str]().union(*(one.models for one in (*prefillers, *decoders)))
        return any(self.admission.open_places(model).alone for model in models or (None,))

    def models(self) -> list[str]:
        """Returns the names that both a ready prefiller and a ready decoder know, or one of them that serves alone now;
        sorted."""
        prefilled, decoded = (
            set[str]().union(*(instance.models for instance in self.of_role(role) if instance.is_ready))
            for role in ROLES
        )
        alone = {name for name in prefilled ^ decoded if self.admission.open_places(name).alone}
        return sorted((prefilled & decoded) | alone)

    def card(self, name: str) -> dict[str, Any]:
        """Returns what the ready instances tell of a model, where they tell it: ``max_model_len``, the smallest one in
        tokens; ``root`` and ``parent``."""
        told: dict[str, Any] = {}
        for instance in self._members.values():
            if not instance.is_ready or instance.facts is None or name not in instance.models:
                continue
            card = next((card for card in instance.facts.cards if card.id == name), ModelCard(name))
            lengths = told.get("max_model_len"), card.max_model_len or instance.facts.max_model_len
            told["max_model_len"] = min(filter(None, lengths), default=None)
            told["root"] = told.get("root") or card.root
            told["parent"] = told.get("parent") or card.parent
        return {field: value for field, value in told.items() if value is not None}

    def check_named(self, model: str | None) -> None:
        """Raises `InvalidRequest` where several models are served and the request names none of them; `NotReady` where
        no model has both a prefiller and a decoder that are ready."""
        if model is not None:
            return
        named = [instance.models for instance in self._members.values() if instance.models and instance.is_ready]
        if not named or frozenset.intersection(*named):
            return
        if not (models := self.models()):
            raise NotReady("of no model both a prefill and a decode instance are ready", retry_after_s=RETRY_AFTER_S)
        raise InvalidRequest(f"model is missing; there are {', '.join(models)}", param="model")

    def status(self) -> list[dict[str, Any]]:
        """Returns the status of each instance of the fleet, then of those that are leaving it."""
        ready = Counter((one.role, one.models, one.revision) for one in self._members.values() if one.is_ready)
        told = [
            instance.status() | {"counterparts": _num_counterparts(instance, ready)}
            for instance in (*self._members.values(), *self._leaving)
        ]
        for one in told[len(self._members) :]:
            one["leaving"] = True
        return told

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when the pages of a decoder do not add up."""
        self.admission.check_integrity()

    def __repr__(self) -> str:
        num_ready = sum(instance.is_ready for instance in self._members.values())
        leaving = f", {len(self._leaving)} leaving" if self._leaving else ""
        return f"<Pool {num_ready} of {len(self._members)} ready{leaving}>"


def _have_pair(ones: Iterable[Instance], others: Iterable[Instance]) -> bool:
    """Tells whether one of `ones` and one of `others`, which have another role, could serve a request together."""
    kinds = {(other.models, other.revision) for other in others}
    return any(
        _share(one.models, models) and one.revision.fits(revision)
        for one in {(one.models, one.revision): one for one in ones}.values()
        for models, revision in kinds
    )


def _num_counterparts(instance: Instance, ready: Counter[tuple[Role, frozenset[str], Revision]]) -> int:
    """Returns with how many ready instances this one could serve requests."""
    return sum(
        number
        for (role, models, revision), number in ready.items()
        if role != instance.role and _share(instance.models, models) and instance.revision.fits(revision)
    )


def _share(models: frozenset[str], others: frozenset[str]) -> bool:
    """Tells whether there is a model in both. An instance that names no models is taken to serve any."""
    return not models or not others or not models.isdisjoint(others)
