"""Disaggregated serves one attempt by a pair: prefill, KV, decode.

Engines differ in which of them says that the KV is ready, whose memory it takes and what frees it. That is told by
their `EngineTraits`. There are two ways through this module: one leg after the other, and both at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from pdproxy.aio.deadline import Deadline, MakeError
from pdproxy.aio.race import cancel_when, run_alongside
from pdproxy.engines.adapter import AttemptInfo, PrefillReply
from pdproxy.engines.traits import EngineTraits, KvReady
from pdproxy.errors import KvFailed, LegFailed, LegTimedOut
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.page_count import pages_needed
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.request import GenerationRequest
from pdproxy.orchestrator.attempt import Attempt
from pdproxy.orchestrator.leg_runner import LegRunner
from pdproxy.telemetry.attempt_record import Path, Phase

# Read once: in Python 3.11 an enum's class looks for each member by way of a hook.
_PREFILL: Final = Phase.PREFILL
_KV_WAIT: Final = Phase.KV_WAIT
_DECODE: Final = Phase.DECODE
_READY_BY_SIGNALS: Final = KvReady.SIGNALS
_READY_BY_ENGINES: Final = KvReady.ENGINES

REPLY_S = 0.2
"""Seconds that the prefiller's reply may still take after the KV was dropped. A prefiller whose token ends the answer
drops the KV in the moment in which it replies, and the reply may come second."""
LEASE_SHARE: Final = 0.8
"""Share of an engine's lease within which a decoder must have begun, where the lease is strict."""
SILENT_SHARE: Final = 1 / 3
"""Share of the time for its first event after which a stream's prefiller is judged."""


class PrefillerWatchdog(Deadline):
    """PrefillerWatchdog judges the prefiller where the decoder has said nothing for a time, because it may still wait
    for KV. It waits for ever where the prefiller has frozen. So the prefiller must be found well; else `LegFailed` is
    raised, and nobody blames the decoder.

    A whole answer has no first event by which to see that its KV has come: its prefiller is judged twice, before the
    look and when that has had its time. A stream is guarded until its first event: its prefiller must not be found
    not well twice in a row, with time for a look in between, nor be another process.

    Mutable state: whether it is being looked at; whether it was well when it was judged last.
    """

    __slots__ = ("_epoch", "_is_looked_at", "_is_stream", "_prefiller", "_probe_s", "_record", "_was_well")

    def __init__(self, attempt: Attempt, after_s: float, *, is_stream: bool, probe_s: float) -> None:
        super().__init__(after_s, self._not_well, attempt.context.limit)
        self._prefiller = attempt.prefiller
        self._epoch = attempt.prefiller.epoch
        self._record = attempt.record
        self._is_stream = is_stream
        self._probe_s = probe_s
        self._is_looked_at = False
        self._was_well = True

    def is_due(self) -> None:
        if self._is_stream:
            self._judge_stream()
        elif not _is_well(self._prefiller):
            self.cut()
        elif not self._is_looked_at:
            self._is_looked_at = True
            self._prefiller.look_soon()
            self.wait(self._probe_s, self._not_well)

    def _judge_stream(self) -> None:
        if self._record.first_token_s is not None:
            return
        prefiller, was_well = self._prefiller, self._was_well
        self._was_well = _is_well(prefiller)
        if not (was_well or self._was_well) or prefiller.is_another(prefiller.epoch, self._epoch):
            self.cut()
        else:
            self.wait(self._probe_s, self._not_well)

    def _not_well(self) -> LegFailed:
        return LegFailed("prefill", self._prefiller.name, "it stopped answering, maybe before the decoder had its KV")


