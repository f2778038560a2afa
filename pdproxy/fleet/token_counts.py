"""TokenCounts gets lengths and ids of prompts from the engines of `Pool` over HTTP. Nothing is rendered in the proxy.

Answers are kept for a short while by what was asked, since a retry or a parallel request asks the same again. Requests
that ask the same at the same time share one call. A template may write the time of day, so nothing is kept for long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from pdproxy.engines.adapter import Adapter, Call, MalformedReply
from pdproxy.engines.http.base import EngineBroken, EngineRefused, EngineUnreachable, LocalFault
from pdproxy.engines.tokenize import is_certain, read_tokens, tokenize_call
from pdproxy.errors import EngineReply, InvalidRequest
from pdproxy.fleet.instance import MAX_WHY_BYTES, Instance
from pdproxy.fleet.page_count import pages_needed
from pdproxy.fleet.pool import Pool
from pdproxy.openai.request import GenerationRequest
from pdproxy.tokens.bounds import UNSEEN, ChatFrame
from pdproxy.tokens.lru import LruCache
from pdproxy.tokens.prompt_size import PromptSize
from transfer.logs import printable

ASK_S: Final = 10.0
"""Seconds that one answer may take. An engine tokenizes a million tokens in two or three seconds."""
NUM_ASKED: Final = 2
"""Number of instances that are asked before the proxy gives up getting an answer."""
KEPT_BYTES: Final = 16 << 20
KEPT_S = 30.0
UNCERTAIN_TOKENS: Final = 256
"""Tokens that are added to a count, as room for what ``/tokenize`` may leave out of a chat."""
TRAITS_S = 0.25
"""Seconds for which the facts about a model's engines are used before they are looked up anew."""
MAX_MODELS = 1024
"""Number of model names for which something is remembered; clients may make up any names."""
_BYTES_PER_ID: Final = 40
_REFUSALS: Final = (400, 422)
"""Statuses with which an engine refuses a prompt. Other statuses speak of the endpoint, or of the engine."""
_UNKNOWN: Final = (404, 405, 501)
"""Statuses which say that there is no such endpoint, or none for this model; the engine is not asked again for a
while."""


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """TokenizerReport holds what was seen of the tokenizer of one engine process."""

    epoch: str | None
    agrees: bool | None = None
    """True where the engine makes the same ids of a text as the proxy's tokenizer; None where that is not known."""
    why: str = "not compared yet"
    frame: ChatFrame | None = None
    """The tokens that the engine's chat template adds; None where the engine did not tell."""

    def status(self) -> dict[str, Any]:
        """Returns what the status page shows of the report."""
        return {"agrees": self.agrees, "why": printable(self.why, MAX_WHY_BYTES)}


@dataclass(frozen=True, slots=True)
class _Answer:
    """_Answer is one engine's answer: a count, with ids or without, or a refusal."""

    count: int
    ids: list[int] | None
    refusal: EngineReply | None
    told_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """_Traits holds what the engines that serve a model are like, taken together."""

    agree: bool
    take_ids: bool
    have_pages: bool
    """True where some owner's pages have a size in tokens, so that a prompt's length matters."""
    prefiller: Adapter | None
    """The adapter of one of the prefillers; None where there are none."""
    frame: ChatFrame
    is_followed: bool
    """True where it is known exactly what some engine has in its prefix cache."""
    is_mixed: bool
    """True where engines of several revisions are ready, so that ids which one of them tells may mean other tokens to
    another."""
    text_key: bytes
    """A digest of what these revisions are."""


