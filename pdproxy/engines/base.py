"""The module says what the orchestrator needs of an engine: an adapter and a client.

The adapter writes bodies and reads replies. It does no I/O, so it is tested with plain values. One adapter is made for
each instance. The client carries the bodies and knows nothing of what it carries.
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
    """`EngineUnreachable` says that there is no connection: the engine has not seen the request."""


class EngineRefused(EngineUnreachable):
    """`EngineRefused` says that nobody listens at the address: the process has gone, and with it all that it held."""


class EngineBroken(Exception):
    """`EngineBroken` says that the connection failed after the request was on its way. Nobody knows what the engine did
    with it.
    """


class MalformedReply(Exception):
    """`MalformedReply` says that the engine's answer is not what its contract says. The message says where."""


class NoHandoff(MalformedReply):
    """`NoHandoff` says that the prompt was read and its KV was not kept for anybody.

    The decoder would silently have to read the prompt again.
    """


# ── what a kind of engine is like ───────────────────────────────────────────────────────────────────────────────────


class KvReady(enum.Enum):
    """`KvReady` says who tells that an attempt's KV can be used."""

    SIGNALS = "signals"
    """Messages on the proxy's signal socket tell that the KV can be used, one per rank of the decoder."""
    PREFILL_REPLY = "prefill_reply"
    """The prefill leg's reply tells that the KV can be used, and the decoder fetches the KV by what the reply says."""
    ENGINES = "engines"
    """The engines tell each other that the KV can be used: both legs are sent at once, and the answer's first event
    shows it.
    """


class ReleaseSignal(enum.Enum):
    """`ReleaseSignal` says what tells that an attempt's pages are free again, when all goes well."""

    SIGNALS = "signals"
    """Messages on the signal socket tell that the pages are free, one per rank."""
    FIRST_EVENT = "first_event"
    """The first event of the decoder's answer tells that the pages are free, because the KV was taken then. For an
    answer that is asked for as a whole, the answer's end tells it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """`EngineTraits` say how engines of one kind hand KV over. The orchestrator goes by this and knows no
    kind by name.
    """

    ready: KvReady
    page_owner: Role
    """The role of the instance whose memory the slots guard."""
    freed: ReleaseSignal
    lease_s: float
    """The seconds after which the page owner drops KV that no engine has asked for."""
    closing_s: float = 1.0
    """The seconds after a leg was closed in which the engine drops what it held for that leg alone."""
    is_lease_strict: bool = False
    """Tells that the decoder must have begun before the lease ends: what it fetches later may be another request's."""
    shows_first_token: bool = False
    """Tells that the decoder's answer starts with the prefiller's token. Otherwise it starts with one that the decoder
    finds by itself.
    """
    streams_whole: WholeShape | None = None
    """The shape of whole answers, where one that is put together from a stream is the same.

    With None, a client's whole answer is asked for as a whole, and has no first event.
    """
    resumes: bool = False
    """Tells that engines of this kind can continue an answer that another one began."""
    serves_alone: bool = True
    """Tells that one instance can answer by itself: a decoder reads prompts too, and a prefiller gives its token to a
    client.

    Otherwise every request goes through both legs.
    """
    kv_lost_code: str | None = None
    """The code in a prefiller's error object, under HTTP 502, where its KV did not reach the decoder, whichever of them
    is at fault; None where the kind has no code for that.
    """
    peer_ended_path: str | None = None
    """The path at which a decoder is told that the process of a peer has ended (``POST {"epoch": …}``).

    The decoder then takes back the pages which that process was writing to. None where decoders find out by themselves.
    """


