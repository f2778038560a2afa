"""A receiver's look at itself: whether it still hears what is sent to its address.

A decoder's HTTP address may answer long after its receiver has gone deaf. Prefillers find that out one by one, and each
of them has to guess whose fault it is. The decoder can know.
"""

from __future__ import annotations

import asyncio
import logging

import zmq

from transfer import wire
from transfer.roles.control import MALFORMED, ControlSocket
from transfer.roles.curve import lock_client
from transfer.trust import FleetKey

log = logging.getLogger(__name__)

MAX_UNHEARD = 3
"""The number of questions in a row without an answer after which the receiver counts as deaf. Each has had a whole
interval of an event loop that turns, so that a process which stood still is not taken for deaf."""


class SelfCheck:
    """A `SelfCheck` asks the receiver at `endpoint` every `interval_s` seconds, by the way that senders take.

    Call `start` on the event loop, and `close` at the end. Mutable state: the number of the last question, and of the
    last one that was answered; the timer.
    """

    def __init__(self, endpoint: wire.Endpoint, epoch: str, *, interval_s: float, fleet_key: FleetKey | None) -> None:
        self._endpoint = endpoint
        self._epoch = epoch
        self._interval_s = interval_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = ControlSocket(self._context, zmq.DEALER, self._hear)
        self._socket.raw.set(zmq.IPV6, "[" in endpoint.address)
        if fleet_key is not None:
            lock_client(self._socket.raw, fleet_key)
        self._num_asked = self._num_answered = 0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<SelfCheck of {self._endpoint.address}: {self.fault or 'it hears'}>"

    @property
    def fault(self) -> str | None:
        """Returns what is wrong with the receiver, in words that stay the same while it is, or None."""
        if self._num_asked - self._num_answered <= MAX_UNHEARD:
            return None
        return f"its receiver of KV at {self._endpoint.address} does not answer"

    def start(self) -> None:
        """Begins to ask."""
        self._socket.raw.connect(self._endpoint.address)
        self._socket.listen()
        self._ask()

    def close(self) -> None:
        """Ends the questions. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close(0)
        self._context.term()

    def _ask(self) -> None:
        had_fault = self.fault is not None
        self._num_asked += 1
        if self.fault is not None and not had_fault:
            log.error("this engine is not well: %s", self.fault)
        self._socket.send([wire.encode(wire.Heartbeat(epoch=self._epoch, serial=self._num_asked, open=[]))])
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._ask)

    def _hear(self, frames: list[bytes]) -> None:
        try:
            message = wire.decode_from_receiver(frames[-1])
        except MALFORMED:
            return  # whatever has said this, it is not our receiver
        if isinstance(message, wire.HeartbeatAck) and message.epoch == self._epoch:
            if self.fault is not None:
                log.info("this engine is well again: its receiver answers")
            self._num_answered = max(self._num_answered, message.serial)
