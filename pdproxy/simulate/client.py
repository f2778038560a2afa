"""The module plays those who ask: it makes a request as the proxy's door would hand it on, and the client that the
answer goes to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from pdproxy.openai.body import Fields
from pdproxy.openai.request import COMPLETIONS, GenerationRequest, PromptKind
from pdproxy.orchestrator.context import Headers
from pdproxy.simulate.adapter import GROUP, MODEL, NUM_SHARED
from pdproxy.simulate.traffic import Question
from transfer.memory_budget import UNLIMITED

_PROMPT = msgspec.Raw(b"[0]")
"""The prompt of every request: its ids are not looked at, and their number is told beside it."""
_FIELDS: Fields = {"prompt": _PROMPT}
_NO_HEADERS: Mapping[str, str] = {}
_ALIKE_BYTES = 16384
"""The size in bytes of a prompt that belongs to a group. It is more than any number of chunks by which prompts are
known again."""


def make_request(question: Question) -> GenerationRequest:
    """Returns a streamed completion of a prompt of ids, which gets exactly as many tokens as it asks for."""
    fields = _FIELDS if question.group is None else _fields_of(question.group, question.num_shared)
    return GenerationRequest(
        endpoint=COMPLETIONS,
        fields=fields,
        model=MODEL,
        stream=True,
        include_usage=False,
        n=1,
        max_tokens=question.num_answer_tokens,
        prompt_kind=PromptKind.IDS,
        num_prompt_bytes=len(_PROMPT),
        is_ascii=True,
        num_prompt_ids=question.num_prompt_tokens,
        num_messages=0,
        num_sequences=1,
        has_text_only=True,
        has_media=False,
        reads_prompt=False,
        has_stop=False,
        wants_token_ids=True,
        timeout_s=None,
        priority=0,
    )


def _fields_of(group: int, num_shared: int) -> Fields:
    shared = msgspec.Raw(b"%d" % num_shared)
    return {"prompt": _beginning(group), GROUP: msgspec.Raw(b"%d" % group), NUM_SHARED: shared}


@lru_cache(maxsize=4096)
def _beginning(group: int) -> msgspec.Raw:
    """Returns a prompt that is equal for all of a group, and different for every other group."""
    return msgspec.Raw((b"[" + b"%d," % group * (_ALIKE_BYTES // (len(str(group)) + 1)))[:-1] + b"]")


class SimulatedClient:
    """SimulatedClient takes an answer, and notes when it came. It implements `context.Client`.

    Mutable state: whether there was a status line, and which; when the first and the latest piece came.
    """

    __slots__ = ("_loop", "first_at", "forwarded", "headers", "is_started", "last_at", "memory", "patience", "status")

    outlet = None

    def __init__(self, loop: asyncio.AbstractEventLoop, session: int | None, session_header: str) -> None:
        self._loop = loop
        self.headers = _NO_HEADERS if session is None else {session_header: str(session)}
        self.forwarded = _NO_HEADERS
        self.memory = UNLIMITED.share()
        self.is_started = False
        self.status = 0
        self.patience: asyncio.Timeout | None = None
        """Holds the timeout until the first piece; None where the client waits for ever."""
        self.first_at: float | None = None
        self.last_at = 0.0

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        self.status = status

    async def send(self, chunk: bytes) -> None:
        self.last_at = self._loop.time()
        if self.first_at is None:
            self.first_at = self.last_at
            if self.patience is not None:
                self.patience.reschedule(None)

    async def end(self) -> None:
        """Does nothing: everything has come."""

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.answer_now(status, headers, body)

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        self.is_started = True
        self.status = status
        return True
