"""Probe looks at every instance again and again, and lets a request go through it before it counts as ready.

"It answers" is not "it works": a prefiller and a decoder that cannot exchange KV both answer. So a new process first
has to serve a canary, together with a counterpart.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from pdproxy.engines import recognise
from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.http.base import EngineBroken, EngineRefused, EngineUnreachable
from pdproxy.engines.info import EngineInfo
from pdproxy.errors import EngineReply, ProxyError
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.pool import Pool

log = logging.getLogger(__name__)

EAGER_S = 0.5
"""Seconds between two looks at an instance that is not ready yet, or did not answer just now: then seconds matter."""

Compare = Callable[[Instance], Awaitable[None]]
"""A function that looks at an instance's tokenizer. Does not raise for what the instance does."""
Prove = Callable[[Instance, Instance], Awaitable[None]]
"""A function that sends a tiny request through a prefiller and a decoder, in this order. Raises an error where it
fails."""


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


class Probe:
    """Probe keeps the health of `pool` up to date. Without `prove`, an answer is enough to be ready."""

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
    ) -> None:
        self._pool = pool
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._prove = prove
        self._compare_tokenizer = compare
        self._canary_timeout_s = canary_timeout_s
        self._expected = expected
        # State: who is watched, and how to stop it; whose turn it is to be a canary's other end; who is
        # being proven by one, and the event of its end.
        self._watched: dict[Instance, anyio.CancelScope] = {}
        self._turn = 0
        self._on_trial: dict[Instance, anyio.Event] = {}

    async def run(self) -> None:
        """Watches the instances, until cancelled. An instance is watched from the time it joins the pool until it has
        left and has nothing under way."""
        try:
            async with anyio.create_task_group() as watchers:
                while True:
                    self._pool.changed.clear()
                    self._follow(watchers)
                    await self._pool.changed.wait()
        finally:
            self._watched.clear()

    async def look(self, instance: Instance) -> None:
        """Asks the instance once, and proves it if it needs that. Never raises for what an instance does."""
        was, why = instance.health, instance.why
        strange: UnlikeItsKind | None = None
        is_misfit = False
        try:
            await self._ask(instance)
            # Before its canary the instance gets no requests anyway. Without a canary it is ready at once, and its
            # tokenizer is compared after that: until then its prompts are counted in another way.
            if self._prove is not None:
                await self._compare_tokenizer(instance)
            await self._make_ready(instance)
            if self._prove is None:
                await self._compare_tokenizer(instance)
        except EngineRefused as error:
            instance.lost(f"it cannot be reached: {error}")
        except MalformedReply as error:
            instance.lost(str(error))
            is_misfit = True
        except UnlikeItsKind as error:
            strange = error
            is_misfit = True
        except (EngineUnreachable, EngineBroken) as error:
            instance.missed(f"it did not answer: {error}")
        except Exception:
            log.exception("looking at %s met a bug", instance.name)
            instance.lost("looking at it met a bug")
        if strange is not None:
            await self._judge(instance, strange)
        if instance.health is not Health.DOWN or (was is Health.DOWN and why == instance.why):
            return
        if is_misfit or (instance.facts is not None and was is not Health.DOWN):
            log.warning("%s is down: %s", instance.name, instance.why)
        elif was is not Health.DOWN:  # as a rule it is still starting
            log.info("%s does not answer yet: %s", instance.name, instance.why)

    async def _judge(self, instance: Instance, error: UnlikeItsKind) -> None:
        """Notes an answer that is not what the instance's kind of engine gives. It is asked once, for each error, of
        what other kind it may be."""
        note = instance.lost if error.is_read else instance.missed
        if str(error) in instance.why:
            note(instance.why)
        elif kind := await self._other_kind(instance):
            instance.lost(f"{error}: {kind}")
        else:
            note(str(error))

    async def _other_kind(self, instance: Instance) -> str | None:
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
        for instance in [instance for instance in self._watched if instance not in present]:
            self._watched.pop(instance).cancel()
        for instance in [instance for instance in present if instance not in self._watched]:
            self._watched[instance] = scope = anyio.CancelScope()
            watchers.start_soon(self._watch, instance, scope)

    async def _watch(self, instance: Instance, scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                await self.look(instance)
                instance.examined()
                is_well = instance.is_ready and not instance.is_doubted and not instance.has_foreign_pages
                pause_s = self._interval_s if is_well else min(EAGER_S, self._interval_s)
                with anyio.move_on_after(pause_s):
                    await instance.suspected.wait()
                instance.examine()

    async def _ask(self, instance: Instance) -> None:
        async with instance.look_lock:
            was, look = instance.epoch, instance.asked()
            answers = {path: await self._get(instance, path) for path in instance.adapter.looks}
            instance.heard(_facts(instance, answers), look)
        if instance.epoch != was:
            log.info("%s: %s, epoch %s", instance.name, instance.url, instance.epoch)
            self._compare(instance)

    async def _get(self, instance: Instance, path: str) -> bytes:
        status, body = await instance.client.get(path, timeout_s=self._timeout_s)
        if status in (401, 403):
            raise UnlikeItsKind(f"it did not answer: {path} is HTTP {status}; its key is said by --engine-api-key")
        if status != 200:
            raise UnlikeItsKind(f"it did not answer: {path} is HTTP {status}")
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
        if instance.health is not Health.ALIVE or self._is_kept_back(instance):
            return
        if self._prove is None:
            self._now_ready(instance)
            return
        partner = self._partner(instance)
        if partner is None:
            return
        ended = anyio.Event()
        on_trial = {one: ended for one in (instance, partner) if not one.is_ready}
        self._on_trial |= on_trial
        try:
            await self._fly_canary(instance, partner, self._prove)
        finally:
            for one in on_trial:
                del self._on_trial[one]
            ended.set()

    def _is_kept_back(self, instance: Instance) -> bool:
        """Tells whether the instance must not become ready yet, because it does not fit some instance that is at work.
        While none is at work, it is kept back where it fits none of the counterparts that it could have."""
        peers = [other for other in self._answering(instance) if other.is_ready]
        misfits = [instance.misfit(other) for other in peers or self._counterparts(instance)]
        why = next(filter(None, misfits), None)
        if why is None or (not peers and None in misfits):
            return False
        if why != instance.why:
            log.warning("%s is kept back: %s", instance.name, why)
        instance.why = why
        return True

    def _answering(self, instance: Instance) -> list[Instance]:
        """Returns the other instances of its model that answer."""
        return [
            other
            for other in self._pool.instances
            if other is not instance
            and other.health in (Health.ALIVE, Health.READY)
            and (not other.models or not instance.models or other.models & instance.models)
        ]

    def _counterparts(self, instance: Instance) -> list[Instance]:
        return [other for other in self._answering(instance) if other.role != instance.role]

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
        except (ProxyError, EngineReply, TimeoutError) as error:
            why = f"a canary from {prefiller.name} to {decoder.name} failed: {str(error) or 'it took too long'}"
            if why != instance.why:
                log.warning("%s: %s", instance.name, why)
            instance.why = why
        else:
            for proven, epoch in epochs.items():
                # The instance may have been restarted since, or others that it does not fit may be at work by now.
                if proven.epoch == epoch and not self._is_kept_back(proven):
                    self._now_ready(proven)

    def _now_ready(self, instance: Instance) -> None:
        was_ready = instance.is_ready
        instance.proven()
        if instance.is_ready and not was_ready:
            log.info("%s is ready", instance.name)


def _facts(instance: Instance, answers: dict[str, bytes]) -> EngineInfo:
    try:
        return instance.adapter.read_facts(answers)
    except MalformedReply as error:
        raise UnlikeItsKind(str(error), is_read=True) from None
