"""The measurement times a push layer by layer from a process that is idle, and from one in which a Python thread is
busy beside it.

An engine's worker is such a thread. The same push is carried out by a data plane that is a thread of the process, and
by one that is a process of its own. Three conditions follow each other in turns, on one machine in one run: nothing
else to do (``idle``), a busy thread in the process that pushes (``busy``), and the same work in another process
(``elsewhere``), which takes as much of the cores and nothing of the interpreter lock.

A push is timed from its first layer until the decoder has all of it. The time until the pushing process knows that is
told separately.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from scripts.dev.bench_transfer.ours import MODEL, TIMEOUT_S, layout_of
from scripts.dev.bench_transfer.processes import PEER
from scripts.dev.common.child import Child, child_group
from transfer import wire
from transfer.agents.nixl import NixlAgent
from transfer.dataplane.in_process import InProcess
from transfer.dataplane.own_process import OwnProcess
from transfer.dataplane.plane import DataPlane, PlanePush
from transfer.memory.buffer import PagedBuffer
from transfer.roles.handshake import Identity

NUM_LAYERS, NUM_PAGES = 80, 64
LAYER_BYTES = 4096
"""The bytes of one layer of a page: 16 tokens of one head."""
PAGE_BYTES = NUM_LAYERS * LAYER_BYTES
WARM_UP = 2
START_S = 0.1
"""The time, in seconds, in which an interpreter has started."""
KINDS = ("thread", "process")
WORK = "while True: sum(number * number for number in range(1_000))"


async def measure_busy(rounds: int, lifetime_s: float) -> dict[str, Any]:
    """Returns, JSON-ready, for each kind of data plane the milliseconds per push, idle and busy. Raises
    `BenchError`."""
    async with child_group() as children:
        receiver = await children.start("receiver", PEER, "receiver", "cpu", lifetime_s)
        address = await receiver.ask("lay_out", PAGE_BYTES, NUM_PAGES, NUM_LAYERS)
        found = {kind: await _measure(kind, receiver, address, rounds) for kind in KINDS}
    return {"layers": NUM_LAYERS, "pages": NUM_PAGES, "bytes": NUM_PAGES * PAGE_BYTES, "rounds": rounds, **found}


def busy_lines(found: dict[str, Any]) -> list[str]:
    """Formats for people what `measure_busy` found."""
    lines = [f"{found['layers']} layers of {found['pages']} pages, with an event each, beside a busy Python thread:"]
    for kind in KINDS:
        one = found[kind]
        lines.append(
            f"data plane as a {kind}: {one['idle_ms_median']:.1f} ms idle, {one['busy_ms_median']:.1f} ms busy, "
            f"ratio {one['ratio']:.2f} ({one['elsewhere_ms_median']:.1f} ms beside as much work in another process, "
            f"ratio {one['ratio_to_elsewhere']:.2f}); told of all layers in {one['told_ms_median']:.1f} ms"
        )
    return lines


async def _measure(kind: str, receiver: Child, address: list[Any], rounds: int) -> dict[str, Any]:
    plane = _plane_of(kind)
    conditions: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "idle": contextlib.nullcontext,
        "busy": _busy_thread,
        "elsewhere": _busy_process,
    }
    times: dict[str, list[float]] = {**{name: [] for name in conditions}, "told": [], "known": []}
    try:
        await asyncio.wrap_future(plane.start())
        for number in range(WARM_UP + rounds):
            for name, load in conditions.items():
                attempt = uuid.uuid4().hex
                endpoint = wire.Endpoint(rank=0, host=address[0], port=address[1])
                params = wire.PushParams(attempt=attempt, receivers=[endpoint], timeout_s=TIMEOUT_S)
                push = plane.open(params, num_tokens=NUM_PAGES * plane.layout.chunk_size)
                await asyncio.wrap_future(push.granted)
                arriving = asyncio.ensure_future(receiver.ask("arrived", attempt))
                await asyncio.sleep(0)  # it is asked before there is anything to wait for
                with load():
                    started, told, known = await asyncio.to_thread(_fill, plane, push)
                arrived = await arriving
                if number >= WARM_UP:
                    times[name].append((arrived - started) * 1e3)
                    times["told"].append((told - started) * 1e3)
                    times["known"].append((known - arrived) * 1e3)
    finally:
        await asyncio.to_thread(plane.close)
    medians = {f"{name}_ms_median": statistics.median(values) for name, values in times.items()}
    busy = medians["busy_ms_median"]
    return {
        **medians,
        "ratio": busy / medians["idle_ms_median"],
        "ratio_to_elsewhere": busy / medians["elsewhere_ms_median"],
        **{f"{name}_ms": times[name] for name in conditions},
    }


def _plane_of(kind: str) -> DataPlane:
    layout, epoch = layout_of(PAGE_BYTES, NUM_LAYERS), uuid.uuid4().hex
    slab, identity = PagedBuffer(NUM_PAGES, PAGE_BYTES, is_shared=True), Identity(MODEL, layout)
    if kind == "process":
        return DataPlane(OwnProcess(epoch, slab, identity))
    make: Callable[[], NixlAgent] = lambda: NixlAgent(epoch, receives=False)  # noqa: E731
    return DataPlane(InProcess(make, slab, identity))


def _fill(plane: DataPlane, push: PlanePush) -> tuple[float, float, float]:
    """Fills a push as an engine's thread does. Returns when it began, when it had told of all layers, and when it knew
    that they are at the decoder, on `time.monotonic()`."""
    pages = list(range(NUM_PAGES))
    started = time.monotonic()
    for layer in range(NUM_LAYERS):
        event = plane.event()
        push.pages_filled(pages, pages, layer, layer + 1, after=event)
        event.set()
    told = time.monotonic()
    push.finish().result(TIMEOUT_S)
    return started, told, time.monotonic()


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    """Returns a context manager. While it is open, a thread of this process computes in Python, and gives the
    interpreter lock up when it has to."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(number * number for number in range(1_000))

    thread = threading.Thread(target=work, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _busy_process() -> Iterator[None]:
    """Returns a context manager. While it is open, another process computes the same."""
    process = subprocess.Popen([sys.executable, "-c", WORK])
    try:
        time.sleep(START_S)
        yield
    finally:
        process.kill()
        process.wait()
