"""A sender's view of one receiver: the handshake, the control socket and the heartbeat.

A session is made when the first attempt goes to a receiver and is *lost* when the receiver changes its epoch, refuses,
falls silent, or NIXL cannot reach it. A lost session fails everyone who waits on it and takes no new attempt; the next
attempt makes a new one. It stays connected, and goes on saying that it is alive, until the writes of its attempts have
ended: as long as bytes may still land in pages, those pages must be nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from transfer import wire
from transfer.agents.base import Region, TransferAgent
from transfer.errors import HandshakeRefused, PeerLost, ReservationRefused, TransferError
from transfer.roles.control import send_now

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 300.0
RECONNECT_MS = 200
RECONNECT_MAX_MS = 10_000
LINGER_MS = 200


@dataclass(slots=True)
class _Ask:
    """A `Reserve` that has not been answered yet."""

    sent_at: float
    grant: asyncio.Future[list[int]]


class Session:
    """The control connection to one receiver.

    Mutable state: `_asks` (who waits for pages, by attempt), `_open` (attempts this side may be writing, with what to
    call when one of them is to be stopped), `_lost` (why the session is over). For time: `_heard_at` (the receiver has
    heard us then, or later), `_unanswered` (when heartbeats without an answer were sent), `_opened_at` (since when
    there are open attempts).
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        agent: TransferAgent,
        endpoint: wire.Endpoint,
        layout: wire.Layout,
        on_lost: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self._agent = agent
        self._endpoint = endpoint
        self._layout = layout
        self._on_lost = on_lost
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        # A fresh identity per connection: the receiver tells writers apart by it.
        self._socket.set(zmq.IDENTITY, uuid.uuid4().hex.encode())
        self._welcome: asyncio.Future[wire.Welcome] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asks: dict[str, _Ask] = {}
        self._open: dict[str, Callable[[str], None]] = {}
        self._has_open = asyncio.Event()
        self._has_none_open = asyncio.Event()
        self._has_none_open.set()
        self._heard_at = self._opened_at = time.monotonic()
        self._unanswered: deque[float] = deque()
        self._lost: TransferError | None = None
        self._connecting: Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        state = f"lost: {self._lost}" if self._lost else f"{len(self._open)} attempts"
        return f"<Session {self.address} {state}>"

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def welcome(self) -> wire.Welcome:
        return self._welcome.result()

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    @property
    def may_write_until(self) -> float:
        """Fence for writes: later than this the receiver may have taken us for dead and given our pages away.

        Counted from when we *sent* what the receiver is known to have heard: an answer that lay unread while this
        process was frozen proves nothing about now.
        """
        return self._heard_at + self._patience_s

    @property
    def _patience_s(self) -> float:
        return self.welcome.writer_timeout_s / 2

    def start(self) -> None:
        """Begin to shake hands; `ready` tells how it went."""
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.lose(PeerLost(f"cannot connect to {self.address}: {error}"))
            return
        self._tasks.append(asyncio.create_task(self._read(), name="session-control"))
        self._tasks.append(asyncio.create_task(self._shake_hands(), name="session-handshake"))

    async def ready(self) -> None:
        """Wait for the handshake, together with whoever else does; one who is cancelled does not disturb the others.

        Raises `HandshakeRefused`, or `PeerLost` when nobody answers or the sender is closed; the session is lost then.
        """
        await asyncio.shield(self._ready)

    async def drain(self) -> None:
        """Close a lost session once none of its attempts is open; at once when cancelled."""
        try:
            await self._has_none_open.wait()
        finally:
            await self._close()

    def is_open(self, attempt: str) -> bool:
        """Whether a write of ours may be under way for this attempt."""
        return attempt in self._open

    async def reserve(self, message: wire.Reserve, on_cancel: Callable[[str], None]) -> list[int]:
        """Ask for pages and wait for them, for `message.timeout_s` at most.

        From now until `release` the attempt is open, and `on_cancel` is called with a reason when the receiver
        withdraws it or the session is lost. Raises `ReservationRefused` or `PeerLost`.
        """
        if self._lost is not None:
            raise self._lost
        ask = _Ask(time.monotonic(), asyncio.get_running_loop().create_future())
        self._asks[message.attempt] = ask
        self._open[message.attempt] = on_cancel
        self._note_open()
        self.send(message)
        try:
            async with asyncio.timeout(message.timeout_s):
                return await ask.grant
        except TimeoutError:
            raise ReservationRefused(
                f"the decoder had no {message.num_now} free pages within {message.timeout_s:.1f} s"
            ) from None
        finally:
            del self._asks[message.attempt]

    def give_up(self, attempt: str, reason: str) -> None:
        """Whoever waits for pages of this attempt waits in vain."""
        ask = self._asks.get(attempt)
        if ask is not None and not ask.grant.done():
            ask.grant.set_exception(ReservationRefused(reason))

    def release(self, message: wire.WritesDone | wire.WritesEnded) -> None:
        """Say the last word about an attempt; no write of ours is under way for it any more."""
        if self._open.pop(message.attempt, None) is not None:
            self.send(message)
        if not self._open:
            self._has_open.clear()
            self._has_none_open.set()

    def send(self, message: wire.SenderMessage) -> None:
        send_now(self._socket, [wire.encode(message)])

    def lose(self, error: TransferError) -> None:
        """The session is over: everyone who waits on it is told, once."""
        if self._lost is not None:
            return
        self._lost = error
        for future in (self._welcome, self._ready):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marked as seen: nobody may be waiting
        for ask in self._asks.values():
            if not ask.grant.done():
                ask.grant.set_exception(error)
        for on_cancel in list(self._open.values()):
            on_cancel(str(error))
        self._on_lost(self)

    def _note_open(self) -> None:
        if not self._has_open.is_set():
            self._opened_at = time.monotonic()
            self._unanswered.clear()
            self._has_open.set()
            self._has_none_open.clear()

    async def _shake_hands(self) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                sent_at = time.monotonic()
                self.send(wire.Hello(version=wire.PROTOCOL_VERSION, epoch=self._agent.epoch, layout=self._layout))
                welcome = await self._welcome
            self._connecting = self._agent.connect(welcome.epoch, welcome.metadata, _region(welcome))
            await asyncio.wrap_future(self._connecting)
        except TimeoutError:
            self.lose(PeerLost(f"the receiver at {self.address} did not answer the handshake"))
        except TransferError as error:
            self.lose(error)
        if self._lost is None:
            self._heard_at = sent_at
            self._ready.set_result(None)
            await self._keep_alive()

    async def _keep_alive(self) -> None:
        """Heartbeat while attempts are open; asleep otherwise, and over after a long sleep."""
        while True:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    await self._has_open.wait()
            except TimeoutError:
                self.lose(PeerLost("the session was idle"))
                return
            if time.monotonic() - max(self._heard_at, self._opened_at) > self._patience_s:
                self.lose(PeerLost(f"the receiver at {self.address} fell silent"))
            self._unanswered.append(time.monotonic())
            self.send(wire.Heartbeat(epoch=self._agent.epoch))
            await asyncio.sleep(self.welcome.heartbeat_s)

    async def _read(self) -> None:
        while True:
            payload = await self._socket.recv()
            try:
                self._handle(wire.decode_from_receiver(payload))
            except msgspec.DecodeError as error:
                log.warning("ignored a malformed message from %s: %s", self.address, error)
            except Exception:
                log.exception("control message failed")  # one bad message must not deafen the session

    def _handle(self, message: wire.ReceiverMessage) -> None:
        match message:
            case wire.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case wire.HelloRefused():
                self.lose(HandshakeRefused(message.field, message.theirs, message.ours))
            case wire.Reserved():
                self._granted(message)
            case wire.ReservationRefused():
                self._check_epoch(message.epoch)
                self.give_up(message.attempt, message.reason)
            case wire.Cancel():
                self._cancelled(message.attempt)
            case wire.HeartbeatAck():
                self._check_epoch(message.epoch)
                if self._unanswered:
                    self._heard_at = max(self._heard_at, self._unanswered.popleft())

    def _check_epoch(self, epoch: str) -> None:
        if epoch != self.welcome.epoch:
            self.lose(PeerLost("the receiver was restarted"))

    def _granted(self, message: wire.Reserved) -> None:
        ask = self._asks.get(message.attempt)
        if ask is not None and not ask.grant.done():
            self._heard_at = max(self._heard_at, ask.sent_at)
            ask.grant.set_result(message.pages)

    def _cancelled(self, attempt: str) -> None:
        """The receiver wants no more of this. One that we no longer write is answered at once."""
        reason = "the decoder cancelled the attempt"
        self.give_up(attempt, reason)
        on_cancel = self._open.get(attempt)
        if on_cancel is None:
            self.send(wire.WritesEnded(attempt=attempt, reason=reason))
        else:
            on_cancel(reason)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=LINGER_MS)
        if self._connecting is None:
            return
        try:
            await asyncio.wrap_future(self._connecting)
            await asyncio.wrap_future(self._agent.disconnect(self.welcome.epoch))
        except TransferError as error:
            log.debug("%r was not connected: %s", self, error)


def _region(welcome: wire.Welcome) -> Region:
    return Region(
        base_address=welcome.base_address,
        num_bytes=welcome.num_pages * welcome.layout.page_bytes,
        device_id=welcome.device_id,
        memory=welcome.memory,
    )
