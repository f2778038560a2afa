"""One request from its parsed body to its last byte: sized, routed, admitted, prefilled, awaited, decoded, settled.

One coroutine owns all of it, and one `finally` settles what it held, exactly once. Before the first byte every failure
is a real HTTP status and may become a new attempt elsewhere; after it, an SSE ``error`` event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from pdproxy import canary
from pdproxy.config import Settings
from pdproxy.engines.base import DecodeLeg, Resumption
from pdproxy.errors import (
    Backpressure,
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
from pdproxy.fleet.routing import Route, Router
from pdproxy.flight import Path, Phase
from pdproxy.legs import EngineSaidError, KvNotTaken, LegTimedOut
from pdproxy.pairing import Pairing, ending
from pdproxy.reaper import Reaper
from pdproxy.reply.refusal import pass_on, tell
from pdproxy.reply.streamed import StreamedAnswer
from pdproxy.reply.transcript import NotReadableError, Shown
from pdproxy.request.openai import COMPLETIONS, GenerationRequest, PromptKind
from pdproxy.request.path import Choice, PathChooser, PromptSize
from pdproxy.request.tokens import PromptSizer
from pdproxy.retries import RetryBudget
from pdproxy.steps import Steps
from pdproxy.telemetry.record import Observer, Outcome, RequestRecord
from pdproxy.trip import Client, ClientStalledError, Trip

log = logging.getLogger(__name__)

Failure = LegFailed | KvFailed | LegTimedOut
"""Of one attempt; another one may do better."""


class Orchestrator:
    """Serves requests. Knows its parts by their protocols only; all of them are started and stopped by others, and all
    go by the same `clock`, at whose pace the event loop's own must run."""

    def __init__(
        self,
        settings: Settings,
        *,
        router: Router,
        sizer: PromptSizer,
        pairing: Pairing,
        steps: Steps,
        reaper: Reaper,
        retries: RetryBudget,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._router = router
        self._sizer = sizer
        self._pairing = pairing
        self._steps = steps
        self._reaper = reaper
        self._retries = retries
        self._observer = observer
        self._clock = clock
        self._paths = PathChooser(min_prompt_tokens=settings.min_prompt_tokens, oversized=settings.oversized)
        # State: the trips under way; whether new ones are taken; streams taken over from a lost decoder; an event for
        # those who wait until the last trip has ended.
        self._trips: set[Trip] = set()
        self._is_draining = False
        self._num_continued = 0
        self._idle: asyncio.Event | None = None

    # ── from outside ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def in_flight(self) -> list[dict[str, Any]]:
        """For the status page: requests under way, then the orphans of earlier ones."""
        orphans = ({"orphan": True, **attempt.flight.facts()} for attempt in self._reaper.orphans)
        return [*(trip.record.facts() for trip in self._trips), *orphans]

    def records(self) -> list[RequestRecord]:
        """Of the requests under way, in no particular order."""
        return [trip.record for trip in self._trips]

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
            trip.abort()

    async def idle(self) -> None:
        """Until no request is under way."""
        while self._trips:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    async def serve(self, request: GenerationRequest, client: Client, record: RequestRecord) -> None:
        """Answer the client, whatever happens. Raises nothing; only a cancellation passes through."""
        record.model, record.stream = request.model, request.stream
        trip = self._trip(request, client, record)
        self._trips.add(trip)
        self._retries.requested()
        try:
            await self._serve(trip)
        except BaseException:
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            self._trips.discard(trip)
            if self._idle is not None and not self._trips:
                self._idle.set()
                self._idle = None
            self._observer.request_finished(record)

    async def prove(self, prefiller: Instance, decoder: Instance) -> None:
        """A canary: a tiny request through this pair. Raises `ProxyError` or `EngineReply` where it does not arrive."""
        record = RequestRecord("canary", COMPLETIONS, is_counted=False, clock=self._clock)
        request = canary.request(prefiller, decoder)
        trip = self._trip(request, canary.NoClient(), record)
        with trip.limit:
            await self._pairing.serve(trip, Route(prefiller, decoder), canary.SIZE)

    def _trip(self, request: GenerationRequest, client: Client, record: RequestRecord) -> Trip:
        """One deadline for everything that will be tried: the operator's, or the client's own where that is shorter."""
        settings = self._settings
        limit_s = settings.request_timeout_s
        if request.timeout_s is not None:
            limit_s = min(limit_s, request.timeout_s)
        kept_bytes = settings.continue_limit if settings.continue_streams and _is_continuable(request) else 0
        stream = StreamedAnswer(request, limit_bytes=kept_bytes)
        return Trip(request, client, record, stream, limit_s, self._clock)

    # ── the whole request ───────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, trip: Trip) -> None:
        try:
            with trip.limit:
                await self._try_until_served(trip)
            trip.record.end(Outcome.DONE)
            return
        except EngineReply as reply:
            answer = pass_on(trip, reply)
        except ProxyError as error:
            answer = tell(trip, error)
        except ClientStalledError:
            trip.record.end(Outcome.CLIENT_GONE)
            return
        except Exception:
            log.exception("request %s met a bug", trip.record.request_id)
            answer = tell(trip, ProxyError("the proxy met an unexpected error"))
        await answer  # out here: compiled code must not wait where it handles an exception

    async def _try_until_served(self, trip: Trip) -> None:
        if self._is_draining:
            raise Draining("the proxy is shutting down", retry_after_s=5.0)
        started = self._clock()
        size = self._sizer.size_now(trip.request)
        if size is None:
            self._router.check(trip.request.model)
            size = await self._sizer.size(trip.request, trip.client.forwarded)
        trip.tokenize_s = self._clock() - started
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
                    await self._steps.relay(trip, trip.last_flight).finish(shown)
                    return
                if trip.prompt_ids(size) is None:
                    size = replace(size, ids=await self._sizer.ids(trip.request, trip.client.forwarded))
                size = self._goes_on(trip, size, shown, failure)
            if not self._retries.spend():
                break
        raise _as_told(failure, trip.client.is_started)

    def _may_try_again(self, trip: Trip, error: Failure) -> bool:
        """Remember who failed. One that is busy or silent is not asked twice; a broken one is, where nobody else is."""
        flight = trip.last_flight
        names = [flight.prefiller, flight.decoder] if isinstance(error, (KvFailed, KvNotTaken)) else [error.instance]
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

    def _try_once(self, trip: Trip, size: PromptSize) -> Coroutine[Any, Any, None]:
        """To be awaited: one attempt, by whom and which way has been decided. Raises where that cannot be."""
        if not trip.client.is_started:
            trip.prompt_usage = None
        # A chat's ids are known of some turns only, and all of its turns shall go to the same instance.
        prompt_ids = None if trip.request.is_chat else size.ids
        hints = self._router.hints(trip.request, prompt_ids, trip.client.headers)
        route = self._router.pick(trip.request.model, trip.avoid, hints)
        if size.num_answer_tokens and not route.decoder.adapter.manner.resumes:
            raise NotReady("no instance that is ready can go on with an answer begun elsewhere")
        choice = self._choose(trip.request, size, route)
        trip.record.reason = choice.reason
        if choice.path is Path.LOCAL:
            return self._serve_locally(trip, route, size)
        if choice.path is Path.PREFILL_ONLY:
            return self._serve_one_token(trip, route, size)
        return self._pairing.serve(trip, route, size)

    def _choose(self, request: GenerationRequest, size: PromptSize, route: Route) -> Choice:
        decoder = route.decoder
        return self._paths.choose(
            request,
            size,
            keeper=route.keeper.known_facts,
            decoder=decoder.known_facts,
            manner=decoder.adapter.manner,
            hands_over=route.prefiller.adapter.hands_over(request, size.ids),
        )

    # ── the three ways ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve_locally(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """The decoder does both halves; no KV travels, so no pages are asked for. It may take as long for the prompt as
        a prefiller."""
        settings, decoder = self._settings, route.decoder
        flight = trip.fly(route, Path.LOCAL, size.tokens)
        with ending(flight):
            resumption = None
            if size.num_answer_tokens:
                assert size.ids is not None
                resumption = Resumption(size.ids, size.num_answer_tokens)
            with_ids = trip.stream.asks_for_ids and decoder.adapter.manner.resumes
            body = decoder.adapter.local_body(trip.request, resumption, with_ids=with_ids)
            flight.advance(Phase.DECODE)
            first_byte_s = settings.first_byte_timeout_s + settings.prefill_timeout_s
            decode = DecodeLeg(body)
            await self._steps.decode(trip, flight, decoder, decode, needs_text=False, first_byte_s=first_byte_s)

    async def _serve_one_token(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """The prefiller's token is the whole answer; no KV travels."""
        flight = trip.fly(route, Path.PREFILL_ONLY, size.tokens)
        with ending(flight):
            flight.advance(Phase.PREFILL)
            body = route.prefiller.adapter.one_token_body(trip.request)
            with route.prefiller.prefilling(size.tokens):
                reply = await self._steps.prefill(trip, flight, route.prefiller, body)
            await self._steps.relay(trip, flight).answer(reply.fields)


def _is_continuable(request: GenerationRequest) -> bool:
    """One streamed answer, to a prompt that ids say everything of."""
    is_one = request.stream and request.n == 1 and request.prompt_kind is not PromptKind.BATCH
    return is_one and not request.has_media and not request.reads_prompt


def _as_told(failure: Failure, is_started: bool) -> ProxyError | EngineReply:
    """The error that the client gets: a busy engine's own words, while there can be a status."""
    return failure.reply if isinstance(failure, Backpressure) and not is_started else failure
