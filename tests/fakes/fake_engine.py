"""A scripted prefiller or decoder, in memory, that hangs or fails at named points and keeps books on its pages.

It is called through `FakeClient`, an `EngineClient` without sockets: what is awaited here is awaited in the caller's
own task, so that a test can hang the peer at one point, cancel, and see what is left. `FakeEngine` speaks the built-in
engine's contract; those of other kinds are in files of their own.

What can happen to an engine as a whole:

* its address refuses connections while it lives on with all it holds: `FakeClient.refusing()`;
* it stands still, so that calls are neither answered nor reset: `freeze`, `thaw`, or `frozen()`;
* its process ends and another one takes its place, empty, with another epoch: `restart`;
* nobody asks for KV that it holds, until its lease is over: `FakeEngine.lease_s`.

How much it holds is `num_occupied`, which it also says of itself where its kind does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdproxy.config.values import Engine, Role
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.engines.http.base import REPLY, CheckSize, EngineBroken, EngineRefused, Source, read_whole
from pdproxy.engines.http.base import Sink as BodySink
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.recognise import LOOKS
from pdproxy.fleet.page_count import pages_needed
from transfer.engine.api_error import from_core
from transfer.errors import StaleTerm, TransferError
from transfer.roles.highest_term import HighestTerm
from transfer.wire import TERM_HEADER, AnySignal, BufferFacts, Endpoint, KvFailed, KvReady, KvReleased, PageGroupFacts

Sink = Callable[[AnySignal], object]
FIRST_ID = 100
"""Of the answer's first word; the next ones count up."""
WORDS = ["Once", " upon", " a", " time", " there", " was", " a", " fox"]


@dataclass
class FakeReply:
    """A reply's head and its body piece by piece. An exception among the pieces is raised there."""

    status: int = 200
    chunks: list[bytes | Exception | str] = field(default_factory=list)
    """A string names a point to pass before the next piece."""
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    over: Callable[[], None] = lambda: None
    """Called when its leg was read to its end, or closed."""
    is_all_here: bool = False
    """Who pours it hears the rest at once, down to its end."""


def json_reply(content: Any, status: int = 200, **headers: str) -> FakeReply:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return FakeReply(status, [json.dumps(content).encode()], {"content-type": "application/json", **names})


def error_reply(status: int, message: str, **headers: str) -> FakeReply:
    error = {"message": message, "type": "some_error", "param": None, "code": "from_engine"}
    return json_reply({"error": error}, status, **headers)


