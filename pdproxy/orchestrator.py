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

from pdproxy import answer, canary
from pdproxy.attempt import Attempt
from pdproxy.config import Settings
from pdproxy.engines.base import Call, MalformedReply, PrefillReply, Push
from pdproxy.errors import (
    Backpressure,
    DeadlineExceeded,
    Draining,
    EngineReply,
    KvFailed,
    LegFailed,
    ModelNotFound,
    NotReady,
    ProxyError,
)
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.routing import Route, Router
from pdproxy.flight import Flight, Path, Phase
from pdproxy.legs import LegUnreachable, OpenLeg, time_limit
from pdproxy.openai import COMPLETIONS, GenerationRequest
from pdproxy.path import Choice, Limits, PromptSize, choose_path
from pdproxy.reaper import Reaper
from pdproxy.refusal import pass_on, tell
from pdproxy.relay import Relay
from pdproxy.signals.board import KvBoard
from pdproxy.telemetry.record import Observer, Outcome, RequestRecord
from pdproxy.tokens import PromptSizer
from pdproxy.trip import Client, ClientStalledError, Trip
from transfer.geometry import pages_for

log = logging.getLogger(__name__)


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
        observer: Observer,
        notify: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._router = router
        self._sizer = sizer
        self._board = board
        self._reaper = reaper
        self._observer = observer
        self._notify = notify
        # State: the trips under way; whether new ones are taken; an event for the next trip to end.
        self._trips: set[Trip] = set()
        self._is_draining = False
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
        limit_s = self._settings.request_timeout_s
        scope = anyio.CancelScope(deadline=anyio.current_time() + limit_s)
        trip = Trip(request=request, client=client, record=record, scope=scope, deadline=time.monotonic() + limit_s)
        self._trips.add(trip)
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
        limit_s = self._settings.request_timeout_s
        with time_limit(limit_s, "the canary took too long"), anyio.CancelScope() as scope:
            trip = Trip(
                request=canary.request(prefiller, decoder),
                client=canary.NoClient(),
                record=record,
                scope=scope,
                deadline=time.monotonic() + limit_s,
            )
            await self._disaggregate(trip, Route(prefiller, decoder), canary.SIZE)

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
        return DeadlineExceeded(f"the request took longer than {self._settings.request_timeout_s:g} s")

    async def _try_until_served(self, trip: Trip) -> None:
        if self._is_draining:
            raise Draining("the proxy is shutting down", retry_after_s=5.0)
        self._router.check(trip.request.model)
        started = time.monotonic()
        size = await self._sizer.size(trip.request)
        trip.tokenize_s = time.monotonic() - started
        failure: ProxyError | None = None
        for _ in range(self._settings.retries + 1):
            try:
                await self._try_once(trip, size)
                return
            except (NotReady, ModelNotFound) as error:
                raise failure or error from None
            except (LegFailed, KvFailed) as error:
                failure = error
                if trip.client.is_started or not self._may_retry(trip, error):
                    break
        assert failure is not None
        raise failure.reply if isinstance(failure, Backpressure) else failure

    def _may_retry(self, trip: Trip, error: LegFailed | KvFailed) -> bool:
        """Remember who failed. A busy instance is not asked twice; a failed one is, where there is no other."""
        flight = trip.record.flight
        assert flight is not None
        names = [error.instance] if isinstance(error, LegFailed) else [flight.prefiller, flight.decoder]
        trip.avoid |= {name for name in names if name is not None}
        if isinstance(error, Backpressure):
            return self._router.has_other(error.instance, trip.request.model, trip.avoid)
        return True

    async def _try_once(self, trip: Trip, size: PromptSize) -> None:
        route = self._router.pick(trip.request.model, trip.avoid)
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
            refuse_oversized=self._settings.oversized == "refuse",
        )
        return choose_path(request, size, pages_for(size.tokens, facts.chunk_size), limits)

    # ── the three ways ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve_locally(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """The decoder does both halves; no KV travels, so no pages are asked for."""
        flight = trip.fly(route, Path.LOCAL, size.tokens)
        with _ending(flight):
            body = route.decoder.adapter.local_body(trip.request)
            await self._decode(trip, flight, route.decoder, body, needs_text=False)

    async def _serve_one_token(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """The prefiller's token is the whole answer; no KV travels."""
        flight = trip.fly(route, Path.PREFILL_ONLY, size.tokens)
        with _ending(flight):
            flight.advance(Phase.PREFILL)
            body = route.prefiller.adapter.one_token_body(trip.request)
            reply = await self._prefill(trip, route.prefiller, body)
            await self._relay(trip, flight).answer(reply.fields)

    async def _disaggregate(self, trip: Trip, route: Route, size: PromptSize) -> None:
        """Lease, prefill, KV, decode. Whatever happens, the `finally` here settles the attempt."""
        flight = trip.fly(route, Path.DISAGGREGATED, size.tokens)
        attempt = Attempt(flight, route.decoder)
        is_seen = True
        try:
            with _ending(flight):
                await self._reserve(trip, attempt, size)
                reply = await self._prefill_attempt(trip, attempt, route, size)
                if reply.handoff is None:
                    flight.take_path(Path.PREFILL_ONLY)
                    await self._relay(trip, flight).answer(reply.fields)
                else:
                    await self._wait_for_kv(trip, attempt)
                    body = route.decoder.adapter.decode_body(trip.request, reply.handoff)
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
        decoder, facts = attempt.decoder, attempt.decoder.known_facts
        limit_s = min(self._settings.slot_timeout_s, trip.seconds_left())
        pages = max(1, pages_for(size.tokens, facts.chunk_size))
        uuid = attempt.flight.attempt
        attempt.reserved(await decoder.admission.acquire(pages, deadline=time.monotonic() + limit_s, attempt=uuid))
        attempt.epoch = decoder.known_facts.epoch  # it may have been restarted while we waited
        ranks = decoder.adapter.ranks(decoder.known_facts)
        attempt.expect(self._board.expect(uuid, ranks, epoch=attempt.epoch))

    async def _prefill_attempt(self, trip: Trip, attempt: Attempt, route: Route, size: PromptSize) -> PrefillReply:
        settings, facts = self._settings, route.decoder.known_facts
        phases_s = settings.prefill_timeout_s + settings.kv_timeout_s + settings.first_byte_timeout_s
        push = Push(
            attempt=attempt.flight.attempt,
            decoder=facts,
            timeout_s=min(phases_s, trip.seconds_left()),
            notify=self._notify(),
            prompt_ids=size.ids,
        )
        body = route.prefiller.adapter.prefill_body(trip.request, push)
        attempt.flight.advance(Phase.PREFILL)
        attempt.sent()
        reply = await self._prefill(trip, route.prefiller, body)
        if reply.prompt_tokens is not None:
            attempt.flight.num_prompt_tokens = reply.prompt_tokens
            attempt.need_only(pages_for(reply.prompt_tokens, facts.chunk_size))
        return reply

    async def _prefill(self, trip: Trip, prefiller: Instance, body: bytes) -> PrefillReply:
        """The prefill leg from end to end. Raises as `OpenLeg` does, and `LegFailed` for a reply that is none."""
        limit_s = self._settings.prefill_timeout_s
        with time_limit(limit_s, f"the prefill leg took longer than {limit_s:g} s"):
            async with self._leg("prefill", trip, prefiller, body) as leg:
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
        limit_s = min(self._settings.kv_timeout_s, trip.seconds_left())
        facts = await attempt.expectation.ready(time.monotonic() + limit_s)
        attempt.ready()
        attempt.need_only(facts.rank_pages)
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
        settings = self._settings
        return Relay(trip, flight, first_byte_s=settings.first_byte_timeout_s, idle_s=settings.idle_timeout_s)


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
