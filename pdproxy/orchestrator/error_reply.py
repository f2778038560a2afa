"""Error replies tell a client that its request cannot be served: a real status while possible, an event after that."""

from __future__ import annotations

import math
from contextlib import suppress

import msgspec

from pdproxy.aio.deadline import Deadline
from pdproxy.errors import Draining, EngineReply, EngineSaidError, ProxyError
from pdproxy.orchestrator.context import Headers, RequestContext
from pdproxy.telemetry.record import Outcome, RequestRecord

JSON = b"application/json"
TELL_S = 5.0
"""Seconds for telling a client what went wrong; after that, a client that does not take the message is left alone."""


async def pass_on(context: RequestContext, reply: EngineReply) -> None:
    """Sends the engine's own answer, unchanged but for its form. It is possible only before the first byte."""
    book(context.record, reply)
    reply = context.dialect.reply(reply)
    more = () if reply.retry_after is None else ((b"retry-after", reply.retry_after.encode("latin-1")),)
    with suppress(_NotListeningError), Deadline(TELL_S, _NotListeningError):
        await context.answer(reply.status, reply.content_type.encode("latin-1"), reply.content, *more)


async def tell(context: RequestContext, error: ProxyError) -> None:
    """Sends the proxy's own error object, as an answer, or as the event that ends a stream under way.

    A whole answer of which a part is out cannot be mended. It stays without its end, so that the server breaks the
    connection off and the client sees that it is not all there.
    """
    book(context.record, error)
    if context.client.is_started and not context.request.stream:
        return
    with suppress(_NotListeningError), Deadline(TELL_S, _NotListeningError):
        if context.client.is_started:
            said = error.events if isinstance(error, EngineSaidError) else context.dialect.error_event(error)
            await context.client.send(said)
            await context.client.end()
        else:
            body = msgspec.json.encode(context.dialect.error_body(error))
            await context.answer(error.status, JSON, body, *retry_header(error))


def book(record: RequestRecord, error: EngineReply | ProxyError) -> None:
    """Ends the record of a request that is not served, because of `error`."""
    if isinstance(error, EngineReply):
        record.error = "engine_reply"
        record.end(Outcome.REFUSED if error.status < 500 else Outcome.FAILED)
    else:
        record.error = error.code or error.type
        record.end(outcome_of(error))


class _NotListeningError(Exception):
    """_NotListeningError says that the client does not take what it is told."""


def retry_header(error: ProxyError) -> Headers:
    """Returns a header that tells when to come again, where that is known."""
    return [] if error.retry_after_s is None else [(b"retry-after", b"%d" % math.ceil(error.retry_after_s))]


def error_headers(error: ProxyError, body: bytes) -> Headers:
    """Returns the headers of an error answer besides its type."""
    return [(b"content-length", b"%d" % len(body)), *retry_header(error)]


def outcome_of(error: ProxyError) -> Outcome:
    """Returns the outcome of a request that is answered with `error`."""
    if isinstance(error, Draining):
        return Outcome.SHUTDOWN
    return Outcome.REFUSED if error.status < 500 else Outcome.FAILED
