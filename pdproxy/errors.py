"""The module holds one small tree of errors.

Each error knows its HTTP status, its OpenAI error code and its Retry-After. `ProxyError` is this proxy's own error.
`EngineReply` carries an engine's own error answer through unchanged: a 4xx, or a 503 where no other instance can help.
"""

from __future__ import annotations

from typing import Any

from transfer.logs import printable

MAX_MESSAGE_BYTES = 2048
"""The most bytes of an error's message, before what cannot be printed is escaped: parts of it are others' words."""
MAX_PARAM_BYTES = 256


class ProxyError(Exception):
    """`ProxyError` is the base of every error that this proxy answers with an OpenAI error object.

    `message` is shown to the client: it names the field or the limit and the way out, never internals. Texts from
    outside are bounded and made printable here.
    `retry_after_s` is in seconds, or None.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        message = printable(message, MAX_MESSAGE_BYTES)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else printable(param, MAX_PARAM_BYTES)
        self.code = code if code is not None else type(self).code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Returns the OpenAI error object: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(ProxyError):
    """`InvalidRequest` says that the client's body cannot be served. `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """`ContextLengthExceeded` says that the prompt is longer than the model's context, or than the decoder's PD buffer
    can ever hold.
    """

    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class ResponseNotFound(InvalidRequest):
    """`ResponseNotFound` says that no decoder keeps the response that the request refers to."""

    status = 404
    code = "response_not_found"


class ApiNotServed(InvalidRequest):
    """`ApiNotServed` says that the engines of the model do not serve this path, or not as a pair."""

    status = 404
    code = "api_not_served"


class BodyTooSlow(InvalidRequest):
    """`BodyTooSlow` says that the body did not arrive in full within its time."""

    status = 408
    code = "body_timeout"


class UnsupportedCoding(InvalidRequest):
    """`UnsupportedCoding` says that the body is compressed, or is coded in another way which this proxy does
    not undo.
    """

    status = 501
    code = "unsupported_transfer_encoding"


class Unauthorized(InvalidRequest):
    """`Unauthorized` says that the proxy has API keys, but the request carries none of them."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NoSuchRoute(InvalidRequest):
    status = 404
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class AdminOff(InvalidRequest):
    """`AdminOff` says that the admin API was called, but the proxy has no key for that API."""

    status = 403
    type = "permission_error"
    code = "admin_disabled"


class NoSuchInstance(InvalidRequest):
    status = 404
    code = "no_such_instance"


class InstanceConflict(InvalidRequest):
    """`InstanceConflict` says that the present state of the fleet forbids the request. A later or a different request
    may work.
    """

    status = 409
    code = "instance_conflict"


class NotReady(ProxyError):
    """`NotReady` says that no instance of the needed role is ready."""

    status = 503
    type = "service_unavailable"
    code = "no_ready_instance"


class MemoryBudgetSpent(ProxyError):
    """`MemoryBudgetSpent` says that what the proxy holds for all its clients together is as much as it may be."""

    status = 503
    type = "service_unavailable"
    code = "memory_budget_spent"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            "the proxy holds as many bytes of requests and answers as it may; try again soon, or give it a larger "
            f"--memory-budget than {limit_bytes} bytes",
            retry_after_s=1.0,
        )


class NotCounted(NotReady):
    """`NotCounted` says that no engine told how long the prompt is, and that the prompt has no upper bound either."""

    code = "prompt_not_counted"


class Draining(NotReady):
    """`Draining` says that the proxy is shutting down and takes no new requests."""

    code = "shutting_down"


class OutOfDescriptors(ProxyError):
    """`OutOfDescriptors` says that the proxy's own process can open no more connections for now. No engine is to
    blame.
    """

    status = 503
    type = "service_unavailable"
    code = "out_of_descriptors"


class StoreUnavailable(ProxyError):
    """`StoreUnavailable` says that the coordinator's store did not answer, or holds what cannot be right."""

    status = 503
    type = "service_unavailable"
    code = "coordinator_unavailable"


class AdmissionError(ProxyError):
    """`AdmissionError` says that admission did not grant the pages. Nothing is held then."""


class NeverFits(AdmissionError):
    """`NeverFits` says that the request needs more pages than there are in all. Waiting cannot help."""

    status = 400
    type = "invalid_request_error"
    code = "context_length_exceeded"

    def __init__(self, pages: int, capacity: int) -> None:
        super().__init__(
            f"the prompt needs {pages} pages of KV memory, and there are {capacity}; "
            "shorten the prompt or enlarge that memory",
            param="prompt",
        )
        self.pages = pages
        self.capacity = capacity


class QueueFull(AdmissionError):
    """`QueueFull` says that the bounded queue for slots is full."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimited(ProxyError):
    """`RateLimited` says that the client's key has used up its requests or tokens per minute."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QueueTimeout(AdmissionError):
    """`QueueTimeout` says that the request waited for slots as long as it may, and got none."""

    status = 503
    type = "service_unavailable"
    code = "queue_timeout"


class LegFailed(ProxyError):
    """`LegFailed` says that a leg failed, before the client saw a byte or in the middle of the answer.

    `leg` is ``prefill`` or ``decode``; `instance` is the instance's name.
    """

    status = 502
    type = "upstream_error"
    code = "leg_failed"

    def __init__(self, leg: str, instance: str, what: str, *, engine_says: str = "") -> None:
        super().__init__(f"the {leg} leg on instance {instance!r} failed: {what}")
        self.leg = leg
        self.instance = instance
        self.engine_says = engine_says
        """The engine's own words, for operators. Clients are not told them: they may hold addresses of the fleet."""


