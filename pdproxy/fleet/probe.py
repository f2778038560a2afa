"""Probe looks at every instance again and again, and lets a request go through it before it counts as ready.

"It answers" is not "it works": a prefiller and a decoder that cannot exchange KV both answer. So a new process first
has to serve a canary, together with a counterpart.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from pdproxy.engines import recognise
from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.http.base import EngineBroken, EngineRefused, EngineUnreachable, LocalFault
from pdproxy.engines.info import EngineInfo
from pdproxy.errors import EngineReply, LegFailed, LegNotTried, ProxyError, StaleTerm
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.pool import Pool

log = logging.getLogger(__name__)

EAGER_S = 0.5
"""Seconds between two looks at an instance that is not ready yet, or did not answer just now: then seconds matter."""
LATELY_S = 15.0
"""Seconds after an instance's last change, during which it is looked at as often as it may be: it may be restarting."""
EXPECTED_S = 2.0
"""Seconds that the canary of a restarted instance may take before the instance's counterparts serve alone."""
GROWTH = 1.0
"""Seconds by which the pause between two looks grows for every second after that, where many instances are not
ready."""
UNREADY_PER_S = 50.0
"""Looks per second, all in all, at instances that have not been ready for long; up to half as many such instances are
looked at every `EAGER_S`."""
HURRIED_PER_S = 800.0
"""Looks per second, all in all, at instances that are not ready and changed lately, and as many at those that requests
ask for. A thousand of them are gone through in less than two seconds."""
TURN_S = 0.05
"""Seconds between two turns in which instances that requests ask for are woken."""
GRID_S = 0.1
"""Looks are due at multiples of these seconds, or of half a shorter pause: a few together cost less than each by
itself."""
MAX_INTERVALS = 4.0
"""The longest pause between two looks at an instance that is not ready, in intervals of those at a ready one."""
JITTER = 0.1
"""The part of a pause that is left to chance, so that looks which began together do not stay together."""

MAX_REASON_CHARS = 500
"""The most characters that are kept of what an engine says is wrong with it."""
STALL_SHARE = 0.2
"""The share of a look's time limit. Where this process stood still for so long meanwhile, the look tells nothing."""

Compare = Callable[[Instance], Awaitable[None]]
"""A function that looks at an instance's tokenizer. Does not raise for what the instance does."""
Prove = Callable[[Instance, Instance], Awaitable[None]]
"""A function that sends a tiny request through a prefiller and a decoder, in this order, or to one instance that stands
for both. Raises an error where it fails."""


async def _compare_nothing(instance: Instance) -> None:
    """Does nothing; stands for the comparison in a proxy that counts no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBuffer:
    """ExpectedBuffer holds what a decoder's PD buffer should be, by model config, buffer size and chunk size."""

    pages: int
    page_bytes: int
    chunk_size: int


class UnlikeItsKind(Exception):
    """`UnlikeItsKind` says that an engine has answered a look with an error, or (`is_read`) with what its kind does not
    say. It may be an engine of another kind."""

    def __init__(self, why: str, *, is_read: bool = False) -> None:
        super().__init__(why)
        self.is_read = is_read


class KeyRefused(UnlikeItsKind):
    """`KeyRefused` says that an engine asks for a key, and was shown none or a wrong one."""


class _Failed(msgspec.Struct):
    """`_Failed` is the body of an engine's look that says what is wrong with it."""

    reason: str = ""


_failed = msgspec.json.Decoder(_Failed)


