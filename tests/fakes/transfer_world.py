"""Senders, receivers and a proxy over real ZMQ on loopback, with a data mover that writes when the test says so.

Leaving `new_world` checks what every test owes: all pages free, or soon so by messages under way, all counts right, no
task or exception left behind.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
import zmq.asyncio

from transfer import wire
from transfer.agents.mock import Hold, MockAgent, MockFabric, MockWrite
from transfer.memory.buffer import PagedBuffer
from transfer.memory.engine_cache import EngineCache
from transfer.memory.reservations import Holding
from transfer.plan.blocks import PageTable
from transfer.plan.layout import KvLayout, Part, RankLayout
from transfer.plan.runs import runs_of
from transfer.plan.tags import tag_of
from transfer.roles.handshake import Identity
from transfer.roles.intake import Intake
from transfer.roles.rank_slab import OtherSlabs, RankSlab
from transfer.roles.receiver import Receiver, ReceiverConfig
from transfer.roles.sender import Push, Sender
from transfer.trust import FleetKey

KV = KvLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=2, chunk_size=4, dtype="float16", element_bytes=2)
IDENTITY = Identity("tiny", KV.of_rank())
LAYOUT = IDENTITY.on_wire
PAGE_BYTES = LAYOUT.page_bytes
CHUNK = KV.chunk_size
QUICK = ReceiverConfig(heartbeat_s=0.1, writer_timeout_s=0.8)
PATIENT = ReceiverConfig(heartbeat_s=5.0, writer_timeout_s=30.0)
LIMIT_S = 5.0

_serial = itertools.count()


def new_epoch() -> str:
    return f"epoch-{next(_serial)}"


class Proxy:
    """A PULL socket that keeps what decoders and prefillers say."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._socket = context.socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.heard: list[wire.AnySignal] = []

    async def next(self, kind: type[Any], attempt: str) -> Any:
        """The first signal of this kind about this attempt, already heard or still to come."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                for signal in self.heard:
                    if isinstance(signal, kind) and signal.attempt == attempt:
                        return signal
                self.heard.append(wire.decode_signal(await self._socket.recv()))

    def count(self, kind: type[Any], attempt: str) -> int:
        return sum(isinstance(signal, kind) and signal.attempt == attempt for signal in self.heard)

    async def all_ranks(self, kind: type[Any], attempt: str, num_ranks: int) -> None:
        """Every rank says so; what was heard until then is in `heard`."""
        async with asyncio.timeout(LIMIT_S):
            while len(set(self.ranks(kind, attempt))) < num_ranks:
                self.heard.append(wire.decode_signal(await self._socket.recv()))

    def ranks(self, kind: type[Any], attempt: str) -> list[int]:
        """Who said so, in ascending order: a rank that did twice is there twice."""
        return sorted(s.rank for s in self.heard if isinstance(s, kind) and s.attempt == attempt)

    def close(self) -> None:
        self._socket.close(linger=0)


class DecoderRank:
    """One rank's slab and agent."""

    def __init__(self, fabric: MockFabric, num_pages: int, identity: Identity) -> None:
        self.layout = identity.layout
        self.agent = MockAgent(fabric, new_epoch())
        self.buffer = PagedBuffer(num_pages, identity.layout.page_bytes)
        self.slab = RankSlab(self.agent, self.buffer, identity)

    def check_elements(self, table: PageTable, pages: Sequence[int], first: int = 0) -> None:
        """Every element that this rank should have is there, in `pages` by ordinal from `first` on."""
        for ordinal, page in enumerate(pages, first):
            for part, content in elements(self.layout, table, ordinal):
                found = self.buffer.pages[page].numpy()[part.offset : part.offset + part.num_bytes]
                assert (found == content).all(), f"ordinal {ordinal}, {part}"