@dataclass
class Seen:
    """One call as the engine got it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    raw: bytes


class ScriptedEngine:
    """What engines of every kind have in common. `role` is ``prefill`` or ``decode``, which is also the first point
    that a generation passes.

    A test puts a point into `hang_at` (never passed) or `fail_at` (an exception, or a `FakeReply` instead of the real
    one), waits for `reached(point)`, and looks at `calls`, `closed` and `pages`.

    Besides what a test sets, the mutable state is: `life`, which counts its processes; `_thawed`, which is there while
    it is frozen; `_on_thaw`, what it will notice when it goes on.
    """

    kind: Engine = "builtin"

    def __init__(self, role: Role, *, num_pages: int = 64, chunk_size: int = 16) -> None:
        self.role: Role = role
        self.epoch = f"epoch-of-{role}"
        self.model = "tiny"
        self.num_pages = num_pages
        self.chunk_size = chunk_size
        self.revision: str | None = None
        """As its operator names it."""
        self.kv_events: tuple[str, str] | None = None
        """Where its KV events are published and repeated, by its operator's word."""
        self.max_model_len = 4096
        self.tokenizer: Any = None
        """A `FastTokenizer`; None: it counts words."""
        self.sink: Sink = lambda signal: None
        self.port = 7300
        """Of a decoder: where its first receiver says it listens."""
        self.prefillers: Sequence[Any] = ()
        """Of a decoder: where it can fetch from."""
        self.decoders: Sequence[Any] = ()
        """Of a prefiller: whom it can push to."""
        self.hang_at: set[str] = set()
        self.fail_at: dict[str, Exception | FakeReply] = {}
        self.finish_at_first: str | None = None
        """A finish reason: the first token ends the answer."""
        self.first_text = WORDS[0]
        self.events: list[bytes] | None = None
        """A decoder's whole stream, instead of the usual one."""
        self.answer_id = "answer-1"
        """Of every answer, which says it was created at 1."""
        self.calls: list[Seen] = []
        self.closed: list[str] = []
        """Paths of legs that were closed before their end."""
        self.pages: dict[Any, int] = {}
        """Of what is in its memory, by the attempt or however its kind names it."""
        self.running: dict[str, int] = {}
        """Pages of requests that it works at, where its kind counts them."""
        self.is_poured = False
        """The bodies of its answers need not be awaited."""
        self.pumps: list[Pump] = []
        """Of those that were not."""
        self.life = 1
        self._thawed: asyncio.Event | None = None
        self._on_thaw: list[Callable[[], object]] = []
        self._reached: dict[str, asyncio.Event] = {}
        self._hangs: dict[str, asyncio.Event] = {}

    # ── for tests ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def settings(self) -> dict[str, Any]:
        """What an operator writes of it, besides its name, role and address."""
        events = self.kv_events and {"kv_events": self.kv_events[0], "kv_events_replay": self.kv_events[1]}
        return {"engine": self.kind} | ({"revision": self.revision} if self.revision else {}) | (events or {})

    async def reached(self, point: str) -> None:
        async with asyncio.timeout(5):
            await self._event(point).wait()

    def let_go(self, point: str) -> None:
        """Who hangs there goes on."""
        self.hang_at.discard(point)
        self._hangs.pop(point, asyncio.Event()).set()

    def forget(self) -> None:
        """As if nothing had been asked or passed yet."""
        self.calls.clear()
        self.closed.clear()
        self.pumps.clear()
        self._reached.clear()

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [call.body for call in self.calls if call.path == path]

    def generations(self) -> list[Seen]:
        """Generation calls, the canaries' left out."""
        return [
            call
            for call in self.calls
            if call.path.endswith("completions") and not call.headers["x-request-id"].startswith("canary")
        ]

    def _event(self, point: str) -> asyncio.Event:
        return self._reached.setdefault(point, asyncio.Event())

    async def pass_point(self, point: str) -> None:
        """Raises what is to happen there, and `EngineBroken` where the process ends meanwhile."""
        life = self.life
        self._event(point).set()
        if point in self.hang_at:
            await self._hangs.setdefault(point, asyncio.Event()).wait()
            self.check_lives(life)
        await self.until_thawed()
        failure = self.fail_at.get(point)
        if isinstance(failure, Exception):
            raise failure

    # ── what happens to all of it ───────────────────────────────────────────────────────────────────────────────────

    @property
    def num_occupied(self) -> int:
        """Pages of its memory that are in use."""
        return sum(self.pages.values()) + sum(self.running.values())

    @property
    def is_frozen(self) -> bool:
        return self._thawed is not None

    def freeze(self) -> None:
        """It stands still, as after SIGSTOP: connections stay, and nothing is answered or noticed."""
        assert self._thawed is None, "it is frozen already"
        self._thawed = asyncio.Event()

    def thaw(self) -> None:
        """It goes on, and notices first what it has missed: legs that were closed, leases that are over."""
        assert self._thawed is not None, "it is not frozen"
        thawed, self._thawed = self._thawed, None
        missed, self._on_thaw = self._on_thaw, []
        for notice in missed:
            notice()
        thawed.set()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It stands still within the block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def restart(self) -> None:
        """Its process ends, and another one is there at once: another epoch, nothing in its memory. Who waits for an
        answer of the old one, or reads on, gets `EngineBroken`."""
        self.life += 1
        self.epoch += "-again"
        self._on_thaw.clear()
        self._lose_all()
        for hang in self._hangs.values():
            hang.set()
        self._hangs.clear()
        if self._thawed is not None:
            self.thaw()

    def _lose_all(self) -> None:
        """What was in the memory of the process that has ended is gone; nobody is told."""
        self.pages.clear()
        self.running.clear()

    def check_lives(self, life: int) -> None:
        """Raises `EngineBroken` unless the process is still the one with that number."""
        if self.life != life:
            raise EngineBroken("the connection was reset")

    async def until_thawed(self) -> None:
        """Returns at once unless it is frozen. Raises `EngineBroken` where its process ends before it goes on."""
        life = self.life
        while self._thawed is not None:
            await self._thawed.wait()
            self.check_lives(life)

    def when_awake(self, notice: Callable[[], object]) -> None:
        """Call `notice` now, or, while it is frozen, when it goes on."""
        if self._thawed is None:
            notice()
        else:
            self._on_thaw.append(notice)

    # ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def handle(self, path: str, raw: bytes, headers: Mapping[str, str]) -> FakeReply:
        seen = Seen(path, json.loads(raw) if raw else {}, dict(headers), raw)
        self.calls.append(seen)
        if isinstance(scripted := self.fail_at.get(path), FakeReply):
            return scripted
        if path == "/tokenize":
            return await self.tokenize(seen.body)
        if path.endswith("completions"):
            return await self.generate(seen)
        return await self.tell(seen)

    async def generate(self, seen: Seen) -> FakeReply:
        await self.pass_point(self.role)
        failure = self.fail_at.get(self.role)
        if isinstance(failure, FakeReply):
            return failure
        handler = self._prefill if self.role == "prefill" else self._decode
        return await handler(seen.path, seen.body)

    async def tokenize(self, body: dict[str, Any]) -> FakeReply:
        """Texts as its `tokenizer` has them, else what it would answer to. Passes the point tokenize."""
        await self.pass_point("tokenize")
        if self.tokenizer is not None and "prompt" in body:
            adds_special_tokens = body.get("add_special_tokens") is not False
            ids = self.tokenizer.ids(body["prompt"], add_special_tokens=adds_special_tokens)
        else:
            ids = self.read_ids(body)
        return json_reply({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    def read_ids(self, body: dict[str, Any]) -> list[int]:
        """The prompt as this engine reads it."""
        raise NotImplementedError

    async def tell(self, seen: Seen) -> FakeReply:
        """The answer to any other call."""
        raise NotImplementedError

    async def _prefill(self, path: str, body: dict[str, Any]) -> FakeReply:
        raise NotImplementedError

    async def _decode(self, path: str, body: dict[str, Any]) -> FakeReply:
        raise NotImplementedError


class FakeEngine(ScriptedEngine):
    """The built-in engine. Points: prefill, prefill_done, decode, first, middle, cancel,
    sender_ended."""

    def __init__(self, role: Role, *, num_pages: int = 64, chunk_size: int = 16, num_ranks: int = 1) -> None:
        super().__init__(role, num_pages=num_pages, chunk_size=chunk_size)
        self.num_ranks = num_ranks
        self.dtype = "float32"
        """Of its KV. To push to a decoder of another one is a fault of the test."""
        self.groups: list[PageGroupFacts] = []
        """Of a decoder whose layers are unlike."""
        self.num_cache_pages = 0
        """Of the cache in which it writes answers; 0: it tells nothing of that."""
        self.windowed = False
        """A prompt larger than its buffer passes through it; to others such a push is a fault of the test."""
        self.signals = "ready"
        """What a decoder says of a push: ready, failed, lost (nothing), released (gone before it was ready), taken
        (ready, and out of the buffer by then)."""
        self.consumed_signal = True
        """Whether a decoder tells that it has taken the KV."""
        self.takes_kv = True
        """Of a decoder; else every push to it fails, and its prefiller says so, with `refuses_kv` as the reason."""
        self.refuses_kv = "the receiver is gone"
        self.answers_cancel = True
        """Else a decoder says that it cannot drop an attempt yet, and keeps its pages until `release`."""
        self.lease_s: float | None = None
        """After which a decoder drops what nobody has asked for; None: never. Counted from when the KV has come."""
        self.expired: list[str] = []
        """Attempts whose lease has ended so."""
        self.num_cached_tokens: int | None = None
        """What a usage says of the prompt; None: nothing."""
        self.tells_ids = True
        """A decoder tells ``token_ids`` where it is asked for them."""
        self.cancelled: list[str] = []
        self.ended_senders: list[str] = []
        """Epochs of prefillers of which a decoder was told that their process has ended."""
        self.num_reservations_waited = 0
        self.num_wrong_tags = 0
        """Of a decoder: pushes for which its buffer had no room. They are taken in all the same; a real one lets them
        wait."""
        self.highest_term = HighestTerm()
        self._leases: dict[str, asyncio.TimerHandle] = {}

    def read_ids(self, body: dict[str, Any]) -> list[int]:
        return _prompt_ids(body)

    async def generate(self, seen: Seen) -> FakeReply:
        """Begins nothing for a leader that has been replaced."""
        term = seen.headers.get(TERM_HEADER)
        try:
            self.highest_term.check(None if term is None else int(term))
        except StaleTerm as error:
            stale = from_core(error)
            return json_reply(stale.body(), stale.status)
        return await super().generate(seen)

    async def tell(self, seen: Seen) -> FakeReply:
        if seen.path == "/health":
            return json_reply({"status": "ok"})
        path, _, query = seen.path.partition("?")
        if path == "/kv_buffer":
            if query:
                self.highest_term.hear(int(query.removeprefix("term=")))
            return FakeReply(200, [msgspec.json.encode(self.facts())])
        if seen.path == "/v1/models":
            return json_reply({"object": "list", "data": [{"id": self.model}]})
        if seen.path == "/kv_transfer/sender_ended":
            await self.pass_point("sender_ended")
            self.ended_senders.append(seen.body["epoch"])
            return json_reply({"released": True})
        if seen.path in LOOKS:  # those of other kinds
            return error_reply(404, "there is no such path")
        assert seen.path == "/kv_transfer/cancel"
        return await self._cancel(seen.body["attempt"])

    def facts(self) -> BufferFacts:
        is_decoder = self.role == "decode"
        return BufferFacts(
            epoch=self.epoch,
            role=self.role,
            model="fingerprint",
            dtype=self.dtype,
            chunk_size=self.chunk_size,
            bytes_per_token=64,
            page_bytes=64 * self.chunk_size,
            num_pages=self.num_pages if is_decoder else 0,
            num_free=max(0, self.num_pages - self.num_occupied) if is_decoder else 0,
            num_quarantined=0,
            max_model_len=self.max_model_len,
            receivers=[Endpoint(rank=r, host="127.0.0.1", port=self.port + r) for r in range(self.num_ranks)]
            if is_decoder
            else [],
            groups=self.groups,
            windowed=self.windowed and is_decoder,
            num_reservations_waited=self.num_reservations_waited,
            num_wrong_tags=self.num_wrong_tags,
            num_cache_pages=self.num_cache_pages,
            num_cache_free=self.num_cache_pages,
        )

    def known_facts(self, **different: Any) -> EngineInfo:
        """As the adapter reads what it says, with what is `different` from that."""
        models = {"object": "list", "data": [{"id": self.model}]}
        told = msgspec.structs.replace(self.facts(), **different)
        answers = {"/kv_buffer": msgspec.json.encode(told), "/v1/models": json.dumps(models).encode()}
        return BuiltinAdapter().read_facts(answers)

    async def _prefill(self, path: str, body: dict[str, Any]) -> FakeReply:
        params = body.get("kv_transfer_params")
        num_tokens = _num_prompt_tokens(body)
        if params is None and body.get("max_tokens") != 1:
            return await self._decode(path, body)
        if params is None:
            return json_reply(self._whole(path, body, [self.first_text], "length", num_tokens))
        num_shown = params.get("num_answer_tokens", 0)
        prompt_ids = params.get("prompt_token_ids") or _prompt_ids(body)
        words = [WORDS[num_shown] if num_shown else self.first_text]
        if self.finish_at_first is not None:
            return json_reply(self._whole(path, body, words, self.finish_at_first, num_tokens, num_shown))
        port = params["receivers"][0]["port"]
        decoder = next(decoder for decoder in self.decoders if decoder.port == port)
        ours, theirs = ((one.dtype, one.chunk_size, one.revision) for one in (self, decoder))
        assert ours == theirs, f"KV of {ours} means nothing to {theirs}"
        if not decoder.takes_kv:
            lost = from_core(TransferError(decoder.refuses_kv))
            return json_reply(lost.body(), lost.status)
        await decoder.until_thawed()
        decoder.receive(params["attempt"], pages_needed(decoder.known_facts(), num_tokens + num_shown))
        await self.pass_point("prefill_done")
        answer = self._whole(path, body, words, "length", num_tokens, num_shown)
        handoff = {
            "attempt": params["attempt"],
            "prompt_token_ids": prompt_ids,
            "first_token_id": FIRST_ID + num_shown,
            "num_pages": 1,
            "num_answer_tokens": num_shown,
        }
        return json_reply(answer | {"kv_transfer_params": handoff})

    def _whole(
        self, path: str, body: dict[str, Any], words: list[str], finish: str, num_tokens: int, num_shown: int = 0
    ) -> dict[str, Any]:
        usage = _usage(num_tokens, num_shown + len(words), self.num_cached_tokens)
        return _answer(path, body, words, finish, num_tokens) | {"id": self.answer_id, "usage": usage}

    def receive(self, attempt: str, num_pages: int) -> None:
        """A prefiller has pushed: the KV is here, and whoever waits is told as scripted."""
        if num_pages > self.num_pages:
            assert self.windowed, "more pages than there are"
            assert not self.pages, "a prompt larger than the buffer is alone in it"
        self.num_reservations_waited += self.pages != {} and self.num_occupied + num_pages > self.num_pages
        self.pages[attempt] = num_pages
        if self.lease_s is not None:
            loop = asyncio.get_running_loop()
            self._leases[attempt] = loop.call_later(self.lease_s, self.when_awake, lambda: self._expire(attempt))
        for rank in range(self.num_ranks):
            self._say(self.signals, attempt, rank, num_pages)
        if self.signals in ("failed", "released"):
            self.release(attempt, "failed")
        elif self.signals == "taken":
            self.release(attempt, "consumed")

    def _say(self, what: str, attempt: str, rank: int, num_pages: int) -> None:
        about: dict[str, Any] = {"attempt": attempt, "rank": rank, "epoch": self.epoch}
        if what in ("ready", "taken"):
            self.sink(KvReady(**about, num_pages=num_pages, num_bytes=num_pages * 1024, transfer_s=0.002))
        elif what == "failed":
            self.sink(KvFailed(**about, reason="the writer vanished"))

    def release(self, attempt: str, reason: str) -> None:
        num_pages = self._drop(attempt)
        if num_pages is None or (reason == "consumed" and not self.consumed_signal):
            return
        for rank in range(self.num_ranks):
            self.sink(KvReleased(attempt=attempt, rank=rank, epoch=self.epoch, num_pages=num_pages, reason=reason))

    def _drop(self, attempt: str) -> int | None:
        """Its pages are free. How many that were; None where there were none."""
        if (lease := self._leases.pop(attempt, None)) is not None:
            lease.cancel()
        return self.pages.pop(attempt, None)

    def _expire(self, attempt: str) -> None:
        """Unless somebody was quicker while it was frozen."""
        if attempt in self.pages:
            self.expired.append(attempt)
            for rank in range(self.num_ranks):
                self._say("failed", attempt, rank, 0)
            self.release(attempt, "expired")

    def _lose_all(self) -> None:
        super()._lose_all()
        for lease in self._leases.values():
            lease.cancel()
        self._leases.clear()
        self.highest_term = HighestTerm()
        self.num_reservations_waited = 0
        self.num_wrong_tags = 0

    async def _cancel(self, attempt: str) -> FakeReply:
        await self.pass_point("cancel")
        self.cancelled.append(attempt)
        if not self.answers_cancel:
            return json_reply({"released": False})
        self._drop(attempt)
        return json_reply({"released": True})

    async def _decode(self, path: str, body: dict[str, Any]) -> FakeReply:
        params = body.get("kv_transfer_params") or {}
        num_shown = params.get("num_answer_tokens", 0)
        if num_shown:
            ids = [FIRST_ID + i for i in range(num_shown)]
            assert params["prompt_token_ids"][-num_shown:] == ids, "the answer goes on with other tokens"
        if "attempt" in params:
            assert self.signals == "taken" or params["attempt"] in self.pages, "the handoff names KV that is not here"
            self.release(params["attempt"], "consumed")
        num_tokens = _num_prompt_tokens(body)
        if not body.get("stream"):
            await self.pass_point("first")
            return json_reply(self._whole(path, body, WORDS, "stop", num_tokens))
        chunks: list[bytes | Exception | str] = ["first", *(self.events or self._stream(path, body, num_shown))]
        chunks.insert(len(chunks) // 2 + 1, "middle")
        return FakeReply(200, chunks, {"content-type": "text/event-stream; charset=utf-8"})

    def _stream(self, path: str, body: dict[str, Any], num_shown: int) -> list[bytes]:
        """From the first word that was not shown. With ids, the finish comes with the last word, as in the engine."""
        is_chat, with_ids = path.endswith("chat/completions"), body.get("return_token_ids") and self.tells_ids
        head = {"id": self.answer_id, "created": len(self.answer_id), "model": body.get("model")}
        chunks: list[dict[str, Any]] = []
        if is_chat:
            chunks.append(_chunk({"delta": {"role": "assistant", "content": ""}}))
        for number, word in enumerate(WORDS[num_shown:], start=num_shown):
            ids = {"token_ids": [FIRST_ID + number]} if with_ids else {}
            finish = "stop" if with_ids and number == len(WORDS) - 1 else None
            chunks.append(_chunk(({"delta": {"content": word}} if is_chat else {"text": word}) | ids, finish))
        if not with_ids:
            chunks.append(_chunk({"delta": {}} if is_chat else {"text": ""}, finish="stop"))
        chunks = for_each(chunks, body)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = _usage(_num_prompt_tokens(body), len(WORDS), self.num_cached_tokens)
            chunks.append({"choices": [], "usage": usage})
        events = [b"data: " + json.dumps(head | chunk).encode() + b"\n\n" for chunk in chunks]
        return [*events, b"data: [DONE]\n\n"]


class FakeLeg:
    """Implements `engines.http.base.Leg`."""

    def __init__(self, engine: ScriptedEngine, path: str, reply: FakeReply) -> None:
        self._engine = engine
        self._path = path
        self._reply = reply
        self._pieces = iter(reply.chunks)
        self._life = engine.life
        self._is_at_end = False
        self._is_closed = False
        self._pump = Pump(self) if engine.is_poured else None

    @property
    def status(self) -> int:
        return self._reply.status

    def header(self, name: str) -> str | None:
        return self._reply.headers.get(name)

    @property
    def is_all_here(self) -> bool:
        return self._reply.is_all_here

    async def read(self, check: CheckSize = REPLY) -> bytes:
        return await read_whole(self.read_chunk, check)

    def read_now(self, check: CheckSize = REPLY) -> bytes | None:
        return None

    async def read_chunk(self) -> bytes:
        """Raises `EngineBroken` where the process ends that answers."""
        self._engine.check_lives(self._life)
        await self._engine.until_thawed()
        for piece in self._pieces:
            if isinstance(piece, str):
                await self._engine.pass_point(piece)
            elif isinstance(piece, Exception):
                raise piece
            else:
                await asyncio.sleep(0)
                return piece
        self._has_ended()
        return b""

    def poured(self, pump: Pump) -> None:
        """From here on nobody awaits it."""
        self._engine.pumps.append(pump)

    def rest(self) -> bytes:
        """Without waiting, and without passing any point."""
        data = b""
        for piece in self._pieces:
            assert not isinstance(piece, str), "it is not all here"
            if isinstance(piece, Exception):
                raise piece
            data += piece
        self._has_ended()
        return data

    def _has_ended(self) -> None:
        if not self._is_at_end:
            self._is_at_end = True
            self._reply.over()

    @property
    def source(self) -> Source | None:
        return self._pump

    def close(self) -> None:
        if self._pump is not None:
            self._pump.close()
        if not self._is_closed and not self._is_at_end:
            self._engine.closed.append(self._path)
            if self._life == self._engine.life:
                self._engine.when_awake(self._reply.over)
        self._is_closed = True


class Pump:
    """Implements `engines.http.base.Source`: what a socket's callbacks would do with a leg's body.

    Each piece is read by a task of its own; the sink is called by the event loop, within no task. Mutable state: the
    sink, until it has heard all; the read under way; whether the sink wants no more for now.
    """

    def __init__(self, leg: FakeLeg) -> None:
        self._leg = leg
        self._sink: BodySink | None = None
        self._reading: asyncio.Task[bytes] | None = None
        self.is_paused = False

    def pour(self, sink: BodySink) -> None:
        assert self._sink is None, "it is poured already"
        self._sink = sink
        self._leg.poured(self)
        if self._leg.is_all_here:
            self._pour_rest()
        else:
            self._read_on()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._read_on()

    def close(self) -> None:
        self._sink = None
        if self._reading is not None:
            self._reading.cancel()

    def _pour_rest(self) -> None:
        try:
            rest, failure = self._leg.rest(), None
        except EngineBroken as error:
            rest, failure = b"", error
        if rest:
            self._feed(rest)
        self._end(failure)

    def _read_on(self) -> None:
        if self._sink is not None and self._reading is None and not self.is_paused:
            self._reading = asyncio.create_task(self._leg.read_chunk())
            self._reading.add_done_callback(self._has_read)

    def _has_read(self, reading: asyncio.Task[bytes]) -> None:
        self._reading = None
        if reading.cancelled():
            return
        failure = reading.exception()
        assert failure is None or isinstance(failure, EngineBroken), failure
        if failure is None and reading.result():
            self._feed(reading.result())
            self._read_on()
        else:
            self._end(failure)

    def _feed(self, data: bytes) -> None:
        """A sink that raises has cost the connection, and is told so."""
        assert data
        if self._sink is None:
            return
        try:
            self._sink.feed(data)
        except Exception as error:
            self._end(EngineBroken(f"the connection was lost: {error!r}"))

    def _end(self, failure: EngineBroken | None) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if failure is None:
            sink.end()
        else:
            sink.fail(failure)


class FakeClient:
    """Implements `engines.http.base.EngineClient` in front of `engine`.

    `is_up` False: nobody listens at its address. That says nothing about the engine, which may live on: its open legs
    go on, and it holds what it held.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.is_up = True

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> FakeLeg:
        self._check_up()
        try:
            await self.engine.until_thawed()
            life = self.engine.life
            reply = await self.engine.handle(path, body, headers)
            self.engine.check_lives(life)
            return FakeLeg(self.engine, path, reply)
        except asyncio.CancelledError:
            self.engine.closed.append(path)
            raise

    async def get(self, path: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        self._check_up()
        if self.engine.is_frozen:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.engine.until_thawed()
            except TimeoutError:
                raise EngineBroken(f"no answer within {timeout_s:g} s") from None
        reply = await self.engine.handle(path, b"", headers or {})
        return reply.status, await FakeLeg(self.engine, path, reply).read()

    async def aclose(self) -> None:
        """Nothing is held."""

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Within the block connections are refused, as at a Kubernetes Service that has no ready endpoint for a moment.
        The engine notices nothing of it."""
        assert self.is_up, "it is refusing already"
        self.is_up = False
        try:
            yield
        finally:
            self.is_up = True

    def _check_up(self) -> None:
        if not self.is_up:
            raise EngineRefused("nobody listens")


BROKEN = EngineBroken("the connection was reset")


def _num_prompt_tokens(body: dict[str, Any]) -> int:
    """One word is a token here; ids count themselves."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    text = prompt if prompt is not None else " ".join(str(m["content"]) for m in body["messages"])
    return len(str(text).split())


def _answer(path: str, body: dict[str, Any], words: list[str], finish: str, num_tokens: int) -> dict[str, Any]:
    text, is_chat = "".join(words), path.endswith("chat/completions")
    part = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {
        "id": "answer-1",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1,
        "model": body.get("model"),
        "choices": [{"index": i, **part, "logprobs": None, "finish_reason": finish} for i in range(body.get("n") or 1)],
        "usage": _usage(num_tokens, len(words)),
    }


def _prompt_ids(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, list) else [1] * _num_prompt_tokens(body)


def _usage(num_tokens: int, num_words: int, num_cached: int | None = None) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": num_tokens,
        "completion_tokens": num_words,
        "total_tokens": num_tokens + num_words,
    }
    return usage if num_cached is None else usage | {"prompt_tokens_details": {"cached_tokens": num_cached}}


def for_each(chunks: list[dict[str, Any]], body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of all answers that are asked for, which are the same."""
    number = body.get("n") or 1
    return [chunk | {"choices": [chunk["choices"][0] | {"index": i}]} for chunk in chunks for i in range(number)]


def _chunk(part: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, **part, "finish_reason": finish}]}


async def as_asgi(engine: ScriptedEngine, scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The same engine behind a real HTTP server."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    await engine.until_thawed()
    reply = await engine.handle(scope["path"], body, headers)
    fields = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": fields})
    async for chunk in _pieces(FakeLeg(engine, scope["path"], reply)):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _pieces(leg: FakeLeg) -> AsyncIterator[bytes]:
    while chunk := await leg.read_chunk():
        yield chunk
