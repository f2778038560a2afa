"""OpenLeg is one leg of an attempt: opened, its status judged, closed whatever happens.

The coroutine that owns the attempt holds the leg and closes it in a `finally`. So a client that goes away closes both
legs at once, and the engines notice.
"""

from __future__ import annotations

from typing import Final

from pdproxy.aio.deadline import Deadline
from pdproxy.aio.descriptors import RETRY_AFTER_S
from pdproxy.engines.adapter import Call
from pdproxy.engines.http.base import (
    MAX_REPLY_BYTES,
    CheckSize,
    EngineBroken,
    EngineRefused,
    EngineUnreachable,
    Leg,
    LocalFault,
    ReplyTooLarge,
    Source,
)
from pdproxy.errors import (
    Backpressure,
    EngineReply,
    EngineSaidError,
    EventTooLarge,
    HandoffMissing,
    KvNotTaken,
    LegFailed,
    LegNotTried,
    LegTimedOut,
    LegUnreachable,
    MemoryBudgetSpent,
    NotAssembled,
    ReceiverNotReached,
    StaleTerm,
)
from pdproxy.fleet.instance import Instance, Reliance
from pdproxy.openai.assembled import too_large
from pdproxy.openai.response import error_code, error_message
from pdproxy.orchestrator.attempt import Attempt
from pdproxy.telemetry.observer import LegObserver

MAX_ERROR_BYTES: Final = 64 * 1024
"""The most bytes of an engine's error object that are read."""
MAX_REASON_CHARS: Final = 500
"""The most characters of an engine's own words in an error of ours."""
_KEPT: Final = frozenset({"ok", "busy", "refused"})
"""The outcomes with which somebody has what was read, so that it counts until the request is over."""


