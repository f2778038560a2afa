"""A canary is the tiny request that must go through a prefiller and a decoder before any client's request does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from pdproxy.fleet.instance import Instance
from pdproxy.ids import fresh_id
from pdproxy.openai.request import COMPLETIONS, GenerationRequest, parse
from pdproxy.orchestrator.context import Headers, Outlet
from pdproxy.tokens.prompt_size import PromptSize
from transfer.memory_budget import UNLIMITED

_PROMPT = "Hi."
_BODY = {"prompt": _PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}

PRIORITY = 1 << 30
"""The canary's priority, above all that clients may ask for: while a fleet is short of instances, waiting before a
canary helps nobody."""
SIZE = PromptSize(tokens=len(_PROMPT), is_exact=False)


def request(prefiller: Instance, decoder: Instance) -> GenerationRequest:
    """Returns a request for two tokens of a model that both serve: the first is the prefiller's, the second needs its
    KV."""
    models = sorted(prefiller.models & decoder.models)
    plain = parse(COMPLETIONS, msgspec.json.encode({"model": models[0]} | _BODY if models else _BODY))
    return replace(plain, priority=PRIORITY)


class NoClient:
    """NoClient takes a canary's answer and drops it. Implements `context.Client`."""

    def __init__(self) -> None:
        self.headers: Mapping[str, str] = {}
        self.forwarded: Mapping[str, str] = {"x-request-id": f"canary-{fresh_id()}"}
        self.memory = UNLIMITED.share()
        self.is_started = False

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True

    async def send(self, chunk: bytes) -> None:
        """Does nothing, because nobody reads the answer."""

    async def end(self) -> None:
        """Does nothing, because nobody waits for the end."""

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.answer_now(status, headers, body)

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        self.is_started = True
        return True

    @property
    def outlet(self) -> Outlet | None:
        return None
