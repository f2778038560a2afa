"""Disaggregated runs one attempt by a pair: pages, prefill, KV, decode, and the one `finally` that settles what was
held.

Engines differ in which of them says that the KV is ready, whose memory it takes and what frees it. That is their
`Manner`. There are two ways through this module: one leg after the other, and both at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from pdproxy.admission.account import Lease
from pdproxy.admission.admission import Admission
from pdproxy.aio.deadline import Deadline, MakeError
from pdproxy.aio.race import cancel_when, run_alongside
from pdproxy.config.settings import Settings
from pdproxy.engines.base import KvReady, Passage, PrefillReply
from pdproxy.errors import KvFailed, LegFailed
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.page_count import pages_needed
from pdproxy.fleet.routing.router import Route
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.request import GenerationRequest
from pdproxy.orchestrator.attempt import Attempt
from pdproxy.orchestrator.context import RequestContext
from pdproxy.orchestrator.leg import LegTimedOut, LegUnreachable
from pdproxy.orchestrator.leg_runner import LegRunner
from pdproxy.orchestrator.reaper import Reaper
from pdproxy.telemetry.flight import Flight, Path, Phase
from pdproxy.tokens.prompt_size import PromptSize

# Read once: in Python 3.11 an enum's class looks for each member by way of a hook.
_PREFILL, _KV_WAIT, _DECODE, _DONE = Phase.PREFILL, Phase.KV_WAIT, Phase.DECODE, Phase.DONE
_READY_BY_SIGNALS, _READY_BY_ENGINES = KvReady.SIGNALS, KvReady.ENGINES

REPLY_S = 0.2
"""Seconds that the prefiller's reply may still take after the KV was dropped. A prefiller whose token ends the answer
drops the KV in the moment in which it replies, and the reply may come second."""
LEASE_SHARE = 0.8
"""Share of an engine's lease within which a decoder must have begun, where the lease is strict."""


