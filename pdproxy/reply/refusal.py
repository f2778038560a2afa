"""What a client is told when its request cannot be served: a real status while possible, an event after that."""

from __future__ import annotations

import math

import anyio
import msgspec

from pdproxy.errors import Draining, EngineReply, ProxyError
from pdproxy.legs import EngineSaidError
from pdproxy.reply.sse import event
from pdproxy.telemetry.record import Outcome
from pdproxy.trip import Headers, Trip

TELL_S = 5.0
"""For telling a client what went wrong; one that does not listen is left alone after that."""


async def pass_on(trip: Trip, reply: EngineReply) -> None:
    """The engine's own answer, unchanged. Only before the first byte."""
    trip.record.error = "engine_reply"
    trip.record.end(Outcome.REFUSED if reply.status < 500 else Outcome.FAILED)
    more = [(b"content-length", str(len(reply.content)).encode())]
    if reply.retry_after is not None:
        more.append((b"retry-after", reply.retry_after.encode("latin-1")))
    with anyio.move_on_after(TELL_S):
        await trip.start(reply.status, reply.content_type, *more)
        await trip.client.send(reply.content)
        await trip.client.end()


async def tell(trip: Trip, error: ProxyError) -> None:
    """Our own error object, as an answer, or as the event that ends a stream under way.

    A whole answer of which a part is out cannot be mended: it stays without its end, so that the server breaks the
    connection off and the client sees that it is not all there.
    """
    trip.record.error = error.code or error.type
    trip.record.end(_outcome_of(error))
    if trip.client.is_started and not trip.request.stream:
        return
    with anyio.move_on_after(TELL_S):
        if trip.client.is_started:
            await trip.client.send(error.events if isinstance(error, EngineSaidError) else event(error.body()))
        else:
            body = msgspec.json.encode(error.body())
            await trip.start(error.status, "application/json", *error_headers(error, body))
            await trip.client.send(body)
        await trip.client.end()


def error_headers(error: ProxyError, body: bytes) -> Headers:
    """What goes with an error answer besides its type."""
    headers = [(b"content-length", str(len(body)).encode())]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    return headers


def _outcome_of(error: ProxyError) -> Outcome:
    if isinstance(error, Draining):
        return Outcome.SHUTDOWN
    return Outcome.REFUSED if error.status < 500 else Outcome.FAILED