class TokenCounts:
    """TokenCounts asks instances of `pool` for the tokens of prompts. Implements `prompt_sizer.Engines`.

    `take_ids` names the kinds of engines that are given ids.

    Mutable state: what was seen of each instance's tokenizer, and at how many of these it is time to forget those of
    instances that have gone; answers that are kept; calls under way, by what they ask;
    until when instances that do not tell are not asked again; whose turn it is; what the engines of a model are like,
    and since when that is known.
    """

    def __init__(
        self, pool: Pool, *, take_ids: frozenset[str] = frozenset(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._take_ids = take_ids
        self._clock = clock
        self._reports: dict[Instance, TokenizerReport] = {}
        self._num_kept = 0
        self._kept: LruCache[_Answer] = LruCache(KEPT_BYTES)
        self._asked: dict[bytes, asyncio.Future[_Answer | None]] = {}
        self._mute: dict[tuple[Instance, str | None], float] = {}
        self._turn = 0
        self._traits_of: dict[str | None, _Traits] = {}
        self._traits_at = clock()

    # ── what is known ───────────────────────────────────────────────────────────────────────────────────────────────

    def report_of(self, instance: Instance) -> TokenizerReport | None:
        """Returns what was seen of the process that runs there now; None where nothing was."""
        report = self._reports.get(instance)
        return report if report is not None and report.epoch == instance.epoch else None

    def report(self, instance: Instance, report: TokenizerReport) -> None:
        if len(self._reports) >= self._num_kept:  # rarely: while a large fleet comes up, everybody reports
            present = {*self._pool.instances, *self._pool.leaving}
            for gone in self._reports.keys() - present:
                del self._reports[gone]
            self._num_kept = 2 * len(present)
        self._reports[instance] = report
        self._traits_of.clear()
        instance.remarks["tokenizer"] = report.status()

    def agree(self, model: str | None) -> bool:
        """Tells whether every ready engine of `model` was seen to tokenize as the proxy does; False without any."""
        return self._traits(model).agree

    def take_ids(self, model: str | None) -> bool:
        """Tells whether ids are of use for `model`: some engine that serves it is given ids, or they tell who has a
        prompt in a cache."""
        return self._traits(model).take_ids

    def frame(self, model: str | None) -> ChatFrame:
        """Returns the most that the templates of the engines that serve `model` add."""
        return self._traits(model).frame

    def have_pages(self, model: str | None) -> bool:
        """Tells whether the pages of some owner have a size in tokens."""
        return self._traits(model).have_pages

    def need_length(self, request: GenerationRequest) -> bool:
        """Tells whether pages are counted for the request: a pair would serve it, and the pages have a size."""
        if request.num_sequences > 1 or request.has_media or request.reads_prompt or request.max_tokens == 1:
            return False
        return self._traits(request.model).have_pages

    def have_plenty(self, model: str | None, num_tokens: int) -> bool:
        """Tells whether half of the pages of some open owner would stay free. False where engines take ids, since they
        are asked for those anyway."""
        if self.take_ids(model):
            return False
        for owner in self._pool.admission.kernel.open_places(model).owners:
            account = owner.account
            if account is not None and isinstance(owner, Instance) and owner.facts is not None:
                pages = pages_needed(owner.facts, num_tokens, is_exact=False)
                if account.held + pages <= account.limit // 2:
                    return True
        return False

    def need_ids(self, request: GenerationRequest) -> bool:
        """Tells whether no pair can serve the request unless its ids are known."""
        prefiller = self._traits(request.model).prefiller
        try:
            # Most engines hand over any prompt, so this is checked first.
            if prefiller is None or prefiller.hands_over(request, None):
                return False
            return self.need_length(request)
        except InvalidRequest:  # the choice of the path tells the client
            return False

    def wants_ids(self, request: GenerationRequest) -> bool:
        """Tells whether the prompt's ids would say which instances have it in their caches."""
        if request.num_sequences > 1 or request.has_media or request.reads_prompt or request.max_tokens == 1:
            return False
        return self._traits(request.model).is_followed

    def _traits(self, model: str | None) -> _Traits:
        """Returns the facts about the engines of `model`, looked up anew when an engine reports, and every `TRAITS_S`
        seconds."""
        now = self._clock()
        if now - self._traits_at >= TRAITS_S or len(self._traits_of) >= MAX_MODELS:
            self._traits_of.clear()
            self._traits_at = now
        traits = self._traits_of.get(model)
        if traits is None:
            traits = self._traits_of[model] = self._look_up(model)
        return traits

    def _look_up(self, model: str | None) -> _Traits:
        serving = self._pool.serving(model)
        reports = [(one, self.report_of(one)) for one in serving]
        compared = [report is not None and report.agrees is True for one, report in reports if one.is_ready]
        frames = [report.frame for _, report in reports if report is not None and report.frame is not None]
        revisions = {one.revision.text_terms for one in serving if one.is_ready}
        is_followed = any(one.kv_events is not None and one.kv_events.index.is_exact for one in serving)
        return _Traits(
            agree=bool(compared) and all(compared),
            take_ids=is_followed or any(one.adapter.name in self._take_ids for one in serving),
            is_followed=is_followed,
            have_pages=any(one.is_owner and one.facts is not None and one.facts.chunk_size for one in serving),
            prefiller=next((one.adapter for one in serving if one.role == "prefill"), None),
            frame=_largest(frames),
            is_mixed=len(revisions) > 1,
            text_key=blake2b(repr(sorted(revisions)).encode(), digest_size=16).digest(),
        )

    # ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def count(self, request: GenerationRequest, headers: Mapping[str, str]) -> PromptSize | None:
        """Returns an engine's count; None where none could give one. Raises `EngineReply` where an engine refuses the
        prompt."""
        if not self._whom(request.model):
            return None
        call, traits = tokenize_call(request), self._traits(request.model)
        with_ids = traits.take_ids and is_certain(request) and (traits.agree or not traits.is_mixed)
        answer = await self._answer(call, request.model, headers, with_ids=with_ids)
        if answer is None:
            return None
        if answer.refusal is not None:
            raise EngineReply(answer.refusal.status, answer.refusal.content, answer.refusal.content_type)
        if is_certain(request):
            return PromptSize(tokens=answer.count, is_exact=True, ids=answer.ids)
        return PromptSize(tokens=answer.count + UNCERTAIN_TOKENS, is_exact=False)

    async def _answer(
        self, call: Call, model: str | None, headers: Mapping[str, str], *, with_ids: bool
    ) -> _Answer | None:
        """Returns the answer that is kept, or the one that another request waits for, or a new one; None where there is
        none."""
        text_key = self._traits(model).text_key + b"ids" if with_ids else self._traits(model).text_key
        key = blake2b(call.body, digest_size=16, key=text_key).digest()
        while True:
            kept = self._kept.get(key)
            if kept is not None and self._clock() - kept.told_at < KEPT_S:
                return kept
            asked = self._asked.get(key)
            if asked is None:
                return await self._ask(key, call, model, headers, with_ids=with_ids)
            await asyncio.wait([asked])
            if not asked.cancelled():
                return asked.result()
            # The request that asked has left: another one has to ask.

    async def _ask(
        self, key: bytes, call: Call, model: str | None, headers: Mapping[str, str], *, with_ids: bool
    ) -> _Answer | None:
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._ask_in_turn(call, model, headers, with_ids=with_ids)
            asked.set_result(answer)
        finally:
            asked.cancel()  # does nothing where there is a result
            del self._asked[key]
        if answer is not None and answer.refusal is None:
            self._kept.put(key, answer, _BYTES_PER_ID * len(answer.ids or ()))
        return answer

    async def _ask_in_turn(
        self, call: Call, model: str | None, headers: Mapping[str, str], *, with_ids: bool
    ) -> _Answer | None:
        """Asks up to `NUM_ASKED` instances, one after the other, until one answers or refuses the prompt; None where
        none did."""
        for instance in self._whom(model)[:NUM_ASKED]:
            try:
                body = await post(instance, call, headers)
                count, ids = read_tokens(body, with_ids=with_ids)
                return _Answer(count, ids, None, self._clock())
            except EngineReply as reply:
                if reply.status in _REFUSALS:
                    return _Answer(0, None, reply, self._clock())
                if reply.status in _UNKNOWN:
                    self._mute[instance, model] = self._clock() + KEPT_S
            except (EngineUnreachable, EngineBroken, MalformedReply, TimeoutError):
                continue
        return None

    def _whom(self, model: str | None) -> list[Instance]:
        """Returns the instances that can be asked, the least busy prefiller first. Equals take turns."""
        self._turn += 1
        serving = [one for one in self._pool.instances if one.is_routable and one.serves(model)]
        if self._mute:
            serving = [one for one in serving if not self._is_mute(one, model)]
        start = self._turn % len(serving) if serving else 0
        return sorted(serving[start:] + serving[:start], key=lambda one: (one.role != "prefill", one.num_legs))

    def _is_mute(self, instance: Instance, model: str | None) -> bool:
        until = self._mute.get((instance, model))
        if until is not None and (until <= self._clock() or len(self._mute) > MAX_MODELS):
            del self._mute[instance, model]
            return False
        return until is not None


def _largest(frames: list[ChatFrame]) -> ChatFrame:
    if not frames:
        return UNSEEN
    return ChatFrame(max(frame.tokens for frame in frames), max(frame.message_tokens for frame in frames))


async def post(instance: Instance, call: Call, headers: Mapping[str, str], *, timeout_s: float = ASK_S) -> bytes:
    """Returns the body of the answer with HTTP 200.

    Raises `EngineReply` for any other status, `EngineUnreachable`, `EngineBroken`, `TimeoutError`. After
    `EngineUnreachable` and `EngineBroken` the instance is looked at, but not after `LocalFault`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            leg = await instance.client.post(call.path, call.body, headers)
            try:
                body = await leg.read()
            finally:
                leg.close()
    except LocalFault:
        raise
    except (EngineUnreachable, EngineBroken) as error:
        instance.suspect(f"{call.path} cannot be asked: {error}", is_lost=isinstance(error, EngineRefused))
        raise
    if leg.status != 200:
        raise EngineReply(leg.status, body, leg.header("content-type") or "application/json")
    return body
