"""Looks at every instance again and again, and lets a request go through it before it counts as ready.

"It answers" is not "it works": a prefiller and a decoder that cannot exchange KV both answer. So a new process first
has to serve a canary, together with a counterpart.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import msgspec

from pdproxy.engines.base import EngineBroken, EngineUnreachable, MalformedReply
from pdproxy.errors import EngineReply, ProxyError
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.pool import Pool

log = logging.getLogger(__name__)

MAX_MISSES = 3
"""Answers that may be late before an instance counts as down; a refused connection counts at once."""
EAGER_S = 0.5
"""Between two looks at an instance that is not ready yet: while a fleet starts, seconds matter."""

Prove = Callable[[Instance, Instance], Awaitable[None]]
"""Prefiller, decoder: a tiny request went through both, or an error was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBuffer:
    """What model config, buffer size and chunk size make of a decoder's PD buffer."""

    pages: int
    page_bytes: int
    chunk_size: int


class _Models(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


class Probe:
    """Keeps the health of `pool` up to date. Without `prove`, an answer is enough to be ready."""

    def __init__(
        self,
        pool: Pool,
        *,
        interval_s: float,
        timeout_s: float,
        prove: Prove | None,
        expected: ExpectedBuffer | None = None,
    ) -> None:
        self._pool = pool
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._prove = prove
        self._expected = expected
        # State: late answers in a row, by name; whose turn it is to be a canary's other end; one canary at a time.
        self._misses: dict[str, int] = {}
        self._turn = 0
        self._canaries = anyio.Lock()

    async def run(self) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as watchers:
            for instance in self._pool.instances:
                watchers.start_soon(self._watch, instance)

    async def look(self, instance: Instance) -> None:
        """Ask once, and prove it if it needs that. Never raises for what an instance does."""
        try:
            await self._ask(instance)
            await self._make_ready(instance)
        except EngineUnreachable as error:
            self._lose(instance, f"it cannot be reached: {error}")
        except MalformedReply as error:
            self._lose(instance, str(error))
        except EngineBroken as error:
            self._miss(instance, f"it did not answer: {error}")
        except Exception:
            log.exception("looking at %s met a bug", instance.name)
            self._lose(instance, "looking at it met a bug")
        else:
            self._misses[instance.name] = 0

    async def _watch(self, instance: Instance) -> None:
        while True:
            await self.look(instance)
            pause_s = self._interval_s if instance.is_ready else min(EAGER_S, self._interval_s)
            with anyio.move_on_after(pause_s):
                await instance.suspected.wait()
            instance.suspected.clear()

    async def _ask(self, instance: Instance) -> None:
        await self._get(instance, "/health")
        facts = instance.adapter.read_facts(await self._get(instance, "/kv_buffer"))
        models = _read_models(await self._get(instance, "/v1/models"))
        is_new = instance.epoch != facts.epoch
        instance.heard(facts, models)
        if is_new:
            log.info("%s: %s, epoch %s", instance.name, instance.url, facts.epoch)
            self._compare(instance)

    async def _get(self, instance: Instance, path: str) -> bytes:
        status, body = await instance.client.get(path, timeout_s=self._timeout_s)
        if status != 200:
            raise MalformedReply(f"it answers {path} with HTTP {status}")
        return body

    def _compare(self, instance: Instance) -> None:
        """The decoder's own word counts; a difference means that somebody configured what he did not mean."""
        facts, expected = instance.known_facts, self._expected
        if expected is None or instance.role != "decode":
            return
        for what, theirs, ours in (
            ("pages", facts.num_pages, expected.pages),
            ("bytes per page", facts.page_bytes, expected.page_bytes),
            ("tokens per page", facts.chunk_size, expected.chunk_size),
        ):
            if theirs != ours:
                log.warning("%s says %d %s; the options make it %d", instance.name, theirs, what, ours)

    async def _make_ready(self, instance: Instance) -> None:
        if instance.health is not Health.ALIVE:
            return
        if self._prove is None:
            instance.proven()
            return
        async with self._canaries:
            partner = self._partner(instance)
            if partner is not None and instance.health is Health.ALIVE:
                await self._fly_canary(instance, partner, self._prove)

    def _partner(self, instance: Instance) -> Instance | None:
        """A counterpart that answers, one that is ready if there is any; each time the next of them."""
        others = [
            other
            for other in self._pool.instances
            if other.role != instance.role and other.health in (Health.ALIVE, Health.READY)
        ]
        candidates = [other for other in others if other.is_ready] or others
        self._turn += 1
        return candidates[self._turn % len(candidates)] if candidates else None

    async def _fly_canary(self, instance: Instance, partner: Instance, prove: Prove) -> None:
        prefiller, decoder = (instance, partner) if instance.role == "prefill" else (partner, instance)
        try:
            await prove(prefiller, decoder)
        except (ProxyError, EngineReply) as error:
            why = f"a canary from {prefiller.name} to {decoder.name} failed: {error}"
            if why != instance.why:
                log.warning("%s: %s", instance.name, why)
            instance.why = why
        else:
            for proven in (instance, partner):
                if not proven.is_ready:
                    log.info("%s is ready", proven.name)
                proven.proven()

    def _miss(self, instance: Instance, why: str) -> None:
        self._misses[instance.name] = self._misses.get(instance.name, 0) + 1
        if not instance.is_ready or self._misses[instance.name] >= MAX_MISSES:
            self._lose(instance, why)

    def _lose(self, instance: Instance, why: str) -> None:
        if instance.health is not Health.DOWN:
            log.warning("%s is down: %s", instance.name, why)
        instance.lost(why)


def _read_models(body: bytes) -> frozenset[str]:
    try:
        return frozenset(model.id for model in msgspec.json.decode(body, type=_Models).data)
    except msgspec.DecodeError as error:
        raise MalformedReply(f"its /v1/models is not understood: {error}") from None
