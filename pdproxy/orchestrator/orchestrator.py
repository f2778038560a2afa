"""Orchestrator takes one request from its parsed body to its last byte.

The request is sized, routed, admitted, prefilled, awaited, decoded and settled. One coroutine owns all of it, and each
attempt settles what it held, exactly once. Before the first byte every failure is a real HTTP status and may become a
new attempt elsewhere. After it, another pair goes on with the stream where that is possible; else the failure is an SSE
``error`` event.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pdproxy.admission.admission import Admission
from pdproxy.admission.grant import Grant
from pdproxy.admission.line import Demand
from pdproxy.admission.retry_budget import RetryBudget
from pdproxy.admission.room import NO_ROOM
from pdproxy.aio.descriptors import DescriptorBudget
from pdproxy.config.values import Assemble
from pdproxy.engines.adapter import DecodeLeg, Resumption
from pdproxy.errors import (
    Backpressure,
    Draining,
    EngineReply,
    EngineSaidError,
    EventTooLarge,
    InvalidRequest,
    KvFailed,
    KvNotTaken,
    LegFailed,
    LegNotTried,
    LegTimedOut,
    MemoryBudgetSpent,
    ModelNotFound,
    NeverFits,
    NotAssembled,
    NotReady,
    ProxyError,
    ReceiverNotReached,
    StaleTerm,
)
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.page_count import pages_leased
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.routing.router import Router
from pdproxy.kv_events.index import PromptBlocks
from pdproxy.openai.client_stream import StreamedAnswer
from pdproxy.openai.dialect import dialect_of
from pdproxy.openai.request import COMPLETIONS, GenerationRequest, PromptKind
from pdproxy.openai.streamable import as_stream, is_streamable
from pdproxy.openai.transcript import NotReadableError, Shown
from pdproxy.orchestrator import canary
from pdproxy.orchestrator.attempt import Attempt
from pdproxy.orchestrator.context import Client, ClientStalledError, RequestContext
from pdproxy.orchestrator.disaggregated import Disaggregated
from pdproxy.orchestrator.error_reply import book, pass_on, tell
from pdproxy.orchestrator.leg_runner import LegRunner
from pdproxy.orchestrator.passing import Passing
from pdproxy.orchestrator.path import CACHED, Choice, PathChooser, Ways, as_cached, check_length, is_divided
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.orchestrator.several_prompts import PromptClient, SeveralPrompts
from pdproxy.telemetry.attempt_record import Path, Phase
from pdproxy.telemetry.observer import Observer
from pdproxy.telemetry.record import Outcome, RequestRecord
from pdproxy.tokens.answer_lengths import AnswerLengths
from pdproxy.tokens.prompt_size import PromptSize
from pdproxy.tokens.prompt_sizer import PromptSizer

log = logging.getLogger(__name__)

_OF_BOTH: Final = (KvFailed, KvNotTaken, ReceiverNotReached)
"""The errors after which neither instance of the pair is asked again where there is another one."""
# Read once: in Python 3.11 an enum's class looks for each member by way of a hook.
_DISAGGREGATED: Final = Path.DISAGGREGATED
_LOCAL: Final = Path.LOCAL
_PREFILL_ONLY: Final = Path.PREFILL_ONLY
_OUTCOME_DONE: Final = Outcome.DONE
_BATCH: Final = PromptKind.BATCH
_API: Final = PromptKind.API
_NOT_BY_IDS: Final = frozenset({"cache_salt", "prompt_embeds", "suffix", "truncate_prompt_tokens"})
"""The fields with which an engine's cache is not known by a prompt's ids."""

BYTES_PER_ID: Final = 40
"""The bytes that one id takes in a list: a pointer and a number."""

Failure = LegFailed | KvFailed | LegTimedOut
"""An error of one attempt; another attempt may do better."""


@dataclass(slots=True, kw_only=True)
class RequestOptions:
    """`RequestOptions` say how a request is served. A change holds for the requests that come later."""

    request_timeout_s: float
    slot_timeout_s: float
    """The longest wait for a decoder's pages."""
    affinity_wait_s: float
    """The longest wait for the instance that has a request's session."""
    retries: int
    """The number of further attempts of a request that fails."""
    continue_limit: int
    """The most bytes of a stream that are kept so that another decoder can continue it; 0 to keep none."""
    max_answer_bytes: int
    """The most bytes of a whole answer."""
    max_prompts: int
    """The most prompts of one body."""
    assemble: Assemble
    """The whole answers that engines are asked for as streams."""
    assemble_min_tokens: int
    """The number of tokens below which a whole answer is not asked for as a stream, because that would not pay."""


