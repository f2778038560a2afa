"""``python -m transfer.dataplane DESCRIPTOR`` is a data plane's process. `transfer.dataplane.own_process` starts it.

The process ends when its engine closes the socket behind the descriptor, and is killed by the kernel when the engine
dies.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from transfer import logs
from transfer.agents.base import Event, Region, close_agent
from transfer.agents.nixl import NixlAgent
from transfer.agents.nixl_options import NixlOptions
from transfer.child_process import end_with_parent, read_message, take_frames, write_message
from transfer.dataplane.events import SeenFlag, SharedFlags
from transfer.dataplane.host import PushHost
from transfer.dataplane.messages import (
    CannotStart,
    Command,
    Filled,
    Ready,
    Report,
    Setup,
)
from transfer.errors import TransferError
from transfer.memory.buffer import region_of
from transfer.memory.shared import GpuTicket, SharedMemory, as_tensor, import_gpu_memory
from transfer.plan.layout import KvLayout
from transfer.roles.handshake import Identity
from transfer.roles.sender import Sender
from transfer.trust import FleetKey

READ_BYTES = 1 << 18
MAX_IPC_EVENTS = 4096
"""The most CUDA events of the engine that are kept open here. An engine records few events again and again."""
_setup: msgspec.msgpack.Decoder[Setup] = msgspec.msgpack.Decoder(Setup)
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def main() -> None:
    end_with_parent()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


async def serve(connection: socket.socket) -> None:
    """Carries out what the engine says until the engine closes its end."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=READ_BYTES)
    setup = await read_message(reader, _setup)
    if setup is None or os.getppid() != setup.parent:
        return  # the engine died before this process was tied to its life
    logs.configure(setup.log_level)
    agent = slab = None
    try:
        slab, region = _slab_of(setup)
        agent = NixlAgent(
            setup.epoch, receives=False, options=_options_of(setup), device=setup.device, is_imported=True
        )
        await asyncio.wrap_future(agent.register(region))
    except (TransferError, RuntimeError, OSError) as error:
        if agent is not None:
            await asyncio.to_thread(close_agent, agent, slab)
        write_message(writer, CannotStart(str(error)))
        await writer.drain()
        return
    key = None if setup.fleet_key is None else FleetKey.parse(setup.fleet_key)
    sender = Sender(agent, _identity_of(setup), fleet_key=key)
    report: Callable[[Report], None] = partial(write_message, writer)
    host = PushHost(sender, report, _Events(setup).of)
    report(Ready())
    reading = asyncio.create_task(_read(reader, host))
    closed = asyncio.create_task(host.closed.wait())
    await asyncio.wait((reading, closed), return_when=asyncio.FIRST_COMPLETED)
    await host.aclose()
    for task in (reading, closed):
        task.cancel()
    await asyncio.gather(reading, closed, return_exceptions=True)
    await asyncio.to_thread(close_agent, agent, slab)
    writer.close()
    del slab  # not earlier: the agent sent from it
    if not reading.cancelled() and (broken := reading.exception()) is not None:
        raise broken  # a command could not be read: the engine and this process have unlike code


async def _read(reader: asyncio.StreamReader, host: PushHost) -> None:
    """Hands the commands to `host` as they come. All commands that are there are handed over at once."""
    unread = bytearray()
    while data := await reader.read(READ_BYTES):
        unread += data
        for message in take_frames(unread):
            host.handle(_command.decode(message))


def _slab_of(setup: Setup) -> tuple[torch.Tensor, Region]:
    if setup.slab_descriptor is not None:
        slab = as_tensor(SharedMemory(setup.slab_descriptor, setup.slab_bytes))
    else:
        assert setup.gpu_slab is not None
        slab = import_gpu_memory(GpuTicket(*setup.gpu_slab))
    return slab, region_of(slab, setup.slab_bytes)


def _identity_of(setup: Setup) -> Identity:
    kv = KvLayout(tuple(setup.layers), setup.chunk_size, setup.element_bytes, setup.dtype)
    return Identity(setup.model, kv.of_rank(setup.num_ranks, setup.rank))


def _options_of(setup: Setup) -> NixlOptions:
    return NixlOptions(tuple(setup.backends), setup.backend_options, setup.progress_delay_us)


class _Events:
    """`_Events` holds the events that the engine's pushes wait for. Mutable state: `_opened`, CUDA events by handle,
    oldest first."""

    def __init__(self, setup: Setup) -> None:
        self._flags = SharedFlags(SharedMemory(setup.flags_descriptor, SharedFlags.NUM_BYTES))
        self._device = torch.device(setup.device)
        self._opened: dict[bytes, Event] = {}

    def of(self, filled: Filled) -> Event | None:
        """Returns the event that these pages wait for, or None where there is none."""
        if filled.flag is not None:
            return SeenFlag(self._flags, *filled.flag)
        if filled.ipc_event is None:
            return None
        event = self._opened.get(filled.ipc_event)
        if event is None:
            event = torch.cuda.Event.from_ipc_handle(self._device, filled.ipc_event)  # type: ignore[no-untyped-call]
            self._opened[filled.ipc_event] = event
            if len(self._opened) > MAX_IPC_EVENTS:
                del self._opened[next(iter(self._opened))]
        return event


if __name__ == "__main__":
    main()