class Disaggregated:
    """Disaggregated serves attempts by the prefiller and the decoder that they are bound to.

    `notify` tells where KV signals go to. `clock` is the board's. The limits are seconds: for the KV after the
    prefill reply, and for a look at a prefiller that is silent.
    """

    def __init__(
        self,
        legs: LegRunner,
        *,
        board: KvBoard,
        notify: Callable[[], str],
        kv_timeout_s: float,
        probe_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._legs = legs
        self._board = board
        self._notify = notify
        self._clock = clock
        self.kv_timeout_s = kv_timeout_s
        self._probe_timeout_s = probe_timeout_s

    @property
    def _phases_s(self) -> float:
        """Returns the seconds that an attempt may take from its prefill leg to its first token."""
        return self._legs.prefill_timeout_s + self.kv_timeout_s + self._legs.first_byte_timeout_s

    def serve(self, attempt: Attempt) -> Coroutine[Any, Any, None]:
        """Returns a coroutine that runs prefill, KV and decode."""
        if attempt.traits.ready is _READY_BY_SIGNALS:
            # The place on the board is taken before the prefill leg is sent, so that no signal can come too early.
            decoder = attempt.decoder
            ranks = decoder.adapter.ranks(decoder.known_facts)
            attempt.expect(self._board.expect(attempt.record.secret, ranks, epoch=decoder.epoch))
        if attempt.traits.ready is _READY_BY_ENGINES:
            return self._serve_concurrent(attempt)
        return self._serve_sequential(attempt)

    # ── the two ways ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve_sequential(self, attempt: Attempt) -> None:
        """Runs one leg after the other."""
        with attempt.prefiller.prefilling(attempt.size.tokens, attempt.id):
            reply = await self._prefill(attempt)
        if reply.is_whole:
            attempt.record.take_path(Path.PREFILL_ONLY)
            await self._legs.relay(attempt.context).answer(reply.fields)
            return
        await self._wait_for_kv(attempt)
        await self._decode(attempt, reply)

    async def _serve_concurrent(self, attempt: Attempt) -> None:
        """Runs both legs at once. The answer is the decoder's; the prefiller's reply is only of interest when it is a
        bad one."""
        prefiller = attempt.prefiller
        with prefiller.prefilling(attempt.size.tokens, attempt.id) as prefilled:
            attempt.prefill_sent(self._info(attempt))
            asked = self._legs.asked(attempt)

            async def prefill() -> None:
                """Runs the prefill leg, which lasts until the decoder, which may have to wait for its turn, has the
                KV."""
                try:
                    attempt.replied(await self._prefill_leg(attempt, limit_s=self._phases_s))
                except (LegFailed, LegTimedOut):
                    if not _has_its_kv(attempt):
                        raise
                prefilled()
                if attempt.record.phase is _PREFILL:
                    attempt.record.advance(_KV_WAIT)
                if not asked.stream:
                    with self._watchdog(attempt, self._legs.first_byte_timeout_s, is_stream=False):
                        # Waits for ever: the watchdog ends this, or `run_alongside` does when the decode leg is over.
                        await asyncio.get_running_loop().create_future()

            await run_alongside(prefill, lambda: self._decode_alongside(attempt, asked))

    # ── the steps ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _info(self, attempt: Attempt) -> AttemptInfo:
        """Returns what the engines are told of the attempt."""
        return AttemptInfo(
            attempt=attempt.record.secret,
            prefiller=attempt.prefiller.known_facts,
            decoder=attempt.decoder.known_facts,
            timeout_s=min(self._phases_s, attempt.context.seconds_left()),
            notify=self._notify(),
            prompt_ids=attempt.size.ids,
            num_answer_tokens=attempt.size.num_answer_tokens,
        )

    async def _prefill(self, attempt: Attempt) -> PrefillReply:
        """Runs the prefill leg. It is cut short where the KV will not come, because a signal says so, or because the
        decoder, which has to give pages for it, is down."""
        attempt.prefill_sent(self._info(attempt))
        expectation = attempt.expectation
        if expectation is None:
            reply = await self._prefill_leg(attempt)
        else:
            gone = _gone(attempt.decoder)
            limit = Deadline(math.inf, gone)
            with limit, attempt.decoder.relied_on(limit, gone):
                answered = await cancel_when(expectation.failed, lambda: self._prefill_leg(attempt), grace_s=REPLY_S)
            if answered is None:
                raise KvFailed(f"the KV cache of this request did not reach the decoder: {expectation.failure}")
            reply = answered
        attempt.replied(reply)
        if reply.usage is not None:
            num_tokens = reply.usage.tokens + attempt.size.num_answer_tokens
            attempt.record.num_prompt_tokens = num_tokens
            attempt.needs(pages_needed(attempt.owner.known_facts, num_tokens))
        return reply

    def _prefill_leg(self, attempt: Attempt, limit_s: float | None = None) -> Coroutine[Any, Any, PrefillReply]:
        """Returns a coroutine that runs the prefill leg, and has its body for itself alone."""
        body = attempt.prefiller.adapter.prefill_body(attempt.context.request, attempt.info)
        return self._legs.prefill(attempt, body, limit_s=limit_s)

    async def _wait_for_kv(self, attempt: Attempt) -> None:
        attempt.record.advance(_KV_WAIT)
        expectation = attempt.expectation
        if expectation is not None:
            ready = expectation.ready(self._clock() + self.kv_timeout_s)
            if expectation.is_ready:  # then it does not matter any more whether an engine goes down
                facts = await ready
            else:
                prefiller, decoder = attempt.prefiller, attempt.decoder
                limit = Deadline(math.inf, _gone(decoder))
                with limit, prefiller.relied_on(limit, _gone(prefiller)), decoder.relied_on(limit, _gone(decoder)):
                    facts = await ready
            attempt.needs(facts.rank_pages)
            attempt.record.num_kv_bytes = facts.num_bytes
            attempt.record.transfer_s = facts.transfer_s
        attempt.ready()

    async def _decode(self, attempt: Attempt, reply: PrefillReply) -> None:
        """Runs the decode leg, of which the prefiller's reply is a part."""
        traits, asked = attempt.traits, self._legs.asked(attempt)
        with_ids = attempt.context.stream.asks_for_ids and traits.resumes and asked.stream
        decode = attempt.decoder.adapter.decode_leg(asked, attempt.info, reply, with_ids=with_ids)
        attempt.record.advance(_DECODE)
        first_byte_s = min(self._legs.first_byte_timeout_s, _lease_left(traits))
        needs_text = decode.opening is None and _must_show(attempt.context.request, traits, reply)
        attempt.decode_sent()
        try:
            answer = self._legs.decode(attempt, decode, asked=asked, first_byte_s=first_byte_s, needs_text=needs_text)
            if not traits.is_lease_strict:
                await answer
            else:
                after_s = first_byte_s * SILENT_SHARE if asked.stream else first_byte_s
                with self._watchdog(attempt, after_s, is_stream=asked.stream):
                    await answer
        except (LegFailed, LegTimedOut) as error:
            if error.leg == "decode":
                attempt.decode_failed()
            raise

    async def _decode_alongside(self, attempt: Attempt, asked: GenerationRequest) -> None:
        """Runs the decode leg beside the prefill leg, whose reply it does without."""
        decode = attempt.decoder.adapter.decode_leg(asked, attempt.info, None)
        attempt.decode_sent()
        try:
            await self._legs.decode(attempt, decode, asked=asked, first_byte_s=self._phases_s)
        except (LegFailed, LegTimedOut):
            attempt.decode_failed()
            raise

    def _watchdog(self, attempt: Attempt, after_s: float, *, is_stream: bool) -> PrefillerWatchdog:
        return PrefillerWatchdog(attempt, after_s, is_stream=is_stream, probe_s=self._probe_timeout_s)


def _gone(instance: Instance) -> MakeError:
    """Returns a maker of the error for KV that was on its way from or to `instance`, which went down."""
    return lambda: KvFailed(f"the KV cache of this request did not reach the decoder: {instance.name!r} went down")


def _is_well(instance: Instance) -> bool:
    return instance.is_ready and not instance.is_doubted


def _must_show(request: GenerationRequest, traits: EngineTraits, reply: PrefillReply) -> bool:
    """Tells whether the answer must have text, because its first token is known and shows: without text it is wrong."""
    is_known = traits.shows_first_token or request.is_greedy
    return is_known and reply.has_text and not request.has_stop


def _has_its_kv(attempt: Attempt) -> bool:
    """Tells whether the decoder has the KV, because its one answer has begun: the prefiller's later failure does not
    matter then."""
    return attempt.context.request.num_sequences == 1 and attempt.record.phase is _DECODE


def _lease_left(traits: EngineTraits) -> float:
    """Returns the seconds within which a decoder must have begun, so that the engine's lease is not over before."""
    return LEASE_SHARE * traits.lease_s if traits.is_lease_strict else math.inf
