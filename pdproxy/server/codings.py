"""The proxy refuses requests whose body is coded by anything besides ``chunked``.

The parser accepts ``transfer-encoding: gzip, chunked`` and hands over the pieces as they are, compressed. A proxy in
front that had decompressed them would have seen another request than this one does.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, Final

import anyio
import msgspec

from pdproxy.errors import UnsupportedCoding

LINGER_S = 2.0
"""Seconds for which the rest of a refused body is read. A connection that is closed while bytes lie unread in it is
reset, and the reset may overtake the answer."""
LINGER_BYTES: Final = 1 << 20


def is_foreign(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tells whether the body is chunked and coded in another way as well; header names in lower case.

    A body whose last coding is not ``chunked`` has no end that can be found. The parser answers that with 400.
    """
    values = [value for name, value in headers if name == b"transfer-encoding"]
    if not values:
        return False
    codings = [coding.strip().lower() for coding in b",".join(values).split(b",")]
    return codings[-1] == b"chunked" and any(coding not in (b"", b"chunked") for coding in codings)


async def refuse(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """Answers 501 and closes the connection. It is an ASGI application."""
    error = UnsupportedCoding("the body of a request may be chunked, and coded in no other way")
    body = msgspec.json.encode(error.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await _read_to_end(receive)
    await send({"type": "http.response.body", "body": b""})


async def _read_to_end(receive: Any) -> None:
    """Reads the body and drops it, up to `LINGER_BYTES` bytes of it and for no longer than `LINGER_S` seconds."""
    num_bytes = 0
    with anyio.move_on_after(LINGER_S):
        while num_bytes < LINGER_BYTES:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                return