class ending:  # noqa: N801 (reads as what it is: ``with ending(flight):``)
    """``with ending(flight):`` ends the flight's phases when the block is left: done, failed or cancelled."""

    __slots__ = ("_flight",)

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def __enter__(self) -> None:
        """Does nothing, because nothing changes yet."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flight.advance(_DONE)
        else:
            self._flight.advance(Phase.FAILED if issubclass(kind, Exception) else Phase.CANCELLED)


class PrefillerWatchdog(Deadline):
    """PrefillerWatchdog has the prefiller looked at after a time, while a whole answer is waited for.

    Such an answer has no first event by which to see that the decoder still waits for KV. The decoder waits for ever
    where the prefiller has frozen. So the prefiller must be found well; else `LegFailed` is raised.

    Mutable state: whether it is being looked at.
    """

    __slots__ = ("_is_looked_at", "_prefiller", "_probe_s")

    def __init__(self, prefiller: Instance, after_s: float, *, probe_s: float) -> None:
        super().__init__(after_s, self._not_well)
        self._prefiller = prefiller
        self._probe_s = probe_s
        self._is_looked_at = False

    def is_due(self) -> None:
        if not _is_well(self._prefiller):
            self.cut()
        elif not self._is_looked_at:
            self._is_looked_at = True
            self._prefiller.suspected.set()
            self.wait(self._probe_s, self._not_well)

    def _not_well(self) -> LegFailed:
        return LegFailed("prefill", self._prefiller.name, "it stopped answering, maybe before the decoder had its KV")


class Disaggregated:
    """Disaggregated serves attempts by a prefiller and a decoder that they are bound to.

    `notify` tells where KV signals go to. `clock` is the board's.
    """

    def __init__(
        self,
        settings: Settings,
        steps: LegRunner,
        *,
        admission: Admission,
        board: KvBoard,
        reaper: Reaper,
        notify: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._admission = admission
        self._board = board
        self._reaper = reaper
        self._notify = notify
        self._clock = clock
        self.go_by(settings)

    def go_by(self, settings: Settings) -> None:
        """Takes over the options; requests that come later are served by them."""
        self._kv_timeout_s = settings.kv_timeout_s
        self._first_byte_timeout_s = settings.first_byte_timeout_s
        self._probe_timeout_s = settings.probe_timeout_s
        self._phases_s = settings.prefill_timeout_s + settings.kv_timeout_s + settings.first_byte_timeout_s
        """The time, in seconds, that an attempt may take from its prefill leg to its first token."""

    async def serve(
        self, context: RequestContext, flight: Flight, route: Route, lease: Lease, size: PromptSize
    ) -> None:
        """Runs prefill, KV and decode. Whatever happens, the `finally` here settles the attempt and its lease."""
        attempt = Attempt(flight, route, lease, context.request, context.client.forwarded, self._admission)
        is_seen = True
        try:
            self._expect(attempt)
            if attempt.manner.ready is _READY_BY_ENGINES:
                await self._at_once(context, attempt, size)
            else:
                await self._in_turn(context, attempt, size)
        except LegUnreachable as error:
            is_seen = error.leg != "prefill"
            raise
        finally:
            attempt.settle(self._reaper.adopt, is_seen=is_seen)

    # ── the two ways ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _in_turn(self, context: RequestContext, attempt: Attempt, size: PromptSize) -> None:
        with attempt.route.prefiller.prefilling(size.tokens):
            reply = await self._prefill(context, attempt, size)
        if reply.is_whole:
            attempt.flight.take_path(Path.PREFILL_ONLY)
            await self._steps.relay(context, attempt.flight).answer(reply.fields)
            return
        await self._wait_for_kv(attempt)
        await self._decode(context, attempt, reply)

    async def _at_once(self, context: RequestContext, attempt: Attempt, size: PromptSize) -> None:
        """Runs both legs at once. The answer is the decoder's; the prefiller's reply is only of interest when it is a
        bad one."""
        prefiller, decoder = attempt.route.prefiller, attempt.route.decoder
        with prefiller.prefilling(size.tokens) as prefilled:
            passage = self._depart(context, attempt, size)
            body = prefiller.adapter.prefill_body(context.request, passage)
            asked = self._steps.asked(context, decoder)

            async def prefill() -> None:
                """Runs the prefill leg, which lasts until the decoder, which may have to wait for its turn, has the
                KV."""
                try:
                    reply = await self._steps.prefill(
                        context, attempt.flight, prefiller, body, decoder=decoder, limit_s=self._phases_s
                    )
                    attempt.replied(reply)
                    context.prefilled(reply, prefiller.adapter)
                except (LegFailed, LegTimedOut):
                    if not _has_its_kv(context, attempt):
                        raise
                prefilled()
                if attempt.flight.phase is _PREFILL:
                    attempt.flight.advance(_KV_WAIT)
                if not asked.stream:
                    with self._watchdog(prefiller, self._first_byte_timeout_s):
                        await asyncio.get_running_loop().create_future()

            await run_alongside(prefill, lambda: self._decode_beside(context, attempt, passage, asked))

    # ── the steps ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _expect(self, attempt: Attempt) -> None:
        """Takes a place on the board before the prefill leg is sent, so that no signal can come too early."""
        if attempt.manner.ready is _READY_BY_SIGNALS:
            decoder = attempt.route.decoder
            ranks = decoder.adapter.ranks(decoder.known_facts)
            attempt.expect(self._board.expect(attempt.flight.secret, ranks, epoch=decoder.epoch))

    def _depart(self, context: RequestContext, attempt: Attempt, size: PromptSize) -> Passage:
        """Begins the prefill phase and returns the passage; from here the engines know of the attempt, or will. Raises
        `KvFailed` where the pages are gone with their process."""
        route = attempt.route
        passage = Passage(
            attempt=attempt.flight.secret,
            prefiller=route.prefiller.known_facts,
            decoder=route.decoder.known_facts,
            timeout_s=min(self._phases_s, context.seconds_left()),
            notify=self._notify(),
            prompt_ids=size.ids,
            num_answer_tokens=size.num_answer_tokens,
        )
        if attempt.lease.is_returned:  # its process ended just after the grant, and the pages with it
            raise KvFailed(f"{attempt.owner.name!r} was restarted just now")
        attempt.flight.advance(_PREFILL)
        attempt.sent(passage)
        return passage

    async def _prefill(self, context: RequestContext, attempt: Attempt, size: PromptSize) -> PrefillReply:
        prefiller, decoder, flight = attempt.route.prefiller, attempt.route.decoder, attempt.flight
        body = prefiller.adapter.prefill_body(context.request, self._depart(context, attempt, size))

        def prefill() -> Coroutine[Any, Any, PrefillReply]:
            return self._steps.prefill(context, flight, prefiller, body, decoder=decoder)

        expectation = attempt.expectation
        if expectation is None:
            reply = await prefill()
        elif (answered := await cancel_when(expectation.failed, prefill, grace_s=REPLY_S)) is not None:
            reply = answered
        else:
            raise KvFailed(f"the KV cache of this request did not reach the decoder: {expectation.failure}")
        attempt.replied(reply)
        context.prefilled(reply, prefiller.adapter)
        if reply.usage is not None:
            num_tokens = reply.usage.tokens + size.num_answer_tokens
            flight.num_prompt_tokens = num_tokens
            attempt.needs(pages_needed(attempt.facts, num_tokens))
        return reply

    async def _wait_for_kv(self, attempt: Attempt) -> None:
        attempt.flight.advance(_KV_WAIT)
        if attempt.expectation is not None:
            prefiller, decoder = attempt.route.prefiller, attempt.route.decoder
            limit = Deadline(math.inf, _gone(decoder))
            with limit, prefiller.relied_on(limit, _gone(prefiller)), decoder.relied_on(limit, _gone(decoder)):
                facts = await attempt.expectation.ready(self._clock() + self._kv_timeout_s)
            attempt.needs(facts.rank_pages)
            attempt.flight.num_kv_bytes = facts.num_bytes
            attempt.flight.transfer_s = facts.transfer_s
        attempt.ready()

    async def _decode(self, context: RequestContext, attempt: Attempt, reply: PrefillReply) -> None:
        flight, decoder = attempt.flight, attempt.route.decoder
        asked, passage = self._steps.asked(context, decoder), attempt.passage
        with_ids = context.stream.asks_for_ids and attempt.manner.resumes and asked.stream
        decode = decoder.adapter.decode_leg(asked, passage, reply, with_ids=with_ids)
        flight.advance(_DECODE)
        attempt.decode_sent()
        first_byte_s = min(self._first_byte_timeout_s, _lease_left(attempt))
        needs_text = decode.opening is None and _must_show(context.request, attempt, reply)

        def begun() -> None:
            flight.mark_first_byte()
            attempt.taken()

        answer = self._steps.decode(
            context,
            flight,
            decoder,
            decode,
            asked=asked,
            needs_text=needs_text,
            first_byte_s=first_byte_s,
            answered=attempt.decode_seen,
            begun=begun,
        )
        try:
            if asked.stream or not attempt.manner.is_lease_strict:
                await answer
            else:
                with self._watchdog(attempt.route.prefiller, first_byte_s):
                    await answer
        except (LegFailed, LegTimedOut):
            attempt.decode_failed()
            raise

    def _watchdog(self, prefiller: Instance, after_s: float) -> PrefillerWatchdog:
        return PrefillerWatchdog(prefiller, after_s, probe_s=self._probe_timeout_s)

    async def _decode_beside(
        self, context: RequestContext, attempt: Attempt, passage: Passage, asked: GenerationRequest
    ) -> None:
        flight, decoder = attempt.flight, attempt.route.decoder
        decode = decoder.adapter.decode_leg(asked, passage, None)
        attempt.decode_sent()

        def begun() -> None:
            if flight.phase is _PREFILL:
                flight.advance(_KV_WAIT)
            flight.advance(_DECODE)
            flight.mark_first_byte()
            attempt.taken()

        try:
            await self._steps.decode(
                context,
                flight,
                decoder,
                decode,
                asked=asked,
                needs_text=False,
                first_byte_s=self._phases_s,
                answered=attempt.decode_seen,
                begun=begun,
            )
        except (LegFailed, LegTimedOut):
            attempt.decode_failed()
            raise


def _gone(instance: Instance) -> MakeError:
    """Returns a maker of the error for KV that was on its way from or to `instance`, which went down."""
    return lambda: KvFailed(f"the KV cache of this request did not reach the decoder: {instance.name!r} went down")


def _is_well(instance: Instance) -> bool:
    return instance.is_ready and not instance.is_doubted


def _must_show(request: GenerationRequest, attempt: Attempt, reply: PrefillReply) -> bool:
    """Tells whether the answer must have text, because its first token is known and shows: without text it is wrong."""
    is_known = attempt.manner.shows_first_token or request.is_greedy
    return is_known and reply.has_text and not request.has_stop


def _has_its_kv(context: RequestContext, attempt: Attempt) -> bool:
    """Tells whether the decoder has the KV, because its one answer has begun: the prefiller's later failure does not
    matter then."""
    return context.request.num_sequences == 1 and attempt.flight.phase is _DECODE


def _lease_left(attempt: Attempt) -> float:
    manner = attempt.manner
    return LEASE_SHARE * manner.lease_s if manner.is_lease_strict else math.inf
