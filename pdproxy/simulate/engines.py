"""The module makes engines that compute nothing and take their time: one prefiller, one decoder. They implement
`engines.http.base.EngineClient`.

They answer when `speed.py` says they would, tell the real KV board what real decoders would tell it, and can be killed,
frozen and slowed down.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from math import inf
from typing import Protocol

from pdproxy.config.values import Role
from pdproxy.engines.http.base import EngineBroken, EngineRefused, EngineUnreachable, Leg
from pdproxy.simulate.batch import Batch, Sequence
from pdproxy.simulate.calls import ENGINES
from pdproxy.simulate.legs import StreamLeg, WholeLeg
from pdproxy.simulate.messages import CANCEL, FACTS, Told, cancel_ask, decode_ask, encode, prefill_ask
from pdproxy.simulate.prompts import Prompt, PromptQueue
from pdproxy.simulate.speed import Speed
from transfer import wire

SIGN_OF_LIFE_S = 20.0
"""The seconds between two pieces of a long answer. The proxy takes a longer silence for a failure."""


class Signals(Protocol):
    """Signals is where decoders tell of KV."""

    def deliver(self, signal: wire.Signal) -> None:
        """Takes a signal. It never raises, and never waits."""


class Engine(ABC):
    """Engine is what both kinds have in common: a process that lives, answers, and can stop doing either.

    Mutable state: whether it lives, or stands still and who waits until it does not; which of its lives it is in; calls
    under way that wait for it.
    """

    role: Role
    is_both = False
    """Tells that this is one half of an engine, which has another one for the other role."""

    def __init__(self, name: str, speed: Speed) -> None:
        self.name = name
        self.speed = speed
        self.loop = asyncio.get_running_loop()
        self.is_alive = True
        self._thawed: asyncio.Event | None = None
        self._num_lives = 1
        self.epoch = f"{name}#1"
        self._waiting: dict[asyncio.Future[None], None] = {}

    @property
    def is_frozen(self) -> bool:
        return self._thawed is not None

    # ── what happens to it ──────────────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """Ends the process with everything it had; no call reaches it until `start`. Both are idempotent."""
        if not self.is_alive:
            return
        self.is_alive = False
        thawed, self._thawed = self._thawed, None
        if thawed is not None:
            thawed.set()
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(EngineBroken(f"{self.name} has gone"))
        self._lose_all()

    def start(self) -> None:
        """Starts a new process, which has nothing."""
        if not self.is_alive:
            self.is_alive = True
            self._num_lives += 1
            self.epoch = f"{self.name}#{self._num_lives}"

    def freeze(self) -> None:
        """Makes the process stand still; calls to it wait until `thaw`. Both are idempotent."""
        if self.is_alive and self._thawed is None:
            self._thawed = asyncio.Event()
            self._stand_still()

    def thaw(self) -> None:
        if self._thawed is not None:
            self._thawed.set()
            self._thawed = None
            self._go_on()

    @abstractmethod
    def slow(self, slowness: float) -> None:
        """Makes everything take `slowness` times as long from now on; 1 is the usual speed."""

    @abstractmethod
    def _lose_all(self) -> None: ...

    @abstractmethod
    def _stand_still(self) -> None: ...

    @abstractmethod
    def _go_on(self) -> None: ...

    # ── what it is asked ────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg: ...

    async def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        self._check_alive()
        if self._thawed is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._thawed.wait()
            except TimeoutError:
                raise EngineUnreachable(f"{self.name} did not answer within {timeout_s:g} s") from None
            self._check_alive()
        if path != FACTS:
            return 404, b""
        return 200, encode(self.tell())

    def tell(self) -> Told:
        """Returns what the engine says about itself, as of now."""
        speed = self.speed
        told = Told(self.name, self.role, self.epoch, speed.pd_buffer_pages, speed.chunk_size)
        told.is_both = self.is_both
        return told

    async def aclose(self) -> None:  # noqa: B027 (nothing to override)
        """Does nothing: nothing is open."""

    async def _reach(self) -> None:
        """Returns once the engine takes calls. Raises `EngineRefused` where it does not live, and `EngineBroken` where
        it went while it stood still."""
        self._check_alive()
        if self._thawed is not None:
            await self._thawed.wait()
            if not self.is_alive:
                raise EngineBroken(f"{self.name} has gone")

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineRefused(f"nobody listens at {self.name}")

    def __repr__(self) -> str:
        state = "dead" if not self.is_alive else "frozen" if self.is_frozen else "alive"
        return f"<{type(self).__name__} {self.epoch}: {state}>"


class Prefiller(Engine):
    """Prefiller reads prompts and sends their KV on. `decoders` are the decoders by name."""

    role: Role = "prefill"

    def __init__(self, name: str, speed: Speed, decoders: Mapping[str, Decoder]) -> None:
        super().__init__(name, speed)
        self.prompts = PromptQueue(speed)
        self._decoders = decoders

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        await self._reach()
        if self.speed.overhead_s:
            await self._wait_overhead()
        ask = prefill_ask.decode(body)
        read: asyncio.Future[None] = self.loop.create_future()
        prompt = Prompt(ask.num_tokens, partial(_happens, read), ask.group, ask.num_shared)
        self.prompts.add(prompt)
        waiting = self._waiting
        waiting[read] = None
        try:
            await read
        except BaseException:
            self.prompts.drop(prompt)
            raise
        finally:
            waiting.pop(read, None)
        if ask.decoder:
            self._decoders[ask.decoder].receive(Transfer(ask.attempt, ask.num_tokens, self), ask.epoch)
        return WholeLeg(b"%d" % (ask.num_tokens - ask.num_answer_tokens))

    async def _wait_overhead(self) -> None:
        passed: asyncio.Future[None] = self.loop.create_future()
        timer = self.loop.call_later(self.speed.overhead_s, passed.set_result, None, context=ENGINES)
        try:
            self._waiting[passed] = None
            await passed
        finally:
            self._waiting.pop(passed, None)
            timer.cancel()

    def slow(self, slowness: float) -> None:
        self.prompts.slowness = slowness

    def _lose_all(self) -> None:
        self.prompts.clear()
        for decoder in self._decoders.values():
            decoder.lost_writer(self)

    def _stand_still(self) -> None:
        self.prompts.freeze()

    def _go_on(self) -> None:
        self.prompts.thaw()


class Transfer:
    """Transfer is one attempt's KV on its way into a decoder's PD buffer, or there.

    Mutable state: whether it has its pages, and since when; whether it is there, and an answer waits for room to go on
    with it; whether anybody wants it still.
    """

    __slots__ = (
        "attempt",
        "began_at",
        "has_pages",
        "is_asked_for",
        "is_there",
        "is_wanted",
        "num_pages",
        "num_tokens",
        "timer",
        "writer",
    )

    def __init__(self, attempt: str, num_tokens: int, writer: Prefiller) -> None:
        self.attempt = attempt
        self.num_tokens = num_tokens
        self.num_pages = 0
        self.writer = writer
        self.began_at = 0.0
        self.has_pages = False
        self.timer: asyncio.TimerHandle | None = None
        self.is_there = False
        self.is_asked_for = False
        self.is_wanted = True


class Answer(Sequence):
    """Answer is one answer that `decoder` has to write, from KV that was brought or from a prompt that the decoder
    reads itself. Its first token is there already: the prefiller's, or that of the prompt that is read here.

    Mutable state: whether it is wanted; the tokens that it had written when it last gave way to others; whether its KV
    is lost, and whether it has room to be read anew.
    """

    __slots__ = ("_decoder", "has_room", "is_lost", "is_wanted", "leg", "num_written", "prompt", "transfer")

    def __init__(self, decoder: Decoder, num_tokens: int, num_before: int, transfer: Transfer | None) -> None:
        super().__init__(num_tokens - 1, num_before)
        self._decoder = decoder
        self.transfer = transfer
        self.is_wanted = True
        self.num_written = 0
        self.is_lost = False
        self.has_room = False
        self.prompt: Prompt | None = None
        self.leg = StreamLeg(self._forsaken)

    def finished(self) -> None:
        self._decoder.has_finished(self)

    def _forsaken(self) -> None:
        self._decoder.forsake(self)


def _happens(what: asyncio.Future[None]) -> None:
    if not what.done():
        what.set_result(None)


class Decoder(Engine):
    """Decoder takes KV in, page by page, and writes answers.

    Like a real one it keeps account of its PD buffer itself: what does not fit waits, first come, first served, and
    what nobody has asked for after `lease_s` is dropped. Its own KV cache is the batch's: an answer that finds no room
    there waits, and where those in it have grown too long the latest gives way, as vLLM has it.

    Mutable state: transfers that wait for pages; those that have them, by attempt; pages in use, and the most there
    ever were; how many transfers found no room; when the link is free; what arrived while it stood still; answers that
    wait for room in the batch, and those in it; the tokens of those that are read anew; how many gave way; a timer for
    signs of life and leases.
    """

    role: Role = "decode"

    def __init__(self, name: str, speed: Speed, signals: Signals, *, lease_s: float) -> None:
        super().__init__(name, speed)
        self._lease_s = lease_s
        self._signals = signals
        self._max_tokens = speed.kv_cache_tokens or inf
        self.batch = Batch(speed, max_tokens=self._max_tokens, on_full=self._give_way)
        self.prompts = PromptQueue(speed, on_busy=self._reads)
        self._incoming: deque[Transfer] = deque()
        self._transfers: dict[str, Transfer] = {}
        self.pages_in_use = 0
        self.most_pages = 0
        self.num_without_room = 0
        self._link_free_at = 0.0
        self._late: list[Transfer] = []
        self._lined_up: deque[Answer] = deque()
        self._written: dict[Answer, None] = {}
        self._num_read_anew = 0
        self.num_given_way = 0
        self._round_timer: asyncio.TimerHandle | None = None

    def tell(self) -> Told:
        told = super().tell()
        told.num_occupied = self.pages_in_use
        if self._max_tokens < inf:
            told.num_cache_tokens = self.speed.kv_cache_tokens
            told.num_cache_used = int(self.batch.num_tokens) + self._num_read_anew
            told.num_cache_waiting = sum(answer.is_wanted for answer in self._lined_up)
        return told

    # ── KV ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, transfer: Transfer, epoch: str) -> None:
        """Takes the word of a prefiller that wants to write a transfer for the process `epoch`. It does nothing where
        that process has gone."""
        if self.is_alive and self.epoch == epoch:
            transfer.num_pages = -(-transfer.num_tokens // self.speed.chunk_size)
            self._incoming.append(transfer)
            self._transfers[transfer.attempt] = transfer
            self._go_round()
            self._take_in()
            if not transfer.has_pages or self.pages_in_use > self.speed.pd_buffer_pages:
                self.num_without_room += 1

    def lost_writer(self, writer: Prefiller) -> None:
        """Frees the transfers that a prefiller had not brought before it went: they will never come."""
        for transfer in [one for one in self._transfers.values() if one.writer is writer and not one.is_there]:
            self._tell(wire.KvFailed(attempt=transfer.attempt, rank=0, epoch=self.epoch, reason="its writer has gone"))
            self._free(transfer, "its writer has gone")

    def _take_in(self) -> None:
        """Gives pages to as many waiting transfers as have room, in order."""
        while self._incoming:
            transfer = self._incoming[0]
            pages = self.pages_in_use + transfer.num_pages
            if transfer.attempt not in self._transfers:
                self._incoming.popleft()
                continue
            if self.pages_in_use and pages > self.speed.pd_buffer_pages:
                return
            self._incoming.popleft()
            transfer.has_pages = True
            self.pages_in_use = pages
            self.most_pages = max(self.most_pages, pages)
            self._write(transfer)

    def _write(self, transfer: Transfer) -> None:
        """Puts a transfer on the link, which it takes when those before it have been written."""
        transfer.began_at = now = self.loop.time()
        begins = max(self._link_free_at, now + self.speed.transfer_s)
        self._link_free_at = begins + self.speed.transfer_takes(transfer.num_tokens)
        transfer.timer = self.loop.call_at(self._link_free_at, self._arrived, transfer, context=ENGINES)

    def _arrived(self, transfer: Transfer) -> None:
        transfer.timer = None
        transfer.is_there = True
        if self.is_frozen:
            self._late.append(transfer)
        else:
            self._tell_ready(transfer)

    def _tell_ready(self, transfer: Transfer) -> None:
        if not transfer.is_wanted:
            self._free(transfer, "cancelled")
            return
        self._tell(
            wire.KvReady(
                attempt=transfer.attempt,
                rank=0,
                epoch=self.epoch,
                num_pages=transfer.num_pages,
                num_bytes=transfer.num_tokens * self.speed.kv_token_bytes,
                transfer_s=self.loop.time() - transfer.began_at,
            )
        )

    def _free(self, transfer: Transfer, reason: str) -> None:
        """Frees a transfer's pages, and looks at the transfers that wait for pages."""
        del self._transfers[transfer.attempt]
        if transfer.timer is not None:
            transfer.timer.cancel()
        if transfer.has_pages:
            self.pages_in_use -= transfer.num_pages
        pages = transfer.num_pages
        self._tell(wire.KvReleased(attempt=transfer.attempt, rank=0, epoch=self.epoch, num_pages=pages, reason=reason))
        self._take_in()

    def _cancel(self, attempt: str) -> bool:
        """Drops an attempt. Returns True where nothing of it is here any more; what is being written has to arrive
        first."""
        transfer = self._transfers.get(attempt)
        if transfer is None:
            return True
        transfer.is_wanted = False
        if transfer.timer is not None:
            return False
        self._free(transfer, "cancelled")
        return True

    def _tell(self, signal: wire.Signal) -> None:
        self._signals.deliver(signal)

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        await self._reach()
        if path == CANCEL:
            return WholeLeg(b"1" if self._cancel(cancel_ask.decode(body).attempt) else b"0")
        ask = decode_ask.decode(body)
        transfer = None
        if ask.attempt:
            transfer = self._transfers.get(ask.attempt)
            if transfer is None or not transfer.is_there or not transfer.is_wanted:
                return WholeLeg(b"", status=500)
            transfer.is_asked_for = True
        num_before = ask.num_prompt_tokens if transfer is None else transfer.num_tokens
        answer = Answer(self, ask.num_tokens - ask.num_shown, num_before + 1, transfer)
        self._written[answer] = None
        if self._round_timer is None:
            self._go_round()
        if transfer is None:
            answer.prompt = Prompt(ask.num_prompt_tokens, lambda: self._line_up(answer))
            self.prompts.add(answer.prompt)
        else:
            self._line_up(answer)
        try:
            await answer.leg.begun()
        except BaseException:
            answer.leg.close()
            raise
        return answer.leg

    def _line_up(self, answer: Answer) -> None:
        if answer.is_wanted:
            self._lined_up.append(answer)
            self._begin_next()

    def _begin_next(self) -> None:
        """Begins as many answers as have room in the batch. Their KV leaves the PD buffer for good."""
        while self._lined_up and self.batch.size < self.speed.max_batch and not self.is_frozen:
            answer = self._lined_up[0]
            if answer.is_wanted and not self._has_room(answer):
                return
            self._lined_up.popleft()
            if not answer.is_wanted:
                continue
            if answer.is_lost:
                self._read_anew(answer)
                continue
            self.batch.join(answer)
            answer.leg.begin()
            if answer.transfer is not None:
                self._free(answer.transfer, "consumed")

    def _has_room(self, answer: Answer) -> bool:
        if self._max_tokens == inf:
            return True
        num_tokens = self.batch.num_tokens + self._num_read_anew
        return num_tokens == 0.0 or num_tokens + answer.num_before < self._max_tokens

    def _give_way(self) -> None:
        """Takes the latest answer out of the batch and loses its KV, because there is no room for another token."""
        answer = next(one for one in reversed(self._written) if one.is_in)
        num = self.batch.num_written(answer)
        self.batch.leave(answer)
        self.num_given_way += 1
        answer.num_written += num
        answer.num_before += num
        answer.num_tokens -= num
        answer.is_lost = True
        self._lined_up.appendleft(answer)

    def _read_anew(self, answer: Answer) -> None:
        """Reads an answer's prompt and what was written of it once more; no other is written meanwhile."""
        answer.is_lost, answer.has_room = False, True
        self._num_read_anew += answer.num_before
        answer.prompt = Prompt(answer.num_before, partial(self._go_on_with, answer))
        self.prompts.add(answer.prompt)

    def _go_on_with(self, answer: Answer) -> None:
        self._give_room_back(answer)
        self.batch.join(answer)

    def _give_room_back(self, answer: Answer) -> None:
        """Frees what was kept for an answer that is read anew. Idempotent."""
        if answer.has_room:
            answer.has_room = False
            self._num_read_anew -= answer.num_before

    def has_finished(self, answer: Answer) -> None:
        """Ends an answer whose last token is written."""
        self._written.pop(answer, None)
        answer.leg.end(1 + answer.num_written + answer.num_tokens)
        self._begin_next()

    def forsake(self, answer: Answer) -> None:
        """Gives an answer up, because its rest is not wanted any more. KV that was not consumed stays until it is
        cancelled."""
        answer.is_wanted = False
        if answer.transfer is not None:
            answer.transfer.is_asked_for = False
        self._written.pop(answer, None)
        self.batch.leave(answer)
        if answer.prompt is not None:
            self.prompts.drop(answer.prompt)
        self._give_room_back(answer)
        self._begin_next()

    def _go_round(self) -> None:
        """Sets the timer for the next round; rounds go on as long as there is anything."""
        if self._round_timer is None:
            self._round_timer = self.loop.call_later(SIGN_OF_LIFE_S, self._look_round, context=ENGINES)

    def _look_round(self) -> None:
        self._round_timer = None
        if not self.is_frozen:
            for answer in self._in_batch():
                answer.leg.tell(1 + answer.num_written + self.batch.num_written(answer))
            self._drop_expired()
        if self._written or self._transfers:
            self._go_round()

    def _drop_expired(self) -> None:
        before = self.loop.time() - self._lease_s
        for transfer in [one for one in self._transfers.values() if one.is_there and one.began_at < before]:
            if not transfer.is_asked_for:
                self._free(transfer, "nobody asked for it")

    def _in_batch(self) -> Iterable[Answer]:
        return [answer for answer in self._written if answer.is_in]

    def _reads(self, is_busy: bool) -> None:
        """Stops all answers while a prompt is read."""
        if is_busy:
            self.batch.hold()
        else:
            self.batch.go()

    # ── what happens to it ──────────────────────────────────────────────────────────────────────────────────────────

    def slow(self, slowness: float) -> None:
        self.batch.slowness = self.prompts.slowness = slowness

    def _lose_all(self) -> None:
        for answer in self._in_batch():
            answer.leg.tell(1 + answer.num_written + self.batch.num_written(answer))
        written, self._written = self._written, {}
        for answer in written:
            answer.is_wanted = False
            answer.leg.break_off(EngineBroken(f"{self.name} has gone"))
        self.prompts.clear()
        self.batch.clear()
        for transfer in self._transfers.values():
            if transfer.timer is not None:
                transfer.timer.cancel()
        self._transfers.clear()
        self._incoming.clear()
        self._late.clear()
        self._lined_up.clear()
        self.pages_in_use = self._num_read_anew = 0
        self._link_free_at = 0.0

    def _stand_still(self) -> None:
        self.batch.hold()
        self.prompts.freeze()

    def _go_on(self) -> None:
        self.batch.go()
        self.prompts.thaw()
        late, self._late = self._late, []
        for transfer in late:
            self._tell_ready(transfer)
        self._begin_next()