class OpenLeg:
    """OpenLeg is an engine's answer with HTTP 200, between `open` and `close`.

    `name` is ``prefill`` or ``decode``. `hands_over`: the leg's KV is for the attempt's decoder.

    The leg's outcome is told at its `close`. What goes wrong is booked by a verb (`fail`, `time_out` …), which returns
    the error to raise.

    Mutable state: the leg, once it is open; which process the peer was then, and the era of the instance's breaker; how
    it ended; how many bytes of its answer the client's share of the memory budget has been charged for.
    """

    __slots__ = (
        "_attempt",
        "_call",
        "_era",
        "_instance",
        "_leg",
        "_memory",
        "_name",
        "_num_bytes",
        "_observer",
        "_outcome",
        "_peer",
        "_peer_epoch",
        "_peer_era",
    )

    def __init__(
        self, name: str, attempt: Attempt, call: Call, observer: LegObserver, *, hands_over: bool = False
    ) -> None:
        self._name = name
        self._attempt = attempt
        self._instance = attempt.prefiller if name == "prefill" else attempt.decoder
        self._call = call
        self._observer = observer
        self._peer = attempt.decoder if hands_over else None
        self._peer_epoch: str | None = None
        self._peer_era = 0
        self._leg: Leg | None = None
        self._outcome = "closed"
        self._era = 0
        self._memory = attempt.context.client.memory
        self._num_bytes = 0

    @property
    def instance(self) -> str:
        return self._instance.name

    async def open(self) -> None:
        """Sends the call, and waits for the answer's head.

        Raises `EngineReply` for the engine's own 4xx, `StaleTerm` for one that means the leader, not the request,
        `Backpressure` for 429 and 503, `LegNotTried` where it is this
        machine's fault, `LegUnreachable` or `LegFailed` for the rest, and `MemoryBudgetSpent` for an error body; then
        the leg is closed.
        """
        instance, call, attempt = self._instance, self._call, self._attempt
        self._era = instance.leg_started(attempt.id)
        if self._peer is not None:
            self._peer_epoch, self._peer_era = self._peer.epoch, self._peer.breaker.era
        try:
            try:
                posting = instance.client.post(call.path, call.body, attempt.headers(instance))
                call.body = b""  # nobody needs it once it is sent, and the answer may take long
                self._leg = leg = await posting
            except LocalFault as fault:
                self._outcome = "not_tried"
                raise LegNotTried(self._name, instance.name, retry_after_s=RETRY_AFTER_S) from fault
            except EngineUnreachable as unreachable:
                raise self._unreachable(unreachable) from unreachable
            except EngineBroken as broken:
                raise self.break_off(broken) from broken
            # With a 429 or a 5xx a decoder may have turned the request away before it knew of the KV.
            if self._name == "decode" and leg.status < 500 and leg.status != 429:
                attempt.decode_seen()
            if leg.status != 200:
                raise await self._refusal(leg)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Tells how the leg went, and lets go of the connection. The caller calls it once for every `open` that
        returned."""
        if self._outcome == "timed_out":
            self._instance.suspect(f"it did not answer a {self._name} leg in time", is_lost=False)
        self._instance.leg_finished(self._era, self._outcome)
        self._observer.leg_finished(self._name, self._instance.name, self._outcome)
        if self._peer is not None and self._outcome == "ok":
            self._instance.exchanges.worked(self._peer.exchanges)
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.close()
        if self._outcome not in _KEPT:
            self._memory.give_back(self._num_bytes)
            self._num_bytes = 0

    async def read(self, max_answer_bytes: int | None = None) -> bytes:
        """Returns the whole body, for which it takes memory of the client's share. It is an answer of at most
        `max_answer_bytes`, or else a reply to the proxy. Raises `LegFailed`, also for more than that, and
        `MemoryBudgetSpent`."""
        try:
            body = await self._open_leg.read(self._keep(max_answer_bytes or MAX_REPLY_BYTES))
        except EngineBroken as error:
            raise self._unreadable(error, max_answer_bytes) from error
        self._outcome = "ok"
        return body

    def read_now(self, max_answer_bytes: int | None = None) -> bytes | None:
        """Does the same as `read` where all of the body has come; else returns None, and has read nothing."""
        try:
            body = self._open_leg.read_now(self._keep(max_answer_bytes or MAX_REPLY_BYTES))
        except EngineBroken as error:
            raise self._unreadable(error, max_answer_bytes) from error
        if body is not None:
            self._outcome = "ok"
        return body

    async def read_chunk(self) -> bytes:
        """Returns the next piece, ``b""`` at the end. Raises `LegFailed`."""
        try:
            chunk = await self._open_leg.read_chunk()
        except EngineBroken as error:
            raise self.break_off(error) from error
        if not chunk:
            self._outcome = "ok"
        return chunk

    def header(self, name: str) -> str | None:
        return self._open_leg.header(name)

    def fail(self, what: str) -> LegFailed:
        """Books that something is wrong with this leg's answer. Returns the error to raise."""
        self._outcome = "failed"
        return LegFailed(self._name, self._instance.name, what)

    def give_up_event(self, max_bytes: int) -> EventTooLarge:
        """Books an event that is larger than `max_bytes`. Returns the error to raise."""
        self._outcome = "too_large"
        return EventTooLarge(self._name, self._instance.name, max_bytes)

    def complete(self) -> None:
        """Books that all of the answer has been taken from the `source`."""
        self._outcome = "ok"

    def break_off(self, error: EngineBroken) -> LegFailed:
        """Books that the connection broke. Returns the error to raise."""
        self._instance.suspect(f"a connection to it broke: {error}", is_lost=False)
        return self.fail("the connection broke")

    def hand_nothing(self, what: str) -> HandoffMissing:
        """Books a prefill leg whose KV was not kept. Returns the error to raise."""
        self._outcome = "no_handoff"
        return HandoffMissing(self._name, self._instance.name, what)

    def reach_nobody(self, what: str) -> LegFailed:
        """Books a prefill leg whose KV was not kept because the receiver of the decoder is silent. Returns the error to
        raise."""
        return self.hand_nothing(what) if self._peer is None else self._receiver_not_reached(self._peer)

    def say_error(self, events: bytes, *, is_ours: bool) -> EngineSaidError:
        """Books an engine's own error event. Returns the error to raise."""
        self._outcome = "failed" if is_ours else "refused"
        return EngineSaidError(self._name, self._instance.name, events, is_ours=is_ours)

    def go_down(self) -> LegFailed:
        """Books that the instance was found to be down, and that the leg has said nothing since. Returns the error to
        raise."""
        self._outcome = "closed"  # that it is down keeps attempts from it already
        return LegFailed(self._name, self._instance.name, "it went down")

    def relied_on(self, limit: Deadline) -> Reliance:
        """Returns a block for a ``with``: `limit` cuts it short where the instance is down and this leg says
        nothing."""
        return self._instance.relied_on(limit, self.go_down)

    def give_up_assembling(self, what: str) -> NotAssembled:
        """Returns the error to raise for a stream that says more than a whole answer can be made of: nobody's fault."""
        return NotAssembled(self._name, self._instance.name, what)

    def look(self) -> None:
        """Has the instance looked at: it has been silent for long, which need not mean anything."""
        self._instance.look_soon()

    def time_out(self, message: str) -> LegTimedOut:
        """Books that the leg missed its time. Returns the error to raise. Call it only in the moment in which it
        does.

        The peer is at fault where it has given no pages for the KV, and this instance has reached others meanwhile.
        """
        peer, expectation = self._peer, self._attempt.expectation
        if peer is not None and expectation is not None and not expectation.has_pages:
            has_reached_others, answers_others = self._instance.exchanges.failed(peer.exchanges)
            if has_reached_others and not answers_others:
                self._outcome = "no_kv"
                peer.blame(self._peer_epoch, self._peer_era, self._attempt.id, "it gave no pages for KV")
                return LegTimedOut("decode", peer.name, f"{message}: {peer.name!r} gave no pages for its KV")
        self._outcome = "timed_out"
        return LegTimedOut(self._name, self._instance.name, message)

    @property
    def source(self) -> Source | None:
        """The source that gives the body without waiting; None where there is none."""
        return self._open_leg.source

    @property
    def _open_leg(self) -> Leg:
        if self._leg is None:
            raise RuntimeError("the leg is not open")
        return self._leg

    def _unreachable(self, error: EngineUnreachable) -> LegUnreachable:
        self._outcome = "failed"
        self._instance.suspect(f"it cannot be reached: {error}", is_lost=isinstance(error, EngineRefused))
        return LegUnreachable(self._name, self._instance.name, "it cannot be reached")

    async def _refusal(self, leg: Leg) -> Exception:
        """Returns the error that an answer with another status than 200 stands for."""
        if leg.status in (429, 503):
            self._outcome = "busy"
            return Backpressure(self._name, self._instance.name, await self._whole_reply(leg))
        if 400 <= leg.status < 500:
            self._outcome = "refused"
            reply, code = await self._whole_reply(leg), self._instance.adapter.traits.stale_term_code
            if leg.status == 409 and code is not None and error_code(reply.content) == code:
                self._outcome = "stale_term"
                said = error_message(reply.content)[:MAX_REASON_CHARS]
                return StaleTerm(self._name, self._instance.name, engine_says=said)
            return reply
        if leg.status == 502 and self._peer is not None:
            traits = self._instance.adapter.traits
            if traits.kv_lost_code is not None:
                body = await self._error_body(leg)
                code = error_code(body)
                if code is not None and code == traits.receiver_lost_code:
                    return self._receiver_not_reached(self._peer)
                if code == traits.kv_lost_code:
                    return self._kv_not_taken(self._peer, error_message(body))
        return self.fail(f"it answered HTTP {leg.status}")

    def _receiver_not_reached(self, peer: Instance) -> ReceiverNotReached:
        """Returns the error of a decoder whose receiver does not answer this prefiller. The decoder is at fault, unless
        it has answered others since and the prefiller has reached nobody else."""
        has_reached_others, answers_others = self._instance.exchanges.failed(peer.exchanges)
        is_ours = answers_others and not has_reached_others
        self._outcome = "failed" if is_ours else "no_kv"
        if not is_ours:
            why = f"its receiver of KV does not answer {self._instance.name}"
            peer.blame(self._peer_epoch, self._peer_era, self._attempt.id, why)
        return ReceiverNotReached(self._instance.name, peer.name, is_ours=is_ours)

    def _kv_not_taken(self, peer: Instance, message: str) -> KvNotTaken:
        """Returns the error of KV that did not arrive, with the prefiller's own words for it. It counts as this leg's
        fault only where the peer is not in doubt already."""
        is_peer_in_doubt = peer.accuse(self._peer_epoch, f"KV from {self._instance.name} did not reach it")
        self._outcome = "no_kv" if is_peer_in_doubt else "failed"
        what = f"its KV did not reach {peer.name!r}"
        return KvNotTaken(self._name, self._instance.name, what, engine_says=message[:MAX_REASON_CHARS])

    async def _error_body(self, leg: Leg) -> bytes:
        """Returns the error body as far as it is read: until `MAX_ERROR_BYTES` are there. Raises `LegFailed`."""
        body = b""
        try:
            while len(body) < MAX_ERROR_BYTES and (chunk := await leg.read_chunk()):
                body += chunk
        except EngineBroken as error:
            raise self.break_off(error) from error
        return body

    def _keep(self, limit_bytes: int) -> CheckSize:
        """Returns a check that takes memory of the client's share for what is read. It raises `ReplyTooLarge` for more
        than `limit_bytes`, and `MemoryBudgetSpent`."""

        def keep(num_bytes: int) -> None:
            if num_bytes > limit_bytes:
                raise ReplyTooLarge(limit_bytes)
            if not self._memory.take_on(num_bytes - self._num_bytes):
                raise MemoryBudgetSpent(self._memory.limit_bytes)
            self._num_bytes = num_bytes

        return keep

    def _unreadable(self, error: EngineBroken, max_answer_bytes: int | None) -> LegFailed:
        """Books a body that broke off or is too large. Returns the error to raise."""
        if not isinstance(error, ReplyTooLarge):
            return self.break_off(error)
        return self.fail(str(error) if max_answer_bytes is None else too_large(max_answer_bytes))

    async def _whole_reply(self, leg: Leg) -> EngineReply:
        try:
            content = await leg.read(self._keep(MAX_REPLY_BYTES))
        except ReplyTooLarge as too_large_reply:
            raise self.fail(str(too_large_reply)) from too_large_reply
        except EngineBroken as broken:
            raise self.break_off(broken) from broken
        content_type = leg.header("content-type") or "application/json"
        return EngineReply(leg.status, content, content_type, leg.header("retry-after"))
