"""The decoder's end of a transfer. It grants pages, learns when they are filled, and gives every page back exactly
once.

The receiver is on rank 0 and is the only ordering point of its decoder: an attempt is granted on all ranks in one
message, and every sender rank speaks with it alone. So no attempt can hold one rank's pages and wait for another's.

What must hold: a page is granted on all ranks of the decoder at once, and comes back on all of them at once, not before
every writer to any rank has said its last word or is known to be dead. A violation would be seen as a write under way
into a page, on some rank, that rank 0's table gives to nobody or to another attempt.

All state changes happen in `Reservations` on the event loop's thread; this file does the I/O around them: the control
socket, the signals to the proxy, and one timer for everything that can run out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from transfer import wire
from transfer.agents.base import TransferAgent
from transfer.errors import (
    AttemptLost,
    HandshakeRefused,
    IllegalTransition,
    ReservationRefused,
    StaleTerm,
    TransferError,
)
from transfer.memory.buffer import PagedBuffer
from transfer.memory.engine_cache import EngineCache
from transfer.memory.reservation import MAY_EXPIRE
from transfer.memory.reservations import Change, Grant, Holding, Reservation, Reservations
from transfer.plan.blocks import PageTable, page_table
from transfer.plan.feeds import all_writers, readers_of
from transfer.plan.ranks import Rank
from transfer.plan.runs import runs_of
from transfer.plan.tags import tag_of
from transfer.roles.allowed_hosts import EVERYWHERE, THIS_MACHINE, AllowedHosts
from transfer.roles.cache_border import GuardedCache
from transfer.roles.control import (
    MALFORMED,
    MAX_MESSAGE_BYTES,
    MAX_REASON_CHARS,
    Complaints,
    ControlSocket,
    notice_dead_hosts,
)
from transfer.roles.curve import Doorkeeper
from transfer.roles.epochs import engines_of, is_successor
from transfer.roles.handshake import Identity
from transfer.roles.highest_term import HighestTerm
from transfer.roles.intake import Intake
from transfer.roles.notifier import Notifier
from transfer.roles.rank_slab import OtherSlabs, RankSlab, check_slabs
from transfer.roles.sender_process import is_on_this_machine, open_process
from transfer.trust import NOT_SIGNED, AttemptKey, FleetKey

log = logging.getLogger(__name__)

MAX_TOMBSTONES = 10_000
"""The most attempts that are remembered when they are over. The earliest is forgotten first."""
VANISHED = "the prefiller vanished"
SHUTTING_DOWN = "the decoder is shutting down"
MAX_PEERS = 10_000
"""The most senders that are remembered by their handshake. The one heard least recently is forgotten first, and shakes
hands anew."""
MAX_QUEUED = 10_000
"""The most attempts that wait for pages. Any further one is refused."""
MAX_WATCHED = 256
"""The most senders on this machine whose processes are watched. The receiver knows of any further sender only what
others say."""
MAX_TIMEOUT_S = 24 * 3600.0
"""The longest time, in seconds, for which a sender may ask for pages."""
MAX_TOKENS = 1 << 40
"""The most tokens of a prompt for which a sender may ask for pages."""
HEARTBEATS_PER_TIMEOUT = 4
"""The least number of heartbeats in `writer_timeout_s`. A sender stops writing after half of that time without an
answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """`ReceiverConfig` holds the settings of a `Receiver`. Raises `TransferError` for heartbeats that are too rare for
    the timeout."""

    host: str = "127.0.0.1"
    """The address to bind, which is also told to prefillers."""
    port: int = 0
    """The port to bind. 0 means any free port."""
    whole_requests: bool = True
    """Grants all pages of a request or none. False only shows the deadlock that this prevents."""
    heartbeat_s: float = 5.0
    """The interval, in seconds, at which a sender with attempts here says that it lives."""
    writer_timeout_s: float = 30.0
    """The seconds of silence after which the attempts of a sender fail. Their pages are used again when the sender
    says that it has ended, or its process is known to have: a process that stands still may go on in the middle of
    a write."""
    fleet_key: FleetKey | None = None
    """The key that a sender must have, too, in order to be heard. With None, every sender that reaches the port is
    heard, in clear text."""
    attempt_key: AttemptKey | None = None
    """The key with which an attempt must be signed in order to get pages. With None, the attempts of all senders get
    pages that have shaken hands."""
    notify_hosts: tuple[str, ...] = ()
    """The addresses that signals may go to (`AllowedHosts`). Where it is empty: with an `attempt_key` signals go
    wherever the proxy signed; without one they go to this machine, by a loopback address or by `host`."""

    def __post_init__(self) -> None:
        if self.heartbeat_s * HEARTBEATS_PER_TIMEOUT > self.writer_timeout_s:
            raise TransferError(
                f"a writer timeout of {self.writer_timeout_s} s needs a heartbeat every "
                f"{self.writer_timeout_s / HEARTBEATS_PER_TIMEOUT} s or more often, not every {self.heartbeat_s} s"
            )


