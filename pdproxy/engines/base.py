"""What the orchestrator needs of an engine: an adapter that writes bodies and reads replies, a client to carry them.

An adapter does no I/O, so it is tested with plain values. A client knows nothing of what it carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdproxy.reply.seam import PromptUsage
from pdproxy.request.openai import Fields, GenerationRequest
from transfer.wire import BufferFacts


class EngineUnreachable(Exception):
    """No connection: the engine has not seen the request."""


class EngineRefused(EngineUnreachable):
    """Nobody listens there: the process has gone, and with it all that it held."""


class EngineBroken(Exception):
    """The connection failed after the request was on its way; what the engine did with it is unknown."""


class MalformedReply(Exception):
    """The engine's answer is not what its contract says; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What a prefill leg has to know of its attempt."""

    attempt: str
    decoder: BufferFacts
    timeout_s: float
    notify: str
    prompt_ids: list[int] | None
    num_answer_tokens: int = 0
    """The last so many of `prompt_ids` are an answer's first tokens, which its client has seen."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """An answer that another engine began."""

    token_ids: list[int]
    """The prompt's, then those of the answer that were shown."""
    num_answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReply:
    """A prefill leg's answer. Without a `handoff` it *is* the client's answer."""

    fields: Fields
    handoff: msgspec.Raw | None
    """Opaque: goes to the decoder byte for byte."""
    usage: PromptUsage | None
    has_text: bool
    """The first token shows; a decode answer without any text would then be a corrupt one."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call to be made."""

    path: str
    body: bytes


class Adapter(Protocol):
    """One kind of engine."""

    @property
    def name(self) -> str: ...

    @property
    def resumes(self) -> bool:
        """Its engines can go on with an answer that another one began."""

    def ranks(self, decoder: BufferFacts) -> frozenset[int]:
        """Whose KV-ready makes an attempt ready."""

    def prefill_body(self, request: GenerationRequest, push: Push) -> bytes: ...

    def one_token_body(self, request: GenerationRequest) -> bytes:
        """A prefill leg that nothing follows."""

    def decode_body(self, request: GenerationRequest, handoff: msgspec.Raw, *, with_ids: bool = False) -> bytes:
        """`with_ids`: the answer is to tell its ``token_ids``, so that it can be resumed elsewhere."""

    def local_body(
        self, request: GenerationRequest, resumption: Resumption | None = None, *, with_ids: bool = False
    ) -> bytes:
        """For a decoder that does both halves; with a `resumption`, that goes on from there."""

    def prompt_ids(self, handoff: msgspec.Raw) -> list[int] | None:
        """The ids that were prefilled, where a handoff tells."""

    def read_prefill(self, body: bytes) -> PrefillReply:
        """Raises `MalformedReply`."""

    def cancel_call(self, attempt: str) -> Call:
        """Tells a decoder to drop an attempt's KV."""

    def read_cancel(self, body: bytes) -> bool:
        """True when the pages are free. Raises `MalformedReply`."""

    def read_facts(self, body: bytes) -> BufferFacts:
        """Raises `MalformedReply`."""


class Leg(Protocol):
    """An HTTP answer whose head is there. Closing is idempotent; one not read to its end costs the connection."""

    @property
    def status(self) -> int: ...

    def header(self, name: str) -> str | None: ...

    async def read(self) -> bytes:
        """The whole body. Raises `EngineBroken`."""

    async def read_chunk(self) -> bytes:
        """The next piece of the body as it comes, ``b""`` at its end. Raises `EngineBroken`."""

    async def aclose(self) -> None: ...


class EngineClient(Protocol):
    """Carries calls to one instance. Has no deadlines of its own beyond connecting: the caller has them."""

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        """Returns when the answer's head is there. Raises `EngineUnreachable` (`EngineRefused`), `EngineBroken`."""

    async def get(self, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises `EngineUnreachable` (`EngineRefused`), `EngineBroken`."""

    async def aclose(self) -> None: ...
