"""The module knows the address that is asked, and how it wants to be asked: any that speaks OpenAI's completions or
chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from pdproxy.engines.http.base import EngineBroken, EngineClient, EngineUnreachable
from pdproxy.engines.http.http1.client import Http1Client, can_reach
from pdproxy.engines.http.httpx_client import HttpxClient
from pdproxy.loadtest.errors import TargetError
from pdproxy.openai.answer import read_cards

Endpoint = Literal["completions", "chat"]

USUAL_EXTRA: Mapping[str, Any] = MappingProxyType({"temperature": 0, "ignore_eos": True})
"""The members of a request which make the same question get the same answer, with exactly as many tokens as were asked
for. (A target that does not know `ignore_eos` may refuse it; then leave it out.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target is the address that is asked, and the form of the requests to it. It raises `TargetError` if `url` is no
    address, or if a chat is to take token ids."""

    url: str
    """Holds the address: ``http://host:port``; a closing ``/v1`` is no part of it."""
    model: str
    endpoint: Endpoint = "completions"
    token_ids: range | None = None
    """Holds the range of ids out of which prompts are made, exact to the token; None means that prompts are words."""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Holds the headers of every request; names are in lower case."""
    extra: Mapping[str, Any] = field(default_factory=lambda: USUAL_EXTRA)
    """Holds further members of every request."""
    wants_usage: bool = True
    """Says whether streams are asked for their `usage`, by ``stream_options``."""
    connect_timeout_s: float = 10.0
    timeout_s: float = 600.0
    """Holds the seconds that one request may take."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TargetError(f"{self.url!r} is no address: give http://host:port")
        if self.token_ids is not None and self.endpoint == "chat":
            raise TargetError("a chat's messages are words: only completions take token ids")

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def client(self) -> EngineClient:
        """Returns a new client of the address; the caller has to close it."""
        make = Http1Client if can_reach(self.root) else HttpxClient
        return make(self.root, connect_timeout_s=self.connect_timeout_s, api_key=self.api_key)

    def body(self, said: Sequence[str], *, num_tokens: int, is_stream: bool) -> bytes:
        """Returns a request's body. `said` is the client's words and the answers to them, in turn; the last one is the
        client's."""
        fields: dict[str, Any] = {"model": self.model, **self.extra, "max_tokens": num_tokens, "stream": is_stream}
        if is_stream and self.wants_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            roles = ("user", "assistant")
            fields["messages"] = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(said)]
        elif self.token_ids is not None:
            fields["prompt"] = msgspec.Raw(f"[{said[-1]}]".encode())
        else:
            fields["prompt"] = "".join(said)
        return msgspec.json.encode(fields)


async def first_model(url: str, *, api_key: str | None = None, timeout_s: float = 10.0) -> str:
    """Returns the first name under which the address serves a model. Raises `TargetError`."""
    client = Target(url=url, model="", api_key=api_key, connect_timeout_s=timeout_s).client()
    try:
        status, body = await client.get("/v1/models", timeout_s=timeout_s)
        cards = read_cards(body) if status == 200 else []
    except EngineUnreachable as error:
        raise TargetError(
            f"{url} cannot be reached: {error}; start what is to be tested, or correct the address"
        ) from None
    except (EngineBroken, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{url} does not say which models it has: {error}") from None
    finally:
        await client.aclose()
    if not cards:
        raise TargetError(f"{url} does not say which models it has: give its name (status {status})")
    return cards[0].id
