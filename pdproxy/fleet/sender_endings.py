"""Tells built-in decoders that a prefiller's process has ended: pages that it was writing wait for that word there.

A decoder sees the end of a process by itself only on its own machine. The word is repeated until the decoder has it or
is another process itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import anyio

from pdproxy.engines.base import Adapter, Call, EngineBroken, EngineUnreachable
from pdproxy.fleet.instance import Instance

log = logging.getLogger(__name__)

RETRY_S = 5.0
MAX_OWED = 10_000
"""Words that are not said yet; the oldest are forgotten."""


class SenderEndings:
    """`decoders` are asked for when a process has ended, and `call_of` for what each is to be told, None for nothing.
    One call may take `call_timeout_s`.

    Mutable state: `_owed`, what is to be said to whom: by decoder, its own epoch and that of the process, the call.
    """

    def __init__(
        self,
        decoders: Callable[[], Iterable[Instance]],
        call_of: Callable[[Adapter, str], Call | None],
        *,
        call_timeout_s: float,
    ) -> None:
        self._decoders = decoders
        self._call_of = call_of
        self._call_timeout_s = call_timeout_s
        self._owed: dict[tuple[Instance, str | None, str], Call] = {}
        self._is_owed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SenderEndings {len(self._owed)} owed>"

    def ended(self, epoch: str) -> None:
        """The engine process `epoch` has certainly ended. Returns at once; the words are said by `run`."""
        for decoder in self._decoders():
            call = self._call_of(decoder.adapter, epoch)
            if call is not None and decoder.epoch is not None:
                self._owed[decoder, decoder.epoch, epoch] = call
        while len(self._owed) > MAX_OWED:
            del self._owed[next(iter(self._owed))]
        self._is_owed.set()

    async def run(self) -> None:
        """Says what is owed, until cancelled."""
        while True:
            await self._is_owed.wait()
            self._is_owed.clear()
            await self.say_all()
            if self._owed:
                with anyio.move_on_after(RETRY_S):
                    await self._is_owed.wait()
                self._is_owed.set()

    async def say_all(self) -> None:
        """Says it to each decoder once; what did not arrive stays owed."""
        for owed, call in list(self._owed.items()):
            decoder, decoder_epoch, _ = owed
            # A successor of the decoder has an empty buffer, and one that has left is asked for nothing more.
            is_void = decoder.epoch != decoder_epoch or decoder not in self._decoders()
            if is_void or await self._say(decoder, call):
                self._owed.pop(owed, None)

    async def _say(self, decoder: Instance, call: Call) -> bool:
        try:
            with anyio.fail_after(self._call_timeout_s):
                leg = await decoder.client.post(call.path, call.body, {})
                try:
                    await leg.read()
                finally:
                    leg.close()
        except (EngineUnreachable, EngineBroken, TimeoutError) as error:
            log.info("%s cannot be told that a prefiller has ended: %r", decoder.name, error)
            return False
        if leg.status != 200:
            log.warning("%s answers HTTP %d to the word that a prefiller has ended", decoder.name, leg.status)
        return True
