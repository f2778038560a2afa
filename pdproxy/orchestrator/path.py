"""PathChooser says which way a request goes, and why: it disaggregates only if that fits and pays. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pdproxy.admission.grant import Grant
from pdproxy.config.values import Oversized
from pdproxy.engines.info import EngineInfo
from pdproxy.engines.traits import EngineTraits
from pdproxy.errors import ApiNotServed, ContextLengthExceeded, InvalidRequest, NotReady, ProxyError
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.page_count import Shape, pages_leased, pages_needed
from pdproxy.openai.request import GenerationRequest, PromptKind
from pdproxy.telemetry.attempt_record import Path
from pdproxy.tokens.prompt_size import PromptSize

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    path: Path
    reason: str
    """The reason in one word, for metrics and headers."""


_DISAGGREGATED: Final = Path.DISAGGREGATED
_BATCH: Final = PromptKind.BATCH
_API: Final = PromptKind.API

FITS: Final = Choice(Path.DISAGGREGATED, "fits")
WINDOW: Final = Choice(Path.DISAGGREGATED, "window")
BOTH_LEGS: Final = Choice(Path.DISAGGREGATED, "both_legs")
ONE_TOKEN: Final = Choice(Path.PREFILL_ONLY, "one_token")
SEVERAL_ANSWERS: Final = Choice(Path.LOCAL, "several_answers")
SEVERAL_PROMPTS: Final = Choice(Path.LOCAL, "several_prompts")
MEDIA: Final = Choice(Path.LOCAL, "media")
PROMPT_IN_ANSWER: Final = Choice(Path.LOCAL, "prompt_in_answer")
ENGINE_TOOLS: Final = Choice(Path.LOCAL, "engine_tools")
NO_HANDOVER: Final = Choice(Path.LOCAL, "no_handover")
OVERSIZED: Final = Choice(Path.LOCAL, "oversized")
SHORT: Final = Choice(Path.LOCAL, "short")
CACHED: Final = Choice(Path.LOCAL, "cached")
NO_PREFILLER: Final = Choice(Path.LOCAL, "no_prefiller")
NO_DECODER: Final = Choice(Path.LOCAL, "no_decoder")
PREFILLERS_BEHIND: Final = Choice(Path.LOCAL, "prefillers_behind")
DECODERS_FULL: Final = Choice(Path.LOCAL, "decoders_full")

_UNKNOWN: Final = -1
"""A number that stands for pages that were not worked out yet."""
_MEMORIES: Final = {"decode": "decoder's PD buffer", "prefill": "prefiller's KV memory"}


class PathChooser:
    """PathChooser chooses by what the operator wants. Prompts shorter than `min_prompt_tokens` are not worth a
    transfer; `oversized` says what becomes of those larger than the memory that the KV goes through."""

    def __init__(self, *, min_prompt_tokens: int, oversized: Oversized) -> None:
        self._min_prompt_tokens = min_prompt_tokens
        self._oversized = oversized

    def choose(
        self,
        request: GenerationRequest,
        size: PromptSize,
        *,
        owner: EngineInfo,
        decoder: EngineInfo,
        traits: EngineTraits,
        hands_over: bool,
    ) -> Choice:
        """Returns the way of the request, and why. `hands_over`: a pair's engines can divide this request.

        Raises `ContextLengthExceeded` where no instance could serve the prompt, or none may.
        """
        if request.endpoint not in traits.endpoints:
            raise _not_served(request)
        check_length(request, size, decoder)
        pages = pages_needed(owner, size.tokens, is_exact=size.is_exact, num_prompts=request.num_sequences)
        has_room = pages <= owner.num_pages
        if not traits.serves_alone:
            if not has_room:
                raise _too_large(request, size, pages, owner, traits)
            return BOTH_LEGS
        if (choice := _decoder_alone(request)) is not None:
            return choice
        if request.max_tokens == 1 and request.prompt_kind is not _API:
            return ONE_TOKEN
        if not hands_over:
            return NO_HANDOVER
        if not has_room:
            return self._too_large(request, size, pages, owner, traits)
        return SHORT if size.tokens < self._min_prompt_tokens else FITS

    def _too_large(
        self, request: GenerationRequest, size: PromptSize, pages: int, owner: EngineInfo, traits: EngineTraits
    ) -> Choice:
        if self._oversized == "window" and owner.windowed:
            return WINDOW
        if self._oversized != "refuse":
            return OVERSIZED
        raise _too_large(request, size, pages, owner, traits)


class Ways:
    """Ways holds the way that one request goes at page owners of each shape, and the pages that it takes there.

    Mutable state: what was found out so far, by shape: the way, and pages (None where it cannot be served); the last
    reason for which it cannot.
    """

    __slots__ = ("_choices", "_pages", "_paths", "_request", "_size", "error")

    def __init__(self, paths: PathChooser, request: GenerationRequest, size: PromptSize) -> None:
        self._paths = paths
        self._request = request
        self._size = size
        self._choices: dict[Shape, Choice] = {}
        self._pages: dict[Shape, int | None] = {}
        self.error: ProxyError | None = None

    def __call__(self, shape: Shape) -> int | None:
        """Returns the pages at an owner of this shape: 0 where the way takes none, None where it cannot be served
        there."""
        pages = self._pages.get(shape, _UNKNOWN)
        if pages == _UNKNOWN:
            pages = self._pages[shape] = self._choose(shape)
        return pages

    def alone(self, instance: Instance) -> Choice:
        """Returns the way at an instance that serves the request alone, as nobody of the other role is there. Raises
        `ApiNotServed`, `ContextLengthExceeded`, and `NotReady` where it cannot go on with an answer."""
        request, traits = self._request, instance.adapter.traits
        if request.endpoint not in traits.endpoints:
            raise _not_served(request)
        if self._size.num_answer_tokens and not traits.resumes:
            raise _no_resumer()
        check_length(request, self._size, instance.known_facts)
        return NO_PREFILLER if instance.role == "decode" else NO_DECODER

    def at(self, grant: Grant) -> Choice:
        """Returns the way at the instances that were granted. Raises as `alone` does."""
        if grant.owner is not grant.peer:
            return self._choices[grant.shape]
        if grant.forecast is None:
            return self.alone(grant.owner)
        check_length(self._request, self._size, grant.owner.known_facts)
        return PREFILLERS_BEHIND if grant.owner.is_writer else DECODERS_FULL

    @property
    def is_prefill_only(self) -> bool:
        """Tells whether no decoder writes the answer, as far as was found out."""
        return all(choice is ONE_TOKEN for choice in self._choices.values())

    def check(self, shapes: Iterable[Any]) -> None:
        """Raises the reason where no owner of these shapes can serve the request."""
        for shape in shapes:
            if self(shape) is not None:
                return
        if self.error is not None:
            raise self.error

    def _choose(self, shape: Shape) -> int | None:
        request, size, facts, adapter = self._request, self._size, shape.facts, shape.adapter
        try:
            if size.num_answer_tokens and not adapter.traits.resumes:
                raise _no_resumer()
            self._choices[shape] = choice = self._paths.choose(
                request,
                size,
                owner=facts,
                decoder=facts,  # there is no decoder yet; the orchestrator checks its context length once there is one
                traits=adapter.traits,
                hands_over=request.endpoint in adapter.traits.divided and adapter.hands_over(request, size.ids),
            )
        except (InvalidRequest, NotReady) as error:
            self.error = error
            return None
        except Exception:  # of an adapter: the caller decides about other requests, too
            log.exception("which way a request goes met a bug")
            self.error = ProxyError("the proxy met an unexpected error")
            return None
        if choice.path is not _DISAGGREGATED:
            return 0
        return pages_leased(facts, size.tokens, is_exact=size.is_exact, num_prompts=request.num_sequences)


def as_cached(choice: Choice, request: GenerationRequest, traits: EngineTraits) -> Choice:
    """Returns the way of a request whose decoder has its whole prompt cached but the last block, instead of `choice`:
    where the pair would serve it and a decoder can do so alone, the decoder does."""
    is_spared = choice.path is _DISAGGREGATED and traits.serves_alone and request.num_sequences == 1
    return CACHED if is_spared else choice


def is_divided(request: GenerationRequest, shapes: Iterable[Any]) -> bool:
    """Tells whether each prompt of a body with several is served by itself, at owners of these shapes.

    It is not where one attempt takes all of them and has room for them. Nor is it where the decoder alone would serve
    each of them: it takes all of them at once, too.
    """
    if request.prompt_kind is not _BATCH or request.n > 1:
        return False
    for shape in shapes:
        if shape.adapter.traits.takes_several_prompts:
            facts: EngineInfo = shape.facts
            return pages_needed(facts, 0, num_prompts=request.num_prompts) > facts.num_pages
    return not request.reads_prompt


def check_length(request: GenerationRequest, size: PromptSize, decoder: EngineInfo) -> None:
    """Raises `ContextLengthExceeded` where the prompt leaves no room for an answer in the model's context."""
    max_len = decoder.max_model_len
    if max_len is not None and size.is_exact and size.tokens >= max_len:
        raise _too_long(request, size, max_len)


