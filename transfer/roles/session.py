"""A sender's view of one receiver: the handshake, the control socket and the heartbeat.

A session is made when the first attempt goes to a receiver and lives until the receiver changes its epoch, refuses, or
falls silent. It then fails everyone who waits on it; the next attempt makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from transfer import wire
from transfer.agents.base import Region, TransferAgent
from transfer.errors import HandshakeRefused, PeerLost, ReservationRefused, TransferError

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 300.0
RECONNECT_MS = 200
RECONNECT_MAX_MS = 10_000


class Session:
    """The control connection to one receiver.

    Mutable state: `_grants` (who waits for pages, by attempt), `_open` (attempts this side may be writing, with what to
    call when the receiver cancels one), `_last_ack` (when the receiver was last heard), `_opened_at` (since when there
    are open attempts), `_lost` (why the session is over).
    """

    def __init__(
        self,
        agent: TransferAgent,
        endpoint: wire.Endpoint,
        layout: wire.Layout,
        on_lost: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self._agent = agent
        self._endpoint = endpoint
        self._layout = layout
        self._on_lost = on_lost
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        # A fresh identity per connection: the receiver tells writers apart by it.
        self._socket.set(zmq.IDENTITY, uuid.uuid4().bytes)
        self._welcome: asyncio.Future[wire.Welcome] = asyncio.get_running_loop().create_future()
        self._grants: dict[str, asyncio.Future[list[int]]] = {}
        self._open: dict[str, Callable[[str], None]] = {}
        self._has_open = asyncio.Event()
        self._last_ack = self._opened_at = time.monotonic()
        self._lost: TransferError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        state = f"lost: {self._lost}" if self._lost else f"{len(self._open)} attempts"
        return f"<Session {self._endpoint.address} {state}>"

    @property
    def welcome(self) -> wire.Welcome:
        return self._welcome.result()

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    @property
    def may_write_until(self) -> float:
        """Fence for writes: later than this the receiver may have taken us for dead and given our pages away."""
        return self._last_ack + self.welcome.writer_timeout_s / 2

    async def start(self) -> None:
        """Shake hands. Raises `HandshakeRefused`, or `PeerLost` when nobody answers; the session is lost then."""
        self._socket.connect(self._endpoint.address)
        self._tasks.append(asyncio.create_task(self._read(), name="session-control"))
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                self.send(wire.Hello(version=wire.PROTOCOL_VERSION, epoch=self._agent.epoch, layout=self._layout))
                welcome = await self._welcome
            await asyncio.wrap_future(self._agent.connect(welcome.epoch, welcome.metadata, _region(welcome)))
        except TimeoutError:
            self._lose(PeerLost(f"the receiver at {self._endpoint.address} did not answer the handshake"))
        except TransferError as error:
            self._lose(error)
        if self._lost is not None:
            raise self._lost
        self._last_ack = time.monotonic()
        self._tasks.append(asyncio.create_task(self._keep_alive(), name="session-heartbeat"))

    async def aclose(self) -> None:
        self._lose(PeerLost("the session was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=200)
        self._context.term()
        if self._welcome.done() and not self._welcome.cancelled() and self._welcome.exception() is None:
            await asyncio.wrap_future(self._agent.disconnect(self.welcome.epoch))

    async def reserve(self, message: wire.Reserve, on_cancel: Callable[[str], None]) -> list[int]:
        """Ask for pages and wait for them, for `message.timeout_s` at most.

        `on_cancel` is called with a reason when the receiver withdraws the attempt, from then until `release`. Raises
        `ReservationRefused` or `PeerLost`; the attempt is then not open.
        """
        if self._lost is not None:
            raise self._lost
        attempt = message.attempt
        grant: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._grants[attempt] = grant
        self._open[attempt] = on_cancel
        if not self._has_open.is_set():
            self._opened_at = time.monotonic()
            self._has_open.set()
        self.send(message)
        try:
            async with asyncio.timeout(message.timeout_s):
                return await grant
        except TimeoutError:
            raise ReservationRefused(
                f"the decoder had no {message.num_now} free pages within {message.timeout_s:.1f} s"
            ) from None
        finally:
            self._grants.pop(attempt, None)

    def release(self, message: wire.WritesDone | wire.WritesEnded) -> None:
        """Say the last word about an attempt; no write of ours is under way for it any more."""
        if self._open.pop(message.attempt, None) is not None and self._lost is None:
            self.send(message)
        if not self._open:
            self._has_open.clear()

    def send(self, message: wire.SenderMessage) -> None:
        self._socket.send(wire.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            payload = await self._socket.recv()
            try:
                self._handle(wire.decode_from_receiver(payload))
            except msgspec.DecodeError as error:
                log.warning("ignored a malformed message from %s: %s", self._endpoint.address, error)

    def _handle(self, message: wire.ReceiverMessage) -> None:
        self._last_ack = time.monotonic()
        match message:
            case wire.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case wire.HelloRefused():
                self._lose(HandshakeRefused(message.field, message.theirs, message.ours))
            case wire.Reserved():
                self._granted(message)
            case wire.ReservationRefused():
                self._check_epoch(message.epoch)
                self._refuse(message.attempt, message.reason)
            case wire.Cancel():
                self._cancelled(message.attempt)
            case wire.HeartbeatAck():
                self._check_epoch(message.epoch)

    def _check_epoch(self, epoch: str) -> None:
        if epoch != self.welcome.epoch:
            self._lose(PeerLost("the receiver was restarted"))

    def _granted(self, message: wire.Reserved) -> None:
        grant = self._grants.get(message.attempt)
        if grant is not None and not grant.done():
            grant.set_result(message.pages)

    def _refuse(self, attempt: str, reason: str) -> None:
        grant = self._grants.get(attempt)
        if grant is not None and not grant.done():
            grant.set_exception(ReservationRefused(reason))

    def _cancelled(self, attempt: str) -> None:
        """The receiver wants no more of this. One that we no longer write is answered at once."""
        self._refuse(attempt, "the decoder cancelled the attempt")
        on_cancel = self._open.get(attempt)
        if on_cancel is None:
            self.send(wire.WritesEnded(attempt=attempt, reason="cancelled"))
        else:
            on_cancel("the decoder cancelled the attempt")

    async def _keep_alive(self) -> None:
        """Heartbeat while attempts are open; asleep otherwise, and over after a long sleep."""
        patience = self.welcome.writer_timeout_s / 2
        while self._lost is None:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    await self._has_open.wait()
            except TimeoutError:
                self._lose(PeerLost("the session was idle"))
                return
            if time.monotonic() - max(self._last_ack, self._opened_at) > patience:
                self._lose(PeerLost(f"the receiver at {self._endpoint.address} fell silent"))
                return
            self.send(wire.Heartbeat(epoch=self._agent.epoch))
            await asyncio.sleep(self.welcome.heartbeat_s)

    def _lose(self, error: TransferError) -> None:
        """The session is over: everyone who waits on it is told, once."""
        if self._lost is not None:
            return
        self._lost = error
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()
        for grant in list(self._grants.values()):
            if not grant.done():
                grant.set_exception(error)
        for on_cancel in list(self._open.values()):
            on_cancel(str(error))
        self._on_lost(self)


def _region(welcome: wire.Welcome) -> Region:
    return Region(
        base_address=welcome.base_address,
        page_bytes=welcome.page_bytes,
        num_pages=welcome.num_pages,
        device_id=welcome.device_id,
        memory=welcome.memory,
    )