# ── what an instance tells of itself ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A `Receiver` is the address at which one rank of a decoder takes KV in."""

    rank: int
    host: str
    port: int
    """The rank's control port (for LMCache: the port of the handshake)."""
    alloc_port: int | None = None
    """The port at which LMCache's prefillers ask for pages; None for other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """`EngineInfo` is what is known of an instance, by its own word and by its configuration. Pages are per rank."""

    epoch: str | None
    """The id of the process. A different value means a different process. None where the engine does not tell processes
    apart.
    """
    role: str | None = None
    """The role, as the engine says; None where it does not know."""
    models: frozenset[str] = frozenset()
    """The names under which the instance serves its model."""
    agreement: Mapping[str, str] = field(default_factory=dict)
    """The facts that must be equal in a pair. Where two instances both tell one of them and differ, one cannot read
    what the other writes.
    """
    num_pages: int = 0
    """The number of pages of the memory that slots guard; 0 where slots guard another instance's."""
    num_occupied: int | None = None
    """The number of pages of that memory which the engine says are in use, on the fullest rank; None where it does not
    say.

    Pages that it keeps only as a cache and would give up on demand are not in use.
    """
    num_wrong_tags: int = 0
    """Counts the attempts that this process has failed because a page held another attempt's KV. It must stay 0."""
    chunk_size: int | None = None
    """The number of tokens per page; with None a request takes one page, whatever its length."""
    page_bytes: int | None = None
    """The size of a page in bytes; None where it is not known."""
    max_model_len: int | None = None
    """The most tokens of prompt and answer; None where it is not known."""
    groups: tuple[PageGroup, ...] = ()
    """The groups of layers over which a prompt's pages are counted; without groups a prompt takes one page
    per chunk.
    """
    windowed: bool = False
    """Tells that a prompt larger than the memory can pass through it while it is alone."""
    receivers: tuple[Receiver, ...] = ()
    """A decoder's receivers, one per rank, where prefillers are told the addresses to write to."""
    bootstrap: str | None = None
    """The ``host:port`` at which a prefiller's peers meet it."""
    engine_id: str | None = None
    """The id by which a Mooncake engine's peers know it."""
    data_parallel_rank: int | None = None
    """The rank of an SGLang prefiller that its peers ask; with None the prefiller chooses the rank itself."""


# ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class AttemptInfo:
    """A `AttemptInfo` is one attempt's way from a prefiller to a decoder: what its legs have to know of it."""

    attempt: str
    """The attempt's id: 32 hexadecimal digits, never used twice.

    It is a secret between this proxy and the engines: anybody who knows it can say that the attempt's KV is ready. It
    goes into bodies, and not into headers that an answer's id may be made of.
    """
    prefiller: EngineInfo
    decoder: EngineInfo
    timeout_s: float
    notify: str
    """The ZMQ address to which KV signals go."""
    prompt_ids: list[int] | None
    """The prompt's ids; None where this proxy does not know them."""
    num_answer_tokens: int = 0
    """The number of ids at the end of `prompt_ids` that are an answer's first tokens, which its client has seen."""


@dataclass(slots=True)
class Resumption:
    """A `Resumption` is an answer that another engine began."""

    token_ids: list[int]
    """The ids of the prompt, followed by those of the answer that were shown."""
    num_answer_tokens: int


@dataclass(slots=True, kw_only=True)
class PrefillReply:
    """A `PrefillReply` is a prefill leg's answer."""

    fields: Fields
    """The answer as the client gets it, where it `is_whole`; else as much of it as the adapter needs for the decode
    leg.
    """
    handoff: msgspec.Raw | None
    """The parameters that go to the decoder byte for byte; None where nothing was kept for a decoder."""
    is_whole: bool
    """Tells that the reply *is* the client's answer. (If it has a handoff, that has to be abandoned.)"""
    usage: PromptUsage | None
    has_text: bool
    """Tells that the first token shows. A decode answer without any text is then a corrupt one."""
    prompt_ids: msgspec.Raw | None = None
    """The ids that were prefilled, where the reply tells them beside the handoff; else None."""


@dataclass(slots=True)
class Call:
    """A `Call` is one HTTP call to be made."""

    path: str
    body: bytes


@dataclass(slots=True)
class DecodeLeg:
    body: bytes
    opening: Opening | None = None
    """The part of the client's answer that the prefiller has written and that the decoder's answer continues; None
    where there is none.
    """


class ReleaseMode(enum.Enum):
    """`ReleaseMode` says what becomes of an attempt's pages when its request has ended early and nobody does
    anything.
    """

    FREE = "free"
    """Closing the legs has freed them."""
    LEASE = "lease"
    """The pages are free when the page owner's lease has run out."""


@dataclass(frozen=True, slots=True)
class ReleaseCall:
    """A `ReleaseCall` is a call that makes an abandoned attempt's pages free."""

    role: Role
    """The role of the attempt's instance that is called."""
    call: Call
    timeout_s: float | None = None
    """The seconds to wait for the answer; None for as long as any look at an instance may take."""
    delay_s: float = 0.0
    """The seconds from the attempt's end to the call: the call must not meet what is still under way."""
    or_ready: bool = False
    """Tells that the delay is over as soon as every rank has said that it is ready."""


