"""A decoder's receiver beside vLLM's worker: a thread with an event loop, and the address at which the proxy asks for
facts. A prefiller has the thread too, for the facts alone."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from transfer import wire
from transfer.agents.base import TransferAgent, close_agent
from transfer.connectors.vllm.facts import FactsServer, facts_app
from transfer.connectors.vllm.loop_thread import LoopThread, use_own_stream
from transfer.connectors.vllm.other_ranks import OtherRanks
from transfer.connectors.vllm.shared_takes import SharedTakes
from transfer.connectors.vllm.transfer_statistics import PAGES
from transfer.errors import TransferError
from transfer.memory.buffer import PagedBuffer
from transfer.memory.engine_cache import EngineCache
from transfer.roles.handshake import Identity
from transfer.roles.rank_slab import OtherSlabs
from transfer.roles.receiver import Receiver, ReceiverConfig

log = logging.getLogger(__name__)
T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""The longest time, in seconds, that the start of the thread may take."""
PAGES_INTERVAL_S = 0.5
"""The seconds between two looks at the buffer's pages, for the statistics."""


class ReceiverThread(LoopThread):
    """A `ReceiverThread` serves facts, and holds a `Receiver` where it is given an agent and a buffer.

    Methods may be called from any other thread. They wait for the event loop, which has little to do.

    Mutable state: `_receiver` and `_takes`, which belong to the loop; `_server` and `_others`, set once at the start;
    `pages`.
    """

    def __init__(
        self,
        make_facts: Callable[[Receiver | None], wire.BufferFacts],
        is_healthy: Callable[[], bool],
        host: str,
        port: int,
    ) -> None:
        super().__init__("kv-receiver")
        self._make_facts = make_facts
        self._is_healthy = is_healthy
        self._host = host
        self._port = port
        self._receiver: Receiver | None = None
        self._takes: SharedTakes | None = None
        self._others: OtherRanks | None = None
        self.pages: dict[str, int] = {}
        """Counts the buffer's pages by state, as they were at most `PAGES_INTERVAL_S` ago. It is replaced, and never
        changed, so any thread may read it."""
        self._close_agent: Callable[[], None] = lambda: None
        self._server: FactsServer | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the thread, and serves facts. Raises `TransferError` where the port cannot be had."""
        self._thread.start()
        self._do(self._serve(), START_TIMEOUT_S)

    def receive(
        self,
        agent: TransferAgent,
        buffer: PagedBuffer,
        identity: Identity,
        config: ReceiverConfig,
        cache: EngineCache | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        """Opens a receiver, once all `others` have joined. Raises `TransferError` where its parts do not fit together,
        its port cannot be had, or a rank does not come."""
        self._close_agent = lambda: close_agent(agent, buffer)
        self._others = others

        async def receive() -> None:
            use_own_stream(buffer.pages)
            slabs = None if others is None else OtherSlabs(await others.joined(), others.delivered)
            receiver = Receiver(agent, buffer, identity, config, others=slabs, cache=cache)
            try:
                await receiver.start()
            except zmq.ZMQError as error:
                await receiver.aclose()
                where = f"port {config.port} on {config.host}"
                raise TransferError(f"{where} cannot be had ({error}); choose another receiver_port or host") from None
            self._receiver, self._takes = receiver, SharedTakes(receiver)
            if others is not None:
                others.takes = self._takes
                if others.lost is not None:  # meanwhile: nobody has told `takes`
                    raise others.lost
            self._look_at_pages()

        try:
            self._do(receive(), START_TIMEOUT_S)
        except TimeoutError:
            raise TransferError(f"the receiver and its ranks have not started within {START_TIMEOUT_S:g} s") from None

    def take(self, attempt: str, num_tokens: int) -> list[int]:
        """Does what `SharedTakes.take` does, for rank 0. Returns the pages, by ordinal."""
        return self._call(lambda _, takes: list(takes.take(0, attempt, num_tokens).pages))

    def check_tags(self, attempt: str) -> None:
        """Does what `Receiver.check_tags` does. Raises `AttemptLost`."""
        self._call(lambda receiver, _: receiver.check_tags(attempt))

    def consumed(self, attempt: str) -> None:
        """Does what `SharedTakes.end` does, for rank 0, and raises what it raises."""
        self._call(lambda _, takes: takes.end(0, attempt))

    def release(self, attempt: str) -> None:
        """Gives an attempt's pages back, which nobody has read. Returns at once."""

        def release() -> None:
            if self._takes is not None and self._takes.is_reading(0, attempt):
                self._takes.end(0, attempt)
            elif self._receiver is not None:
                self._receiver.cancel(attempt, "the decoder does not need it")

        self._loop.call_soon_threadsafe(release)

    def close(self) -> None:
        """Closes the receiver and stops serving. Waits for that."""
        if self._thread.is_alive():
            try:
                self._do(self._aclose(), 10.0)
            except (TransferError, TimeoutError) as error:
                log.warning("the receiver was not closed: %s", error)
            self._stop()
        self._close_agent()

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, work: Callable[[Receiver, SharedTakes], T]) -> T:
        async def call() -> T:
            if self._receiver is None or self._takes is None:
                raise TransferError("this engine is a prefiller: nothing can be received here")
            try:
                return work(self._receiver, self._takes)
            finally:
                self._count_pages()

        return self._do(call(), None)

    def _look_at_pages(self) -> None:
        self._count_pages()
        self._loop.call_later(PAGES_INTERVAL_S, self._look_at_pages)

    def _count_pages(self) -> None:
        if self._receiver is not None:
            pages = self._receiver.reservations
            counts = pages.num_free, pages.num_reserved, pages.num_quarantined
            self.pages = dict(zip(PAGES, counts, strict=True))

    async def _serve(self) -> None:
        self._server = FactsServer(facts_app(self), self._host, self._port)
        # Bound here: where uvicorn cannot have a port it ends the thread, and who waits for the start waits on.
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._bound()]))
        while not self._server.started:
            if self._serving.done():
                raise TransferError(f"{self._host}:{self._port} (host, kv_port) cannot be served")
            await asyncio.sleep(0.01)

    def _bound(self) -> socket.socket:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            return socket.create_server(address[:2], family=family)
        except OSError as error:
            text = f"port {self._port} on {self._host} cannot be had ({error}); choose another kv_port or host"
            raise TransferError(text) from None

    async def _aclose(self) -> None:
        if self._receiver is not None:
            await self._receiver.aclose()
        if self._others is not None:
            self._others.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    # ── for the routes, on the event loop ───────────────────────────────────────────────────────────────────────────

    def is_healthy(self) -> bool:
        """Tells whether this engine's end of the transfer can work."""
        return self._is_healthy() and (self._others is None or self._others.lost is None)

    def buffer_facts(self) -> wire.BufferFacts:
        """Returns what the proxy is told."""
        facts = self._make_facts(self._receiver)
        num_wrong = facts.num_wrong_tags + (0 if self._takes is None else self._takes.num_wrong_tags)
        term = None if self._receiver is None else self._receiver.highest_term.value
        return msgspec.structs.replace(facts, num_wrong_tags=num_wrong, term=term)

    def cancel(self, attempt: str) -> bool:
        """Withdraws an attempt. Returns True when none of its pages is held any more."""
        return self._receiver is None or self._receiver.cancel(attempt)

    def sender_ended(self, epoch: str) -> bool:
        """Notes that a prefiller's process has ended. See `Receiver.sender_ended`."""
        return self._receiver is None or self._receiver.sender_ended(epoch)