class Decoder:
    """A receiver with the slabs of all ranks: `agent` and `buffer` are rank 0's, `others` those of ranks 1, 2, …"""

    def __init__(
        self,
        fabric: MockFabric,
        num_pages: int,
        config: ReceiverConfig,
        identity: Identity,
        intake: Intake | None,
        cache: EngineCache | None = None,
        others: Sequence[DecoderRank] = (),
        slabs: Sequence[wire.Slab] = (),
    ) -> None:
        self.num_pages, self.identity = num_pages, identity
        self.layout = identity.layout
        self.agent = MockAgent(fabric, new_epoch())
        self.buffer = PagedBuffer(num_pages, identity.layout.page_bytes)
        self.others = list(others)
        self.receiver = Receiver(
            self.agent,
            self.buffer,
            identity,
            config,
            others=OtherSlabs(slabs, self._delivered) if slabs else None,
            intake=intake,
            cache=cache,
        )

    async def _delivered(self) -> None:
        for rank in self.others:
            await rank.slab.delivered()

    @property
    def pages(self) -> Any:
        return self.receiver.reservations

    @property
    def agents(self) -> list[MockAgent]:
        """By rank."""
        return [self.agent, *(rank.agent for rank in self.others)]

    @property
    def buffers(self) -> list[PagedBuffer]:
        """By rank."""
        return [self.buffer, *(rank.buffer for rank in self.others)]

    def bytes_of(self, pages: list[int]) -> list[int]:
        """The first byte of each page; all bytes of a page are the same or this fails."""
        assert all((self.buffer.pages[page] == self.buffer.pages[page][0]).all() for page in pages)
        return [int(self.buffer.pages[page][0]) for page in pages]

    def check_elements(self, table: PageTable, pages: Sequence[int], first: int = 0) -> None:
        """Every element that each rank should have is there, in `pages` by ordinal from `first` on."""
        DecoderRank.check_elements(self, table, pages, first)  # type: ignore[arg-type]
        for rank in self.others:
            rank.check_elements(table, pages, first)

    async def read(self, attempt: str) -> list[int]:
        """Wait for its KV and take the pages, on every rank."""
        async with asyncio.timeout(LIMIT_S):
            await self.receiver.wait_ready(attempt)
        pages = self.receiver.take(attempt)
        for rank in self.others:
            assert rank.slab.take(attempt, self.receiver.written(attempt)) == pages
        return pages

    def holding(self, attempt: str) -> Holding | None:
        found = self.pages.get(attempt)
        return None if found is None else found.holding

    async def lose_writers(self) -> None:
        """All writers have been silent for too long. The pages of one whose connection is still there are kept, so the
        receiver looks again until it has seen the connection go."""

        def are_gone() -> bool:
            for writer in list(self.receiver._last_heard):
                self.receiver._writer_lost(writer)
            return not self.receiver._last_heard

        await until(are_gone)

    def check_all_free(self) -> None:
        self.pages.check_integrity()
        assert self.pages.num_free == self.pages.num_pages
        assert self.receiver._waiters == {}
        assert self.receiver._moved == {}


class Prefiller:
    """A sender with 64 local pages; page i is filled with i + 1."""

    def __init__(self, fabric: MockFabric, identity: Identity, fleet_key: FleetKey | None) -> None:
        self.layout = identity.layout
        self.agent = MockAgent(fabric, new_epoch())
        self.slab = PagedBuffer(64, identity.layout.page_bytes)
        self.agent.register(self.slab.region)
        for page in range(64):
            self.slab.pages[page] = page + 1
        self.sender = Sender(self.agent, identity, fleet_key=fleet_key)

    def die(self, *decoders: Decoder) -> None:
        """As when its process is killed, and these decoders are told by somebody who knows."""
        cut_off(self.sender)
        for decoder in decoders:
            decoder.receiver.sender_ended(self.agent.epoch)

    def mute(self) -> None:
        """It tells the proxy nothing: what the proxy hears then comes from receivers alone."""
        self.sender._notifier.tell = lambda address, signal: None  # type: ignore[method-assign]

    def compute(self, table: PageTable, first_page: int = 0) -> None:
        """The prompt's KV, element by element, into the pages from `first_page` on, one per ordinal."""
        for ordinal in range(len(table)):
            for part, content in elements(self.layout, table, ordinal):
                page = self.slab.pages[first_page + ordinal].numpy()
                page[part.offset : part.offset + part.num_bytes] = content


