"""Subscriber follows the KV events of one engine process and keeps an index of its cache.

Events come over a ZMQ PUB socket, numbered from 0 by each process. PUB drops what a subscriber does not take in time,
and what is sent while nobody is connected. So the engine keeps the last batches, and repeats them from any number on at
a second socket. The subscriber asks for them when it begins, when a number is missing, and while it hears nothing: only
then does it know that it has missed nothing, and that the process is the one of before.

The publisher is believed, but not trusted to be well. What it sends may be garbage, too large, out of order, or never
end; all that this costs is the index.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from hashlib import blake2b

import zmq
import zmq.asyncio

from pdproxy.kv_events.index import IndexBroken, KvIndex, Trust
from pdproxy.kv_events.wire import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    MalformedEvents,
    read_batch,
    read_sequence,
)

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
"""The most bytes of a message. ZMQ drops a connection that sends a larger one, and does not read that. A batch of
100,000 prompt tokens in blocks of 16 takes about 700,000 bytes."""
RECEIVE_QUEUE = 128
"""The most batches that wait in a socket, of whatever size they are. Further ones wait at the engine, which drops those
that it has no room for. Then they are asked for again."""
QUIET_S = 3.0
"""Seconds without a batch after which the engine is asked whether there was none."""
REPLY_S = 3.0
"""Seconds that the engine has to repeat one more batch."""
RETRY_S = 5.0
"""Seconds after which everything begins anew, where the index had to be dropped."""
HEARTBEAT_MS = 5_000
"""Milliseconds after which ZMQ finds out about a peer that is gone without a word, and connects again."""
NO_REPLAY = "no replay address is configured, so that nobody can tell whether events were lost"
FORGETFUL = "its replay address did not have a batch that it had just published"


Context = zmq.asyncio.Context
"""The owner of all sockets of a process."""


class ReplayFailed(Exception):
    """A `ReplayFailed` says why the engine could not be asked for batches again."""


class Subscriber:
    """A `Subscriber` keeps `index` as the events at `address` tell; at `replay_address` the engine repeats them. Both
    are ZMQ's, as ``tcp://host:5557``. Without the second one the index is never exact. `name` is for the log.

    Mutable state: the sequence number of the next batch, negative where any may come; the time and a digest of the last
    one; why batches cannot be had again, empty where they can; whether another process is known to be there; what was
    logged last.
    """

    def __init__(
        self,
        index: KvIndex,
        context: Context,
        address: str,
        replay_address: str | None,
        *,
        name: str,
    ) -> None:
        self.index = index
        self._context = context
        self._address = address
        self._replay_address = replay_address
        self._name = name
        self._no_replay = ""
        self._next = 0
        self._last_ts = 0.0
        self._last_digest: bytes | None = None
        self._restarted = asyncio.Event()
        self._told = (Trust.OFF, index.why)

    def restarted(self) -> None:
        """Notes that another process answers there now, whose cache is empty."""
        self.index.drop("another process answers there, whose events were not heard yet")
        self._restarted.set()

    async def run(self) -> None:
        """Follows the events until it is cancelled."""
        while True:
            self._restarted.clear()
            try:
                await self._follow()
            except (IndexBroken, MalformedEvents, ReplayFailed, zmq.ZMQError) as error:
                self.index.drop(str(error))
            except Exception:  # the index is worth less than what else this process does
                log.exception("the KV events of %s met a bug", self._name)
                self.index.drop("reading its events met a bug")
            self._tell()
            # What broke the index may break it again at once: the pause bounds what that costs.
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._restarted.wait()

    def _tell(self) -> None:
        """Logs how far the index can be believed, where that has changed."""
        now = self.index.trust, self.index.why
        if now != self._told:
            self._told = now
            trust, why = now
            log.log(
                logging.INFO if trust is Trust.EXACT else logging.WARNING,
                "what %s has cached is %s%s",
                self._name,
                "known exactly" if trust is Trust.EXACT else f"not known exactly ({trust})",
                f": {why}" if why else "",
            )

    # ── as they come ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self) -> None:
        """Takes batches until another process is there. Raises what makes it impossible to believe the index."""
        self._no_replay = "" if self._replay_address else NO_REPLAY
        live = self._socket(zmq.SUB, self._address)
        try:
            live.subscribe(b"")
            live.connect(self._address)
            await self._begin(-1)
            while not self._restarted.is_set():
                self._tell()
                if await live.poll(int(QUIET_S * 1000)):
                    frames = await live.recv_multipart(zmq.NOBLOCK)
                    await self._take(read_sequence(frames), frames[-1])
                    await asyncio.sleep(0)  # a message that is there does not suspend by itself
                elif not self._no_replay:
                    await self._check()
        finally:
            live.close(linger=0)

    async def _take(self, sequence: int, payload: bytes) -> None:
        """Takes in a batch that has just come. Raises `IndexBroken`, `MalformedEvents`, `ReplayFailed`."""
        if self._next < 0:
            self._next = sequence
        if sequence < self._next:
            if read_batch(payload).ts <= self._last_ts:
                return  # a replay had it already
            log.info("%s publishes its KV events from the beginning: it was restarted", self._name)
            await self._begin(sequence)
        elif sequence > self._next:
            self.index.num_gaps += 1
            if not self._no_replay:
                self.index.doubt("batches of its events are missing, and are asked for")
                await self._catch_up()
                if sequence >= self._next:
                    self._no_replay = FORGETFUL
                    self.index.doubt(FORGETFUL)  # until another process is there: nothing is checked any more
        if sequence > self._next:
            self._lose(sequence)
        if sequence == self._next:
            await self._apply(sequence, payload)

    async def _apply(self, sequence: int, payload: bytes) -> None:
        """Takes in a batch. A large one is taken in bit by bit, so that nobody has to wait for all of it."""
        batch = read_batch(payload)
        for _ in self.index.steps(batch):
            await asyncio.sleep(0)
        self._next, self._last_ts = sequence + 1, batch.ts
        self._last_digest = _digest(payload)

    def _lose(self, sequence: int) -> None:
        """Begins anew at `sequence`: the batches before it cannot be had."""
        lost = f"{sequence - self._next} batches of events cannot be had any more"
        self.index.begin(self._no_replay or lost)
        self._next = sequence

    # ── once more ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _begin(self, sequence: int) -> None:
        """Begins anew, with all batches of a process that the engine still has; without a replay at the batch
        `sequence`. Raises `IndexBroken`, `MalformedEvents`, `ReplayFailed`."""
        self._last_ts, self._last_digest = 0.0, None
        if self._no_replay:
            self.index.begin(self._no_replay)
            self._next = sequence
            return
        self._from_zero()
        await self._catch_up()

    def _from_zero(self) -> None:
        self.index.begin()
        self.index.doubt("its events are read from the beginning")
        self._next, self._last_digest = 0, None

    async def _check(self) -> None:
        """Asks whether there were other batches after the last one. An engine that does not answer is doubted. Raises
        `IndexBroken`, `MalformedEvents`."""
        with suppress(ReplayFailed):
            await self._catch_up()

    async def _catch_up(self) -> None:
        """Takes in all batches from the next one on. Raises `IndexBroken`, `MalformedEvents`, `ReplayFailed`."""
        while True:
            before = self._next, self._last_digest
            if await self._replay():
                self.index.doubt("")
                return
            if before == (self._next, self._last_digest):
                why = f"its replay address {self._replay_address} does not answer"
                self.index.doubt(why)
                raise ReplayFailed(why)

    async def _replay(self) -> bool:
        """Asks for all batches from the last known one on, and takes in those that follow it. Returns False where no
        end came, or not all are there yet. Raises `IndexBroken`, `MalformedEvents`.

        The engine drops what its socket has no room for, and the end with it. A new socket for each question has
        nothing in it that belongs to another one.
        """
        assert self._replay_address is not None
        socket = self._socket(zmq.DEALER, self._replay_address)
        try:
            socket.connect(self._replay_address)
            start, is_first = max(0, self._next - 1), True
            await socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            while not self._restarted.is_set() and await socket.poll(int(REPLY_S * 1000)):
                frames = await socket.recv_multipart(zmq.NOBLOCK)
                is_end = frames[-2:-1] == [END_OF_REPLAY]
                if is_first and self._last_digest is not None and not self._is_same(start, frames, is_end=is_end):
                    self._from_zero()  # another process is there
                    return False
                if is_end:
                    return True
                sequence = read_sequence(frames)
                if sequence > self._next and not is_first:
                    return False  # some were dropped on the way
                is_first = False
                if sequence > self._next:
                    self._lose(sequence)
                if sequence == self._next:
                    await self._apply(sequence, frames[-1])
                await asyncio.sleep(0)
            return self._restarted.is_set()
        finally:
            socket.close(linger=0)

    def _is_same(self, start: int, frames: list[bytes], *, is_end: bool) -> bool:
        """Tells whether the first message of a replay shows that the process of before is there: it has the last batch
        that it published, number `start`, or so many newer ones that it no longer keeps that one."""
        if is_end:
            return False
        sequence = read_sequence(frames)
        return sequence > start or (sequence == start and _digest(frames[-1]) == self._last_digest)

    def _socket(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, 2_000)
        socket.set(zmq.IPV6, "[" in address)
        return socket


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=8).digest()
