"""What the orchestrator needs of an engine: an adapter that writes bodies and reads replies, a client to carry them.

An adapter does no I/O, so it is tested with plain values; one is made for each instance. A client knows nothing of what
it carries.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pdproxy.config.settings import Role
from pdproxy.openai.assembled import WholeShape
from pdproxy.openai.first_token import Opening
from pdproxy.openai.request import Fields, GenerationRequest
from pdproxy.openai.usage import PromptUsage
from transfer.geometry import PageGroup


class EngineUnreachable(Exception):
    """No connection: the engine has not seen the request."""


class EngineRefused(EngineUnreachable):
    """Nobody listens there: the process has gone, and with it all that it held."""


class EngineBroken(Exception):
    """The connection failed after the request was on its way; what the engine did with it is unknown."""


class MalformedReply(Exception):
    """The engine's answer is not what its contract says; the message says where."""


class NoHandoff(MalformedReply):
    """The prompt was read and its KV was not kept for anybody: the decoder would silently have to read it again."""


# ── what a kind of engine is like ───────────────────────────────────────────────────────────────────────────────────


class KvReady(enum.Enum):
    """Who says that an attempt's KV can be used."""

    SIGNALS = "signals"
    """Messages on the proxy's signal socket, one per rank of the decoder."""
    PREFILL_REPLY = "prefill_reply"
    """The prefill leg's reply: the decoder fetches the KV by what that says."""
    ENGINES = "engines"
    """The engines, among themselves: both legs are sent at once, and the answer's first event tells."""


class ReleaseSignal(enum.Enum):
    """What tells that an attempt's pages are free again, when all goes well."""

    SIGNALS = "signals"
    """A message on the signal socket, one per rank."""
    FIRST_EVENT = "first_event"
    """The first event of the decoder's answer (of one that is asked for as a whole, its end): the KV was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """How engines of one kind hand KV over; the orchestrator goes by this and knows no kind by name."""

    ready: KvReady
    keeper: Role
    """Whose memory the slots guard."""
    freed: ReleaseSignal
    lease_s: float
    """After this time the keeper drops KV that nobody has asked for."""
    closing_s: float = 1.0
    """So long after a leg was closed the engine has dropped what it held for that leg alone."""
    is_lease_strict: bool = False
    """The decoder must have begun before that: what it fetches later may be another request's."""
    shows_first_token: bool = False
    """The decoder's answer starts with the prefiller's token; else with one that it finds by itself."""
    streams_whole: WholeShape | None = None
    """What its whole answers look like, where one that is put together from a stream is the same; None: a client's
    whole answer is asked for as a whole, and has no first event."""
    resumes: bool = False
    """Its engines can go on with an answer that another one began."""
    serves_alone: bool = True
    """One instance can answer by itself: a decoder reads prompts too, a prefiller gives its token to a client. Else
    whatever is asked for goes through both legs."""
    kv_lost_code: str | None = None
    """Of a prefiller's error object, under HTTP 502, where its KV did not reach the decoder, whichever of them is at
    fault; None where it has no code for that."""
    peer_ended_path: str | None = None
    """Where a decoder is told that the process of a peer has ended (``POST {"epoch": …}``), so that it takes back the
    pages which that one was writing to; None where decoders find out by themselves."""