@dataclass(frozen=True, slots=True)
class _Peer:
    """A `_Peer` is a sender as it shook hands on one connection."""

    rank: Rank
    epoch: str
    serial: int
    process: wire.Process | None

    def speaks_for(self, other: _Peer) -> bool:
        """Returns whether a word of this connection holds for attempts of the other one. It does where both are of the
        same sender, and this one is not the earlier one."""
        return self.epoch == other.epoch and self.serial >= other.serial


class Receiver:
    """A `Receiver` is a decoder's PD buffer, open for prefillers: the same pages on every rank.

    What must hold: a page into which a sender may still have bytes under way belongs to nobody else. The receiver knows
    that a sender has none by the sender's own word (`WritesDone`, `WritesEnded`, a heartbeat that does not name the
    attempt), by the end of its process where that is on this machine, and by `sender_ended`. A violation would be seen
    as one attempt's bytes in another's pages.

    Mutable state: `_reservations` (pages), `_waiters` (futures of those who wait for KV-ready, by attempt), `_moved`
    (the `WritesDone` of each attempt's writers), `_peers` (senders that shook hands, by connection), `_last_heard`
    (senders with attempts here), `_ended` (epochs of senders known to be dead, and whether those of their engine's
    other ranks are), `_watched` (descriptors of living ones, by epoch), `_tombstones` (attempts that are over, so that
    a reservation which comes too late is refused), `_tasks` (steps that wait for undelivered bytes), `_due` (the time
    that `_timer` is set to).
    """

    def __init__(
        self,
        agent: TransferAgent,
        buffer: PagedBuffer,
        identity: Identity,
        config: ReceiverConfig,
        *,
        others: OtherSlabs | None = None,
        intake: Intake | None = None,
        cache: EngineCache | None = None,
        highest_term: HighestTerm | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes rank 0's `agent`, `buffer` and `identity`; `others` are the slabs of the other ranks, if there are any.

        Where the ranks have unlike numbers of pages, only as many are used as the smallest has. An `intake` is for one
        rank, and a `cache` answers for all of them. The `highest_term` is the whole process's. Raises `TransferError`
        for arguments that do not fit together.
        """
        self._slab = RankSlab(agent, buffer, identity)
        self._slabs = [] if others is None else list(others.slabs)
        check_slabs(identity, self._slabs)
        if intake is not None and self._slabs:
            raise TransferError("a prompt cannot pass through the buffers of several ranks")
        self._others = others
        self._notify_hosts = _notify_hosts(config)
        self._agent = agent
        self._identity = identity
        self._config = config
        self._intake = intake
        self._clock = clock
        self.highest_term = highest_term or HighestTerm()
        """Tells which leaders have been replaced. Their attempts get no pages."""
        self.highest_term.when_raised(self._turn_away)
        num_pages = min([buffer.num_pages, *(slab.num_pages for slab in self._slabs)])
        self._reservations = Reservations(num_pages, None if cache is None else GuardedCache(cache))
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._moved: dict[str, list[wire.WritesDone]] = {}
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._ended: OrderedDict[str, bool] = OrderedDict()
        self._watched: dict[str, int] = {}
        self._last_heard: dict[bytes, float] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._notifier = Notifier()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = ControlSocket(self._context, zmq.ROUTER, self._hear)
        self._socket.raw.set(zmq.ROUTER_MANDATORY, 1)
        notice_dead_hosts(self._socket.raw, config.writer_timeout_s)
        self._complaints = Complaints(log)
        self._doorkeeper: Doorkeeper | None = None
        if config.fleet_key is not None:
            self._doorkeeper = Doorkeeper(self._context, config.fleet_key, self._complaints)
            self._doorkeeper.lock(self._socket.raw)
        self._port = config.port
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    def __repr__(self) -> str:
        return f"<Receiver of {self.num_ranks} ranks, {self._reservations!r}>"

    @property
    def num_ranks(self) -> int:
        return self._identity.layout.rank.size

    @property
    def endpoint(self) -> wire.Endpoint:
        return self.endpoints[0]

    @property
    def endpoints(self) -> list[wire.Endpoint]:
        """Returns the value for `PushParams.receivers`: one endpoint for each rank, all with rank 0's address."""
        host, port = self._config.host, self._port
        return [wire.Endpoint(rank=rank, host=host, port=port) for rank in range(self.num_ranks)]

    @property
    def num_wrong_tags(self) -> int:
        """Counts, since the start, how often pages of rank 0 were found to be written by another attempt than
        theirs."""
        return self._slab.num_wrong_tags

    @property
    def reservations(self) -> Reservations:
        """The page table, for facts and checks. Do not change it from outside."""
        return self._reservations

    async def start(self) -> None:
        """Registers the buffer and opens the control socket. Raises `zmq.ZMQError` when the port is taken."""
        self._slabs.insert(0, await self._slab.start())
        host = wire.bracketed(self._config.host)
        self._socket.raw.set(zmq.IPV6, "[" in host)
        if self._config.port:
            self._socket.raw.bind(f"tcp://{host}:{self._config.port}")
        else:
            self._port = self._socket.raw.bind_to_random_port(f"tcp://{host}")
        self._socket.listen()
        if self._doorkeeper is not None:
            self._doorkeeper.listen()

    async def aclose(self) -> None:
        """Stops listening. Attempts that are still here fail; senders notice by their heartbeat. Idempotent."""
        if self._socket.is_closed:
            return
        self._socket.close(0)
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._reset_timer()
        for epoch in list(self._watched):
            self._unwatch(epoch)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reservation in self._reservations.all():
            if reservation.holding in MAY_EXPIRE:
                self._close_intake(reservation, SHUTTING_DOWN)
        self._reservations.close()
        for attempt in list(self._waiters):
            self._wake(attempt, AttemptLost(SHUTTING_DOWN))
        self._context.term()
        await self._notifier.aclose()

    # ── the engine's side ───────────────────────────────────────────────────────────────────────────────────────────

    async def wait_ready(self, attempt: str) -> Reservation:
        """Waits until this attempt's KV is complete, and returns its reservation. The wait ends with the attempt's own
        time.

        Raises `AttemptLost` when the attempt is unknown, withdrawn, or fails while this waits.
        """
        reservation = self._reservations.get(attempt)
        if reservation is None or reservation.holding is Holding.QUARANTINED:
            raise AttemptLost(f"no KV of attempt {attempt} is here: {self._tombstones.get(attempt, 'unknown attempt')}")
        if reservation.holding in (Holding.QUEUED, Holding.RESERVED):
            waiter = self._waiters.setdefault(attempt, asyncio.get_running_loop().create_future())
            await asyncio.shield(waiter)
        return reservation

    def take(self, attempt: str) -> list[int]:
        """Returns the pages of a READY attempt, by ordinal. From here to `consumed` they are the reader's, on every
        rank.

        The first `Reservation.num_cached` ordinals have no page: they are in the engine's own cache, where they stay
        pinned until the engine gives them up. Pages may be shared with other attempts: only read them. An attempt that
        passed through a window is with the intake, and its pages are of no interest. Raises `IllegalTransition` where
        the attempt is not READY, and `AttemptLost` where it is not here or another attempt has written its pages.
        """
        reservation = self._reservations.get(attempt)
        if reservation is not None and reservation.holding is Holding.READY and not reservation.window:
            self._check_or_withdraw(reservation, reservation.pages)
        return self._reservations.take(attempt)

    def written(self, attempt: str) -> list[wire.WrittenPages]:
        """Returns what the other ranks must be told in order to read an attempt that was taken: see `RankSlab.take`."""
        reservation = self._reservations.get(attempt)
        return [] if reservation is None else self._slab.tags.who_wrote(reservation.pages)

    def check_tags(self, attempt: str) -> None:
        """Looks once more at the pages of a taken attempt. Call it when they have been copied, on any thread.

        Raises `AttemptLost` where another attempt has written them since. Then the copy is worthless.
        """
        reservation = self._reservations.get(attempt)
        if reservation is not None and not reservation.window:
            self._slab.check_tags(attempt, reservation.pages)

    def consumed(self, attempt: str, *, is_wrong: bool = False) -> None:
        """Notes that every rank has copied the KV out. The pages go back, and the proxy is told.

        With `is_wrong` another rank has found pages that another attempt has written. Then nobody is to read them
        again. Raises `AttemptLost` or `IllegalTransition` where the attempt was not taken.
        """
        reservation = self._reservations.get(attempt)
        if reservation is not None and not reservation.window:
            is_wrong = is_wrong or bool(self._slab.tags.wrong(reservation.pages))
        if is_wrong:
            self._reservations.distrust(attempt)
        self._tell_released(self._reservations.consume(attempt), "consumed")
        self._grant()

    def cancel(self, attempt: str, reason: str = "cancelled") -> bool:
        """Withdraws the attempt, whether it is known or still to come. Returns True when none of its pages is held any
        more."""
        self._bury(attempt, reason)
        self._withdraw(attempt, reason, "cancelled")
        return self._reservations.get(attempt) is None

    def pages_taken(self, attempt: str, count: int) -> None:
        """Notes that the intake has copied the first `count` pages of a windowed attempt. The sender may go on behind
        them.

        Raises `AttemptLost` when the attempt has failed meanwhile, or another one has written its pages. Then what was
        copied is worthless.
        """
        reservation = self._reservations.get(attempt)
        if reservation is not None and reservation.window:
            ordinals = range(reservation.num_taken, min(count, reservation.num_written))
            pages = [reservation.pages[ordinal % reservation.window] for ordinal in ordinals]
            self._check_or_withdraw(reservation, pages)
        credit = self._reservations.page_taken(attempt, count)
        self._tell(credit.tell, wire.PagesTaken(attempt=attempt, count=count))
        if credit.is_ready:
            self._ready(credit.reservation)

    def sender_ended(self, epoch: str) -> bool:
        """Notes that the process of the sender `epoch` has ended. Call it only with certain knowledge: as a launcher,
        or where another process was seen in its place.

        The sender's attempts fail, and their pages come back. Nothing is granted to it any more. An engine of several
        ranks ends as a whole: `epoch` stands for the senders ``EPOCH.1``, ``EPOCH.2``, … too. If the process lives,
        this would let it write into pages of others. Returns True when none of its pages is held any more. Where its
        connections are still being read, the pages come back by themselves.
        """
        self._note_ended(epoch, has_all_ranks=True)
        names = {epoch} | {peer.epoch for peer in self._peers.values() if epoch in engines_of(peer.epoch)}
        for name in names:
            self._process_ended(name)
        return not any(map(self._attempts_of, names))

    def _has_ended(self, epoch: str) -> bool:
        """Returns whether this decoder was told that the process, or the engine that it belongs to, is dead."""
        return epoch in self._ended or any(self._ended.get(name, False) for name in engines_of(epoch))

    def _process_ended(self, epoch: str) -> None:
        """Notes that this sender's process has ended, whatever has become of the others of its engine."""
        self._note_ended(epoch, has_all_ranks=self._ended.get(epoch, False))
        self._unwatch(epoch)
        for reservation in self._attempts_of(epoch):
            if reservation.holding is not Holding.QUARANTINED:
                log.warning("%r: %s", reservation, VANISHED)
                self._withdraw(reservation.attempt, VANISHED)
        self._when_delivered(partial(self._forget_writers, epoch))

    def _note_ended(self, epoch: str, *, has_all_ranks: bool) -> None:
        self._ended[epoch] = has_all_ranks
        if len(self._ended) > MAX_PEERS:
            self._ended.popitem(last=False)

    # ── the senders' side ───────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, frames: list[bytes]) -> None:
        try:
            writer, payload = frames
            self._handle(writer, wire.decode_from_sender(payload))
        except MALFORMED as error:
            self._complaints.add("ignored a malformed control message: %s", error)
        except (AttemptLost, IllegalTransition) as error:
            self._complaints.add("ignored a control message: %s", error)
        except Exception:
            log.exception("control message failed")  # one bad message must not end the service

    def _handle(self, writer: bytes, message: wire.SenderMessage) -> None:
        if writer in self._last_heard:
            self._last_heard[writer] = self._clock()
        match message:
            case wire.Hello():
                self._greet(writer, message)
            case wire.Reserve():
                self._reserve(writer, message)
            case wire.PagesWritten():
                self._pages_written(writer, message)
            case wire.WritesDone():
                self._writes_done(writer, message)
            case wire.WritesEnded():
                self._writes_ended(writer, message)
            case wire.Heartbeat():
                self._heartbeat(writer, message)

    def _greet(self, writer: bytes, hello: wire.Hello) -> None:
        try:
            self._identity.check_version(hello.version)
            known = self._peers.get(writer)
            if known is not None and known.epoch != hello.epoch:
                raise HandshakeRefused("epoch", known.epoch, hello.epoch)  # one sender cannot become another
            theirs = self._identity.check(hello.layout)
            welcome = self._welcome(theirs.rank)
        except HandshakeRefused as refusal:
            self._complaints.add("refused a prefiller: %s", refusal)
            answer = wire.HelloRefused(field=refusal.field, ours=str(refusal.ours), theirs=str(refusal.theirs))
            self._send(writer, answer)
            return
        self._peers[writer] = _Peer(theirs.rank, hello.epoch, hello.serial, hello.process)
        self._peers.move_to_end(writer)
        if len(self._peers) > MAX_PEERS:
            # There is one: the newcomer has no attempts yet.
            forgotten = next(peer for peer in self._peers if not self._reservations.of_writer(peer))
            del self._peers[forgotten]
            self._last_heard.pop(forgotten, None)
        for name in {peer.epoch for peer in self._peers.values() if is_successor(hello.epoch, peer.epoch)}:
            self._process_ended(name)
        self._send(writer, welcome)

    def _welcome(self, rank: Rank) -> wire.Welcome:
        """Returns the answer to a handshake. It holds what this sender rank needs, and no more. Raises
        `HandshakeRefused` where that is too long for a message."""
        welcome = wire.Welcome(
            epoch=self._agent.epoch,
            layout=self._identity.on_wire,
            slabs=[self._slabs[index] for index in readers_of(self._identity.layout.kv, rank, self.num_ranks)],
            num_pages=self._reservations.num_pages,
            whole_requests=self._config.whole_requests,
            heartbeat_s=self._config.heartbeat_s,
            writer_timeout_s=self._config.writer_timeout_s,
        )
        num_bytes = len(wire.encode(welcome))
        if num_bytes > MAX_MESSAGE_BYTES:
            raise HandshakeRefused("metadata", f"{num_bytes} bytes", f"{MAX_MESSAGE_BYTES} bytes at most")
        return welcome

    def _reserve(self, writer: bytes, message: wire.Reserve) -> None:
        peer = self._peers.get(writer)
        if peer is None:
            # No epoch is told: a sender that was forgotten is to shake hands again, as after a restart.
            reason = "this connection has not shaken hands"
            self._send(writer, wire.Refusal(attempt=message.attempt, epoch="", reason=reason))
            return
        self._peers.move_to_end(writer)
        rank = peer.rank
        try:
            if self._has_ended(peer.epoch):
                raise ReservationRefused("this decoder was told that the prefiller's process has ended")
            table = self._check_reserve(message)
            wanted = Reservation(
                attempt=message.attempt,
                num_pages=message.num_pages,
                num_now=message.num_now,
                num_tokens=message.num_tokens,
                expires_at=self._clock() + message.timeout_s,
                notify=message.notify,
                expected=all_writers(self._identity.layout.kv, rank.size, self.num_ranks),
                num_senders=rank.size,
                keys=tuple(message.keys),
                term=message.term,
            )
            grant = self._reservations.request(wanted, rank.index, writer, windowed=self._may_pass(table))
        except ReservationRefused as refusal:
            epoch, term = self._agent.epoch, refusal.heard if isinstance(refusal, StaleTerm) else None
            self._send(writer, wire.Refusal(attempt=message.attempt, epoch=epoch, reason=str(refusal), term=term))
            return
        self._last_heard[writer] = self._clock()
        self._watch(peer)
        if grant is not None:
            self._tell_grant(grant)
        self._grant()
        self._reset_timer()

    def _check_reserve(self, message: wire.Reserve) -> PageTable:
        """Returns the attempt's page table. Raises `ReservationRefused` where the message may not get pages."""
        if message.epoch != self._agent.epoch:
            raise ReservationRefused("another process than this decoder's has promised the pages; ask for a new turn")
        self._check_trust(message)
        self._check_term(message)
        is_new = self._reservations.get(message.attempt) is None
        if is_new and self._reservations.num_queued >= MAX_QUEUED:
            raise ReservationRefused(f"{MAX_QUEUED} attempts wait for pages already")
        if message.attempt in self._tombstones:
            raise ReservationRefused(f"the attempt is over: {self._tombstones[message.attempt]}")
        if message.num_now != message.num_pages and self._config.whole_requests:
            raise ReservationRefused("this receiver grants whole requests only")
        if not 0 < message.timeout_s <= MAX_TIMEOUT_S:
            raise ReservationRefused(f"a reservation cannot last {message.timeout_s} s")
        return self._check_pages(message)

    def _check_trust(self, message: wire.Reserve) -> None:
        """Raises `ReservationRefused` for an attempt that no proxy of ours made, and for signals to a foreign place.

        What must hold: with an attempt key no page is ever granted for an attempt that the key's owners did not sign,
        no matter who asks. A violation would be seen as a grant to a sender that has shaken hands and nothing else.
        """
        attempt, notify, key = message.attempt, message.notify, self._config.attempt_key
        if key is not None and not key.allows(attempt, notify, message.capability):
            self._complaints.add("refused attempt %r: it was not signed with the attempt key", attempt[:64])
            raise ReservationRefused(NOT_SIGNED)
        if notify is not None and not self._notify_hosts.allows(notify):
            self._complaints.add("refused attempt %r: its signals would go to %r", attempt[:64], notify[:300])
            raise ReservationRefused(
                f"this decoder sends no signals to {notify}; allow it with the decoder's option notify_hosts"
            )

    def _check_term(self, message: wire.Reserve) -> None:
        """Raises `StaleTerm` for an attempt that would begin here for a leader that has been replaced, and
        `ReservationRefused` for a term that is none.

        A rank that joins an attempt which has begun begins nothing, whatever was heard of since its first rank asked.
        """
        term = message.term
        if term is not None and not 0 < term <= wire.MAX_TERM:
            raise ReservationRefused(f"a term is from 1 to {wire.MAX_TERM}, not {term}")
        self.highest_term.hear(term)  # before the look: it may end an attempt that waits
        known = self._reservations.get(message.attempt)
        if known is None or known.holding is Holding.QUARANTINED:
            self.highest_term.check(term)

    def _turn_away(self) -> None:
        """Refuses the attempts of replaced leaders that wait for their first pages.

        All of them are withdrawn before anybody is told: telling lets the queue have its turn.
        """
        if self._socket.is_closed:
            return
        waiting = [r for r in self._reservations.all() if r.holding is Holding.QUEUED and not r.pages]
        stale = [r for r in waiting if self.highest_term.is_stale(r.term)]
        changes = [self._reservations.withdraw(r.attempt, "its leader has been replaced", "failed") for r in stale]
        for change in changes:
            if change is not None:
                reservation = change.reservation
                refusal = wire.Refusal(
                    attempt=reservation.attempt,
                    epoch=self._agent.epoch,
                    reason=reservation.reason,
                    term=self.highest_term.value,
                )
                self._tell(change.stop, refusal)  # before the word that only cancels: it tells them why
                self._follow(change)
        self._reset_timer()

    def _check_pages(self, message: wire.Reserve) -> PageTable:
        """Returns the attempt's page table. Raises `ReservationRefused` unless as many pages are asked for as both
        sides would work out for such a prompt."""
        kv = self._identity.layout.kv
        if not 0 < message.num_tokens <= MAX_TOKENS:
            raise ReservationRefused(f"a prompt of {message.num_tokens} tokens has no KV")
        table = page_table(kv.groups, message.num_tokens, kv.chunk_size)
        if message.num_pages != len(table):
            raise ReservationRefused(f"{message.num_tokens} tokens are {len(table)} pages, not {message.num_pages}")
        return table

    def _may_pass(self, table: PageTable) -> bool:
        """Returns whether a request larger than the buffer may pass through it. Raises `ReservationRefused` where the
        intake refuses or fails."""
        if len(table) <= self._reservations.num_pages or self._intake is None:
            return False
        try:
            self._intake.check(table)
        except ReservationRefused:
            raise
        except Exception as error:  # border: an engine's own code
            log.exception("the intake failed")
            raise ReservationRefused(f"the intake failed: {error!r}") from error
        return True

    def _pages_written(self, writer: bytes, message: wire.PagesWritten) -> None:
        rank = self._rank_of(writer, message.attempt)
        if rank is None:
            return
        ordinals = self._reservations.note_written(message.attempt, rank, message.count)
        reservation = self._reservations.get(message.attempt)
        if ordinals and reservation is not None and self._intake is not None:
            pages = [reservation.pages[ordinal % reservation.window] for ordinal in ordinals]
            self._slab.tags.expect(pages, tag_of(message.attempt), reservation.num_senders)
            self._check_or_withdraw(reservation, pages)
            self._pass_on(reservation, partial(self._intake.arrived, message.attempt, ordinals, pages))

    def _pass_on(self, reservation: Reservation, step: Callable[[], None]) -> bool:
        """Calls the intake by `step`. An exception fails this attempt, and nothing else. Returns False then."""
        try:
            step()
        except Exception as error:  # border: an engine's own code
            log.exception("the intake failed")
            self._withdraw(reservation.attempt, f"the intake failed: {error!r}")
            return False
        return True

    def _writes_done(self, writer: bytes, message: wire.WritesDone) -> None:
        rank = self._rank_of(self._as_joined(writer, message.attempt), message.attempt)
        if rank is None:
            return
        change = self._reservations.writes_done(message.attempt, rank)
        if not change.is_released:
            self._moved.setdefault(message.attempt, []).append(message)
        if change.is_ready:
            self._ready(change.reservation)
        else:
            self._follow(change)

    def _writes_ended(self, writer: bytes, message: wire.WritesEnded) -> None:
        reason = message.reason[:MAX_REASON_CHARS]
        rank = self._rank_of(self._as_joined(writer, message.attempt), message.attempt)
        if rank is None:
            return
        end = partial(self._end_writer, message.attempt, rank, reason)
        if message.has_broken:
            self._withdraw(message.attempt, reason)
            self._when_delivered(end)
        else:
            end()

    def _end_writer(self, attempt: str, rank: int, reason: str) -> None:
        change = self._reservations.writes_ended(attempt, rank, reason)
        if change is not None:
            self._follow(change)

    def _heartbeat(self, writer: bytes, message: wire.Heartbeat) -> None:
        """Asks for last words that are missing here, and repeats what was cancelled: either message may have been
        lost."""
        peer, is_open = self._peers.get(writer), set(message.open)
        known = [] if peer is None else self._attempts_of(peer.epoch, peer)
        missing = [reservation.attempt for reservation in known if reservation.attempt not in is_open]
        self._send(writer, wire.HeartbeatAck(epoch=self._agent.epoch, serial=message.serial, missing=missing))
        for reservation in known:
            if reservation.holding is Holding.QUARANTINED and reservation.attempt in is_open:
                self._send(writer, wire.Cancel(attempt=reservation.attempt))

    def _remind(self, writer: bytes) -> bool:
        """Repeats what was cancelled. Returns False when this writer has attempts in quarantine, and no connection."""
        is_reached = True
        for reservation in self._reservations.of_writer(writer):
            if reservation.holding is Holding.QUARANTINED:
                is_reached = self._send(writer, wire.Cancel(attempt=reservation.attempt)) and is_reached
        return is_reached

    def _as_joined(self, writer: bytes, attempt: str) -> bytes:
        """Returns the connection under which the sender behind `writer` joined the attempt; for a stranger, `writer`
        itself."""
        reservation, peer = self._reservations.get(attempt), self._peers.get(writer)
        if reservation is None or peer is None:
            return writer
        joined = [w.identity for w in reservation.writers.values()]
        if writer in joined:
            return writer
        return next((one for one in joined if one in self._peers and peer.speaks_for(self._peers[one])), writer)

    def _attempts_of(self, epoch: str, peer: _Peer | None = None) -> list[Reservation]:
        """Returns the attempts that this sender may still be writing; with `peer`, those over its connection or earlier
        ones."""
        found = []
        for writer in self._reservations.writers:
            other = self._peers.get(writer)
            if other is not None and other.epoch == epoch and (peer is None or peer.speaks_for(other)):
                found += self._reservations.of_writer(writer)
        return found

    # ── whether a sender lives ──────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, peer: _Peer) -> None:
        """Begins to watch for the end of the sender's process, if it is on this machine."""
        if peer.epoch in self._watched or peer.process is None or not is_on_this_machine(peer.process):
            return
        if len(self._watched) >= MAX_WATCHED:
            for epoch in [epoch for epoch in self._watched if not self._attempts_of(epoch)]:
                self._unwatch(epoch)
            if len(self._watched) >= MAX_WATCHED:
                return
        loop = asyncio.get_running_loop()
        try:
            descriptor = open_process(peer.process)
        except OSError as error:
            self._complaints.add("cannot watch a prefiller's process: %s", error)
            return
        if descriptor is None:
            loop.call_soon(self._process_ended, peer.epoch)
            return
        self._watched[peer.epoch] = descriptor
        loop.add_reader(descriptor, self._process_ended, peer.epoch)

    def _unwatch(self, epoch: str) -> None:
        descriptor = self._watched.pop(epoch, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def _forget_writers(self, epoch: str) -> None:
        """Ends this sender's part in every attempt, because no write of it can land any more."""
        for writer in self._reservations.writers:
            peer = self._peers.get(writer)
            if peer is not None and peer.epoch == epoch:
                for change in self._reservations.writer_gone(writer, VANISHED):
                    self._follow(change)

    def _when_delivered(self, step: Callable[[], None]) -> None:
        """Does `step` when nothing of a connection that has broken can arrive any more on any rank. Where there is one
        rank, that is mostly at once."""
        if self._socket.is_closed:
            return
        if self._others is None and self._slab.is_delivered:
            step()
            return
        task = asyncio.get_running_loop().create_task(self._deliver(step), name="deliver")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, step: Callable[[], None]) -> None:
        try:
            if self._others is not None:
                await self._others.delivered()
        except TransferError as error:
            log.error("pages stay in quarantine, because another rank of this decoder cannot be asked: %s", error)
            return
        await self._slab.delivered()
        step()

    def _rank_of(self, writer: bytes, attempt: str) -> int | None:
        """Returns the sender rank as which this connection writes the attempt; None for a stranger, whose word is
        ignored."""
        reservation = self._reservations.get(attempt)
        return None if reservation is None else reservation.rank_of(writer)

    # ── what follows from a change of state ─────────────────────────────────────────────────────────────────────────

    def _grant(self) -> None:
        """Grants pages from the queue, and tells the senders."""
        for grant in self._reservations.pump():
            if self._open_window(grant.reservation):
                self._tell_grant(grant)
                self._tell_savings(grant.reservation)

    def _open_window(self, reservation: Reservation) -> bool:
        """Tells the intake of a windowed attempt. Returns True unless the attempt is windowed and the intake fails."""
        if not reservation.window or self._intake is None:
            return True
        kv = self._identity.layout.kv
        table = page_table(kv.groups, reservation.num_tokens, kv.chunk_size)
        return self._pass_on(reservation, partial(self._intake.opened, reservation.attempt, table))

    def _tell_grant(self, grant: Grant) -> None:
        attempt, num_cached = grant.reservation.attempt, grant.reservation.num_cached
        pages, present = runs_of(grant.pages), runs_of(grant.present)
        self._tell(grant.tell, wire.Reserved(attempt=attempt, pages=pages, present=present, num_cached=num_cached))

    def _tell_savings(self, reservation: Reservation) -> None:
        """Tells the proxy that some pages are not needed. Until then the proxy keeps pages for the whole prompt."""
        if reservation.num_cached:
            self._signal(reservation, wire.KvGranted, num_pages=len(reservation.pages))

    def _signal(self, reservation: Reservation, kind: Callable[..., wire.Signal], **facts: object) -> None:
        """Tells the proxy the same for all ranks, because it waits for a word from each."""
        for rank in range(self.num_ranks):
            signal = kind(attempt=reservation.attempt, rank=rank, epoch=self._agent.epoch, **facts)
            self._notifier.tell(reservation.notify, signal)

    def _withdraw(self, attempt: str, reason: str, outcome: str = "failed") -> None:
        change = self._reservations.withdraw(attempt, reason, outcome)
        if change is not None:
            self._follow(change)
            self._reset_timer()

    def _ready(self, reservation: Reservation) -> None:
        """Tells that every byte of the attempt is here. The proxy may send the decode leg."""
        log.debug("%r", reservation)
        if not reservation.window:
            self._slab.tags.expect(reservation.own_pages, tag_of(reservation.attempt), reservation.num_senders)
        moved = self._moved.get(reservation.attempt, [])
        num_bytes = sum(done.num_bytes for done in moved)
        seconds = max((done.transfer_s for done in moved), default=0.0)

        def ready(*, rank: int, **facts: Any) -> wire.Signal:
            return wire.KvReady(rank=rank, num_bytes=0 if rank else num_bytes, **facts)

        self._signal(reservation, ready, num_pages=len(reservation.pages), transfer_s=seconds)
        self._wake(reservation.attempt)

    def _check_or_withdraw(self, reservation: Reservation, pages: Sequence[int]) -> None:
        """Looks at the tags of these pages. Raises `AttemptLost` where another attempt has written them; then the
        attempt is withdrawn."""
        try:
            self._slab.check_tags(reservation.attempt, pages)
        except AttemptLost as error:
            self._reservations.distrust(reservation.attempt)
            self._withdraw(reservation.attempt, str(error), "failed")
            raise

    def _follow(self, change: Change) -> None:
        """Tells everyone concerned what has become of an attempt that failed or was withdrawn.

        Then the queue has its turn: the attempt may have been its head, or have left pages that it shared.
        """
        reservation = change.reservation
        if change.is_failed:
            self._bury(reservation.attempt, reservation.reason)
            self._fail(reservation)
        self._tell(change.stop, wire.Cancel(attempt=reservation.attempt))
        if change.is_released:
            self._tell_released(reservation, reservation.outcome)
        self._grant()

    def _fail(self, reservation: Reservation) -> None:
        """Tells everybody who waits for this attempt's KV that it will not come."""
        attempt, reason = reservation.attempt, reservation.reason
        self._close_intake(reservation, reason)
        self._wake(attempt, AttemptLost(f"attempt {attempt}: {reason}"))
        self._signal(reservation, wire.KvFailed, reason=reason)

    def _close_intake(self, reservation: Reservation, reason: str) -> None:
        """Tells the intake that it may forget this attempt, if it was told that the attempt passes through the
        buffer."""
        if reservation.window and reservation.pages and self._intake is not None:
            try:
                self._intake.closed(reservation.attempt, reason)
            except Exception:  # border: an engine's own code
                log.exception("the intake failed")

    def _tell_released(self, reservation: Reservation, outcome: str) -> None:
        """Tells the proxy that the attempt's pages are free again."""
        self._moved.pop(reservation.attempt, None)
        self._signal(reservation, wire.KvReleased, num_pages=len(reservation.pages), reason=outcome)

    def _wake(self, attempt: str, error: AttemptLost | None = None) -> None:
        waiter = self._waiters.pop(attempt, None)
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
            waiter.exception()  # marked as seen: the waiter may have left already

    def _bury(self, attempt: str, reason: str) -> None:
        self._tombstones[attempt] = reason
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _tell(self, writers: Iterable[bytes], message: wire.ReceiverMessage) -> None:
        for writer in writers:
            if not self._send(writer, message) and (successor := self._successor(writer)) is not None:
                self._send(successor, message)

    def _successor(self, writer: bytes) -> bytes | None:
        """Returns the latest connection of the same sender, or None where that is this one."""
        peer = self._peers.get(writer)
        if peer is None:
            return None
        same = [(other.serial, one) for one, other in self._peers.items() if other.speaks_for(peer) and one != writer]
        return max(same)[1] if same else None

    def _send(self, writer: bytes, message: wire.ReceiverMessage) -> bool:
        """Queues a message for a sender. Returns False when that sender has no connection any more."""
        return self._socket.send([writer, wire.encode(message)])

    # ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reset_timer(self) -> None:
        """Sets the one timer to the next thing that can run out. There is no timer while no attempt is here, and none
        after the end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = None if self._socket.is_closed else self._next_due()
        if due is not None:
            self._due = due
            # Not less, so that times which are due one after the other do not keep the loop busy.
            delay = max(0.01, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_time)

    def _next_due(self) -> float | None:
        expiry = self._reservations.next_expiry()
        silence = min(
            (self._last_heard[w] + self._config.writer_timeout_s for w in self._writers_with_attempts()),
            default=None,
        )
        return min((t for t in (expiry, silence) if t is not None), default=None)

    def _writers_with_attempts(self) -> list[bytes]:
        return [w for w in self._last_heard if self._reservations.of_writer(w)]

    def _on_time(self) -> None:
        now = self._clock()
        if now - self._due > self._config.heartbeat_s:
            # This process stood still (stopped, suspended): what was said meanwhile has not been read yet.
            self._last_heard = dict.fromkeys(self._last_heard, now)
        for reservation in self._reservations.expired(now):
            self._withdraw(reservation.attempt, "expired", "expired")
        for writer, heard_at in list(self._last_heard.items()):
            if heard_at + self._config.writer_timeout_s <= now:
                self._writer_lost(writer)
        self._reset_timer()

    def _writer_lost(self, writer: bytes) -> None:
        """Fails the attempts of a sender that has been silent for too long.

        Silence proves nothing about the sender's writes, with or without a connection: a process that stands still may
        go on in the middle of one. So the pages wait, and the sender is reminded for as long as it can be reached.
        """
        for reservation in self._reservations.of_writer(writer):
            if reservation.holding is not Holding.QUARANTINED:
                log.warning("%r: %s", reservation, VANISHED)
                self._withdraw(reservation.attempt, VANISHED)
        if self._reservations.of_writer(writer) and self._remind(writer):
            self._last_heard[writer] += self._config.heartbeat_s  # look again after that time
            return
        del self._last_heard[writer]


def _notify_hosts(config: ReceiverConfig) -> AllowedHosts:
    """Returns the hosts that signals may go to. Raises `TransferError` for a pattern that is none."""
    if config.notify_hosts:
        return AllowedHosts(config.notify_hosts)
    if config.attempt_key is not None:
        return AllowedHosts([EVERYWHERE])
    own = [wire.bracketed(config.host)]
    return AllowedHosts([*THIS_MACHINE, *(host for host in own if host != EVERYWHERE)])
