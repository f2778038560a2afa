"""The side of a rank other than 0. It takes rank 0's steps with its part of the model, and holds its own ends of the
transfer.

It has no scheduler and no HTTP: rank 0 decides which pages are whose, and they are the same on every rank. Its process
ends when rank 0's end of the sockets does, and, with an error, when a step fails: rank 0 notices.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from typing import Any

import msgspec
import torch

from transfer.agents.base import close_agent
from transfer.agents.nixl import NixlAgent
from transfer.child_process import read_message, write_message
from transfer.dataplane.plane import DataPlane, PlanePush
from transfer.engine.api import RankLost
from transfer.engine.config import EngineSettings
from transfer.engine.layer_reports import report_block, report_reused
from transfer.engine.parts import new_agent, new_pd_buffer, new_plane, new_runner, new_store
from transfer.engine.ranks import messages
from transfer.engine.ranks.link import Link, sum_over
from transfer.errors import AttemptLost, ReservationRefused, TransferError
from transfer.roles.epochs import epoch_of_rank
from transfer.roles.rank_slab import RankSlab

log = logging.getLogger(__name__)
_request = msgspec.msgpack.Decoder(messages.Request)


def follow(settings: EngineSettings, index: int, link: Link) -> None:
    """Runs rank `index` until rank 0 is gone. Raises `RankLost`, `TransferError`, or the exception that a step met."""
    try:
        asyncio.run(Follower(settings, index, link).run())
    finally:
        link.close()


class _Taken:
    """`_Taken` holds the pages of an attempt that is read here. Mutable state: `is_read`, set when that is over."""

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.is_read = asyncio.Event()


class Follower:
    """A `Follower` is a rank other than 0.

    Mutable state: `_pushes` (attempts on their way out, or whose pages are asked for), `_taken` (attempts whose
    received pages are read here), `_facts` (of this rank's slab, set once), `_tasks` (answers being worked out),
    `_failure` (why the thread ended). The event loop's thread owns all but the model and the cache, which are the
    engine thread's.
    """

    def __init__(self, settings: EngineSettings, index: int, link: Link) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._settings = settings
        self._link = link
        self._index = index
        self._runner = new_runner(settings, index, lambda part: sum_over([link], part))
        self._identity = self._runner.identity()
        self._store = new_store(settings, self._runner)
        self._received = new_pd_buffer(settings, self._runner)
        self._agents: list[NixlAgent] = []
        self._slab: RankSlab | None = None
        self._facts = messages.RankFacts()
        self._plane: DataPlane | None = None
        self._pushes: dict[str, PlanePush] = {}
        self._taken: dict[str, _Taken] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Answers and takes steps until rank 0 is gone. Raises what ended it otherwise."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        reader, self._writer = await asyncio.open_connection(sock=self._link.asks)
        thread = threading.Thread(target=self._take_steps, args=(loop, ended), name="engine", daemon=True)
        thread.start()
        answering = asyncio.create_task(self._answer_all(reader))
        stepping = asyncio.create_task(ended.wait())
        await asyncio.wait((answering, stepping), return_when=asyncio.FIRST_COMPLETED)
        self._link.break_off()
        await asyncio.to_thread(thread.join)
        for task in (answering, stepping, *self._tasks):
            task.cancel()
        await asyncio.gather(answering, stepping, *self._tasks, return_exceptions=True)
        await self._close()
        if self._failure is not None:
            raise self._failure

    async def _close(self) -> None:
        self._writer.close()
        if self._plane is not None:
            await asyncio.to_thread(self._plane.close)
        for agent in self._agents:
            await asyncio.to_thread(close_agent, agent, self._received)

    # ── the engine's thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _take_steps(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        try:
            while (step := self._link.next_step()) is not None:
                self._take(step, loop)
        except RankLost as error:
            log.info("%s", error)
        except BaseException as error:
            self._failure = error
        finally:
            loop.call_soon_threadsafe(ended.set)

    def _take(self, step: messages.Step, loop: asyncio.AbstractEventLoop) -> None:
        match step:
            case messages.Feed():
                push = None if step.attempt is None else self._pushes.get(step.attempt)
                tables, on_layers = step.tables, None
                if push is not None:
                    on_layers = report_block(self._runner, push.table, tables, step.block, push.layers_filled)
                self._runner.forward(self._store, tables, step.position, step.token_ids, on_layers)
            case messages.Reuse():
                if (push := self._pushes.get(step.attempt)) is not None:
                    report_reused(self._runner, push.table, step.pages, push.layers_filled)
            case messages.CopyIn():
                assert self._slab is not None
                taken = self._taken[step.attempt].pages
                source = taken[step.first : step.first + len(step.pages)]
                self._store.copy_in(self._slab.buffer.pages, source, step.pages)
                self._runner.synchronize()
                self._slab.check_tags(step.attempt, taken)  # wrong tags end the engine: steps have no answers
            case messages.LetGo():
                loop.call_soon_threadsafe(self._let_go, step.attempt)

    # ── the event loop ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer_all(self, reader: asyncio.StreamReader) -> None:
        """Begins each ask as it comes, so that one that waits does not delay the others."""
        while (request := await read_message(reader, _request)) is not None:
            self._own(asyncio.create_task(self._answer(request)))

    async def _answer(self, request: messages.Request) -> None:
        try:
            answer = messages.Answer(request.number, await self._work(request.ask))
        except TransferError as error:
            answer = messages.Answer(request.number, error=str(error))
        except asyncio.CancelledError:
            answer = messages.Answer(request.number, error="given up")
        except Exception as error:  # border: rank 0 passes it on to the one that asked
            log.exception("an ask failed")
            answer = messages.Answer(request.number, error=repr(error))
        write_message(self._writer, answer)

    async def _work(self, ask: messages.Ask) -> Any:
        value: Any = None
        match ask:
            case messages.Start():
                await self._start(ask.epoch)
                value = self._facts
            case messages.Look():
                num_wrong_tags = 0 if self._slab is None else self._slab.num_wrong_tags
                value = msgspec.structs.replace(self._facts, num_wrong_tags=num_wrong_tags)
            case messages.OpenPush():
                await self._open(ask)
            case messages.WatchPush():
                await self._watch(ask.attempt)
            case messages.FinishPush():
                value, _ = await asyncio.wrap_future(self._push(ask.attempt).finish())
            case messages.AbortPush():
                await self._abort(ask.attempt, ask.reason)
            case messages.EndPush():
                if (push := self._pushes.get(ask.attempt)) is not None:
                    await asyncio.wrap_future(push.ended)
            case messages.TakeKv():
                assert self._slab is not None
                self._taken[ask.attempt] = _Taken(self._slab.take(ask.attempt, ask.written))
            case messages.DropKv():
                self._let_go(ask.attempt)
            case messages.WaitRead():
                if (taken := self._taken.get(ask.attempt)) is not None:
                    await taken.is_read.wait()
            case messages.WaitDelivered():
                assert self._slab is not None
                await self._slab.delivered()
        return value

    async def _start(self, epoch: str) -> None:
        if self._received is not None:
            agent = self._new_agent(uuid.uuid4().hex, receives=True)
            self._slab = RankSlab(agent, self._received, self._identity)
            self._facts = messages.RankFacts(slab=await self._slab.start())
        if self._settings.role != "decode":
            name = epoch_of_rank(epoch, self._index)
            self._plane = new_plane(self._settings, self._runner, name, self._store)
            await asyncio.wrap_future(self._plane.start())

    def _new_agent(self, epoch: str, *, receives: bool) -> NixlAgent:
        agent = new_agent(self._settings, self._runner, epoch, receives)
        self._agents.append(agent)
        return agent

    async def _open(self, ask: messages.OpenPush) -> None:
        assert self._plane is not None
        loop, attempt = asyncio.get_running_loop(), ask.params.attempt
        if attempt in self._pushes:
            raise ReservationRefused(f"attempt {attempt} is being pushed already")
        push = self._plane.open(ask.params, num_tokens=ask.num_tokens, keys=ask.keys)
        self._pushes[attempt] = push
        push.ended.add_done_callback(lambda _: loop.call_soon_threadsafe(self._forget, push))
        await asyncio.wrap_future(push.granted)

    def _forget(self, push: PlanePush) -> None:
        if self._pushes.get(push.attempt) is push:
            del self._pushes[push.attempt]

    async def _watch(self, attempt: str) -> None:
        if (push := self._pushes.get(attempt)) is None:
            return
        failed, ended = asyncio.wrap_future(push.failed), asyncio.wrap_future(push.ended)
        try:
            await asyncio.wait((failed, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
            ended.cancel()
        if push.failure is not None:
            raise AttemptLost(push.failure)

    def _push(self, attempt: str) -> PlanePush:
        if (push := self._pushes.get(attempt)) is None:
            raise AttemptLost("its push is over")
        return push

    async def _abort(self, attempt: str, reason: str) -> None:
        """Gives a push up. Returns when it is over: rank 0 has the pages written anew then, and the decoder must not be
        told."""
        if (push := self._pushes.get(attempt)) is not None:
            push.abort(reason)
            await asyncio.wait([asyncio.wrap_future(push.finished)])

    def _let_go(self, attempt: str) -> None:
        if (taken := self._taken.pop(attempt, None)) is not None:
            taken.is_read.set()

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
