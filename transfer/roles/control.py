"""The one way both roles send on their control sockets: now, or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import zmq
import zmq.asyncio

log = logging.getLogger(__name__)


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    """Queue a message without waiting. On a full queue or a closed socket it is dropped, and the log says so.

    Both protocols live with a lost message: whatever is waited for has a deadline.
    """
    if socket.closed:
        return
    sent = asyncio.ensure_future(socket.send_multipart(frames, zmq.NOBLOCK))  # done already
    if (error := sent.exception()) is not None:
        log.warning("a control message was dropped: %s", error)
