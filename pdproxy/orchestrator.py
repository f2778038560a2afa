"""One request from its parsed body to its last byte: sized, routed, admitted, prefilled, awaited, decoded, settled.

One coroutine owns all of it, and one `finally` settles what it held, exactly once. Before the first byte every failure
is a real HTTP status and may become a new attempt elsewhere; after it, an SSE ``error`` event.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from pdproxy import canary
from pdproxy.attempt import Attempt
from pdproxy.config import Settings
from pdproxy.engines.base import Call, MalformedReply, PrefillReply, Push, Resumption
from pdproxy.errors import (
    Backpressure,
    DeadlineExceeded,
    Draining,
    EngineReply,
    GoneWhileWaiting,
    InvalidRequest,
    KvFailed,
    LegFailed,
    ModelNotFound,
    NeverFits,
    NotReady,
    ProxyError,
)
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.paging import pages_leased, pages_needed
from pdproxy.fleet.routing import Route, Router
from pdproxy.flight import Flight, Path, Phase
from pdproxy.legs import EngineSaidError, LegTimedOut, LegUnreachable, OpenLeg, time_limit
from pdproxy.race import unless
from pdproxy.reaper import Reaper
from pdproxy.reply import answer
from pdproxy.reply.refusal import pass_on, tell
from pdproxy.reply.relay import Relay
from pdproxy.reply.streamed import StreamedAnswer
from pdproxy.reply.transcript import NotReadableError, Shown
from pdproxy.request.openai import COMPLETIONS, GenerationRequest, PromptKind
from pdproxy.request.path import Choice, Limits, PromptSize, choose_path
from pdproxy.request.tokens import PromptSizer
from pdproxy.retries import RetryBudget
from pdproxy.signals.board import KvBoard
from pdproxy.telemetry.record import Observer, Outcome, RequestRecord
from pdproxy.trip import Client, ClientStalledError, Trip

log = logging.getLogger(__name__)

REPLY_S = 0.2
"""A prefiller whose token ends the answer drops the KV in the instant in which it replies, which may come second."""

Failure = LegFailed | KvFailed | LegTimedOut
"""Of one attempt; another one may do better."""


class Orchestrator:
    """Serves requests. Knows its parts by their protocols only; all of them are started and stopped by others."""

    def __init__(
        self,
        settings: Settings,
        *,
        router: Router,
        sizer: PromptSizer,
        board: KvBoard,
        reaper: Reaper,
        retries: RetryBudget,
        observer: Observer,
        notify: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._router = router
        self._sizer = sizer
        self._board = board
        self._reaper = reaper
        self._retries = retries
        self._observer = observer
        self._notify = notify
        # State: the trips under way; whether new ones are taken; streams taken over from a lost decoder; an event for
        # the next trip to end.
        self._trips: set[Trip] = set()
        self._is_draining = False
        self._num_continued = 0
        self._ended = anyio.Event()

    # ── from outside ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def in_flight(self) -> list[dict[str, Any]]:
        """For the status page: requests under way, then the orphans of earlier ones."""
        orphans = ({"orphan": True, **attempt.flight.facts()} for attempt in self._reaper.orphans)
        return [*(trip.record.facts() for trip in self._trips), *orphans]

    @property
    def num_trips(self) -> int:
        return len(self._trips)

    @property
    def num_continued(self) -> int:
        """How often another decoder was asked to go on with a stream."""
        return self._num_continued

    def stop_accepting(self) -> None:
        """New requests are answered 503 from now on."""
        self._is_draining = True

    def abort_all(self) -> None:
        """End every request now; each client is told."""
        for trip in self._trips:
            trip.is_aborted = True
            trip.scope.cancel()

    async def idle(self) -> None:
        """Until no request is under way."""
        while self._trips:
            await self._ended.wait()

    async def serve(self, request: GenerationRequest, client: Client, record: RequestRecord) -> None:
        """Answer the client, whatever happens. Raises nothing; only a cancellation passes through."""
        record.model, record.stream = request.model, request.stream
        trip = self._trip(request, client, record, anyio.CancelScope())
        self._trips.add(trip)
        self._retries.requested()
        try:
            await self._serve(trip)
        except BaseException:
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            self._trips.discard(trip)
            self._ended.set()
            self._ended = anyio.Event()
            self._observer.request_finished(record)

    async def prove(self, prefiller: Instance, decoder: Instance) -> None:
        """A canary: a tiny request through this pair. Raises `ProxyError` or `EngineReply` where it does not arrive."""
        record = RequestRecord("canary", COMPLETIONS, is_counted=False)
        request = canary.request(prefiller, decoder)
        with time_limit(self._settings.request_timeout_s, "the canary took too long"), anyio.CancelScope() as scope:
            trip = self._trip(request, canary.NoClient(), record, scope)
            await self._disaggregate(trip, Route(prefiller, decoder), canary.SIZE)

    def _trip(
        self, request: GenerationRequest, client: Client, record: RequestRecord, scope: anyio.CancelScope
    ) -> Trip:
        """One deadline for everything that will be tried: the operator's, or the client's own where that is shorter."""
        settings = self._settings
        limit_s = settings.request_timeout_s
        if request.timeout_s is not None:
            limit_s = min(limit_s, request.timeout_s)
        kept_bytes = settings.continue_limit if settings.continue_streams and _is_continuable(request) else 0
        stream = StreamedAnswer(request, limit_bytes=kept_bytes)
        return Trip(request=request, client=client, record=record, scope=scope, limit_s=limit_s, stream=stream)

    # ── the whole request ───────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, trip: Trip) -> None:
        try:
            with trip.scope:
                await self._try_until_served(trip)
            if trip.scope.cancelled_caught:
                raise self._why_cut_short(trip)
            trip.record.end(Outcome.DONE)
        except EngineReply as reply:
            await pass_on(trip, reply)
        except ProxyError as error:
            await tell(trip, error)
        except ClientStalledError:
            trip.record.end(Outcome.CLIENT_GONE)
        except Exception:
            log.exception("request %s met a bug", trip.record.request_id)
            await tell(trip, ProxyError("the proxy met an unexpected error"))

    def _why_cut_short(self, trip: Trip) -> ProxyError:
        if trip.is_aborted:
            return Draining("the proxy is shutting down", retry_after_s=5.0)
        return DeadlineExceeded(f"the request took longer than {trip.limit_s:g} s")

    async def _try_until_served(self, trip: Trip) -> None:
        if self._is_draining:
            raise Draining("the proxy is shutting down", retry_after_s=5.0)
        self._router.check(trip.request.model)
        started = time.monotonic()
        size = await self._sizer.size(trip.request)
        trip.tokenize_s = time.monotonic() - started
        failure: Failure | None = None
        num_left = self._settings.retries
        while True:
            num_shown = trip.stream.num_bytes
            try:
                await self._try_once(trip, size)
                return
            except (NotReady, ModelNotFound) as error:
                raise failure or error from None
            except (EngineReply, InvalidRequest, NeverFits):
                if failure is None or not trip.client.is_started:
                    raise
                raise failure from None
            except (LegFailed, KvFailed, LegTimedOut) as error:
                failure = error
            if isinstance(failure, GoneWhileWaiting):
                trip.avoid |= {failure.instance}
                continue  # Nothing was sent: to wait elsewhere burdens nobody, and the deadline bounds it.
            # An attempt that showed the client something new has earned the next one its full number of retries.
            num_left = self._settings.retries if trip.stream.num_bytes > num_shown else num_left
            if num_left < 1 or not self._may_try_again(trip, failure):
                break
            num_left -= 1
            if trip.client.is_started:
                shown = self._shown(trip, failure)
                if trip.stream.can_end(shown, trip.prompt_usage):
                    await self._relay(trip, trip.last_flight).finish(shown)
                    return
                size = self._goes_on(trip, size, shown, failure)
            if not self._retries.spend():
                break
        raise _as_told(failure, trip.client.is_started)

    def _may_try_again(self, trip: Trip, error: Failure) -> bool:
        """Remember who failed. One that is busy or silent is not asked twice; a broken one is, where nobody else is."""
        flight = trip.last_flight
        names = [flight.prefiller, flight.decoder] if isinstance(error, KvFailed) else [error.instance]
        trip.avoid |= {name for name in names if name is not None}
        if isinstance(error, EngineSaidError) and not error.is_ours:
            return False
        if isinstance(error, (Backpressure, LegTimedOut)):
            return self._router.has_other(error.instance, trip.request.model, trip.avoid)
        return True

    # ── a stream whose decoder was lost ─────────────────────────────────────────────────────────────────────────────

    def _shown(self, trip: Trip, failure: Failure) -> Shown:
        """What the client has of the answer. Raises `failure` where that is not known well enough to go on."""
        try:
            return trip.stream.read()
        except NotReadableError as error:
            log.info("request %s is not continued: %s", trip.record.request_id, error)
            raise failure from None

    def _goes_on(self, trip: Trip, size: PromptSize, shown: Shown, failure: Failure) -> PromptSize:
        """What the next attempt has to read before it can go on. Raises `failure` where the prompt is not known."""
        prompt_ids = trip.prompt_ids(size)
        if prompt_ids is None or shown.is_finished:
            lacks = "usage" if shown.is_finished else "prompt's ids"
            log.info("request %s is not continued: its %s cannot be known", trip.record.request_id, lacks)
            raise failure
        self._num_continued += 1
        return size.with_answer(prompt_ids, shown.answer_ids)

    # ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _try_once(self, trip: Trip, size: PromptSize) -> None:
        if not trip.client.is_started:
            trip.prompt_usage = None
        hints = self._router.hints(trip.request, size.ids, trip.client.headers)
        route = self._router.pick(trip.request.model, trip.avoid, hints)
        if size.num_answer_tokens and not (route.prefiller.adapter.resumes and route.decoder.adapter.resumes):
            raise NotReady("no instance that is ready can go on with an answer begun elsewhere")
        choice = self._choose(trip.request, size, route.decoder)
        trip.record.reason = choice.reason
        if choice.path is Path.LOCAL:
            await self._serve_locally(trip, route, size)
        elif choice.path is Path.PREFILL_ONLY:
            await self._serve_one_token(trip, route, size)
        else:
            await self._disaggregate(trip, route, size)

    def _choose(self, request: GenerationRequest, size: PromptSize, decoder: Instance) -> Choice:
        facts = decoder.known_facts
        limits = Limits(
            capacity_pages=facts.num_pages,
            max_model_len=facts.max_model_len,
            min_prompt_tokens=self._settings.min_prompt_tokens,
            oversized=self._settings.oversized,
            is_windowed=facts.windowed,
        )
        return choose_path(request, size, pages_needed(facts, size.tokens, is_exact=size.is_exact), limits)

    # ── the three ways ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve_locally(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """The decoder does both halves; no KV travels, so no pages are asked for."""
        flight = trip.fly(route, Path.LOCAL, size.tokens)
        with _ending(flight):
            resumption = None
            if size.num_answer_tokens:
                assert size.ids is not None
                resumption = Resumption(size.ids, size.num_answer_tokens)
            body = route.decoder.adapter.local_body(trip.request, resumption, with_ids=trip.stream.asks_for_ids)
            await self._decode(trip, flight, route.decoder, body, needs_text=False)

    async def _serve_one_token(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """The prefiller's token is the whole answer; no KV travels."""
        flight = trip.fly(route, Path.PREFILL_ONLY, size.tokens)
        with _ending(flight):
            flight.advance(Phase.PREFILL)
            body = route.prefiller.adapter.one_token_body(trip.request)
            with route.prefiller.prefilling(size.tokens):
                reply = await self._prefill(trip, route.prefiller, body)
            await self._relay(trip, flight).answer(reply.fields)

    async def _disaggregate(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """Lease, prefill, KV, decode. Whatever happens, the `finally` here settles the attempt."""
        flight = trip.fly(route, Path.DISAGGREGATED, size.tokens)
        attempt = Attempt(flight, route.decoder)
        is_seen = True
        try:
            with _ending(flight):
                with route.prefiller.prefilling(size.tokens):
                    await self._reserve(trip, attempt, size)
                    reply = await self._prefill_attempt(trip, attempt, route, size)
                if reply.handoff is None:
                    flight.take_path(Path.PREFILL_ONLY)
                    await self._relay(trip, flight).answer(reply.fields)
                else:
                    await self._wait_for_kv(trip, attempt)
                    with_ids = trip.stream.asks_for_ids
                    body = route.decoder.adapter.decode_body(trip.request, reply.handoff, with_ids=with_ids)
                    needs_text = reply.has_text and not trip.request.has_stop
                    await self._decode(trip, flight, route.decoder, body, needs_text=needs_text)
        except LegUnreachable as error:
            is_seen = error.leg != "prefill"
            raise
        finally:
            attempt.settle(self._reaper.adopt, is_seen=is_seen)

    # ── the steps ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _reserve(self, trip: Trip, attempt: Attempt, size: PromptSize) -> None:
        """Pages, then a place on the board: before the prefill leg is sent, so that no signal can come too early."""
        decoder, uuid = attempt.decoder, attempt.flight.attempt
        if self._has_room(decoder, size):
            await self._acquire(trip, attempt, size)
        elif await unless(decoder.gone, lambda: self._acquire(trip, attempt, size)) is None:
            raise GoneWhileWaiting(decoder.name)
        attempt.epoch = decoder.known_facts.epoch  # it may have been restarted while we waited
        ranks = decoder.adapter.ranks(decoder.known_facts)
        attempt.expect(self._board.expect(uuid, ranks, epoch=attempt.epoch))

    def _has_room(self, decoder: Instance, size: PromptSize) -> bool:
        """Its pages will be granted at once: there is no wait that anything could interrupt."""
        admission, facts = decoder.admission, decoder.known_facts
        limit = min(facts.num_pages, self._settings.concurrent_pages or facts.num_pages)
        pages = pages_leased(facts, size.tokens, is_exact=size.is_exact)
        return admission.num_waiting == 0 and admission.held + pages <= limit

    async def _acquire(self, trip: Trip, attempt: Attempt, size: PromptSize) -> bool:
        decoder = attempt.decoder
        try:
            lease = await decoder.admission.acquire(
                pages_leased(decoder.known_facts, size.tokens, is_exact=size.is_exact),
                deadline=time.monotonic() + self._settings.slot_timeout_s,
                attempt=attempt.flight.attempt,
                priority=trip.request.priority,
            )
        except NeverFits:
            if attempt.is_void:  # it came back with a smaller buffer: another way, or another decoder, may do
                raise GoneWhileWaiting(decoder.name) from None
            raise
        attempt.reserved(lease)
        return True

    async def _prefill_attempt(self, trip: Trip, attempt: Attempt, route: Route, size: PromptSize) -> PrefillReply:
        settings, facts = self._settings, route.decoder.known_facts
        phases_s = settings.prefill_timeout_s + settings.kv_timeout_s + settings.first_byte_timeout_s
        push = Push(
            attempt=attempt.flight.attempt,
            decoder=facts,
            timeout_s=min(phases_s, trip.seconds_left()),
            notify=self._notify(),
            prompt_ids=size.ids,
            num_answer_tokens=size.num_answer_tokens,
        )
        body = route.prefiller.adapter.prefill_body(trip.request, push)
        attempt.flight.advance(Phase.PREFILL)
        attempt.sent()
        expectation = attempt.expectation
        reply = await unless(expectation.failed, lambda: self._prefill(trip, route.prefiller, body), grace_s=REPLY_S)
        if reply is None:
            raise KvFailed(f"the KV cache of this request did not reach the decoder: {expectation.failure}")
        trip.prefilled(reply, route.prefiller.adapter)
        if reply.usage is not None:
            num_tokens = reply.usage.tokens + size.num_answer_tokens
            attempt.flight.num_prompt_tokens = num_tokens
            attempt.needs(pages_needed(facts, num_tokens))
        return reply

    async def _prefill(self, trip: Trip, prefiller: Instance, body: bytes) -> PrefillReply:
        """The prefill leg from end to end. Raises as `OpenLeg` does, and `LegFailed` for a reply that is none."""
        leg = self._leg("prefill", trip, prefiller, body)
        with leg.within(self._settings.prefill_timeout_s):
            async with leg:
                reply_body = await leg.read()
                try:
                    reply = prefiller.adapter.read_prefill(reply_body)
                    if reply.handoff is None:
                        _check_finished(trip.request, reply)
                except (MalformedReply, answer.CorruptAnswer) as error:
                    raise leg.failed(str(error)) from error
                return reply

    async def _wait_for_kv(self, trip: Trip, attempt: Attempt) -> None:
        attempt.flight.advance(Phase.KV_WAIT)
        facts = await attempt.expectation.ready(time.monotonic() + self._settings.kv_timeout_s)
        attempt.ready()
        attempt.needs(facts.rank_pages)
        attempt.flight.num_kv_bytes = facts.num_bytes
        attempt.flight.transfer_s = facts.transfer_s

    async def _decode(self, trip: Trip, flight: Flight, decoder: Instance, body: bytes, *, needs_text: bool) -> None:
        flight.advance(Phase.DECODE)
        leg = self._leg("decode", trip, decoder, body)
        await self._relay(trip, flight).decode(leg, needs_text=needs_text)

    def _leg(self, name: str, trip: Trip, instance: Instance, body: bytes) -> OpenLeg:
        call = Call(trip.request.endpoint, body)
        return OpenLeg(name, instance, call, trip.client.forwarded, self._observer)

    def _relay(self, trip: Trip, flight: Flight) -> Relay:
        """A decoder that has to read the prompt first may take as long for that as a prefiller."""
        settings = self._settings
        first_byte_s = settings.first_byte_timeout_s + (settings.prefill_timeout_s if flight.path is Path.LOCAL else 0)
        return Relay(trip, flight, first_byte_s=first_byte_s, idle_s=settings.idle_timeout_s)


@contextmanager
def _ending(flight: Flight) -> Iterator[None]:
    """Leaving the block ends the flight's phases, each way in its own end."""
    try:
        yield
    except Exception:
        flight.advance(Phase.FAILED)
        raise
    except BaseException:
        flight.advance(Phase.CANCELLED)
        raise
    flight.advance(Phase.DONE)


def _check_finished(request: GenerationRequest, reply: PrefillReply) -> None:
    """A prefill reply without a handoff must be a whole answer. Raises `MalformedReply`, `CorruptAnswer`.

    One that merely ran into its single token, when more are wanted, would be a silently short answer.
    """
    reason = answer.finish_reason(reply.fields)
    if reason is None or reason in answer.BROKEN_FINISHES or (reason == "length" and request.max_tokens != 1):
        raise MalformedReply(f"it neither finished the answer (finish_reason {reason!r}) nor handed it over")


def _is_continuable(request: GenerationRequest) -> bool:
    """One streamed answer, to a prompt that ids say everything of."""
    is_one = request.stream and request.n == 1 and request.prompt_kind is not PromptKind.BATCH
    return is_one and not request.has_media and not request.reads_prompt


def _as_told(failure: Failure, is_started: bool) -> ProxyError | EngineReply:
    """The error that the client gets: a busy engine's own words, while there can be a status."""
    return failure.reply if isinstance(failure, Backpressure) and not is_started else failure
