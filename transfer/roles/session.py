"""A sender's view of one decoder: the handshake, the control socket and the heartbeat, all with rank 0's receiver.

NIXL connections are made to those ranks of the decoder to which this sender's heads go.

A session is made when the first attempt goes to a receiver and is *lost* when the receiver changes its epoch, refuses,
falls silent, or NIXL cannot reach one of its ranks. A lost session fails everyone who waits on it and takes no new
attempt; the next attempt makes a new one. The lost session stays connected, and goes on saying that it is alive, until
the writes of its attempts have ended: as long as bytes may still land in pages, those pages must be nobody else's.
Messages that are lost with its connection are said again by its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import zmq

from transfer import wire
from transfer.agents.base import Region, TransferAgent
from transfer.errors import (
    AttemptLost,
    HandshakeRefused,
    PeerLost,
    ReceiverLost,
    ReservationRefused,
    StaleTerm,
    TransferError,
)
from transfer.plan.feeds import readers_of
from transfer.plan.placement import Placement
from transfer.plan.runs import Run, are_within, num_in, numbers_of
from transfer.plan.spans import SpanMap
from transfer.plan.tags import slab_bytes
from transfer.roles.control import MALFORMED, MAX_REASON_CHARS, Complaints, ControlSocket
from transfer.roles.curve import lock_client
from transfer.roles.handshake import Identity
from transfer.roles.sender_process import own_process
from transfer.roles.standing import LastWord, Standing
from transfer.trust import FleetKey

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""The time, in seconds, within which a receiver must answer the handshake."""
IDLE_TIMEOUT_S = 300.0
"""The time, in seconds, after which a session without attempts ends. A lost session waits no longer than this until its
last words are known to have arrived."""
RECONNECT_MS = 200
"""The first pause, in milliseconds, before the session connects again."""
RECONNECT_MAX_MS = 1_000
"""The longest pause, in milliseconds, before the session connects again. A receiver that was restarted should be found
again soon."""
LINGER_MS = 200
"""The time, in milliseconds, that queued messages have to leave when the session is closed."""
MAX_UNANSWERED = 64
"""The most heartbeats that are remembered without an answer. The latest ones are kept."""
MIN_HEARTBEAT_S = 0.01
"""The shortest interval of heartbeats, in seconds, that a receiver may ask for. With a shorter one this side would
spin."""


@dataclass(frozen=True, slots=True)
class GrantedPages:
    """`GrantedPages` are pages at the receiver, by ordinal from `num_cached` on, as one answer grants them. It says
    which of them hold their bytes already."""

    pages: list[int]
    present: list[int]
    num_cached: int
    """Counts the ordinals at the front that are in the decoder's own KV cache. They have no page."""
    is_window: bool
    """True where there are fewer pages than the attempt has. Then ordinal i goes into page ``i % len(pages)``."""