class Orchestrator:
    """Orchestrator serves requests. It is given its parts, which others make, start and stop. All of them go by the
    same `clock`, at whose pace the event loop's own clock must run."""

    def __init__(
        self,
        options: RequestOptions,
        *,
        paths: PathChooser,
        admission: Admission,
        pool: Pool,
        router: Router,
        sizer: PromptSizer,
        disaggregated: Disaggregated,
        legs: LegRunner,
        reaper: Reaper,
        retries: RetryBudget,
        observer: Observer,
        passing: Passing,
        descriptors: DescriptorBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self._paths = paths
        self._admission = admission
        self._pool = pool
        self._router = router
        self._sizer = sizer
        self._disaggregated = disaggregated
        self._legs = legs
        self._reaper = reaper
        self._retries = retries
        self._observer = observer
        self.passing = passing
        self._descriptors = descriptors
        self._clock = clock
        # State: the requests under way; the lengths of answers; whether clients are to go elsewhere; whether new
        # requests are taken; the number of streams taken over from a lost decoder; an event for those who wait until
        # the last request has ended.
        self._contexts: set[RequestContext] = set()
        self._lengths = AnswerLengths()
        self._is_leaving = False
        self._is_draining = False
        self._num_continued = 0
        self._idle: asyncio.Event | None = None

    # ── from outside ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_leaving(self) -> bool:
        """Tells whether clients are asked to go elsewhere. Those who do not are served until it `is_draining`."""
        return self._is_leaving

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def in_flight(self) -> list[dict[str, Any]]:
        """Returns what the status page shows: requests under way, then the orphans of earlier ones."""
        orphans = (attempt.orphan_facts(self._admission.now()) for attempt in self._reaper.orphans)
        return [*(record.facts() for record in self.records()), *orphans]

    def records(self) -> list[RequestRecord]:
        """Returns the records of the requests under way, in no particular order. Of a body whose prompts are served one
        by one, these are the records of its prompts."""
        return [record for context in self._contexts if (record := context.record).is_counted]

    @property
    def num_requests(self) -> int:
        return len(self._contexts)

    @property
    def num_continued(self) -> int:
        """Number of times that another decoder was asked to go on with a stream."""
        return self._num_continued

    def leave(self) -> None:
        """Has clients told from now on that they should go elsewhere. New requests are still served."""
        self._is_leaving = True

    def stop_accepting(self) -> None:
        """Has new requests answered with 503 from now on."""
        self._is_leaving = self._is_draining = True

    def abort_all(self) -> None:
        """Ends every request now; each client is told."""
        for context in self._contexts:
            context.abort()

    async def idle(self) -> None:
        """Waits until no request is under way."""
        while self._contexts:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    async def serve(self, request: GenerationRequest, client: Client, record: RequestRecord) -> None:
        """Answers the client, whatever happens. Raises nothing; only a cancellation passes through."""
        record.model, record.stream = request.model, request.stream
        context = self._context(request, client, record)
        self._contexts.add(context)
        self._retries.requested()
        answer: Coroutine[Any, Any, None] | None = None
        try:
            try:
                with context.limit:
                    await self._served(context)
                record.end(_OUTCOME_DONE)
            except EngineReply as reply:
                answer = pass_on(context, reply)
            except ProxyError as error:
                answer = tell(context, error)
            except ClientStalledError:
                record.end(Outcome.CLIENT_GONE)
            except Exception:
                log.exception("request %s met a bug", record.request_id)
                answer = tell(context, ProxyError("the proxy met an unexpected error"))
            if answer is not None:  # out here: compiled code must not wait where it handles an exception
                await answer
        except BaseException:  # as a rule a cancellation, because the client has gone
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            self._contexts.discard(context)
            if self._idle is not None and not self._contexts:
                self._idle.set()
                self._idle = None
            self._observer.request_finished(record)

    async def prove(self, prefiller: Instance, decoder: Instance) -> None:
        """Sends a canary, a tiny request, through this pair, or to one instance that stands for both. Raises
        `ProxyError` or `EngineReply` where it does not arrive."""
        record = RequestRecord("canary", COMPLETIONS, is_counted=False, clock=self._clock)
        request = canary.request(prefiller, decoder)
        context = self._context(request, canary.NoClient(), record)
        context.ask_for_whole()  # a whole answer: no client's request should be the first to try it
        attempt = self._attempt(context, canary.SIZE)
        demand = Demand(
            attempt.id,
            request.model,
            lambda shape: pages_leased(shape.facts, canary.SIZE.tokens),
            age=record.started,
            deadline=self._admission.now() + self.options.slot_timeout_s,
            priority=request.priority,
            pair=(prefiller, decoder) if prefiller.is_owner else (decoder, prefiller),
            is_again=True,  # so that no full queue keeps the canary out
        )
        with context.limit, attempt:
            attempt.bind(self._admission.bind_now(demand) or await self._admission.wait(demand))
            attempt.take_path(_LOCAL if prefiller is decoder else _DISAGGREGATED)
            await (self._serve_locally(attempt) if prefiller is decoder else self._disaggregated.serve(attempt))

    def _context(
        self, request: GenerationRequest, client: Client, record: RequestRecord, turn: asyncio.Lock | None = None
    ) -> RequestContext:
        """Returns the request's context, with one deadline for everything that will be tried. It is the operator's, or
        the client's own where that is shorter."""
        limit_s = self.options.request_timeout_s
        if request.timeout_s is not None:
            limit_s = min(limit_s, request.timeout_s)
        as_stream = None if request.stream else self._as_stream(request)
        streamed = as_stream or request
        kept_bytes = self.options.continue_limit if _is_continuable(streamed) else 0
        record.tokens.num_sequences = request.num_sequences
        record.tokens.mark = dialect_of(request.endpoint).token_mark
        stream = StreamedAnswer(streamed, tokens=record.tokens, limit_bytes=kept_bytes)
        return RequestContext(
            request,
            client,
            record,
            stream,
            limit_s,
            self._clock,
            max_answer_bytes=self.options.max_answer_bytes,
            as_stream=as_stream,
            turn=turn,
        )

    def _as_stream(self, request: GenerationRequest) -> GenerationRequest | None:
        """Returns the stream request that engines are asked for a whole answer; None where they have to be asked for it
        as it is."""
        wanted = self.options.assemble
        if request.max_tokens is not None and request.max_tokens < self.options.assemble_min_tokens:
            return None  # so short an answer is over before a stream would pay
        if request.prompt_kind is _API:
            return None
        if wanted == "none" or (wanted == "completions" and request.is_chat) or not is_streamable(request):
            return None
        return as_stream(request)

    # ── several prompts ─────────────────────────────────────────────────────────────────────────────────────────────

    def _served(self, context: RequestContext) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that serves the request, or each of its prompts by itself. Raises `Draining`, and
        `InvalidRequest` for too many prompts."""
        if self._is_draining:
            raise Draining("the proxy is shutting down", retry_after_s=5.0)
        request = context.request
        if request.is_passed:
            self._check_descriptors()
            return self.passing.serve(context)
        if request.prompt_kind is not _BATCH:
            return self._try_until_served(context)
        if request.num_prompts > self.options.max_prompts:
            raise InvalidRequest(
                f"prompt has {request.num_prompts} prompts, and {self.options.max_prompts} are taken (max_prompts); "
                "send them in several bodies",
                param="prompt",
                code="too_many_prompts",
            )
        if is_divided(request, self._pool.open_places(request.model).shapes):
            return self._serve_each(context)
        return self._try_until_served(context)

    def _check_descriptors(self) -> None:
        """Raises `OutOfDescriptors` where one more request would take those that are kept for probes and signals."""
        if self._descriptors is not None:
            self._descriptors.check(len(self._contexts))

    async def _serve_each(self, context: RequestContext) -> None:
        """Serves each prompt as a request of its own. Raises the error of the first that is not served; the others
        are cancelled then."""
        prompts = SeveralPrompts(context)
        if not context.client.memory.take_on(prompts.num_further_bytes):
            raise MemoryBudgetSpent(context.client.memory.limit_bytes)
        context.record.is_counted = False  # its prompts are
        context.record.reason = "several_prompts"
        await prompts.serve(partial(self._serve_prompt, prompts))
        relay = self._legs.relay(context)
        await (relay.end(prompts.end_of_stream()) if context.request.stream else relay.answer(prompts.whole_answer()))

    async def _serve_prompt(self, prompts: SeveralPrompts, request: GenerationRequest, client: PromptClient) -> None:
        """Serves one prompt of several. Raises the error for which it was not served."""
        body = prompts.context.record
        record = RequestRecord(body.request_id, body.endpoint, prompt=client.index, clock=self._clock)
        record.model, record.stream = request.model, request.stream
        record.key_name, record.charge = body.key_name, body.charge
        record.received()
        client.record = record
        context = self._context(request, client, record, prompts.turn)
        self._contexts.add(context)
        self._retries.requested()
        try:
            with context.limit:
                await self._try_until_served(context)
            record.end(_OUTCOME_DONE)
        except (EngineReply, ProxyError) as error:
            book(record, error)
            raise
        except BaseException:
            # Cancelled: because time is over for all, or another prompt has failed, or the client has gone.
            if prompts.context.limit.is_cut:
                book(record, prompts.context.why_cut_short())
            elif isinstance(prompts.failure, (EngineReply, ProxyError)):
                book(record, prompts.failure)  # what the client is told of this prompt, too
            record.end(Outcome.CLIENT_GONE if prompts.failure is None else Outcome.FAILED)
            raise
        finally:
            self._contexts.discard(context)
            self._observer.request_finished(record)

    # ── the whole request ───────────────────────────────────────────────────────────────────────────────────────────

    async def _try_until_served(self, context: RequestContext) -> None:
        """Makes one attempt after the other until one has served the request. Raises the error that the client is to
        be told where none did, or none may be made any more."""
        self._check_descriptors()
        started = self._clock()
        size = self._sizer.size_now(context.request)
        if size is None:
            self._pool.open_places(context.request.model)
            size = await self._sizer.size(context.request, context.client.forwarded)
        context.tokenize_s = self._clock() - started
        if (charge := context.record.charge) is not None:
            charge.reserve(size.tokens, is_exact=size.is_exact)
        if size.ids is not None:
            context.client.memory.charge(BYTES_PER_ID * len(size.ids))
        prompt = size
        failure: Failure | None = None
        num_left = self.options.retries
        while True:
            num_shown = context.stream.num_bytes
            try:
                await self._try_once(context, size)
                if context.request.max_tokens != 1:
                    num_sequences = max(1, context.request.num_sequences)
                    self._lengths.note(context.request.model, context.record.tokens.num_output // num_sequences)
                return
            except (NotReady, ModelNotFound) as error:
                # The failure before says more than that there is nobody left to ask.
                raise failure or error from None
            except (EngineReply, InvalidRequest, NeverFits):
                if failure is None or not context.has_begun:
                    raise
                # What was refused is the prompt with the answer so far, which is not what the client has sent.
                raise failure from None
            except LegNotTried:
                raise  # Another attempt needs as much of this machine, and would cost some of the retry budget.
            except NotAssembled:
                context.ask_for_whole()
                size = prompt
                continue  # At most once: nobody failed, and the answer is asked for in another form.
            except (LegFailed, KvFailed, LegTimedOut) as error:
                failure = error
            # An attempt that showed the client something new has earned the next one its full number of retries.
            num_left = self.options.retries if context.stream.num_bytes > num_shown else num_left
            shown = self._shown(context) if context.has_begun else None
            if shown is not None and context.stream.can_end(shown, context.prompt_usage):
                await self._legs.relay(context).finish(shown)  # all that was missing can be said without an engine
                return
            if num_left < 1 or not self._may_try_again(context, failure):
                break
            num_left -= 1
            is_onward = False
            if context.has_begun:
                if shown is not None and context.prompt_ids(size) is None:
                    # Another engine can go on only from ids, and nobody has told the prompt's so far.
                    size = size.with_ids(await self._sizer.ids(context.request, context.client.forwarded))
                onward = None if shown is None else self._goes_on(context, size, shown)
                if onward is None:
                    if context.client.is_started:
                        break
                    context.start_over()
                size = onward or prompt
                is_onward = onward is not None
            if not self._retries.spend():
                break
            self._num_continued += is_onward
        raise _as_told(failure, context.client.is_started)

    def _may_try_again(self, context: RequestContext, error: Failure) -> bool:
        """Tells whether another attempt may help, and remembers which instances failed. An instance that is busy or
        silent is not asked twice; a broken one is, where there is no other."""
        if isinstance(error, StaleTerm):
            return True  # No instance is at fault: the next attempt may go to the same ones, for today's leader.
        attempt = context.last_attempt
        names = [attempt.prefiller, attempt.decoder] if isinstance(error, _OF_BOTH) else [error.instance]
        context.avoid |= {name for name in names if name is not None}
        if isinstance(error, EventTooLarge) or (isinstance(error, EngineSaidError) and not error.is_ours):
            return False
        if isinstance(error, (Backpressure, LegTimedOut)):
            text_terms = context.text_terms if context.has_begun else None
            return self._pool.has_other(error.instance, context.request.model, context.avoid, text_terms)
        return True

    # ── a stream whose decoder was lost ─────────────────────────────────────────────────────────────────────────────

    def _shown(self, context: RequestContext) -> Shown | None:
        """Returns what there is of the answer; None where that is not known well enough to go on."""
        try:
            return context.stream.read()
        except NotReadableError as error:
            log.info("request %s is not continued: %s", context.record.request_id, error)
            return None

    def _goes_on(self, context: RequestContext, size: PromptSize, shown: Shown) -> PromptSize | None:
        """Returns the size of what the next attempt has to read before it can go on; None where it cannot go on."""
        prompt_ids = context.prompt_ids(size)
        if prompt_ids is None or shown.is_finished:
            lacks = "usage" if shown.is_finished else "prompt's ids"
            log.info("request %s is not continued: its %s cannot be known", context.record.request_id, lacks)
            return None
        if not self._pool.goes_on(context.request.model, context.text_terms):
            log.info("request %s is not continued: no pair of its revision is ready", context.record.request_id)
            return None
        return size.with_answer(prompt_ids, shown.answer_ids)

    # ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _try_once(self, context: RequestContext, size: PromptSize) -> None:
        """Runs one attempt. Admission decides, in the instant of the attempt's turn, which instances serve it; `Ways`
        has the way that it goes there. Raises the error for which it was not served."""
        request = context.request
        if not context.has_begun:
            context.prompt_usage = None  # an earlier prefiller's, of whose answer nobody has seen anything
        ways = Ways(self._paths, request, size)
        ways.check(self._pool.open_places(request.model).shapes)
        with self._attempt(context, size) as attempt:
            try:
                grant = None
                if context.turn is None:
                    demand = self._demand(attempt, ways)
                    grant = self._admission.bind_now(demand)
                    if grant is None:
                        self._pool.wanted.note(request.model)
                        grant = await self._admission.wait(demand)
                else:
                    grant = await self._grant_in_turn(attempt, ways, context.turn)
            except NeverFits as error:
                # `ways` knows which memory is too small, and what can be done about it.
                error.param = request.prompt_field
                raise ways.error or error from None
            attempt.bind(grant)
            choice = ways.at(grant)
            if attempt.blocks is not None and attempt.decoder.has_cached(attempt.blocks):
                choice = as_cached(choice, request, attempt.traits)
            await self._serve_bound(attempt, choice)

    async def _grant_in_turn(self, attempt: Attempt, ways: Ways, turn: asyncio.Lock) -> Grant:
        """Returns the grant, for which the attempt stands in line once it has its turn: until then it holds nothing,
        and its time in line has not begun. Raises as `Admission.wait` does."""
        await turn.acquire()
        try:
            demand = self._demand(attempt, ways)
            grant = self._admission.bind_now(demand)
            if grant is None:
                self._pool.wanted.note(attempt.context.request.model)
                grant = await self._admission.wait(demand)
            return grant
        finally:
            turn.release()

    def _attempt(self, context: RequestContext, size: PromptSize) -> Attempt:
        return Attempt(context, size, self._admission, self._reaper.adopt, self._blocks(context.request, size))

    def _blocks(self, request: GenerationRequest, size: PromptSize) -> PromptBlocks | None:
        """Returns the prompt as instances' caches are asked for it; None where none is known, or its ids do not say all
        that matters."""
        if not self._pool.knows_caches or request.has_media or not _NOT_BY_IDS.isdisjoint(request.fields):
            return None
        ids = size.ids or request.prompt_ids
        return None if ids is None else PromptBlocks(ids, request.model)

    def _demand(self, attempt: Attempt, ways: Ways) -> Demand:
        """Returns the attempt's demand, which keeps the age that its request had from the beginning."""
        context, now = attempt.context, self._admission.now()
        request = context.request
        # The ids of a chat are known for some turns only, and all of its turns shall go to the same instance.
        prompt_ids = None if request.is_chat else attempt.size.ids
        hints = self._router.hints(request, prompt_ids, context.client.headers, attempt.blocks)
        return Demand(
            attempt.id,
            request.model,
            ways,
            age=context.record.started,
            deadline=now + self.options.slot_timeout_s,
            priority=request.priority,
            avoid=context.avoid,
            tied_until=now + self.options.affinity_wait_s if self._router.is_tied(hints) else -math.inf,
            # A body is let in with its first prompt: the others find no queue too full for them.
            is_again=context.record.num_attempts > 1 or bool(context.record.prompt),
            hints=hints,
            num_tokens=attempt.size.tokens,
            room=NO_ROOM
            if request.max_tokens == 1 and ways.is_prefill_only
            else self._lengths.room(request, attempt.size),
            text_terms=context.text_terms if context.has_begun else None,
        )

    def _serve_bound(self, attempt: Attempt, choice: Choice) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that serves the attempt the way that was chosen, with the instances that it is bound
        to."""
        attempt.context.record.reason = choice.reason
        if attempt.owner is not attempt.decoder:  # `Ways` could only look at the owner, before there was a decoder
            check_length(attempt.context.request, attempt.size, attempt.decoder.known_facts)
        attempt.take_path(choice.path)
        if choice.path is _LOCAL:
            return self._serve_locally(attempt, is_cached=choice is CACHED)
        if choice.path is _PREFILL_ONLY:
            return self._serve_one_token(attempt)
        return self._disaggregated.serve(attempt)

    # ── the two ways without KV on its way ──────────────────────────────────────────────────────────────────────────

    def _serve_locally(self, attempt: Attempt, *, is_cached: bool = False) -> Coroutine[Any, Any, None]:
        """Has the decoder do both halves. No KV travels, so no pages are asked for. The first byte may also take the
        time that a prefiller has for the prompt, also where it `is_cached`: it may be gone when the request comes."""
        size, adapter, resumption = attempt.size, attempt.decoder.adapter, None
        if size.num_answer_tokens:
            assert size.ids is not None
            resumption = Resumption(size.ids, size.num_answer_tokens)
        asked = self._legs.asked(attempt)
        with_ids = attempt.context.stream.asks_for_ids and adapter.traits.resumes and asked.stream
        body = adapter.local_body(asked, resumption, with_ids=with_ids)
        attempt.record.advance(Phase.DECODE)
        if is_cached:
            attempt.record.predicted_s = None  # of another way
        elif asked.stream:  # else nobody sees when the prompt has been read
            attempt.reads(attempt.decoder.prefilling(size.tokens, attempt.id))
        legs = self._legs  # this decoder reads the prompt, too, before its first token
        first_byte_s = legs.prefill_timeout_s + legs.first_byte_timeout_s
        return legs.decode(attempt, DecodeLeg(body), asked=asked, first_byte_s=first_byte_s)

    async def _serve_one_token(self, attempt: Attempt) -> None:
        """Answers with the prefiller's token, which is the whole answer; no KV travels."""
        attempt.record.advance(Phase.PREFILL)
        adapter, request = attempt.prefiller.adapter, attempt.context.request
        with attempt.prefiller.prefilling(attempt.size.tokens, attempt.id):
            reply = await self._legs.prefill(attempt, adapter.one_token_body(request), hands_over=False)
        await self._legs.relay(attempt.context).answer(reply.fields)


def _is_continuable(request: GenerationRequest) -> bool:
    """Tells whether the request is for one streamed answer, to a prompt of which ids say everything."""
    is_one = request.stream and request.n == 1 and request.prompt_kind is not _BATCH and request.prompt_kind is not _API
    return is_one and not request.has_media and not request.reads_prompt


def _as_told(failure: Failure, is_started: bool) -> ProxyError | EngineReply:
    """Returns the error that the client gets: a busy engine's own words, while there can be a status."""
    return failure.reply if isinstance(failure, Backpressure) and not is_started else failure
