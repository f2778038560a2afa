"""The module says what the orchestrator needs of a kind of engine: an adapter, which writes bodies and reads replies.

An adapter does no I/O, so it is tested with plain values. One adapter is made for each instance.

What each request makes anew has its ``__init__`` written out: the one that `dataclasses` makes is never compiled, and
takes ten times as long.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pdproxy.config.values import Role
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.traits import EngineTraits
from pdproxy.openai.body import Fields
from pdproxy.openai.first_token import Opening
from pdproxy.openai.request import GenerationRequest
from pdproxy.openai.usage import PromptUsage


class MalformedReply(Exception):
    """`MalformedReply` says that the engine's answer is not what its contract says. The message says where."""


class RoleRefused(Exception):
    """`RoleRefused` says that an engine did not change its role, and why. `is_unharmed` says that it works in its old
    role."""

    def __init__(self, why: str, *, is_unharmed: bool) -> None:
        super().__init__(why)
        self.is_unharmed = is_unharmed


class NoHandoff(MalformedReply):
    """`NoHandoff` says that the prompt was read and its KV was not kept for anybody.

    The decoder would silently have to read the prompt again.
    """


class NobodyReached(NoHandoff):
    """`NobodyReached` says that the KV was not kept because the decoder's receiver does not answer the prefiller."""


@dataclass(slots=True, init=False)
class AttemptInfo:
    """An `AttemptInfo` is what the engines are told of one attempt."""

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
    num_answer_tokens: int
    """The number of ids at the end of `prompt_ids` that are an answer's first tokens, which its client has seen."""

    def __init__(
        self,
        *,
        attempt: str,
        prefiller: EngineInfo,
        decoder: EngineInfo,
        timeout_s: float,
        notify: str,
        prompt_ids: list[int] | None,
        num_answer_tokens: int = 0,
    ) -> None:
        self.attempt = attempt
        self.prefiller = prefiller
        self.decoder = decoder
        self.timeout_s = timeout_s
        self.notify = notify
        self.prompt_ids = prompt_ids
        self.num_answer_tokens = num_answer_tokens


@dataclass(slots=True)
class Resumption:
    """A `Resumption` is an answer that another engine began."""

    token_ids: list[int]
    """The ids of the prompt, followed by those of the answer that were shown."""
    num_answer_tokens: int


@dataclass(slots=True, init=False)
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
    prompt_ids: msgspec.Raw | None
    """The ids that were prefilled, where the reply tells them beside the handoff; else None."""

    def __init__(
        self,
        *,
        fields: Fields,
        handoff: msgspec.Raw | None,
        is_whole: bool,
        usage: PromptUsage | None,
        has_text: bool,
        prompt_ids: msgspec.Raw | None = None,
    ) -> None:
        self.fields = fields
        self.handoff = handoff
        self.is_whole = is_whole
        self.usage = usage
        self.has_text = has_text
        self.prompt_ids = prompt_ids


@dataclass(slots=True, init=False)
class Call:
    """A `Call` is one HTTP call to be made."""

    path: str
    body: bytes

    def __init__(self, path: str, body: bytes) -> None:
        self.path = path
        self.body = body


@dataclass(slots=True, init=False)
class DecodeLeg:
    body: bytes
    opening: Opening | None
    """The part of the client's answer that the prefiller has written and that the decoder's answer continues; None
    where there is none.
    """

    def __init__(self, body: bytes, opening: Opening | None = None) -> None:
        self.body = body
        self.opening = opening


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
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers that go with the call. Adapters leave them to the attempt."""


class Adapter(Protocol):
    """An `Adapter` stands for one instance of one kind of engine. Each body is asked of the adapter of the instance
    that gets it.
    """

    name: str
    """The kind, as in the configuration."""
    traits: EngineTraits

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
        """Reads the answer to a `ReleaseCall`. Returns True when the pages are free, or will be without another call.
        Raises `MalformedReply`.
        """
