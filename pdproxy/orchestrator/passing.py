"""Passing has one instance answer a body as it is: no legs, no KV, no pages.

One ready instance that serves the model gets the client's bytes, and its answer goes back with its status. Until the
first byte has reached the client another instance takes over from one that fails; after it nobody does. Each call tells
the instance's breaker how it went, and is closed whatever happens. An instance that lives and answers HTTP 5xx is at
fault only where another one can answer the same body: engines stumble over some bodies, and no client may keep others
from all of them with those. A violation would be an answer of two instances together, or a call that is still counted
(`Instance.num_legs`) when its client has gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from pdproxy.admission.retry_budget import RetryBudget
from pdproxy.aio.deadline import Deadline
from pdproxy.aio.descriptors import RETRY_AFTER_S
from pdproxy.engines.http.base import (
    REPLY,
    CheckSize,
    EngineBroken,
    EngineRefused,
    EngineUnreachable,
    Leg,
    LocalFault,
    ReplyTooLarge,
)
from pdproxy.errors import (
    Backpressure,
    EngineReply,
    EngineSaidError,
    LegFailed,
    LegNotTried,
    LegTimedOut,
    MemoryBudgetSpent,
    ModelNotFound,
    NoSuchRoute,
    NotReady,
    ProxyError,
    ResponseNotFound,
)
from pdproxy.fleet.instance import Health, Instance
from pdproxy.fleet.pool import RETRY_AFTER_S as NOT_READY_S
from pdproxy.fleet.pool import Pool
from pdproxy.openai.apis import KEPT_RESPONSE, PASSED, UNREAD, marked
from pdproxy.openai.request import RESPONSES, GenerationRequest, encode
from pdproxy.openai.sse import EventBuffer
from pdproxy.orchestrator.context import ClientStalledError, RequestContext
from pdproxy.telemetry.attempt_record import AttemptRecord, Path, Phase
from pdproxy.telemetry.observer import LegObserver

LEG = "pass"
"""The name of such a call among the legs, in metrics and errors."""
MARK_BYTES = 4
_NOT_THERE = frozenset({404, 405, 501})
"""The statuses with which a server says that it has no such path. Engines say other things with them as well."""
_NO_PATH = frozenset({"not found", "method not allowed", "not implemented"})
"""The words which servers have for a path that is not there, in small letters."""
_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassingLimits:
    """`PassingLimits` are seconds: for a whole answer or a stream's head, for a whole answer that has to be written,
    and between two pieces of a stream. Also the number of further attempts, and the most bytes of a whole answer and of
    an event."""

    answer_s: float
    whole_s: float
    idle_s: float
    retries: int
    max_answer_bytes: int
    max_event_bytes: int


class _Words(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    detail: msgspec.Raw = msgspec.Raw(b"null")
    message: str = ""
    error: msgspec.Raw = msgspec.Raw(b"null")


_refusal = msgspec.json.Decoder(_Refusal)
_words = msgspec.json.Decoder(_Words | str | None)


def mark_of(instance: str, owner: str | None) -> str:
    """Returns the mark by which the ids of responses tell which decoder keeps them; `instance` is its name. `owner` is
    the name of the client's key, if it has one: with a key of another name, the mark is no decoder's."""
    told = instance if owner is None else f"{owner}\n{instance}"
    return blake2b(told.encode(), digest_size=MARK_BYTES).hexdigest()


class Passing:
    """Passing serves requests that one instance answers as they are.

    Mutable state: whose turn it is among equals.
    """

    def __init__(self, pool: Pool, retries: RetryBudget, observer: LegObserver, limits: PassingLimits) -> None:
        self._pool = pool
        self._retries = retries
        self._observer = observer
        self.limits = limits
        self._turn = 0

    async def serve(self, context: RequestContext) -> None:
        """Serves the request by one instance after the other until one has answered. Raises the error that the client
        is to be told: `EngineReply`, `ProxyError`."""
        request = context.request
        context.record.reason = PASSED.get(request.endpoint, KEPT_RESPONSE)
        if (charge := context.record.charge) is not None and request.endpoint not in UNREAD:
            charge.reserve(request.num_prompt_bytes, is_exact=False)
        num_left = 0 if request.keeper is not None else self.limits.retries
        failure: LegFailed | LegTimedOut | None = None
        in_doubt: list[_PassedCall] = []
        while True:
            try:
                instance = self._choose(request, context.avoid, context.record.key_name)
            except (NotReady, ModelNotFound) as error:
                raise _as_told(failure) or error from None
            try:
                await self._ask(context, instance)
                for call in in_doubt:
                    call.blame()
                return
            except LegNotTried:
                raise
            except EngineSaidError as error:
                if not error.is_ours:
                    raise  # it would fare no better elsewhere
                failure = error
            except _StumbledError as error:
                failure = error
                in_doubt.append(error.call)
            except (LegFailed, LegTimedOut) as error:
                failure = error
            context.avoid |= {instance.name}
            if num_left < 1 or context.client.is_started or not self._has_other(request, context.avoid):
                break
            if not self._retries.spend():
                break
            num_left -= 1
        told = failure if context.client.is_started else _as_told(failure)
        assert told is not None
        raise told

    # ── whom to ask ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _choose(self, request: GenerationRequest, avoid: frozenset[str], owner: str | None) -> Instance:
        """Returns the least busy of the instances that serve the model; those that have failed come last. Raises
        `NotReady`, `ModelNotFound`, `ResponseNotFound`, `InvalidRequest`."""
        self._pool.check_named(request.model)
        if request.keeper is not None:
            return self.keeper(request.keeper, owner)
        serving = self._serving(request)
        if not serving:
            raise self._why_none(request.model)
        self._turn += 1
        start = self._turn % len(serving)
        return min(serving[start:] + serving[:start], key=lambda one: (one.name in avoid, one.num_legs))

    def keeper(self, mark: str, owner: str | None, *, param: str = "previous_response_id") -> Instance:
        """Returns the decoder with this mark, for the `owner` of the response. Raises `ResponseNotFound` where there is
        none."""
        for instance in self._pool.of_role("decode"):
            if mark and mark_of(instance.name, owner) == mark and instance.is_routable:
                return instance
        raise ResponseNotFound(
            "no decoder that is ready keeps this response; send the whole conversation as input",
            param=param,
        )

    def _serving(self, request: GenerationRequest) -> list[Instance]:
        """Returns the instances that can be asked. Those through which no canary has gone count where no other serves
        the model: an engine for embeddings writes no text."""
        able = [one for one in self._pool.instances if not one.is_draining and one.serves(request.model)]
        if request.endpoint == RESPONSES:  # the response is kept where it is written
            able = [one for one in able if one.role == "decode"]
        ready = [one for one in able if one.is_ready and one.breaker.allows()]
        return ready or [one for one in able if one.health is Health.ALIVE and one.breaker.allows()]

    def _has_other(self, request: GenerationRequest, avoid: frozenset[str]) -> bool:
        return any(one.name not in avoid for one in self._serving(request))

    def _why_none(self, model: str | None) -> ProxyError:
        self._pool.wanted.note(model)
        instances = self._pool.instances
        if any(one.is_ready for one in instances) and not any(one.is_known_for(model) for one in instances):
            return ModelNotFound(f"the model {model!r} does not exist", param="model")
        return NotReady(
            f"no instance of {model!r} is ready" if model else "no instance is ready", retry_after_s=NOT_READY_S
        )

    # ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, context: RequestContext, instance: Instance) -> None:
        """Has `instance` answer. Raises `LegFailed` and `LegTimedOut` where another one may do better, `EngineReply`
        for the engine's own refusal, and `NoSuchRoute` where it has no such path."""
        attempt = context.begin_attempt(None)
        is_prefiller = instance.role == "prefill"
        attempt.bind(Path.PASSED, instance.name if is_prefiller else None, None if is_prefiller else instance.name)
        attempt.advance(Phase.PASSED)
        call = _PassedCall(instance, self._observer)
        end = Phase.CANCELLED
        try:
            await self._answer(context, attempt, call)
            end = Phase.DONE
        except Exception:
            end = Phase.FAILED
            raise
        finally:
            call.close()
            attempt.advance(end)

    async def _answer(self, context: RequestContext, attempt: AttemptRecord, call: _PassedCall) -> None:
        request, limits, instance = context.request, self.limits, call.instance
        headers = {**context.client.forwarded, **instance.adapter.leg_headers(context.record.request_id, attempt.id)}
        is_written = request.endpoint == RESPONSES and not request.stream
        answer_s = limits.whole_s if is_written else limits.answer_s
        limit = Deadline(answer_s, lambda: call.time_out(f"it did not answer within {answer_s:g} s"))
        with limit, instance.relied_on(limit, call.go_down):
            leg = await call.open(request.endpoint, _body(context, instance), headers)
            content_type = leg.header("content-type") or "application/json"
            if leg.status == 200 and content_type.startswith(_STREAM):
                await self._relay(context, call, leg, limit, content_type)
                return
            body = await call.read(leg, self._keep(context))
        _judge(request, call, leg, body, content_type)
        if request.endpoint not in UNREAD:  # `count_tokens` tells a number like a usage
            context.record.tokens.tell(body)
        with Deadline(limits.idle_s, lambda: _stalled(limits.idle_s)):
            await context.answer(leg.status, content_type.encode("latin-1"), body)

    async def _relay(
        self, context: RequestContext, call: _PassedCall, leg: Leg, limit: Deadline, content_type: str
    ) -> None:
        """Relays a stream in whole events. Raises `LegFailed` where it breaks off, or ends without its last event, and
        `EngineSaidError` where it ends with the engine's own error."""
        idle_s, dialect, is_done = self.limits.idle_s, context.dialect, False
        buffer = EventBuffer(self.limits.max_event_bytes, lambda: call.fail("an event of its answer is too large"))
        while True:
            chunk = await call.read_chunk(leg)
            if not chunk:
                break
            events = buffer.feed(chunk)
            if not events:
                continue
            error_events = b""
            if events.find(dialect.error_mark) >= 0:
                events, error_events = dialect.before_error(events)
            if events:
                is_done = is_done or dialect.has_done(events)
                context.record.tokens.add(events)
                if events.find(dialect.usage_mark) >= 0:
                    context.record.tokens.tell(events)
                limit.wait(idle_s, lambda: _stalled(idle_s))
                if not context.client.is_started:
                    await context.start(leg.status, content_type.encode("latin-1"))
                await context.client.send(events)
            if error_events:
                raise call.say_error(error_events, is_ours=not dialect.is_clients_fault(error_events))
            limit.wait(idle_s, lambda: call.time_out(f"it was silent for {idle_s:g} s"))
        if not is_done or buffer.num_pending_bytes:
            raise call.fail("its answer broke off")
        call.outcome = "ok"
        await context.client.end()

    def _keep(self, context: RequestContext) -> CheckSize:
        """Returns a check that takes memory of the client's share for what is read."""
        num_taken = 0

        def keep(num_bytes: int) -> None:
            nonlocal num_taken
            if num_bytes > self.limits.max_answer_bytes:
                raise ReplyTooLarge(self.limits.max_answer_bytes)
            if not context.client.memory.take_on(num_bytes - num_taken):
                raise MemoryBudgetSpent(context.client.memory.limit_bytes)
            num_taken = num_bytes

        return keep

    # ── without a body ──────────────────────────────────────────────────────────────────────────────────────────────

    async def get(
        self, path: str, instance: Instance | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Returns status and body of `path` as one ready instance tells them; of `instance`, where it must be that
        one. Raises `LegFailed`, `NotReady`, and `NoSuchRoute` where no engine has the path."""
        ready = [instance] if instance is not None else [one for one in self._pool.instances if one.is_routable]
        error: ProxyError = NotReady("no instance is ready", retry_after_s=NOT_READY_S)
        for one in ready[: 1 + self.limits.retries]:
            call = _PassedCall(one, self._observer)
            try:
                status, body = await call.get(path, headers, timeout_s=self.limits.answer_s)
            except LegFailed as failed:
                error = failed
                continue
            finally:
                call.close()
            if not (status in _NOT_THERE and _says_no_path(body)):
                return status, body
            error = NoSuchRoute(f"the engine ({one.adapter.name}) has no GET {path}")
        raise error

    async def post(self, path: str, instance: Instance, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Sends a POST without a body. Returns status and body. Raises `LegFailed`, `LegTimedOut`."""
        call = _PassedCall(instance, self._observer)
        answer_s = self.limits.answer_s
        try:
            with Deadline(answer_s, lambda: call.time_out(f"it did not answer within {answer_s:g} s")):
                leg = await call.open(path, b"", headers)
                body = await call.read(leg, REPLY)
            call.outcome = "ok" if leg.status < 400 else "refused"
            return leg.status, body
        finally:
            call.close()


class _PassedCall:
    """_PassedCall is one call to one instance. What goes wrong is booked by a verb, which returns the error to raise.

    Mutable state: the answer, once its head is there; how the call ended, and whether it is in doubt whose fault that
    is; whether the call is closed.
    """

    __slots__ = ("_era", "_is_closed", "_is_in_doubt", "_leg", "_observer", "instance", "outcome")

    def __init__(self, instance: Instance, observer: LegObserver) -> None:
        self.instance = instance
        self._observer = observer
        self._leg: Leg | None = None
        self.outcome = "closed"
        self._is_in_doubt = False
        self._is_closed = False
        self._era = instance.leg_started()
        """The era of the breaker when the call began."""

    async def open(self, path: str, body: bytes, headers: Mapping[str, str]) -> Leg:
        """Sends the call. Returns the answer when its head is there. Raises `LegFailed`."""
        try:
            self._leg = leg = await self.instance.client.post(path, body, headers)
        except (EngineUnreachable, EngineBroken) as error:
            raise self._broken(error) from error
        return leg

    async def get(self, path: str, headers: Mapping[str, str] | None, *, timeout_s: float) -> tuple[int, bytes]:
        """Returns status and body. Raises `LegFailed`."""
        try:
            answer = await self.instance.client.get(path, timeout_s=timeout_s, headers=headers)
        except (EngineUnreachable, EngineBroken) as error:
            raise self._broken(error) from error
        self.outcome = "ok" if answer[0] < 400 else "refused"
        return answer

    async def read(self, leg: Leg, check: CheckSize) -> bytes:
        """Returns the whole body. Raises `LegFailed`, and what `check` raises."""
        try:
            return await leg.read(check)
        except ReplyTooLarge as error:
            raise self.fail(str(error)) from error
        except EngineBroken as error:
            raise self._broken(error) from error

    async def read_chunk(self, leg: Leg) -> bytes:
        """Returns the next piece, ``b""`` at the end. Raises `LegFailed`."""
        try:
            return await leg.read_chunk()
        except EngineBroken as error:
            raise self._broken(error) from error

    def fail(self, what: str) -> LegFailed:
        """Books that something is wrong with the answer."""
        self.outcome = "failed"
        return LegFailed(LEG, self.instance.name, what)

    def stumble(self, what: str) -> _StumbledError:
        """Books that the instance could not cope with the request, which may be the request's fault."""
        self.outcome = "failed"
        self._is_in_doubt = True
        return _StumbledError(self, what)

    def blame(self) -> None:
        """Tells the breaker of a call that was in doubt: it was the instance's fault."""
        self.instance.breaker.failed(self._era)

    def say_error(self, events: bytes, *, is_ours: bool) -> EngineSaidError:
        """Books the engine's own error event, with which it ended a stream."""
        self.outcome = "failed" if is_ours else "refused"
        return EngineSaidError(LEG, self.instance.name, events, is_ours=is_ours)

    def time_out(self, what: str) -> LegTimedOut:
        """Books that the call missed its time."""
        self.outcome = "timed_out"
        return LegTimedOut(LEG, self.instance.name, f"instance {self.instance.name!r}: {what}")

    def go_down(self) -> LegFailed:
        """Books that the instance was found to be down, and has said nothing since."""
        self.outcome = "closed"  # that it is down keeps requests from it already
        return LegFailed(LEG, self.instance.name, "it went down")

    def close(self) -> None:
        """Tells how the call went, and lets go of the connection. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.outcome == "timed_out":
            self.instance.suspect("it did not answer in time", is_lost=False)
        self.instance.leg_finished(self._era, "refused" if self._is_in_doubt else self.outcome)
        self._observer.leg_finished(LEG, self.instance.name, self.outcome)
        if self._leg is not None:
            self._leg.close()

    def _broken(self, error: EngineUnreachable | EngineBroken) -> LegFailed:
        name = self.instance.name
        if isinstance(error, LocalFault):
            self.outcome = "not_tried"
            return LegNotTried(LEG, name, retry_after_s=RETRY_AFTER_S)
        self.instance.suspect(f"a call to it failed: {error}", is_lost=isinstance(error, EngineRefused))
        return self.fail("it cannot be reached" if isinstance(error, EngineUnreachable) else "the connection broke")


class _StumbledError(LegFailed):
    """_StumbledError says that an instance answered HTTP 5xx. The `call` is in doubt."""

    def __init__(self, call: _PassedCall, what: str) -> None:
        super().__init__(LEG, call.instance.name, what)
        self.call = call


def _judge(request: GenerationRequest, call: _PassedCall, leg: Leg, body: bytes, content_type: str) -> None:
    """Books how the call went. Raises the error for an answer that is not passed on as it is: `Backpressure`,
    `LegFailed`, `EngineReply`, `NoSuchRoute`."""
    name, status = call.instance.name, leg.status
    if status < 400:
        call.outcome = "ok"
        return
    reply = EngineReply(status, body, content_type, leg.header("retry-after"))
    if status in (429, 503):
        call.outcome = "busy"
        raise Backpressure(LEG, name, reply)
    if status in _NOT_THERE and _says_no_path(body):
        call.outcome = "refused"
        raise NoSuchRoute(f"the engine of this model ({call.instance.adapter.name}) has no POST {request.endpoint}")
    if status >= 500 and status not in _NOT_THERE:
        raise call.stumble(f"it answered HTTP {status}")
    call.outcome = "refused"
    raise reply


def _says_no_path(body: bytes) -> bool:
    """Tells whether an error body speaks of the path, and not of a model or of anything else in the request."""
    try:
        told = _refusal.decode(body)
        error = _words.decode(told.error)
        words = error.message if isinstance(error, _Words) else error or told.message
        detail = msgspec.json.decode(told.detail)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # no JSON: not an engine's API has answered, but the server in front of it
    said = words or (detail if isinstance(detail, str) else "")
    return said.rpartition(": ")[2].lower().rstrip(".") in _NO_PATH or said.startswith("there is no ")


def _body(context: RequestContext, instance: Instance) -> bytes:
    """Returns the client's fields; a response is kept under an id that tells where."""
    request = context.request
    if request.endpoint != RESPONSES:
        return encode(request.fields)
    return encode(marked(request, mark_of(instance.name, context.record.key_name)))


def _stalled(idle_s: float) -> ClientStalledError:
    return ClientStalledError(f"the client took nothing for {idle_s:g} s")


def _as_told(failure: LegFailed | LegTimedOut | None) -> ProxyError | EngineReply | None:
    """Returns the error that the client gets: a busy engine's own words, while there can be a status."""
    return failure.reply if isinstance(failure, Backpressure) else failure