class LegUnreachable(LegFailed):
    """LegUnreachable says that the engine has not seen the request: nothing is under way there."""


class LegNotTried(LegUnreachable):
    """`LegNotTried` says that the proxy could not even try to reach the engine, because this machine had no
    descriptor, port or memory left. It says nothing of the engine.
    """

    status = 503
    type = "service_unavailable"
    code = "out_of_descriptors"

    def __init__(self, leg: str, instance: str, *, retry_after_s: float) -> None:
        super().__init__(leg, instance, "")
        self.message = "the proxy can open no more connections for now; try again soon"
        self.args = (self.message,)
        self.retry_after_s = retry_after_s


class Backpressure(LegFailed):
    """`Backpressure` says that an engine answered 429 or 503. This is not a fault.

    The client gets `reply` where no other instance can take the request.
    """

    def __init__(self, leg: str, instance: str, reply: EngineReply) -> None:
        super().__init__(leg, instance, f"it is busy (HTTP {reply.status})")
        self.reply = reply


class StaleTerm(LegFailed):
    """`StaleTerm` says that an engine has heard of a later leader than the one for whom the leg was sent. Nothing was
    begun there, and the engine is not at fault: a new attempt asks for its turn at whoever leads now.
    """

    status = 503
    type = "service_unavailable"
    code = "stale_term"

    def __init__(self, leg: str, instance: str, *, engine_says: str = "") -> None:
        super().__init__(leg, instance, "", engine_says=engine_says)
        self.message = "requests are admitted by another process now; try again soon"
        self.args = (self.message,)
        self.retry_after_s = 1.0


class HandoffMissing(LegFailed):
    """`HandoffMissing` says that a prefiller read the prompt and kept its KV for nobody.

    The proxy never lets the decoder read the prompt again instead, since then nobody would notice that prefillers work
    for nothing.
    """

    code = "kv_not_handed_over"


class EventTooLarge(LegFailed):
    """`EventTooLarge` says that one event of a stream is larger than the proxy keeps. A client can ask for such events,
    with `logprobs` or `echo`. So it says nothing against the engine, and another engine would do the same."""

    code = "event_too_large"

    def __init__(self, leg: str, instance: str, max_bytes: int) -> None:
        super().__init__(
            leg,
            instance,
            f"an event of its answer is larger than {max_bytes} bytes; ask for fewer log-probabilities or for less of "
            "the prompt in the answer, or raise the proxy's max-event-bytes",
        )


class KvFailed(ProxyError):
    """`KvFailed` says that the KV of this attempt will not arrive at the decoder."""

    status = 502
    type = "upstream_error"
    code = "kv_transfer_failed"


class DeadlineExceeded(ProxyError):
    """`DeadlineExceeded` says that the request's deadline has passed, or the time limit of one phase."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineReply(Exception):
    """`EngineReply` is an engine's own answer, which goes to the client with its status, body and content type
    unchanged.
    """

    def __init__(
        self, status: int, content: bytes, content_type: str = "application/json", retry_after: str | None = None
    ) -> None:
        super().__init__(f"the engine answered HTTP {status}")
        self.status = status
        self.content = content
        self.content_type = content_type
        self.retry_after = retry_after


class ConfigError(Exception):
    """`ConfigError` says that the configuration cannot work. The message names the option and the way out."""


class IllegalTransition(Exception):
    """`IllegalTransition` says that a state table does not allow this step. It is raised before anything has changed,
    and is always a bug.
    """


class IntegrityError(Exception):
    """`IntegrityError` says that numbers which must add up do not add up. This is always a bug."""


class KvNotTaken(LegFailed):
    """`KvNotTaken` says that a prefiller's KV did not reach its decoder. Either of them may be at fault."""


class ReceiverNotReached(LegFailed):
    """`ReceiverNotReached` says that a prefiller could give its KV to nobody, because the decoder does not answer it.

    `instance` is the one at fault.
    """

    code = "kv_transfer_failed"

    def __init__(self, prefiller: str, decoder: str, *, is_ours: bool) -> None:
        leg, instance = ("prefill", prefiller) if is_ours else ("decode", decoder)
        what = f"no KV can be sent to it: its receiver does not answer {prefiller!r}"
        super().__init__(leg, instance, f"the receiver of {decoder!r} does not answer it" if is_ours else what)


class EngineSaidError(LegFailed):
    """`EngineSaidError` says that the engine ended a stream under way with an error event: `events`, as it came.

    `is_ours` False: the event blames the request, which would fare no better elsewhere.
    """

    code = "engine_error"

    def __init__(self, leg: str, instance: str, events: bytes, *, is_ours: bool) -> None:
        super().__init__(leg, instance, "it reported an error")
        self.events = events
        self.is_ours = is_ours


class NotAssembled(LegFailed):
    """`NotAssembled` says that no answer can be put together from this stream: it has to be asked for as a whole.

    Nobody is at fault.
    """


class LegTimedOut(DeadlineExceeded):
    """`LegTimedOut` says that a leg was silent for as long as it may be."""

    def __init__(self, leg: str, instance: str, message: str) -> None:
        super().__init__(message)
        self.leg = leg
        self.instance = instance