# ── what an instance tells of itself ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """Where one rank of a decoder takes KV in."""

    rank: int
    host: str
    port: int
    """Its control port (LMCache: for the handshake)."""
    alloc_port: int | None = None
    """LMCache: where pages are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What is known of an instance, by its own word and by its configuration. Pages are per rank."""

    epoch: str | None
    """Another value, another process; None where the engine does not tell processes apart."""
    role: str | None = None
    """As the engine says; None where it does not know."""
    models: frozenset[str] = frozenset()
    """The names it serves its model under."""
    agreement: Mapping[str, str] = field(default_factory=dict)
    """Where two instances both tell one of these and differ, one cannot read what the other writes."""
    num_pages: int = 0
    """Of the memory that slots guard; 0 where they guard another instance's."""
    num_occupied: int | None = None
    """Pages of the memory that slots guard which the engine says are in use, on the fullest rank; None where it does
    not say. Pages that it keeps only as a cache and would give up on demand are not in use."""
    num_wrong_tags: int = 0
    """Attempts that this process has failed because a page held another attempt's KV. It must stay 0."""
    chunk_size: int | None = None
    """Tokens per page; None: a request takes one page, whatever its length."""
    page_bytes: int | None = None
    """None where it is not known."""
    max_model_len: int | None = None
    """Tokens of prompt and answer; None where it is not known."""
    groups: tuple[PageGroup, ...] = ()
    """What a prompt occupies is counted over these; none: one page per chunk."""
    windowed: bool = False
    """A prompt larger than the memory can pass through it while it is alone."""
    receivers: tuple[Receiver, ...] = ()
    """A decoder's, one per rank, where prefillers are told where to write."""
    bootstrap: str | None = None
    """``host:port`` at which a prefiller's peers meet it."""
    engine_id: str | None = None
    """Mooncake: by which its peers know it."""
    data_parallel_rank: int | None = None
    """SGLang: which of a prefiller's ranks its peers ask; None: whichever it chooses."""


# ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class Passage:
    """One attempt's way from a prefiller to a decoder: what its legs have to know of it."""

    attempt: str
    """32 hexadecimal digits, never used twice. A secret between this proxy and the engines: who knows it can say that
    the attempt's KV is ready. It goes into bodies, and not into headers that an answer's id may be made of."""
    prefiller: EngineInfo
    decoder: EngineInfo
    timeout_s: float
    notify: str
    """Where KV signals go to, as a ZMQ address."""
    prompt_ids: list[int] | None
    """Where this proxy knows them."""
    num_answer_tokens: int = 0
    """The last so many of `prompt_ids` are an answer's first tokens, which its client has seen."""


@dataclass(slots=True)
class Resumption:
    """An answer that another engine began."""

    token_ids: list[int]
    """The prompt's, then those of the answer that were shown."""
    num_answer_tokens: int


@dataclass(slots=True, kw_only=True)
class PrefillReply:
    """A prefill leg's answer."""

    fields: Fields
    """Where it `is_whole`, as the client gets it; else as much of it as the adapter needs for the decode leg."""
    handoff: msgspec.Raw | None
    """Goes to the decoder byte for byte. None: nothing was kept for one."""
    is_whole: bool
    """It *is* the client's answer. (With a handoff, that has to be abandoned.)"""
    usage: PromptUsage | None
    has_text: bool
    """The first token shows; a decode answer without any text would then be a corrupt one."""
    prompt_ids: msgspec.Raw | None = None
    """The ids that were prefilled, where the reply tells them beside the handoff."""


@dataclass(slots=True)
class Call:
    """One HTTP call to be made."""

    path: str
    body: bytes


@dataclass(slots=True)
class DecodeLeg:
    body: bytes
    opening: Opening | None = None
    """What the prefiller has written of the client's answer, where the decoder's goes on behind it."""


class ReleaseMode(enum.Enum):
    """What becomes of an attempt's pages when its request has ended early, without anybody doing anything."""

    FREE = "free"
    """Closing the legs has freed them."""
    LEASE = "lease"
    """They are free when the keeper's lease has run out."""


@dataclass(frozen=True, slots=True)
class ReleaseCall:
    """A call that makes an abandoned attempt's pages free."""

    role: Role
    """Which of the attempt's instances is called."""
    call: Call
    timeout_s: float | None = None
    """For its answer; None: as long as any look at an instance may take."""
    delay_s: float = 0.0
    """From the attempt's end to the call: what is still under way must not meet it."""
    or_ready: bool = False
    """The delay is over as soon as every rank has said that it is ready."""