class World:
    """Decoders, prefillers and a proxy of one test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.fabric = MockFabric()
        self.context = zmq.asyncio.Context()
        self.proxy = Proxy(self.context)
        self.decoders: list[Decoder] = []
        self.sockets: list[zmq.asyncio.Socket] = []

    async def decoder(
        self,
        num_pages: int = 4,
        config: ReceiverConfig = PATIENT,
        identity: Identity = IDENTITY,
        intake: Intake | None = None,
        cache: EngineCache | None = None,
        others: Sequence[DecoderRank] = (),
    ) -> Decoder:
        slabs = [await rank.slab.start() for rank in others]
        decoder = Decoder(self.fabric, num_pages, config, identity, intake, cache, others, slabs)
        self._stack.push_async_callback(decoder.receiver.aclose)
        await decoder.receiver.start()
        self.decoders.append(decoder)
        return decoder

    def prefiller(self, identity: Identity = IDENTITY, fleet_key: FleetKey | None = None) -> Prefiller:
        prefiller = Prefiller(self.fabric, identity, fleet_key)
        self._stack.push_async_callback(prefiller.sender.aclose)
        return prefiller

    async def decoder_ranks(self, kv: KvLayout, size: int, num_pages: int = 4, **options: Any) -> Decoder:
        """One decoder of `size` tensor-parallel ranks."""
        own, *identities = [Identity("tiny", kv.of_rank(size, index)) for index in range(size)]
        others = [DecoderRank(self.fabric, num_pages, identity) for identity in identities]
        return await self.decoder(num_pages, identity=own, others=others, **options)

    def prefiller_ranks(self, kv: KvLayout, size: int) -> list[Prefiller]:
        return [self.prefiller(Identity("tiny", kv.of_rank(size, index))) for index in range(size)]

    def params(self, decoder: Decoder | wire.Endpoint, attempt: str = "a", timeout_s: float = 30.0) -> wire.PushParams:
        """For a push to all ranks of one decoder."""
        endpoints = [decoder] if isinstance(decoder, wire.Endpoint) else decoder.receiver.endpoints
        return wire.PushParams(attempt=attempt, receivers=endpoints, timeout_s=timeout_s, notify=self.proxy.address)

    async def open(
        self,
        prefiller: Prefiller,
        decoder: Decoder,
        attempt: str = "a",
        num_pages: int = 2,
        timeout_s: float = 30.0,
        keys: Sequence[bytes] = (),
    ) -> Push:
        params = self.params(decoder, attempt, timeout_s)
        chunk_size = prefiller.layout.chunk_size
        return await prefiller.sender.open(params, num_tokens=num_pages * chunk_size, keys=keys)

    def raw(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        self.sockets.append(socket)
        return socket

    def stranger(self, decoder: Decoder) -> RawSender:
        socket = self.raw(zmq.DEALER)
        socket.connect(decoder.receiver.endpoint.address)
        return RawSender(socket, decoder, self.proxy.address)

    def raw_receiver(self) -> RawReceiver:
        return RawReceiver(self.fabric, self.raw(zmq.ROUTER))

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(linger=0)
        self.proxy.close()
        self.context.term()


class RawSender:
    """A prefiller that says only what the test tells it to: it can fall silent, lie and babble."""

    def __init__(self, socket: zmq.asyncio.Socket, decoder: Decoder, notify: str) -> None:
        self.socket = socket
        self.epoch = new_epoch()
        self._decoder = decoder
        self._epoch = decoder.agent.epoch
        self._notify = notify
        self._has_greeted = False

    async def greet(self, layout: wire.Layout = LAYOUT) -> wire.ReceiverMessage:
        self._has_greeted = True
        await self.say(wire.Hello(version=wire.PROTOCOL_VERSION, epoch=self.epoch, layout=layout))
        return await self.hear()

    def hang_up(self) -> None:
        self.socket.close(linger=0)

    def die(self) -> None:
        """As when its process ends, and somebody who knows says so."""
        self.hang_up()
        self._decoder.receiver.sender_ended(self.epoch)

    async def say(self, message: wire.Message) -> None:
        """Whatever it says it has written has been, as far as tags go."""
        if isinstance(message, wire.WritesDone | wire.PagesWritten):
            reservation = self._decoder.pages.get(message.attempt)
            if reservation is not None and reservation.pages:
                tag = torch.frombuffer(bytearray(tag_of(message.attempt)), dtype=torch.uint8)
                self._decoder.buffer.tags[:, reservation.own_pages] = tag
        await self.socket.send(wire.encode(message))

    async def hear(self) -> wire.ReceiverMessage:
        async with asyncio.timeout(LIMIT_S):
            return wire.decode_from_receiver(await self.socket.recv())

    def request(self, attempt: str = "a", num_pages: int = 2, **changes: Any) -> wire.Reserve:
        message = wire.Reserve(
            attempt=attempt,
            epoch=self._epoch,
            num_pages=num_pages,
            num_now=num_pages,
            num_tokens=num_pages * CHUNK,
            timeout_s=30.0,
            notify=self._notify,
        )
        return msgspec.structs.replace(message, **changes)

    async def reserve(self, attempt: str = "a", num_pages: int = 2, **changes: Any) -> wire.ReceiverMessage:
        """Ask, having shaken hands, and return the next thing that is heard."""
        if not self._has_greeted:
            await self.greet()
        await self.say(self.request(attempt, num_pages, **changes))
        return await self.hear()

    async def round_trip(self) -> None:
        """Everything said before has been handled when this returns."""
        await self.say(wire.Heartbeat(epoch=self.epoch))
        while not isinstance(await self.hear(), wire.HeartbeatAck):
            pass


class RawReceiver:
    """A decoder of one page that answers only as the test tells it to."""

    WRITER_TIMEOUT_S = 10.0

    def __init__(self, fabric: MockFabric, socket: zmq.asyncio.Socket) -> None:
        self.agent = MockAgent(fabric, new_epoch())
        self._buffer = PagedBuffer(1, PAGE_BYTES)
        self.agent.register(self._buffer.region)
        self._socket = socket
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = wire.Endpoint(rank=0, host="127.0.0.1", port=port)
        self._identity = b""
        self._heard: list[wire.SenderMessage] = []

    async def say(self, message: wire.Message) -> None:
        await self._socket.send_multipart([self._identity, wire.encode(message)])

    async def hear(self, kind: type[Any]) -> Any:
        """The first message of this kind, already heard or still to come."""
        async with asyncio.timeout(LIMIT_S):
            while not any(isinstance(message, kind) for message in self._heard):
                self._identity, payload = await self._socket.recv_multipart()
                self._heard.append(wire.decode_from_sender(payload))
        return next(message for message in self._heard if isinstance(message, kind))

    async def welcome(self, layout: wire.Layout = LAYOUT) -> None:
        await self.hear(wire.Hello)
        region = self._buffer.region
        slab = wire.Slab(
            epoch=self.agent.epoch,
            layout=layout,
            metadata=self.agent.epoch.encode(),
            base_address=region.base_address,
            num_pages=self._buffer.num_pages,
            device_id=region.device_id,
            memory=region.memory,
        )
        await self.say(
            wire.Welcome(
                epoch=self.agent.epoch,
                layout=layout,
                slabs=[slab],
                num_pages=self._buffer.num_pages,
                whole_requests=True,
                heartbeat_s=self.WRITER_TIMEOUT_S / 4,
                writer_timeout_s=self.WRITER_TIMEOUT_S,
            )
        )

    async def grant(self, attempt: str, pages: list[int]) -> None:
        await self.hear(wire.Reserve)
        await self.say(wire.Reserved(attempt=attempt, pages=runs_of(pages)))


@asynccontextmanager
async def new_world() -> AsyncIterator[World]:
    async with _no_loose_ends(), AsyncExitStack() as stack:
        world = World(stack)
        stack.callback(world.close)
        yield world
        with suppress(TimeoutError):
            await until(lambda: all(d.pages.num_free == d.pages.num_pages for d in world.decoders))
        for decoder in world.decoders:
            decoder.check_all_free()


@asynccontextmanager
async def _no_loose_ends() -> AsyncIterator[None]:
    """No task outlives the test, and nothing was reported to the loop as unhandled."""
    unhandled: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    gc.collect(1)  # exceptions that nobody looked at are reported when they are collected
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert unhandled == []


def elements(layout: RankLayout, table: PageTable, ordinal: int) -> Iterator[tuple[Part, np.ndarray[Any, Any]]]:
    """What belongs into each part of a page, as bytes: another 64-bit number for every element of the model."""
    at = table.pages[ordinal]
    group = layout.groups[at.group]
    for part in group.parts:
        num_dims = part.head_bytes // (layout.chunk_size * 8)
        layer, heads = group.layers[part.layer], np.array(part.heads)[:, None, None]
        tokens, dims = np.arange(layout.chunk_size)[None, :, None], np.arange(num_dims)[None, None, :]
        numbers = ((((ordinal * 100 + layer) * 2 + part.is_values) * 100 + heads) * 100 + tokens) * 100 + dims
        yield part, numbers.astype(np.int64).reshape(-1).view(np.uint8)


async def settled(task: asyncio.Task[Any]) -> Any:
    async with asyncio.timeout(LIMIT_S):
        return await task


async def until(condition: Callable[[], bool]) -> None:
    """For what no message tells: the loop is given turns until it is so."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def cut_off(sender: Sender) -> None:
    """Nothing is said any more, and its connections end."""
    for session in sender._sessions.values():
        for task in session._tasks:
            task.cancel()
        session._socket.close(0)


def fill(push: Push, *pages: int) -> None:
    """The next pages of the prompt are these local ones."""
    first = int(push._filled.any(axis=1).sum())
    for ordinal, page in enumerate(pages, first):
        push.page_filled(ordinal, page)


def hold(write: MockWrite) -> Hold:
    """A script: every write waits until the test lands it."""
    return Hold()


async def next_held(agent: MockAgent) -> MockWrite:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.wrap_future(agent.next_held())
