"""Decoders learn here that the process of a peer has ended, so that they take back the pages that it was writing to.

A decoder cannot know by itself that a prefiller on another machine is dead: silence proves nothing. The proxy sees
another process answer in its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import anyio
import msgspec

from pdproxy.engines.adapter import Call
from pdproxy.engines.http.base import EngineBroken, EngineUnreachable
from pdproxy.errors import EngineReply
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool
from pdproxy.fleet.token_counts import post

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""The pause, in seconds, between two tries at a decoder that did not answer."""
MAX_UNTOLD = 1024
"""The number of messages that are kept for decoders that did not answer; the oldest ones are dropped beyond it. A
decoder that cannot be reached for that long is restarted, or its pages stay in quarantine until the peer's own
connection tells."""


class EndedPeers:
    """EndedPeers knows which decoders have still to be told of which ended processes.

    What must hold: suppose that a decoder takes such messages (`EngineTraits.peer_ended_path`) and was in `pool` when a
    process was found to have ended. Then it is told so until it has answered, has left, or is another process itself. A
    violation would be seen as pages that stay in quarantine although the proxy knows better.

    Mutable state: which decoder is to be told of which epoch, each with the decoder's own epoch then; an event that
    says that there is something to tell.
    """

    def __init__(self, pool: Callable[[], Pool], *, timeout_s: float) -> None:
        """Calls `pool` for the fleet when a process has ended. A call to a decoder may take `timeout_s` seconds."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._untold: dict[tuple[Instance, str], str | None] = {}
        self._has_untold = asyncio.Event()

    def ended(self, epoch: str) -> None:
        """Tells every decoder that the process with this `epoch` has certainly ended. Returns at once."""
        for decoder in self._present():
            if decoder.role == "decode" and decoder.adapter.traits.peer_ended_path is not None:
                self._untold[decoder, epoch] = decoder.epoch
        while len(self._untold) > MAX_UNTOLD:
            del self._untold[next(iter(self._untold))]
        self._has_untold.set()

    async def run(self) -> None:
        """Tells the decoders, until cancelled."""
        while True:
            await self._has_untold.wait()
            self._has_untold.clear()
            async with anyio.create_task_group() as tasks:
                for decoder, epoch in list(self._untold):
                    tasks.start_soon(self._tell, decoder, epoch)
            if self._untold:
                with anyio.move_on_after(RETRY_S):
                    await self._has_untold.wait()
                self._has_untold.set()

    async def _tell(self, decoder: Instance, epoch: str) -> None:
        path = decoder.adapter.traits.peer_ended_path
        is_there = decoder in self._present() and decoder.epoch == self._untold.get((decoder, epoch))
        if path is None or not is_there or await self._has_heard(decoder, path, epoch):
            self._untold.pop((decoder, epoch), None)

    async def _has_heard(self, decoder: Instance, path: str, epoch: str) -> bool:
        try:
            await post(decoder, Call(path, msgspec.json.encode({"epoch": epoch})), {}, timeout_s=self._timeout_s)
        except EngineReply as reply:
            if reply.status >= 500:
                return False
            log.warning(
                "%s takes no word of peers that have ended: HTTP %d", decoder.name, reply.status
            )  # it has an older version
        except (EngineUnreachable, EngineBroken, TimeoutError) as error:
            log.debug("%s was to hear that %s has ended: %r", decoder.name, epoch, error)
            return False
        return True

    def _present(self) -> list[Instance]:
        pool = self._pool()
        return [*pool.instances, *pool.leaving]