class Adapter(Protocol):
    """One instance of one kind of engine. Bodies are asked of the adapter of the instance that gets them."""

    @property
    def name(self) -> str:
        """The kind, as in the configuration."""

    @property
    def manner(self) -> EngineTraits: ...

    # ── looking at it ──

    @property
    def looks(self) -> tuple[str, ...]:
        """What to GET, in order, to know how it is: paths, or whole URLs; each must answer 200."""

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        """From the bodies of `looks`. Raises `MalformedReply`."""

    # ── the legs ──

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        """A pair can serve it; else the decoder alone has to. `prompt_ids` as far as this proxy knows them.

        Raises `InvalidRequest` for what neither can.
        """

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        """Whose word makes an attempt ready; only where that comes by signals."""

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        """What goes with a leg besides what the client sends to every leg; names in lower case. `attempt` is the id as
        clients see it."""

    def prefill_body(self, request: GenerationRequest, passage: Passage) -> bytes: ...

    def one_token_body(self, request: GenerationRequest) -> bytes:
        """A prefill leg that nothing follows."""

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        """Raises `MalformedReply`, `NoHandoff`."""

    def decode_leg(
        self, request: GenerationRequest, passage: Passage, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        """`reply` is None where both legs are sent at once. `with_ids`: the answer is to tell its ``token_ids``, so
        that it can be resumed elsewhere."""

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        """For a decoder that does both halves; with a `resumption`, that goes on from there."""

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        """The ids that were prefilled, where the reply tells."""

    # ── an early end ──

    def abandon(
        self, request: GenerationRequest, passage: Passage, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        """How the pages of an attempt become free that nobody will finish. `reply` is None as long as there is none."""

    def read_errand(self, status: int, body: bytes) -> bool:
        """The answer to an `ReleaseCall`: True when the pages are free. Raises `MalformedReply`."""


# ── carrying calls ──────────────────────────────────────────────────────────────────────────────────────────────────


class Leg(Protocol):
    """An HTTP answer whose head is there."""

    @property
    def status(self) -> int: ...

    def header(self, name: str) -> str | None: ...

    async def read(self) -> bytes:
        """The whole body. Raises `EngineBroken`."""

    async def read_chunk(self) -> bytes:
        """The next piece of the body as it comes, ``b""`` at its end. Raises `EngineBroken`."""

    @property
    def source(self) -> Source | None:
        """The body, for who does not want to wait for its pieces; None where there is no such way."""

    def close(self) -> None:
        """Nothing more is wanted of it. Idempotent; of an answer that was not read to its end it costs the connection.

        That is gone a little later: the client sees to it, whatever becomes of the caller.
        """


class Sink(Protocol):
    """Where a body can be poured. Called by the event loop: `feed` any number of times, then one of `end` and `fail`.

    It may call the source's `pause` and `resume`, and the leg's `close`, from within; after `close` it hears nothing
    more. It must not raise: that costs the connection, and comes back as `fail`.
    """

    def feed(self, data: bytes) -> None:
        """The next bytes, never none. To have no more for now, call the source's `pause`."""

    def end(self) -> None:
        """The body was fed to its end."""

    def fail(self, error: EngineBroken) -> None:
        """The body broke off."""


class Source(Protocol):
    """A leg whose body need not be awaited: it goes from the socket's callback to a sink, without a task in between."""

    def pour(self, sink: Sink) -> None:
        """From here on the body goes to `sink`: first, and at once, what has come and was not read."""

    def pause(self) -> None:
        """No more for now; what was read from the socket already may still come. Idempotent, like `resume`."""

    def resume(self) -> None: ...


class EngineClient(Protocol):
    """Carries calls to one instance. Has no deadlines of its own beyond connecting: the caller has them."""

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        """Returns when the answer's head is there. Raises `EngineUnreachable` (`EngineRefused`), `EngineBroken`."""

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body; `path` may be a whole URL. Raises `EngineUnreachable` (`EngineRefused`), `EngineBroken`."""

    async def aclose(self) -> None:
        """Takes no new calls, and ends when the connections are closed of those that are over. Idempotent."""