class Adapter(Protocol):
    """An `Adapter` stands for one instance of one kind of engine. Each body is asked of the adapter of the instance
    that gets it.
    """

    @property
    def name(self) -> str:
        """Returns the kind, as in the configuration."""

    @property
    def traits(self) -> EngineTraits: ...

    # ── looking at it ──

    @property
    def looks(self) -> tuple[str, ...]:
        """Returns what to GET, in order, to know the instance's state: paths, or whole URLs. Each must answer 200."""

    def read_facts(self, answers: Mapping[str, bytes]) -> EngineInfo:
        """Reads the bodies of `looks`. Raises `MalformedReply`."""

    # ── the legs ──

    def hands_over(self, request: GenerationRequest, prompt_ids: list[int] | None) -> bool:
        """Tells whether a pair can serve the request; else the decoder alone has to. `prompt_ids` is None where this
        proxy does not know them.

        Raises `InvalidRequest` for a request that neither can serve.
        """

    def ranks(self, decoder: EngineInfo) -> frozenset[int]:
        """Returns the ranks whose word makes an attempt ready; empty where that does not come by signals."""

    def leg_headers(self, request_id: str, attempt: str) -> Mapping[str, str]:
        """Returns the headers of a leg besides those that the client sends to every leg. Names are in lower case.

        `attempt` is the id as clients see it.
        """

    def prefill_body(self, request: GenerationRequest, info: AttemptInfo) -> bytes: ...

    def one_token_body(self, request: GenerationRequest) -> bytes:
        """Returns the body of a prefill leg without a decode leg."""

    def read_prefill(self, request: GenerationRequest, body: bytes) -> PrefillReply:
        """Reads the answer to a prefill leg. Raises `MalformedReply`, `NoHandoff`."""

    def decode_leg(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, with_ids: bool = False
    ) -> DecodeLeg:
        """Returns the decode leg. `reply` is None where both legs are sent at once.

        With `with_ids` the answer tells its ``token_ids``, so that another engine can resume it.
        """

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        """Returns the body for a decoder that does both halves. With a `resumption`, the decoder
        continues from there.
        """

    def prompt_ids(self, reply: PrefillReply) -> list[int] | None:
        """Returns the ids that were prefilled, where the reply tells them; else None."""

    # ── an early end ──

    def abandon(
        self, request: GenerationRequest, info: AttemptInfo, reply: PrefillReply | None, *, is_decode_sent: bool
    ) -> ReleaseCall | ReleaseMode:
        """Says how the pages of an attempt become free that nobody will finish. `reply` is None as long as there is
        none.
        """

    def read_errand(self, status: int, body: bytes) -> bool:
        """Reads the answer to a `ReleaseCall`. Returns True when the pages are free. Raises `MalformedReply`."""


# ── carrying calls ──────────────────────────────────────────────────────────────────────────────────────────────────


class Leg(Protocol):
    """A `Leg` is an HTTP answer whose head is there."""

    @property
    def status(self) -> int: ...

    def header(self, name: str) -> str | None: ...

    async def read(self) -> bytes:
        """Returns the whole body. Raises `EngineBroken`."""

    async def read_chunk(self) -> bytes:
        """Returns the next piece of the body as it comes, ``b""`` at its end. Raises `EngineBroken`."""

    @property
    def source(self) -> Source | None:
        """Returns the body as a source, which can be poured without waiting for its pieces; None where there is no such
        way.
        """

    def close(self) -> None:
        """Gives the answer up. Idempotent. An answer that was not read to its end costs the connection.

        The connection is gone a little later. The client sees to that, whatever becomes of the caller.
        """


class Sink(Protocol):
    """A `Sink` is where a body can be poured. The event loop calls `feed` any number of times, then one of `end` and
    `fail`.

    From within, it may call the source's `pause` and `resume`, and the leg's `close`. After `close` it hears nothing
    more. It must not raise: that costs the connection, and comes back as `fail`.
    """

    def feed(self, data: bytes) -> None:
        """Takes the next bytes, never none. It can call the source's `pause` to get no more for now."""

    def end(self) -> None:
        """Is called when the body was fed to its end."""

    def fail(self, error: EngineBroken) -> None:
        """Is called when the body broke off."""


class Source(Protocol):
    """A `Source` is a leg whose body goes from the socket's callback to a sink, without a task in between that awaits
    it.
    """

    def pour(self, sink: Sink) -> None:
        """Sends the body to `sink` from here on. What has come and was not read goes first, and at once."""

    def pause(self) -> None:
        """Stops for now. Bytes that were read from the socket already may still come. Idempotent, like `resume`."""

    def resume(self) -> None: ...


class EngineClient(Protocol):
    """An `EngineClient` carries calls to one instance. It has no deadlines of its own beyond connecting: the caller has
    them.
    """

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        """Sends a POST and returns its answer when the answer's head is there.

        Raises `EngineUnreachable` (`EngineRefused`), `EngineBroken`.
        """

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Returns status and body. `path` may be a whole URL. Raises `EngineUnreachable` (`EngineRefused`),
        `EngineBroken`.
        """

    async def aclose(self) -> None:
        """Takes no new calls from now on, and ends when the connections of calls that are over are
        closed. Idempotent.
        """