def _decoder_alone(request: GenerationRequest) -> Choice | None:
    """Returns why this body cannot be split in two legs; None where it can."""
    if request.n > 1:
        return SEVERAL_ANSWERS
    if request.num_sequences > 1:
        return SEVERAL_PROMPTS
    if request.has_media:
        return MEDIA
    if request.runs_tools:  # it would go on after each tool, and fetch the same KV once more, which is gone by then
        return ENGINE_TOOLS
    return PROMPT_IN_ANSWER if request.reads_prompt else None


def _not_served(request: GenerationRequest) -> ApiNotServed:
    return ApiNotServed(f"the engines of this model do not serve {request.endpoint}; engines of vLLM do")


def _no_resumer() -> NotReady:
    return NotReady("no instance that is ready can go on with an answer begun elsewhere")


def _too_long(request: GenerationRequest, size: PromptSize, max_len: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {size.tokens} tokens, and the model's context of {max_len} tokens "
        "must also hold the answer; shorten the prompt",
        param=request.prompt_field,
    )


def _too_large(
    request: GenerationRequest, size: PromptSize, pages: int, owner: EngineInfo, traits: EngineTraits
) -> ContextLengthExceeded:
    memory = _MEMORIES[traits.page_owner]
    counted = "" if size.is_exact else " (counted in bytes; give the proxy --model for exact counting)"
    return ContextLengthExceeded(
        f"the prompt needs {pages} pages of the {memory}{counted}, which has {owner.num_pages}; "
        f"shorten the prompt or enlarge the {memory}",
        param=request.prompt_field,
    )
