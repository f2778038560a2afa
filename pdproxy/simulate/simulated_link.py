"""The module has the network between fronts and the leader: it takes time, loses packets and can be cut.

What must hold, as on TCP: what one end says is heard by the other once and in order, or the link is over. A violation
would be seen as a lease that only one end knows of when everything is settled.
"""

from __future__ import annotations

import asyncio
import random
from contextvars import Context
from typing import Any

import msgspec

from pdproxy.fronts.channel import Handlers, OutboxLine


class Beat(msgspec.Struct):
    """A sign of life of a front. The leader answers with the same."""

    sent_at: float


class Gone(msgspec.Struct):
    """The leader took the front for gone, and has ended its session."""


class Weather(msgspec.Struct, frozen=True):
    """Weather says what the network does to frames: each takes `delay_s` one way, and up to `jitter_s` more. A share
    `loss` of them, and of what is sent again, has to be sent again after `retransmit_s`; those behind wait for it."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    retransmit_s: float = 0.0


class Network:
    """Network is what lies between one front and whoever leads.

    Mutable state: whether it is cut; the lines that cross it; frames that were carried and messages in them, and frames
    that were sent twice; what is left to chance.
    """

    def __init__(self, weather: Weather, dice: random.Random) -> None:
        self.weather = weather
        self.is_cut = False
        self.lines: list[Line] = []
        self.num_messages = self.num_frames = self.num_lost = 0
        self._dice = dice

    def cut(self) -> None:
        """Lets nothing arrive until `mend`. Both are idempotent."""
        self.is_cut = True

    def mend(self) -> None:
        self.is_cut = False
        for line in self.lines:
            line.go_on()

    def takes(self, num_messages: int) -> float:
        """Returns the seconds that a frame takes."""
        weather = self.weather
        seconds = weather.delay_s
        if weather.jitter_s:
            seconds += weather.jitter_s * self._dice.random()
        while weather.loss and self._dice.random() < weather.loss:
            self.num_lost += 1
            seconds += weather.retransmit_s
        self.num_frames += 1
        self.num_messages += num_messages
        return seconds


class Line(OutboxLine):
    """Line is one direction of a link. What is sent in a turn travels as one frame, as on a real link, and is handled
    in the context `receiver`, by `handlers`.

    Mutable state: what is to be sent; how many frames are under way, when the last of them arrives, and those that have
    come to where the network is cut; whether nothing takes any time; whether it is over.
    """

    def __init__(self, network: Network, receiver: Context) -> None:
        super().__init__(self._carry)
        self.handlers: Handlers = {}
        self.num_under_way = 0
        self._loop = asyncio.get_running_loop()
        self._network = network
        self._receiver = receiver
        self._is_instant = False
        self._stuck: list[list[Any]] = []
        self._free_at = 0.0
        network.lines.append(self)

    def hand_over(self) -> None:
        """Has what is to be sent arrive in no time, for a link that was there before anything was measured."""
        self._is_instant = True
        self._outbox.flush()
        self._is_instant = False

    def _carry(self, frame: list[Any]) -> None:
        if self._is_instant:
            self.take(frame)
        elif not self.is_over:
            self.num_under_way += 1
            self._free_at = max(self._free_at, self._loop.time() + self._network.takes(len(frame)))
            self._loop.call_at(self._free_at, self._arrive, frame, context=self._receiver)

    def _arrive(self, frame: list[Any]) -> None:
        if self._network.is_cut or self._stuck:
            self._stuck.append(frame)
            return
        self.num_under_way -= 1
        self.take(frame)

    def go_on(self) -> None:
        """Has what is stuck arrive, now that the network is mended."""
        if self._stuck:
            self._loop.call_soon(self._take_stuck, context=self._receiver)

    def _take_stuck(self) -> None:
        if not self._network.is_cut:
            stuck, self._stuck = self._stuck, []
            for frame in stuck:
                self._arrive(frame)

    def take(self, frame: list[Any]) -> None:
        """Hands messages over."""
        for message in frame:
            if self.is_over:  # by what was handled before it
                return
            self.handlers[type(message)](message)

    def end(self) -> None:
        """Ends the line: nothing more is sent or arrives. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self._outbox.clear()
            self._network.lines.remove(self)


class Link:
    """Link is the connection of one front to one leader: `up` to the leader, `down` to the front."""

    def __init__(self, network: Network, front: Context, leader: Context) -> None:
        self.up, self.down = Line(network, leader), Line(network, front)

    @property
    def is_over(self) -> bool:
        return self.up.is_over

    @property
    def is_quiet(self) -> bool:
        """Tells whether nothing is under way."""
        return self.is_over or not (self.up.num_under_way or self.down.num_under_way)

    def end(self) -> None:
        """Ends both directions. Idempotent."""
        self.up.end()
        self.down.end()
