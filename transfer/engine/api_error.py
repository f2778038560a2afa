"""The errors that the engine answers with: OpenAI's error object and the HTTP status that goes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from transfer.engine.api import EngineBusy, JobTooLarge, RankLost
from transfer.errors import ReceiverLost, StaleTerm, TransferError
from transfer.wire import TERM_HEADER


@dataclass(eq=False)
class ApiError(Exception):
    """An `ApiError` is shown to the client as it is. The message names the field or the limit and the way out, never
    internals."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    type: str = "invalid_request_error"
    retry_after_s: float | None = None
    ends_connection: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """Returns ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [] if self.retry_after_s is None else [(b"retry-after", b"%d" % math.ceil(self.retry_after_s))]
        return [*headers, (b"connection", b"close")] if self.ends_connection else headers


def refuse_if(condition: bool, param: str, message: str) -> None:
    """Raises the 400 that names the field `param`, if `condition` is true."""
    if condition:
        raise ApiError(message, param=param)


def too_long(message: str, param: str) -> ApiError:
    """Returns the error for more tokens than the model's context, or this engine's KV cache, can ever hold."""
    return ApiError(message, param=param, code="context_length_exceeded")


def model_not_found(name: str) -> ApiError:
    message = f"The model {name!r} does not exist."
    return ApiError(message, param="model", code="model_not_found", status=404)


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(f"The request body is larger than {limit_bytes} bytes.", code="body_too_large", status=413)


def out_of_descriptors() -> ApiError:
    """Returns the answer to clients for whom this process has no descriptors left."""
    return ApiError(
        "This engine has as many connections open as it can have; try again soon.",
        code="out_of_descriptors",
        status=503,
        type="service_unavailable",
        retry_after_s=1.0,
        ends_connection=True,
    )


def memory_spent(limit_bytes: int) -> ApiError:
    return ApiError(
        f"The engine holds as many bytes of request bodies as it may; try again soon, or give it a larger "
        f"--memory-budget than {limit_bytes} bytes.",
        code="memory_budget_spent",
        status=503,
        type="service_unavailable",
        retry_after_s=1.0,
    )


def from_core(error: Exception) -> ApiError:
    """Returns the answer to an error that the engine core raised. Lost KV is a 502: the same prompt can be tried
    anew."""
    match error:
        case ApiError():
            return error
        case EngineBusy(retry_after_s=retry_after_s):
            return ApiError(
                str(error),
                code="engine_busy",
                status=503,
                type="service_unavailable",
                retry_after_s=retry_after_s,
            )
        case JobTooLarge():
            return too_long(str(error), "prompt")
        case StaleTerm():  # nobody's fault: a new attempt, of the leader of today, may be tried at once
            message = f"{error}; ask for a new turn"
            return ApiError(message, param=TERM_HEADER, code="stale_term", status=409, type="conflict_error")
        case RankLost():  # this engine's fault, not its peer's
            return ApiError(str(error), code="rank_lost", status=500, type="server_error")
        case ReceiverLost():  # the peer's fault, as far as can be seen from here
            return ApiError(str(error), code="kv_receiver_lost", status=502, type="server_error")
        case TransferError():
            return ApiError(str(error), code="kv_transfer_failed", status=502, type="server_error")
    return ApiError("The engine failed to answer; its log tells why.", status=500, type="server_error")
