"""The two routes that generate. One coroutine owns a request from its first byte to the last byte of its reply.

That coroutine holds in `async with` what the engine core lends, so every way out of it (finished, failed, client gone,
shutdown) gives it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transfer.descriptors import Descriptors
from transfer.engine.answer import Answer
from transfer.engine.api import EngineCore, GenerationJob, ModelFacts, RankLost
from transfer.engine.api_error import ApiError, from_core, out_of_descriptors
from transfer.engine.asgi import (
    DONE,
    ClientGoneError,
    Receive,
    Reply,
    Scope,
    Send,
    event,
    read_body,
    read_term,
    while_connected,
)
from transfer.engine.choices import Choice, EventStream, collect, run_all
from transfer.engine.logprobs import for_handoff
from transfer.engine.prompts import PromptEncoder, check_ids
from transfer.engine.replies import ChatShape, CompletionShape, ReplyShape, usage
from transfer.engine.requests import GenerationRequest, max_answer_tokens, parse_chat, parse_completion, prompt_params
from transfer.engine.sampling import SamplingParams, fresh_seed
from transfer.engine.text import token_texts
from transfer.memory_budget import MemoryBudget, MemoryShare
from transfer.wire import Handoff

log = logging.getLogger(__name__)

Parse = Callable[[bytes, ModelFacts, str], GenerationRequest]


class GenerationEndpoint:
    """A `GenerationEndpoint` is an ASGI application for one route. It holds no state of any request."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Any,
        prompts: PromptEncoder,
        *,
        is_chat: bool,
        max_body_bytes: int,
        memory: MemoryBudget,
        descriptors: Descriptors | None = None,
    ) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._role = core.buffer_facts().role
        self._parse: Parse = parse_chat if is_chat else parse_completion
        self._shape: type[ReplyShape] = ChatShape if is_chat else CompletionShape
        self._max_body_bytes = max_body_bytes
        self._descriptors = descriptors
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        with self._memory.share() as memory:  # until the end: what was read of the body is about as large as the body
            try:
                request = await self._read(scope, receive, memory)
            except ClientGoneError:
                return
            except Exception as error:
                await reply.fail(_told(error))
                return
            await while_connected(receive, lambda: self._answer(request, reply))

    async def _read(self, scope: Scope, receive: Receive, memory: MemoryShare) -> GenerationRequest:
        """Returns what the body says, and keeps nothing of the body. Raises `ApiError` and `ClientGoneError`."""
        if self._descriptors is not None:
            self._descriptors.measure_again()  # the KV side opens connections that nobody counts
            if self._descriptors.is_tight:
                raise out_of_descriptors()
        term = read_term(scope)
        body = await read_body(scope, receive, self._max_body_bytes, memory)
        request = self._parse(body, self._core.model, self._role)
        return request if term is None else request.of_term(term)

    async def _answer(self, request: GenerationRequest, reply: Reply) -> None:
        """Answers a request. This is the border: an error below it becomes an OpenAI error object here."""
        try:
            await self._serve(request, reply)
        except Exception as error:
            await reply.fail(_told(error))

    async def _serve(self, request: GenerationRequest, reply: Reply) -> None:
        shape = self._shape_of(request)
        jobs = [await self._job(request, index, param, shape.id) for index, param in enumerate(prompt_params(request))]
        if request.push is not None:
            await self._prefill(request, jobs[0], shape, reply)
        else:
            await self._generate(request, jobs, shape, reply)

    def _shape_of(self, request: GenerationRequest) -> ReplyShape:
        return self._shape(
            self._core.model.name,
            token_texts(self._tokenizer),
            with_logprobs=request.sampling.logprobs is not None,
            include_usage=request.include_usage,
            with_token_ids=request.return_token_ids,
        )

    async def _job(self, request: GenerationRequest, index: int, param: str, request_id: str) -> GenerationJob:
        """Returns the job of the first answer to prompt `index`, which came in the field `param`. Raises `ApiError`."""
        model, sampling = self._core.model, request.sampling
        prompt_ids = await self._prompts.encode(request.prompts[index], add_special_tokens=request.adds_special_tokens)
        check_ids(prompt_ids, model, param)
        if index > 0 and not request.has_own_seed:
            sampling = replace(sampling, seed=fresh_seed())
        return GenerationJob(
            request_id=request_id if len(request.prompts) == 1 else f"{request_id}-{index}",
            prompt_token_ids=prompt_ids,
            sampling=sampling,
            num_answer_tokens=request.num_answer_tokens,
            max_tokens=max_answer_tokens(request, len(prompt_ids) - request.num_answer_tokens, model, param),
            min_tokens=request.min_tokens,
            eos_token_ids=frozenset() if request.ignore_eos else model.eos_token_ids,
            push=request.push,
            handoff=request.handoff,
            term=request.term,
        )

    def _new_answer(self, request: GenerationRequest, job: GenerationJob) -> Answer:
        # One more than a prefill leg feeds: otherwise its one token would end the answer by length, without a handoff.
        goes_on_elsewhere = job.push is not None
        answer = Answer(
            self._tokenizer,
            max_tokens=job.max_tokens + goes_on_elsewhere,
            eos_token_ids=job.eos_token_ids,
            stop=request.stop,
            with_logprobs=request.sampling.logprobs is not None,
        )
        try:
            answer.resume(job.answer_token_ids)
        except ValueError:
            message = f"the answer was finished before the last of its {job.num_answer_tokens} tokens"
            raise ApiError(message, param="kv_transfer_params") from None
        return answer

    async def _prefill(self, request: GenerationRequest, job: GenerationJob, shape: ReplyShape, reply: Reply) -> None:
        """Replies with one token and the handoff. If that token already finishes the answer, there is no handoff and no
        KV is kept."""
        answer = self._new_answer(request, job)
        if answer.finish_reason is not None:  # a resumed answer, all of which has been shown before
            await reply.json(200, shape.reply([answer], usage(job.num_question_tokens, answer.num_tokens, 0)))
            return
        async with self._core.prefill(job) as prefill:
            answer.feed(prefill.first_token)
            goes_on = answer.finish_reason is None
            if goes_on:
                answer.hand_off()
            tokens = usage(job.num_question_tokens, answer.num_tokens, prefill.num_cached_tokens)
            content = shape.reply([answer], tokens)
            if goes_on:
                assert job.push is not None
                content["kv_transfer_params"] = Handoff(
                    attempt=job.push.attempt,
                    prompt_token_ids=job.prompt_token_ids,
                    first_token_id=prefill.first_token.token_id,
                    num_pages=prefill.num_pages,
                    first_token_logprobs=for_handoff(prefill.first_token),
                    num_answer_tokens=job.num_answer_tokens,
                )
                prefill.keep()  # before sending: once the reply is out, the client may hang up at any moment
        await reply.json(200, content)

    async def _generate(
        self, request: GenerationRequest, jobs: list[GenerationJob], shape: ReplyShape, reply: Reply
    ) -> None:
        """Answers all prompts side by side. Choices are numbered by prompt: all of the first one's come first."""
        each = [one for job in jobs for one in _one_job_each(job, request.num_sequences)]
        choices = [Choice(index, one, self._new_answer(request, one)) for index, one in enumerate(each)]
        if not request.stream:
            await run_all(choices, self._core, collect)
            await reply.json(200, shape.reply([choice.answer for choice in choices], _usage(jobs, choices)))
            return
        stream = EventStream(shape, reply, is_resumed=request.num_answer_tokens > 0)
        await run_all(choices, self._core, stream.emit)
        wanted = request.include_usage
        await reply.end((event(shape.usage_chunk(_usage(jobs, choices))) if wanted else b"") + DONE)


def _told(error: Exception) -> ApiError:
    """Returns the error that the client is told, and logs one that nobody has foreseen."""
    answer = from_core(error)
    if answer.status == 500 and not isinstance(error, RankLost):  # a lost rank is logged once, for all requests
        log.error("a request failed", exc_info=error)
    return answer


def _one_job_each(job: GenerationJob, num_sequences: int) -> list[GenerationJob]:
    """Returns the job itself for one sequence; for more, jobs with ids and (where there is a seed) seeds of their
    own."""
    if num_sequences == 1:
        return [job]
    return [
        replace(job, request_id=f"{job.request_id}-{index}", sampling=_reseeded(job.sampling, index))
        for index in range(num_sequences)
    ]


def _reseeded(sampling: SamplingParams, index: int) -> SamplingParams:
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)


def _usage(jobs: list[GenerationJob], choices: list[Choice]) -> dict[str, Any]:
    """Returns the sum over all prompts, each of them counted once, and all answers."""
    first_choices = choices[:: len(choices) // len(jobs)]
    return usage(
        sum(job.num_question_tokens for job in jobs),
        sum(choice.answer.num_tokens for choice in choices),
        sum(choice.num_cached_tokens for choice in first_choices),
    )
