"""The module stands between decoders and proxy and treats KV signals as a bad network would: lost, late, twice, out of
order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

import zmq
import zmq.asyncio

from pdproxy.launch.ports import HOST

MAX_LATE_S = 4.0
"""The most seconds by which a signal is late. That is beyond the KV-ready limit, so that some signals come when the
proxy does not expect them any more."""
MAX_HELD_S = 0.5
"""The most seconds for which a message that another one is to overtake is held."""


class Fate(StrEnum):
    PASSED = "passed"
    LOST = "lost"
    LATE = "late"
    DOUBLED = "doubled"
    REORDERED = "reordered"


ODDS = {Fate.PASSED: 0.84, Fate.LOST: 0.03, Fate.LATE: 0.04, Fate.DOUBLED: 0.05, Fate.REORDERED: 0.04}


class SignalRelay:
    """SignalRelay takes what decoders push to `port`, and sends it to `target_port`, where the proxy pulls. Things go
    wrong only while `is_faulty`.

    Mutable state: the sockets, until `close`; `_held`, the message that is to be overtaken; `_timers`, those of late
    messages; `fates`, how many of each.
    """

    def __init__(self, port: int, target_port: int, dice: random.Random) -> None:
        self.is_faulty = False
        self.fates: Counter[str] = Counter()
        self._dice = dice
        self._held: bytes | None = None
        self._timers: set[asyncio.TimerHandle] = set()
        self._in = zmq.asyncio.Context()
        self._out = zmq.Context()
        self._from_decoders = self._in.socket(zmq.PULL)
        self._from_decoders.bind(f"tcp://{HOST}:{port}")
        self._to_proxy = self._out.socket(zmq.PUSH)
        self._to_proxy.connect(f"tcp://{HOST}:{target_port}")

    async def run(self) -> None:
        """Passes messages on until it is cancelled."""
        while True:
            self._treat(await self._from_decoders.recv())

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for socket in (self._from_decoders, self._to_proxy):
            socket.close(linger=0)
        self._in.term()
        self._out.term()

    def _treat(self, message: bytes) -> None:
        fate = self._draw()
        self.fates[fate] += 1
        match fate:
            case Fate.LATE:
                self._later(self._dice.uniform(0.01, MAX_LATE_S), message)
            case Fate.REORDERED if self._held is None:
                self._held = message
                self._in_time(MAX_HELD_S, self._let_go)
                return
            case Fate.DOUBLED:
                self._send(message)
                self._send(message)
            case Fate.PASSED | Fate.REORDERED:
                self._send(message)
        self._let_go()

    def _draw(self) -> Fate:
        return self._dice.choices(list(ODDS), list(ODDS.values()))[0] if self.is_faulty else Fate.PASSED

    def _let_go(self) -> None:
        """Sends the held message: it has been overtaken, or no other one came."""
        held, self._held = self._held, None
        if held is not None:
            self._send(held)

    def _later(self, delay_s: float, message: bytes) -> None:
        self._in_time(delay_s, lambda: self._send(message))

    def _in_time(self, delay_s: float, act: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            act()

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(timer)

    def _send(self, message: bytes) -> None:
        try:
            self._to_proxy.send(message, zmq.NOBLOCK)
        except zmq.Again:
            self.fates[Fate.LOST] += 1
