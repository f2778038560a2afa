"""The engine core: the model's thread and the two ends of the transfer. It stands behind the HTTP face's `EngineCore`.

A generation:   (a handoff's KV is taken from the PD buffer →) sequence → tokens → dropped.
A large one:    pages copied into the cache as they arrive → a handoff's sequence goes on with them → as above.
A prefill:      pages reserved at the decoder → sequence, its layers told as they are computed, each page pushed as it
                is filled → first token → the push is finished behind the caller's back → the decoder is told → local
                pages freed.

What is lent out lives in `async with` blocks. What must go on after such a block (a kept push; waiting for writes that
cannot be called back) is a task in `_background`, owned here and waited for on close.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from transfer import wire
from transfer.agents.base import close_agent
from transfer.agents.lane import Lane, check_lane, measure_lane
from transfer.agents.nixl import NixlAgent
from transfer.dataplane.plane import DataPlane
from transfer.engine.api import EngineBusy, Generation, GenerationJob, JobTooLarge, ModelFacts, Prefill, RankLost
from transfer.engine.cache_need import cache_need, max_cached_tokens
from transfer.engine.config import EngineSettings
from transfer.engine.intake import CacheIntake
from transfer.engine.kv_events import KvEventPublisher
from transfer.engine.model import ModelRunner
from transfer.engine.on_loop import on_loop
from transfer.engine.paged_cache import PagedStore
from transfer.engine.parts import new_agent, new_pd_buffer, new_plane, new_runner, new_store, receiver_config
from transfer.engine.ranks.leader import OtherRanks
from transfer.engine.ranks.messages import LetGo, Look, RankFacts, Start, WaitDelivered
from transfer.engine.ranks.pushes import RanksPush
from transfer.engine.ranks.takes import RanksTake
from transfer.engine.running import Prefilled, Running, first_token
from transfer.engine.scheduler import Scheduler
from transfer.engine.sequence import Sequence
from transfer.engine.worker import EngineWorker
from transfer.errors import AttemptLost, GeometryError, StaleTerm, TransferError
from transfer.geometry import PageGroup
from transfer.memory.buffer import PagedBuffer
from transfer.plan.blocks import PageTable, page_table
from transfer.plan.keys import chunk_keys
from transfer.roles.epochs import sender_epoch
from transfer.roles.highest_term import HighestTerm
from transfer.roles.rank_slab import OtherSlabs
from transfer.roles.receiver import Receiver
from transfer.roles.self_check import SelfCheck

log = logging.getLogger(__name__)


class Engine:
    """An `Engine` is one engine process. Call `start` before anything else, and `aclose` at the end.

    Mutable state: `_num_taken` (requests inside), `_pushes` (attempts on their way out), `_background` (what outlives
    its request), `_lane` (set once, at start), `_totals` (for statistics), `_others` (what the other ranks last said of
    their parts of the PD buffer), `_highest_term` (of the leaders that were heard of). Event loop's thread only; the
    worker has the rest.
    """

    def __init__(self, settings: EngineSettings, ranks: OtherRanks | None = None) -> None:
        """Makes the engine's parts. `ranks` are the other ranks of this engine, as many as `settings` say; they make
        their parts meanwhile."""
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self.epoch = uuid.uuid4().hex
        self._ranks = ranks or OtherRanks()
        if self._ranks.size != settings.tensor_parallel_size:
            raise TransferError(
                f"tensor_parallel_size is {settings.tensor_parallel_size}, and {self._ranks.size} ranks were started"
            )
        self._others: list[RankFacts] = []
        self._runner = new_runner(settings, 0, self._ranks.add_up)
        self._identity = self._runner.identity()
        self._fleet_key = settings.fleet
        self._chunk_secret = b"" if self._fleet_key is None else self._fleet_key.chunk_secret
        layout = self._runner.layout
        store = new_store(settings, self._runner)
        self._max_model_len = _max_model_len(settings, self._runner, store)
        self._receives = settings.role in ("decode", "both")
        self._sends = settings.role in ("prefill", "both")
        self._shares_prompts = settings.prefix_cache and _can_share(layout.kv.groups)
        self._received = new_pd_buffer(settings, self._runner)
        # The pages of its longest sequence. All further pages of the cache may be pinned for attempts.
        self._max_need = store.buffer.num_pages
        self._pins_prompts = self._receives and self._shares_prompts and self._ranks.size == 1
        if self._pins_prompts:
            self._max_need = -(-self._max_model_len // settings.chunk_size)
        self.kv_events: KvEventPublisher | None = None
        """The publisher of what the prefix cache holds; None where nobody shall follow it."""
        if settings.kv_events is not None:
            self.kv_events = KvEventPublisher(settings.kv_events, settings.kv_events_replay, settings.chunk_size)
            if not self._shares_prompts:
                log.info("kv_events: no prompt is kept for others, so that there is nothing to publish")
        self._worker = EngineWorker(
            self._runner,
            store,
            Scheduler(
                store.buffer.num_pages, settings.chunk_size, store.buffer.num_pages - self._max_need, self.kv_events
            ),
            self._received.pages if self._received else None,
            self._ranks,
        )
        self._store = store
        self._agents: list[NixlAgent] = []
        self._lane: Lane | None = None
        self._highest_term = HighestTerm()
        self._receiver: Receiver | None = None
        self._self_check: SelfCheck | None = None
        self._intake: CacheIntake | None = None
        self._plane: DataPlane | None = None
        self._num_taken = 0
        self._pushes: dict[str, RanksPush] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._totals = {"generations": 0, "handoffs": 0, "prefills": 0, "pushed_pages": 0, "pushed_bytes": 0}

    def __repr__(self) -> str:
        return f"<Engine {self.settings.role} {self._num_taken} requests, {len(self._pushes)} pushes>"

    @property
    def model(self) -> ModelFacts:
        return ModelFacts(
            name=self.settings.model_name,
            max_model_len=self._max_model_len,
            vocab_size=self._runner.vocab_size,
            eos_token_ids=self._runner.eos_token_ids,
        )

    async def start(self, on_lost: Callable[[], None] = lambda: None) -> None:
        """Opens the transfer's ends and starts computing. `on_lost` is called when another rank is lost.

        Raises when a port is taken, or NIXL cannot be used or moves bytes wrongly; on a GPU also when it is slow.
        """

        def end(error: RankLost) -> None:
            self._worker.end(error)
            on_lost()

        await self._ranks.start(end)
        self._lane = await asyncio.to_thread(
            measure_lane, self._new_agent, self._runner.device, self.settings.nixl_options
        )
        check_lane(self._lane)
        self._worker.start()
        if self._pins_prompts and self._max_need == self._store.buffer.num_pages:
            log.info(
                "the KV cache has room for one longest sequence only: what it has of a prompt is sent all the same"
            )
        self._others = [msgspec.convert(facts, RankFacts) for facts in await self._ranks.ask(Start(self.epoch))]
        if self._received is not None:
            agent = self._new_agent(self.epoch, receives=True)
            self._agents.append(agent)
            self._receiver = self._make_receiver(agent, self._received)
            await self._receiver.start()
            self._self_check = SelfCheck(
                self._receiver.endpoint,
                agent.epoch,
                interval_s=receiver_config(self.settings).heartbeat_s,
                fleet_key=self._fleet_key,
            )
            self._self_check.start()
        if self._sends:
            epoch = sender_epoch(self.epoch) if self._receives else self.epoch
            self._plane = new_plane(self.settings, self._runner, epoch, self._store)
            await asyncio.wrap_future(self._plane.start())

    async def aclose(self) -> None:
        """Stops everything. Writes under way get a moment to end. What is still held elsewhere runs out there."""
        for push in list(self._pushes.values()):
            push.abort("the prefiller is shutting down")
        if self._background:
            await asyncio.wait(self._background, timeout=2)
        if self._plane is not None:  # before its pages are given back below: until then it may send them
            await asyncio.to_thread(self._plane.close)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._self_check is not None:
            self._self_check.close()
        if self._receiver is not None:
            await self._receiver.aclose()
        if self._intake is not None:
            self._intake.close()
        await asyncio.to_thread(self._worker.close)
        if self.kv_events is not None:
            await asyncio.to_thread(self.kv_events.close)
        await self._ranks.aclose()
        for agent in self._agents:
            await asyncio.to_thread(close_agent, agent, self._received)

    # ── what the HTTP face asks for ─────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def generate(self, job: GenerationJob) -> AsyncIterator[Generation]:
        """Computes an answer. See `EngineCore.generate`."""
        self._highest_term.check(job.term)
        with self._place():
            running = Running(self._continued_sequence(job))
            if job.handoff is None:
                self._worker.add(running.sequence)
            else:
                await self._add_handoff(running.sequence, job.handoff)
            self._totals["handoffs" if job.handoff else "generations"] += 1
            try:
                yield running
            finally:
                self._worker.drop(running.sequence)

    @asynccontextmanager
    async def prefill(self, job: GenerationJob) -> AsyncIterator[Prefill]:
        """Reads a prompt and pushes its KV. See `EngineCore.prefill`."""
        assert job.push is not None
        self._highest_term.check(job.term)
        if self._plane is None:
            raise TransferError(f"this engine's role is {self.settings.role}: it does not push KV to a decoder")
        with self._place():
            running = Running(self._sequence(job, len(job.prompt_token_ids)))
            sequence = running.sequence
            keys = sequence.keys or self._chunk_keys(job, sequence.prompt_pages)
            try:
                push = await RanksPush.open(self._plane, self._ranks, job.push, sequence.num_prompt_tokens, keys)
            except StaleTerm as error:
                self._highest_term.hear(error.heard)  # the decoder knew of it first
                raise
            self._pushes[job.push.attempt] = push
            self._totals["prefills"] += 1
            sequence.stops_after_first = True
            sequence.on_layers = push.layers_filled
            prefill = Prefilled(len(push.table) - push.num_cached)
            self._worker.add(sequence)
            try:
                prefill.token = await first_token(running, push)
                prefill.num_cached_tokens = running.num_cached_tokens
                yield prefill
            finally:
                self._spawn(self._end_push(job.push.attempt, push, sequence, prefill.is_kept))

    async def cancel(self, attempt: str) -> bool:
        """Drops an attempt's KV. See `EngineCore.cancel`."""
        push = self._pushes.get(attempt)
        if push is not None:
            push.abort("cancelled")
        gone = self._receiver.cancel(attempt) if self._receiver is not None else True
        return gone and push is None

    async def refresh(self) -> None:
        """Asks the other ranks for their facts. See `EngineCore.refresh`."""
        self._others = [msgspec.convert(facts, RankFacts) for facts in await self._ranks.ask(Look())]

    async def sender_ended(self, epoch: str) -> bool:
        """Notes that a prefiller's process has ended. See `EngineCore.sender_ended`."""
        if self._receiver is None:
            return True
        answers = [self._receiver.sender_ended(name) for name in (epoch, sender_epoch(epoch))]
        return all(answers)

    def hear_term(self, term: int) -> None:
        """Notes that there is a leader of this term. See `EngineCore.hear_term`."""
        self._highest_term.hear(term)

    def buffer_facts(self) -> wire.BufferFacts:
        """Returns the facts for the proxy. Pages are the same on every rank; wrong tags are added up. See
        `EngineCore.buffer_facts`."""
        receiver = self._receiver
        pages = receiver.reservations if receiver is not None else None
        scheduler = self._worker.scheduler
        return wire.BufferFacts(
            epoch=self.epoch,
            role=self.settings.role,
            model=self._identity.model,
            dtype=self._runner.layout.kv.dtype,
            chunk_size=self._runner.layout.chunk_size,
            bytes_per_token=self._runner.layout.kv.bytes_per_token,
            page_bytes=self._runner.layout.page_bytes,
            num_pages=pages.num_pages if pages else 0,
            num_free=pages.num_free if pages else 0,
            num_quarantined=pages.num_quarantined if pages else 0,
            max_model_len=self._max_model_len,
            receivers=receiver.endpoints if receiver is not None else [],
            groups=[
                wire.PageGroupFacts(kind=g.kind, num_layers=g.num_layers, window=g.window, state_pages=g.state_pages)
                for g in self._runner.layout.kv.groups
            ],
            windowed=self._intake is not None,
            num_cached=pages.num_cached if pages else 0,
            num_reserved=pages.num_reserved if pages else 0,
            num_queued=pages.num_queued if pages else 0,
            num_reservations_waited=pages.num_waited if pages else 0,
            num_wrong_tags=self._num_wrong_tags,
            fleet_key="none" if self._fleet_key is None else self._fleet_key.fingerprint,
            term=self._highest_term.value,
            num_cache_pages=scheduler.pool.num_pages,
            num_cache_free=scheduler.store.num_available,
            num_cache_waiting=scheduler.counts["waiting"],
        )

    def fault(self) -> str | None:
        """Returns what is wrong with this process. See `EngineCore.fault`."""
        if not self._worker.is_alive:
            return "the thread that computes has ended"
        if self._ranks.lost is not None:
            return str(self._ranks.lost)
        if self._plane is not None and not self._plane.is_well:
            return "its data plane, which sends KV, does not work"
        return None if self._self_check is None else self._self_check.fault

    def statistics(self) -> dict[str, Any]:
        scheduler = self._worker.scheduler
        return {
            "role": self.settings.role,
            "epoch": self.epoch,
            "tokens_fed": self._runner.num_tokens_fed,
            "requests": self._num_taken,
            "pushes": len(self._pushes),
            "sequences": scheduler.counts,
            "cache_pages": {"total": scheduler.pool.num_pages, "free": scheduler.store.num_available},
            "prefix_cache": asdict(self._worker.statistics),
            "num_reservations_waited": self._receiver.reservations.num_waited if self._receiver is not None else 0,
            "lane": {"backends": self.settings.nixl_options.backends, **asdict(self._lane)} if self._lane else None,
            "cached_pages": self._receiver.reservations.num_cached if self._receiver is not None else 0,
            "wrong_tags": self._num_wrong_tags,
            **self._totals,
        }

    # ── below ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _num_wrong_tags(self) -> int:
        """Adds up, over all ranks, how often pages were found to be written by another attempt than theirs. What the
        other ranks have found is as of the last `refresh`."""
        own = self._receiver.num_wrong_tags if self._receiver is not None else 0
        return own + sum(rank.num_wrong_tags for rank in self._others)

    def _new_agent(self, epoch: str, receives: bool) -> NixlAgent:
        return new_agent(self.settings, self._runner, epoch, receives)

    def _make_receiver(self, agent: NixlAgent, buffer: PagedBuffer) -> Receiver:
        """Makes a receiver. It has an intake where prompts larger than the buffer may pass through, and asks the KV
        cache where prompts are shared."""
        if self.settings.windowed and self.settings.reservation == "whole" and self._ranks.size == 1:
            self._intake = CacheIntake(
                self._worker,
                self._max_need,
                pages_taken=lambda attempt, count: receiver.pages_taken(attempt, count),
                cancel=lambda attempt, reason: receiver.cancel(attempt, reason),
            )
        receiver = Receiver(
            agent,
            buffer,
            self._identity,
            receiver_config(self.settings),
            others=self._other_slabs(),
            intake=self._intake,
            cache=self._worker if self._pins_prompts else None,
            highest_term=self._highest_term,
        )
        return receiver

    def _other_slabs(self) -> OtherSlabs | None:
        slabs = [facts.slab for facts in self._others if facts.slab is not None]
        return OtherSlabs(slabs, lambda: self._ranks.ask(WaitDelivered())) if slabs else None

    def _place(self) -> _Place:
        if self._ranks.lost is not None:
            raise self._ranks.lost
        if self._num_taken >= self.settings.max_num_seqs:
            raise EngineBusy(f"{self._num_taken} requests are being served, which is this engine's limit")
        return _Place(self)

    def _sequence(self, job: GenerationJob, num_tokens: int) -> Sequence:
        groups, chunk_size = self._runner.layout.kv.groups, self._runner.layout.chunk_size
        num_prompt_tokens = len(job.prompt_token_ids)
        need = cache_need(groups, chunk_size, num_tokens, num_prompt_tokens if job.handoff is not None else 0)
        if need.num_pages > self._max_need:
            raise JobTooLarge(
                f"prompt and answer need {need.num_pages} pages of KV cache, this engine has {self._max_need}"
            )
        prompt_pages = page_table(groups, num_prompt_tokens, chunk_size)
        keys = self._chunk_keys(job, prompt_pages) if self._shares_prompts else []
        return Sequence(job, need, prompt_pages, on_token=_unset, on_error=_unset, keys=keys)

    def _chunk_keys(self, job: GenerationJob, table: PageTable) -> list[bytes]:
        return chunk_keys(job.prompt_token_ids, table, secret=self._chunk_secret)

    def _continued_sequence(self, job: GenerationJob) -> Sequence:
        """Returns a sequence with pages for its answer. Raises `JobTooLarge`; then a handoff's KV is of no use to
        anybody."""
        try:
            return self._sequence(job, _num_fed_tokens(job))
        except JobTooLarge as error:
            if job.handoff is not None and self._receiver is not None:
                self._receiver.cancel(job.handoff.attempt, str(error))
            raise

    async def _add_handoff(self, sequence: Sequence, handoff: wire.Handoff) -> None:
        """Starts a sequence with the attempt's KV, which is in the PD buffer, or in the cache if it was too large for
        that.

        Raises `AttemptLost` unless all of it is there.
        """
        receiver = self._receiver
        if receiver is None:
            raise TransferError(f"this engine's role is {self.settings.role}: it receives no KV from prefillers")
        reservation = await receiver.wait_ready(handoff.attempt)
        if reservation.num_tokens != sequence.num_prompt_tokens:
            receiver.cancel(handoff.attempt, "handed off with another prompt")
            raise AttemptLost(
                f"the handoff has {sequence.num_prompt_tokens} prompt tokens, the KV here {reservation.num_tokens}"
            )
        num_pinned = reservation.num_cached
        if list(reservation.keys[:num_pinned]) != sequence.keys[:num_pinned]:
            receiver.cancel(handoff.attempt, "handed off with another prompt")
            raise AttemptLost(
                f"the handoff's prompt does not begin with the {num_pinned} pages that its prefiller named"
            )
        takes = RanksTake(receiver, self._ranks, self._spawn)
        received_pages = await takes.take(handoff.attempt)
        if reservation.window:
            assert self._intake is not None
            self._worker.go_on(sequence, self._intake.hand_over(handoff.attempt))
            receiver.consumed(handoff.attempt)
            return
        if num_pinned:
            self._worker.adopt_pins(sequence, handoff.attempt, num_pinned)
        sequence.received_pages = received_pages
        sequence.check_received = lambda: receiver.check_tags(handoff.attempt)
        let_go_here = on_loop(takes.let_go)

        def let_go() -> None:
            self._ranks.tell(LetGo(handoff.attempt))
            let_go_here(handoff.attempt)

        sequence.on_received = let_go
        self._worker.add(sequence)

    async def _end_push(self, attempt: str, push: RanksPush, sequence: Sequence, keep: bool) -> None:
        """Completes the push, behind its request, or gives it up.

        The local pages are free when it is over. The attempt is not forgotten before its last write has ended.
        """
        try:
            if keep:
                num_bytes, _ = await push.finish()
                self._totals["pushed_bytes"] += num_bytes
                self._totals["pushed_pages"] += push.num_sent
            else:
                push.abort("the answer ended at the prefiller, or its client left")
        except AttemptLost as error:
            log.warning("%s", error)
        finally:
            self._worker.drop(sequence)
        try:
            await push.wait_ended()
        finally:
            self._pushes.pop(attempt, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Place:
    """A `_Place` is one of the `max_num_seqs` places."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine._num_taken += 1

    def __exit__(self, *exc: object) -> None:
        self._engine._num_taken -= 1


def _num_fed_tokens(job: GenerationJob) -> int:
    """Returns how many tokens of prompt and answer are fed. The last token of an answer is told, and never fed."""
    return max(len(job.prompt_token_ids), job.num_question_tokens + job.max_tokens - 1)


def _can_share(groups: tuple[PageGroup, ...]) -> bool:
    """Returns whether a prompt's blocks are of use to others that begin alike. A window's tail is not, and a ring
    forgets."""
    return len(groups) == 1 and groups[0].kind in ("full", "mla")


def _unset(_: object) -> None:
    raise RuntimeError("the sequence was started before it had a listener")


def _max_model_len(settings: EngineSettings, runner: ModelRunner, store: PagedStore) -> int:
    """Returns the shortest of: what was asked for, what the model was made for, what the cache can hold. Raises
    `GeometryError` where there is no room, or no limit."""
    num_pages, groups = store.buffer.num_pages, runner.layout.kv.groups
    cached = max_cached_tokens(groups, num_pages, settings.chunk_size)
    if cached == 0:
        raise GeometryError(
            f"kv_cache_size has room for {num_pages} pages; one chunk of this model needs {len(groups)}"
        )
    limits = [n for n in (settings.max_model_len, runner.context_length, cached) if n is not None]
    if not limits:
        raise GeometryError("neither the model nor its cache has a longest sequence; give max_model_len")
    return min(limits)