class PushListener(Protocol):
    """A `PushListener` hears what becomes of the pages of its attempt. It is called on the event loop's thread."""

    def cancelled(self, error: TransferError) -> None:
        """Posts nothing more, because the receiver withdraws the attempt, or the session is lost.

        Not called for a lost session while pages are asked for there: then `Session.reserve` tells.
        """
        ...

    def taken(self, count: int) -> None:
        """Hears that the first `count` pages of a windowed attempt have been read."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """A `Target` is a rank of the decoder that this side writes to, and says what goes there."""

    slab: wire.Slab
    span_map: SpanMap

    @property
    def rank(self) -> int:
        return self.slab.layout.tp_rank

    @property
    def region(self) -> Region:
        return Region(
            base_address=self.slab.base_address,
            num_bytes=slab_bytes(self.slab.num_pages, self.slab.layout.page_bytes),
            device_id=self.slab.device_id,
            memory=self.slab.memory,
        )


@dataclass(slots=True)
class _Ask:
    """A `Reserve` that has not been answered yet."""

    sent_at: float
    num_pages: int
    is_whole: bool
    term: int | None
    grant: asyncio.Future[GrantedPages]


class Session:
    """A `Session` is the control connection to one receiver.

    Mutable state: `_targets` (the ranks that are written to, once the handshake is over), `_asks` (requests for pages
    that wait for an answer, by attempt), `_open` (attempts this side may be writing, each with its listener),
    `_unconfirmed` (attempts whose last word was said here, and may have been lost), `_lost` (why the session is over).
    For time: `_heard_sent_at` (when we sent the latest message that the receiver is known to have heard),
    `_unanswered` (heartbeats without an answer, by serial: when they were sent, and what was unconfirmed then),
    `_busy_since` (since when there is something to be told or heard).
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        agent: TransferAgent,
        endpoint: wire.Endpoint,
        identity: Identity,
        on_lost: Callable[[Session], None] = lambda session: None,
        *,
        standing: Standing,
        placement: Placement | None = None,
        fleet_key: FleetKey | None = None,
    ) -> None:
        self._agent = agent
        self._placement = placement
        self._standing = standing
        self._serial = standing.next_serial()
        self._endpoint = endpoint
        self._identity = identity
        self._targets: list[Target] = []
        self._on_lost = on_lost
        self._socket = ControlSocket(context, zmq.DEALER, self._hear)
        self._complaints = Complaints(log)
        self._socket.raw.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.raw.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        # A fresh identity per connection: the receiver tells writers apart by it.
        self._socket.raw.set(zmq.IDENTITY, uuid.uuid4().hex.encode())
        if fleet_key is not None:
            lock_client(self._socket.raw, fleet_key)
        self._has_key = fleet_key is not None
        self._welcome: asyncio.Future[wire.Welcome] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asks: dict[str, _Ask] = {}
        self._open: dict[str, PushListener] = {}
        self._unconfirmed: dict[str, None] = {}
        self._is_busy, self._is_at_rest = asyncio.Event(), asyncio.Event()
        self._is_at_rest.set()
        self._has_none_open = asyncio.Event()
        self._has_none_open.set()
        self._heard_sent_at = self._busy_since = time.monotonic()
        self._num_heartbeats = 0
        self._unanswered: dict[int, tuple[float, list[str]]] = {}
        self._lost: TransferError | None = None
        self._connecting: list[tuple[str, Future[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        state = f"lost: {self._lost}" if self._lost else f"{len(self._open)} attempts"
        return f"<Session {self.address} {state}>"

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def likely_cause(self) -> str:
        """Says what may be wrong where a receiver does not answer the handshake.

        Where only one side has a fleet key, or they have different ones, neither side can read what the other sends.
        """
        if self._has_key:
            return "this side has a fleet key, the receiver perhaps none or another one"
        return "this side has no fleet key, the receiver perhaps one"

    @property
    def welcome(self) -> wire.Welcome:
        return self._welcome.result()

    @property
    def targets(self) -> Sequence[Target]:
        """The ranks of the decoder that this side writes to, in ascending order. They are known once the handshake is
        over."""
        return self._targets

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    @property
    def may_write_until(self) -> float:
        """The fence for writes, on `time.monotonic()`. After it the receiver may take us for lost, and the attempt may
        have failed there.

        It is counted from when we *sent* what the receiver is known to have heard: an answer that lay unread while this
        process was frozen proves nothing about now.
        """
        return self._heard_sent_at + self._patience_s

    @property
    def _patience_s(self) -> float:
        return self.welcome.writer_timeout_s / 2

    def start(self) -> None:
        """Begins to shake hands. `ready` tells how it went."""
        try:
            self._socket.raw.set(zmq.IPV6, "[" in self.address)
            self._socket.raw.connect(self.address)
        except (zmq.ZMQError, ValueError) as error:
            self.lose(PeerLost(f"cannot connect to {self.address}: {error}"))
            return
        self._socket.listen()
        self._tasks.append(asyncio.create_task(self._shake_hands(), name="session-handshake"))

    async def ready(self) -> None:
        """Waits for the handshake. Several callers may wait; cancelling one does not disturb the others.

        Raises `HandshakeRefused`, or `PeerLost` when nobody answers or the sender is closed. The session is lost then.
        """
        await asyncio.shield(self._ready)

    async def drain(self) -> None:
        """Closes a lost session once none of its attempts is open, and its last words have arrived or `IDLE_TIMEOUT_S`
        is over.

        When this is cancelled it closes the session at once.
        """
        try:
            await self._has_none_open.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    await self._is_at_rest.wait()
        finally:
            await self._close()

    def is_open(self, attempt: str) -> bool:
        """Returns whether a write of ours may be under way for this attempt."""
        return attempt in self._open

    async def reserve(self, message: wire.Reserve, listener: PushListener) -> GrantedPages:
        """Asks for pages and waits for them, for `message.timeout_s` seconds at most. Returns what was granted.

        From now until `release` the attempt is open, and `listener` is told what happens to it. Raises
        `ReservationRefused` or `PeerLost`; if the attempt was not open before, this then says the last word about it.
        """
        if self._lost is not None:
            raise self._lost
        is_first, is_whole = message.attempt not in self._open, message.num_now == message.num_pages
        future = asyncio.get_running_loop().create_future()
        ask = _Ask(time.monotonic(), message.num_pages, is_whole, message.term, future)
        self._asks[message.attempt] = ask
        if is_first:
            self._standing.opened(self.welcome.epoch, message.attempt)
        self._open[message.attempt] = listener
        self._has_none_open.clear()
        self._note_busy()
        self.send(message)
        try:
            return await self._answer(ask, message)
        except BaseException as error:
            if is_first:
                self.release(wire.WritesEnded(attempt=message.attempt, reason=f"not granted: {error}"))
            raise
        finally:
            del self._asks[message.attempt]

    def give_up(self, attempt: str, reason: str) -> None:
        """Ends the wait for pages of this attempt with `ReservationRefused`, if anybody waits."""
        self._refuse(attempt, ReservationRefused(reason))

    def _refuse(self, attempt: str, error: ReservationRefused) -> None:
        if (ask := self._asks.get(attempt)) is not None:
            _fail(ask.grant, error)

    def release(self, message: LastWord) -> None:
        """Says the last word about an attempt. No write of ours is under way for it any more."""
        if message.attempt in self._open:
            self.send(message)
            self._standing.said(self.welcome.epoch, message, self._serial)
            self._unconfirmed[message.attempt] = None
            del self._open[message.attempt]
            self._standing.closed(self.welcome.epoch, message.attempt)
        if not self._open:
            if self._lost is not None and self._is_busy.is_set() and not self._has_none_open.is_set():
                self._beat()  # the session closes when this is answered, which tells that its last words have arrived
            self._has_none_open.set()
            self._rest()

    def send(self, message: wire.SenderMessage) -> None:
        self._socket.send([wire.encode(message)])

    def lose(self, error: TransferError) -> None:
        """Ends the session. Everyone who waits on it is told, once."""
        if self._lost is not None:
            return
        self._lost = error
        if self._is_busy.is_set():
            self._beat()  # a session that is about to close waits for the answer
            self._rest()
        _fail(self._welcome, error)
        _fail(self._ready, error)
        told = {attempt for attempt, ask in self._asks.items() if _fail(ask.grant, error)}
        for attempt, listener in list(self._open.items()):
            if attempt not in told:
                listener.cancelled(error)
        self._on_lost(self)

    def _note_busy(self) -> None:
        if not self._is_busy.is_set():
            self._busy_since = time.monotonic()
            self._unanswered.clear()
            self._is_busy.set()
            self._is_at_rest.clear()

    def _rest(self) -> None:
        """Stops the heartbeat, unless something is open or may have been lost. That holds for earlier connections, too,
        unless this one is lost and they have another successor."""
        is_settled = self._lost is not None or not self._standing.has_unsettled(self.welcome.epoch)
        if is_settled and not self._open and not self._unconfirmed:
            self._is_busy.clear()
            self._is_at_rest.set()

    async def _answer(self, ask: _Ask, message: wire.Reserve) -> GrantedPages:
        try:
            async with asyncio.timeout(message.timeout_s):
                return await ask.grant
        except TimeoutError:
            raise ReservationRefused(
                f"the decoder had no {message.num_now} free pages within {message.timeout_s:.1f} s"
            ) from None

    async def _shake_hands(self) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                sent_at = time.monotonic()
                self.send(
                    wire.Hello(
                        version=wire.PROTOCOL_VERSION,
                        epoch=self._agent.epoch,
                        layout=self._identity.on_wire,
                        serial=self._serial,
                        process=own_process(),
                    )
                )
                welcome = await self._welcome
            _check_times(welcome)
            self._targets = self._find_targets(welcome)
            self._connecting = [
                (to.slab.epoch, self._agent.connect(to.slab.epoch, to.slab.metadata, to.region)) for to in self._targets
            ]
            for _, connecting in self._connecting:
                await asyncio.wrap_future(connecting)
        except TimeoutError:
            cause = self.likely_cause
            self.lose(ReceiverLost(f"the receiver at {self.address} did not answer the handshake; {cause}"))
        except TransferError as error:
            self.lose(error)
        if self._lost is None:
            self._heard_sent_at = sent_at
            self._ready.set_result(None)
            if self._standing.has_unsettled(welcome.epoch):
                self._note_busy()  # an earlier connection may be unable to say how its attempts end
            self._beat()  # the answer asks for last words that an earlier connection could not say
            await self._keep_alive()

    def _find_targets(self, welcome: wire.Welcome) -> list[Target]:
        """Returns the ranks that this side writes to. Raises `HandshakeRefused`, or `PeerLost` for slabs that are not
        those of these ranks."""
        ours = self._identity.layout
        num_ranks = self._identity.check(welcome.layout).rank.size
        needed = readers_of(ours.kv, ours.rank, num_ranks)
        found = [self._identity.check(slab.layout) for slab in welcome.slabs]
        named = [layout.rank.index for layout in found]
        if named != needed or any(layout.rank.size != num_ranks for layout in found):
            raise PeerLost(f"the receiver at {self.address} names ranks {named}, and this side writes to {needed}")
        if any(slab.num_pages < welcome.num_pages for slab in welcome.slabs):
            raise PeerLost(f"the receiver at {self.address} has {welcome.num_pages} pages, and a rank of it fewer")
        return [
            Target(slab, SpanMap(ours, layout, self._placement))
            for slab, layout in zip(welcome.slabs, found, strict=True)
        ]

    async def _keep_alive(self) -> None:
        """Sends heartbeats while attempts are open or last words unconfirmed. Else sleeps, and ends the session after a
        long sleep."""
        while True:
            try:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    await self._is_busy.wait()
            except TimeoutError:
                if self._is_busy.is_set():
                    continue  # it became busy in the last moment
                self.lose(PeerLost("the session was idle"))
                return
            if time.monotonic() - max(self._heard_sent_at, self._busy_since) > self._patience_s:
                self.lose(ReceiverLost(f"the receiver at {self.address} fell silent"))
            self._beat()
            await asyncio.sleep(self.welcome.heartbeat_s)

    def _beat(self) -> None:
        self._num_heartbeats += 1
        said = list(self._unconfirmed)
        if self._lost is None:
            # Only this connection speaks for its predecessors: its answers tell of their words, too.
            said = list(dict.fromkeys([*said, *self._standing.said_to(self.welcome.epoch)]))
        self._unanswered[self._num_heartbeats] = time.monotonic(), said
        self._unanswered.pop(self._num_heartbeats - MAX_UNANSWERED, None)
        is_open = self._standing.open_at(self.welcome.epoch)
        self.send(wire.Heartbeat(epoch=self._agent.epoch, serial=self._num_heartbeats, open=is_open))

    def _hear(self, frames: list[bytes]) -> None:
        try:
            (payload,) = frames
            self._handle(wire.decode_from_receiver(payload))
        except MALFORMED as error:
            self._complaints.add("ignored a malformed message from %s: %s", self.address, error)
        except Exception:
            log.exception("control message failed")  # one bad message must not deafen the session

    def _handle(self, message: wire.ReceiverMessage) -> None:
        match message:
            case wire.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case wire.HelloRefused():
                # The two values change places: the receiver's `theirs` is ours.
                self.lose(HandshakeRefused(message.field, message.theirs, message.ours))
            case _ if not self._ready.done():
                kind = type(message).__name__
                self._complaints.add("ignored a %s from %s before the handshake", kind, self.address)
            case wire.Reserved():
                self._granted(message)
            case wire.PagesTaken():
                if (listener := self._open.get(message.attempt)) is not None:
                    listener.taken(message.count)
            case wire.Refusal():
                self._check_epoch(message.epoch)
                self._refuse(message.attempt, self._why_refused(message))
            case wire.Cancel():
                self._cancelled(message.attempt)
            case wire.HeartbeatAck():
                self._check_epoch(message.epoch)
                self._answered(message)

    def _why_refused(self, message: wire.Refusal) -> ReservationRefused:
        """Returns the error that a refusal stands for: `StaleTerm` where a higher term than ours is the reason."""
        ask = self._asks.get(message.attempt)
        if ask is not None and ask.term is not None and message.term is not None and message.term > ask.term:
            return StaleTerm(ask.term, message.term)
        return ReservationRefused(message.reason[:MAX_REASON_CHARS])

    def _check_epoch(self, epoch: str) -> None:
        if self._lost is None and epoch != self.welcome.epoch:
            self.lose(PeerLost(f"the receiver at {self.address} was restarted, or has forgotten us"))

    def _answered(self, message: wire.HeartbeatAck) -> None:
        """Notes that the receiver has heard a heartbeat, and everything that was said before it, except what it says is
        missing."""
        if message.epoch != self.welcome.epoch:
            self._unconfirmed.clear()  # the process that was to hear it is gone
        sent_at, said = self._unanswered.pop(message.serial, (0.0, []))
        self._heard_sent_at = max(self._heard_sent_at, sent_at)
        for attempt in set(said).difference(message.missing):
            self._unconfirmed.pop(attempt, None)
            self._standing.arrived(self.welcome.epoch, attempt, self._serial)
        for attempt in message.missing:
            self._say_again(attempt)
        self._rest()

    def _say_again(self, attempt: str) -> bool:
        """Tells the receiver the last word that it lacks. Returns False, and tells nothing, while a write may be under
        way."""
        word = self._standing.last_word(self.welcome.epoch, attempt)
        if word is not None:
            self.send(word)
        return word is not None

    def _granted(self, message: wire.Reserved) -> None:
        ask = self._asks.get(message.attempt)
        if ask is None or ask.grant.done():
            self._say_again(message.attempt)  # the question was long on its way, and nobody waits any more
            return
        if not _makes_sense(message, ask, self.welcome.num_pages, len(self._targets)):
            self.lose(PeerLost(f"the receiver at {self.address} granted pages that cannot be"))
        else:
            self._heard_sent_at = max(self._heard_sent_at, ask.sent_at)
            pages, present = numbers_of(message.pages), numbers_of(message.present)
            is_window = ask.is_whole and message.num_cached + len(pages) < ask.num_pages
            ask.grant.set_result(GrantedPages(pages, present, message.num_cached, is_window))

    def _cancelled(self, attempt: str) -> None:
        """Gives an attempt up, because the receiver wants no more of it. Where we no longer write it, answers at
        once."""
        reason = "the decoder cancelled the attempt"
        self.give_up(attempt, reason)
        listener = self._open.get(attempt)
        if listener is not None:
            listener.cancelled(AttemptLost(reason))
        else:
            self._say_again(attempt)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also where this is cancelled: the socket's context waits for it
            self._socket.close(LINGER_MS)
            for epoch, connecting in self._connecting:
                connecting.add_done_callback(partial(self._disconnect, epoch))

    def _disconnect(self, epoch: str, connecting: Future[None]) -> None:
        """Disconnects from a rank, whenever the agent has connected it, perhaps on the agent's thread. Nobody waits for
        this: an agent may be stuck."""
        if connecting.exception() is None:
            self._agent.disconnect(epoch)


def _fail(future: asyncio.Future[Any], error: TransferError) -> bool:
    """Gives `error` to everybody who waits for the future. Returns False where the future is done already."""
    if future.done():
        return False
    future.set_exception(error)
    future.exception()  # marked as seen: nobody may be waiting
    return True


def _check_times(welcome: wire.Welcome) -> None:
    """Raises `PeerLost` for a heartbeat interval that cannot be kept or is too long for the timeout."""
    heartbeat_s, timeout_s = welcome.heartbeat_s, welcome.writer_timeout_s
    if not MIN_HEARTBEAT_S <= heartbeat_s < timeout_s / 2 < math.inf:
        raise PeerLost(f"a heartbeat every {heartbeat_s} s cannot keep alive who may be silent for {timeout_s} s")


def _makes_sense(message: wire.Reserved, ask: _Ask, num_pages: int, num_targets: int) -> bool:
    """Returns whether the grant can be: its pages exist, none of them is there twice, and they are no more than were
    asked for. A window may be granted to one rank only, and with nothing present or cached."""
    first, total = message.num_cached, num_in(message.pages)
    is_all = first + total == ask.num_pages
    return (
        0 < total <= ask.num_pages - first
        and are_within(message.pages, 0, num_pages)
        and _are_apart(message.pages)
        and are_within(message.present, first, ask.num_pages)
        and _are_apart(message.present)
        and (is_all or not (message.present or first))
        and (is_all or num_targets == 1 or not ask.is_whole)
    )


def _are_apart(runs: Sequence[Run]) -> bool:
    ordered = sorted(runs)
    return all(start + count <= behind for (start, count), (behind, _) in pairwise(ordered))