class Probe:
    """Probe keeps the health of `pool` up to date. Without `prove`, an answer is enough to be ready. `stalled_s`
    returns the seconds for which this process has stood still so far. `rng` spreads the looks."""

    def __init__(
        self,
        pool: Pool,
        *,
        interval_s: float,
        timeout_s: float,
        prove: Prove | None,
        compare: Compare = _compare_nothing,
        canary_timeout_s: float = 30.0,
        expected: Sequence[ExpectedBuffer] = (),
        stalled_s: Callable[[], float] = lambda: 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self._pool = pool
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._prove = prove
        self._compare_tokenizer = compare
        self._canary_timeout_s = canary_timeout_s
        self._expected = expected
        self._stalled_s = stalled_s
        self._rng = rng or random.Random()
        # State: who is watched, and how to stop it; who of them is not ready, as of its last look; who of these is
        # between two looks, and since when, the longest first; whose turn it is to be a canary's other end; whether
        # there may be several kinds of engines; who is being proven by a canary, and the event of its end.
        self._watched: dict[Instance, anyio.CancelScope] = {}
        self._unready: set[Instance] = set()
        self._resting: dict[Instance, float] = {}
        self._turn = 0
        self._has_kinds = True
        self._on_trial: dict[Instance, anyio.Event] = {}

    async def run(self) -> None:
        """Watches the instances, until cancelled. An instance is watched from the time it joins the pool until it has
        left and has nothing under way."""
        try:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(self._hurry)
                while True:
                    self._pool.changed.clear()
                    self._follow(watchers)
                    await self._pool.changed.wait()
        finally:
            for instance in list(self._watched):
                self._forget(instance)

    async def look(self, instance: Instance) -> bool:
        """Asks the instance once, and proves it if it needs that. Never raises for what an instance does.

        Returns False where this machine could not even ask: that proves nothing, and the instance keeps its health.
        """
        was, why, stalled_s = instance.health, instance.why, self._stalled_s()
        strange: UnlikeItsKind | None = None
        is_misfit = False
        try:
            await self.ask(instance)
            # Before its canary the instance gets no requests anyway. Without a canary it is ready at once, and its
            # tokenizer is compared after that: until then its prompts are counted in another way.
            if self._prove is not None:
                await self._compare_tokenizer(instance)
            await self._make_ready(instance)
            if self._prove is None:
                await self._compare_tokenizer(instance)
        except LocalFault as error:
            if not instance.is_ready:
                instance.why = f"the proxy cannot ask it: {error}"
            return False
        except EngineRefused as error:
            instance.lost(f"it cannot be reached: {error}")
        except MalformedReply as error:
            instance.lost(str(error))
            is_misfit = True
        except UnlikeItsKind as error:
            strange = error
            is_misfit = True
        except (EngineUnreachable, EngineBroken) as error:
            if self._stalled_s() - stalled_s < STALL_SHARE * self._timeout_s:
                instance.missed(f"it did not answer: {error}")
            else:  # its answer may have been there, and nobody read it
                log.warning("%s is looked at again, because this proxy stood still: %s", instance.name, error)
                instance.suspected.set()
        except Exception:
            log.exception("looking at %s met a bug", instance.name)
            instance.lost("looking at it met a bug")
        if strange is not None:
            await self._judge(instance, strange)
        if instance.health is not Health.DOWN or (was is Health.DOWN and why == instance.why):
            return True
        if is_misfit or (instance.facts is not None and was is not Health.DOWN):
            log.warning("%s is down: %s", instance.name, instance.why)
        elif was is not Health.DOWN:  # as a rule it is still starting
            log.info("%s does not answer yet: %s", instance.name, instance.why)
        return True

    async def _judge(self, instance: Instance, error: UnlikeItsKind) -> None:
        """Notes an answer that is not what the instance's kind of engine gives. It is asked once, for each error, of
        what other kind it may be."""
        note = instance.lost if error.is_read else instance.missed
        if str(error) in instance.why:
            note(instance.why)
        elif kind := await self.other_kind(instance):
            instance.lost(f"{error}: {kind}")
        else:
            note(str(error))

    async def other_kind(self, instance: Instance) -> str | None:
        """Asks the instance of what other kind it may be. Returns that as part of a sentence; None where it is not
        known."""
        answers: dict[str, bytes] = {}
        try:
            for path in recognise.LOOKS:
                status, body = await instance.client.get(path, timeout_s=self._timeout_s)
                if status == 200:
                    answers[path] = body
        except (EngineUnreachable, EngineBroken):
            return None  # the next look begins anew
        return recognise.other_kind(instance.adapter.name, answers)

    def _follow(self, watchers: TaskGroup) -> None:
        """Starts a watcher for each instance that has none, and stops those of instances that are gone."""
        present = dict.fromkeys([*self._pool.instances, *self._pool.leaving])
        self._has_kinds = len({instance.adapter.name for instance in present}) > 1
        for instance in [instance for instance in self._watched if instance not in present]:
            self._forget(instance).cancel()
        for instance in [instance for instance in present if instance not in self._watched]:
            self._watched[instance] = scope = anyio.CancelScope()
            watchers.start_soon(self._watch, instance, scope)

    def _forget(self, instance: Instance) -> anyio.CancelScope:
        """Forgets the instance. Returns the scope of its watcher."""
        self._unready.discard(instance)
        self._resting.pop(instance, None)
        return self._watched.pop(instance)

    async def _watch(self, instance: Instance, scope: anyio.CancelScope) -> None:
        loop = asyncio.get_running_loop()
        with scope:
            was, since = instance.health, anyio.current_time()
            while True:
                self._resting.pop(instance, None)
                was_asked = await self.look(instance)
                instance.no_longer_expected()
                instance.examined()
                if instance.health is not was or instance.is_doubted:
                    was, since = instance.health, anyio.current_time()
                pause_s = self._pause_s(instance, anyio.current_time() - since)
                if not was_asked and instance.is_ready:
                    pause_s = min(EAGER_S, pause_s)
                # The timer sets the event, for a time limit of anyio's would go round and round on uvloop, whose clock
                # counts milliseconds, until the last one is over.
                due_at = loop.time() + pause_s * (1.0 - JITTER * self._rng.random())
                timer = loop.call_at(due_at - due_at % min(GRID_S, pause_s / 2), instance.suspected.set)
                try:
                    await instance.suspected.wait()
                finally:
                    timer.cancel()
                instance.examine()

    def _pause_s(self, instance: Instance, unchanged_s: float) -> float:
        """Returns the longest time until the next look at the instance, in seconds. Nothing about it has changed in the
        last `unchanged_s` seconds."""
        interval_s, eager_s = self._interval_s, min(EAGER_S, self._interval_s)
        if instance.is_ready:
            self._unready.discard(instance)
            return eager_s if instance.is_doubted or instance.has_foreign_pages else interval_s
        if instance not in self._unready:
            self._unready.add(instance)
            self._pool.wanted.noted.set()  # a request may be waiting for it already
        self._resting[instance] = anyio.current_time()
        longest_s = MAX_INTERVALS * interval_s
        if instance.health is Health.ALIVE:  # it may become ready by another's canary, and is watched as such then
            longest_s = interval_s
        longest_s = min(longest_s, len(self._unready) / UNREADY_PER_S)
        shortest_s = max(eager_s, len(self._unready) / HURRIED_PER_S)
        return max(shortest_s, min(longest_s, (unchanged_s - LATELY_S) * GROWTH))

    async def _hurry(self) -> None:
        """Cuts short the pauses of instances that requests ask for, as long as they do."""
        pool = self._pool
        while True:
            # A request that waits in line asks for as long as it waits.
            models = {*pool.wanted.models(), *pool.admission.kernel.waiting_models()}
            if models and self._unready:
                self._wake(models)
                await anyio.sleep(TURN_S)
            else:
                pool.wanted.noted.clear()
                await pool.wanted.noted.wait()

    def _wake(self, models: set[str | None]) -> None:
        """Has some of the instances that could serve one of the models looked at now, those first that rest longest."""
        num_left = math.ceil(HURRIED_PER_S * TURN_S)
        rested_since = anyio.current_time() - min(EAGER_S, self._interval_s)
        for instance, since in self._resting.items():
            if since > rested_since or num_left == 0:
                return
            if not instance.is_draining and any(_could_serve(instance, model) for model in models):
                instance.suspected.set()
                num_left -= 1

    async def ask(self, instance: Instance) -> None:
        """Asks the instance once how it is, and lets it take in the answer. It does not become ready by that.

        Raises `EngineUnreachable`, `EngineBroken`, `UnlikeItsKind`, and `MalformedReply` where the answer does not fit
        what is configured.
        """
        async with instance.look_lock:
            was, look = instance.epoch, instance.asked()
            term, term_path = look.term, instance.adapter.traits.term_path
            answers = {
                path: await self._get(instance, path if term is None or path != term_path else f"{path}?term={term}")
                for path in instance.adapter.looks
            }
            instance.heard(_facts(instance, answers), look)
        if instance.epoch != was:
            log.info("%s: %s, epoch %s", instance.name, instance.url, instance.epoch)
            self._compare(instance)
            if (num_ranks := instance.num_unnamed_ranks) > 1:
                log.warning(
                    "%s has %d data-parallel ranks, and is one instance here; give it data_parallel_size = %d, "
                    "or --%s-data-parallel-size %d, so that each is an instance with pages of its own",
                    instance.name,
                    num_ranks,
                    num_ranks,
                    instance.role,
                    num_ranks,
                )

    async def _get(self, instance: Instance, path: str) -> bytes:
        status, body = await instance.client.get(path, timeout_s=self._timeout_s)
        if status in (401, 403):
            raise KeyRefused(f"{path} is HTTP {status}: the key that --engine-api-key gives it is missing or wrong")
        if status != 200:
            raise UnlikeItsKind(f"{path} is HTTP {status}{_reason(body)}")
        return body

    def _compare(self, instance: Instance) -> None:
        """Warns where the page owner's own numbers differ from those of the options. The page owner's numbers count; a
        difference means that the configuration says something that nobody meant."""
        facts = instance.known_facts
        if not self._expected or instance.role != "decode" or facts.page_bytes is None:
            return
        alike = (expected for expected in self._expected if expected.page_bytes == facts.page_bytes)
        expected = next(alike, self._expected[0])
        for what, theirs, ours in (
            ("pages", facts.num_pages, expected.pages),
            ("bytes per page", facts.page_bytes, expected.page_bytes),
            ("tokens per page", facts.chunk_size, expected.chunk_size),
        ):
            if theirs != ours:
                log.warning("%s says %d %s; the options make it %d", instance.name, theirs, what, ours)

    async def _make_ready(self, instance: Instance) -> None:
        if self._prove is not None:
            await anyio.lowlevel.checkpoint()  # an instance that answers in the same moment is a partner already
        if instance in self._on_trial:
            await self._on_trial[instance].wait()
            return
        try:
            await self._prove_ready(instance)
        finally:
            instance.no_longer_expected()

    async def _prove_ready(self, instance: Instance) -> None:
        is_alone = instance.is_ready and instance.is_proven_alone
        if not (instance.health is Health.ALIVE or is_alone) or self._is_kept_back(instance):
            return
        if self._prove is None:
            self._now_ready(instance)
            return
        partner = self._partner(instance)
        if partner is None and not is_alone and self._is_left_alone(instance):
            partner = instance
        if partner is None or not (instance.grants and partner.grants):
            return
        ended = anyio.Event()
        on_trial = {one: ended for one in (instance, partner) if not one.is_ready}
        self._on_trial |= on_trial
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(EXPECTED_S, one.no_longer_expected) for one in on_trial]
        try:
            await self._fly_canary(instance, partner, self._prove)
        finally:
            for timer in timers:
                timer.cancel()
            for one in on_trial:
                del self._on_trial[one]
            ended.set()

    def _is_left_alone(self, instance: Instance) -> bool:
        """Tells whether the instance has to serve alone, because no counterpart is there nor may come in a moment."""
        others = [one for one in self._pool.instances if one.role != instance.role]
        is_without = next(self._counterparts(instance), None) is None
        return instance.serves_alone and is_without and not any(one.is_expected for one in others)

    def _is_kept_back(self, instance: Instance) -> bool:
        """Tells whether the instance must not become ready yet: because others of its model that are at work are of
        another kind, or because counterparts answer and it fits none of them. Then it waits for the first one of its
        own revision."""
        unlike = self._unlike(instance)
        if unlike is not None:
            why = str(instance.misfit(unlike))
        else:
            misfits = (instance.misfit(other) for other in self._counterparts(instance))
            misfit = next(misfits, None)
            if misfit is None or None in misfits:  # the first one that fits is enough: there may be thousands
                return False
            counterpart = "decoder" if instance.role == "prefill" else "prefiller"
            why = f"it waits for a {counterpart} of its revision; {misfit}"
        if why != instance.why:
            log.warning("%s is kept back: %s", instance.name, why)
        instance.why = why
        return True

    def _unlike(self, instance: Instance) -> Instance | None:
        """Returns an instance of its model that is at work and of another kind; None where there is none."""
        if not self._has_kinds:
            return None
        name = instance.adapter.name
        others = (one for one in self._pool.instances if one.adapter.name != name and one.is_ready)
        return next((other for other in others if _have_model(instance, other)), None)

    def _counterparts(self, instance: Instance) -> Iterator[Instance]:
        """Yields the instances of the other role that answer and serve a model of its own."""
        for other in self._pool.instances:
            if (
                other.role != instance.role
                and other.health in (Health.ALIVE, Health.READY)
                and _have_model(instance, other)
            ):
                yield other

    def _partner(self, instance: Instance) -> Instance | None:
        """Returns a counterpart that answers and fits, a ready one if there is any; None where there is none. Each call
        returns the next of them."""
        others = [
            other
            for other in self._counterparts(instance)
            if instance.misfit(other) is None and other not in self._on_trial
        ]
        candidates = [other for other in others if other.is_ready] or others
        self._turn += 1
        return candidates[self._turn % len(candidates)] if candidates else None

    async def _fly_canary(self, instance: Instance, partner: Instance, prove: Prove) -> None:
        prefiller, decoder = (instance, partner) if instance.role == "prefill" else (partner, instance)
        epochs = {one: one.epoch for one in (instance, partner)}
        try:
            with anyio.fail_after(self._canary_timeout_s):
                await prove(prefiller, decoder)
        except (LegNotTried, StaleTerm):
            pass  # the proxy's own fault, or it leads no more: that says nothing of the pair
        except (ProxyError, EngineReply, TimeoutError) as error:
            says = f" ({error.engine_says})" if isinstance(error, LegFailed) and error.engine_says else ""
            way = f"to {decoder.name}" if prefiller is decoder else f"from {prefiller.name} to {decoder.name}"
            why = f"a canary {way} failed: {str(error) or 'it took too long'}{says}"
            if why != instance.why:
                log.warning("%s: %s", instance.name, why)
            instance.why = why
            if instance.is_ready and partner.is_ready:
                instance.disproven(why)
        else:
            for proven, epoch in epochs.items():
                # The instance may have been restarted since, or others of another kind may be at work by now.
                if proven.epoch == epoch and not self._is_kept_back(proven):
                    self._now_ready(proven, is_alone=instance is partner)

    def _now_ready(self, instance: Instance, *, is_alone: bool = False) -> None:
        was_ready = instance.is_ready
        instance.proven(is_alone=is_alone)
        if instance.is_ready and not was_ready:
            log.info("%s is ready%s", instance.name, " to serve alone" * is_alone)


def _reason(body: bytes) -> str:
    """Returns the engine's own words for why it is not well, behind a colon; empty where it gives none."""
    try:
        reason = _failed.decode(body).reason
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return f": {reason[:MAX_REASON_CHARS]}" if reason else ""


def _have_model(one: Instance, other: Instance) -> bool:
    """Tells whether there is a model that both serve, as far as they tell."""
    return not other.models or not one.models or not other.models.isdisjoint(one.models)


def _could_serve(instance: Instance, model: str | None) -> bool:
    return instance.serves(model) or instance.is_known_for(model)


def _facts(instance: Instance, answers: dict[str, bytes]) -> EngineInfo:
    try:
        return instance.adapter.read_facts(answers)
    except MalformedReply as error:
        raise UnlikeItsKind(str(error), is_read=True) from None
