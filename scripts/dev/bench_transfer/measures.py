"""The measurements, one function each. All of them use what `Stage` offers and return plain numbers."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

from scripts.dev.bench_transfer.plan import CONTIGUOUS, NUM_LAYERS, SERIAL, Case, Plan
from scripts.dev.bench_transfer.samples import Measured, p99
from scripts.dev.bench_transfer.stage import Stage

SMALL_PAGES = 16
"""The number of pages in the buffers of the latency measurement."""
COMPUTE_PER_TRANSFER = 2.0
"""The ratio of the time in which a layer is computed to the time in which it travels."""
TRIALS = 4
"""The number of transfers at the end that tell how long a layer travels. As many again follow, in turns with layered
ones."""

Tell = Callable[[str], None]


async def throughput(stage: Stage, plan: Plan, results: list[Measured], tell: Tell) -> None:
    """Measures every case of `plan`, in rounds of ours, bare NIXL and the copy. Appends them to `results` one by
    one."""
    cases = plan.cases
    for page_bytes, alike in groupby(cases, key=lambda case: case.page_bytes):
        await stage.lay_out(page_bytes, plan.total_bytes // page_bytes, NUM_LAYERS)
        await stage.add_bare()
        for case in alike:
            tell(f"case {len(results) + 1} of {len(cases)}")
            await stage.prepare(case)
            await stage.check()
            results.append(await _rounds(stage, case, plan.rounds))


async def _rounds(stage: Stage, case: Case, rounds: int) -> Measured:
    measured = Measured(case)
    for _ in range(rounds):
        measured.ours.append((await stage.ours())[0])
        measured.nixl.append(await stage.nixl())
        measured.copy.append(await stage.copy())
    return measured


async def idle_and_latency(stage: Stage, plan: Plan, tell: Tell) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what an open session costs while nothing happens, and what ours adds to a push of one small page, in
    µs."""
    case = Case(plan.small_page_bytes, CONTIGUOUS, SERIAL, 1, plan.small_page_bytes)
    await stage.lay_out(plan.small_page_bytes, SMALL_PAGES, NUM_LAYERS)
    await stage.prepare(case)
    await stage.ours()
    tell("idle")
    idle = await _idle(stage, plan.idle_s)
    tell("latency")
    await stage.add_bare()
    await stage.check()
    ours, nixl, reserving = [], [], []
    for _ in range(plan.pushes):
        sample, opened = await stage.ours()
        ours.append(sample.seconds * 1e6)
        reserving.append(opened[0].seconds * 1e6)
        nixl.append((await stage.nixl()).seconds * 1e6)
    return idle, latency(ours, nixl, reserving, plan.small_page_bytes)


async def _idle(stage: Stage, seconds: float) -> dict[str, Any]:
    """Returns shares of a core, in percent, with a session open and no attempt in it."""
    ends = {"sender": stage.senders[0], "receiver": stage.receiver}
    before = {name: (await end.ask("cpu"), time.monotonic()) for name, end in ends.items()}
    await asyncio.sleep(seconds)
    used = {}
    for name, end in ends.items():
        cpu_s, began = before[name]
        used_s = await end.ask("cpu") - cpu_s
        used[f"{name}_percent"] = 100 * used_s / (time.monotonic() - began)  # a sleep may last longer than was asked
    return {"seconds": seconds, **used}


def latency(ours: list[float], nixl: list[float], reserving: list[float], page_bytes: int) -> dict[str, Any]:
    """Returns the figures of the latency, all in µs. Entries i of the lists were measured one after the other; what is
    added is taken push by push."""
    added = [mine - bare for mine, bare in zip(ours, nixl, strict=True)]
    in_all = [extra + reserved for extra, reserved in zip(added, reserving, strict=True)]
    figures = {"ours": ours, "nixl": nixl, "added": added, "reserving": reserving, "added_with_reservation": in_all}
    return {
        "page_bytes": page_bytes,
        "pushes": len(ours),
        **{f"{name}_us_median": statistics.median(values) for name, values in figures.items()},
        **{f"{name}_us_p99": p99(values) for name, values in figures.items()},
    }


async def layerwise(stage: Stage, plan: Plan, tell: Tell) -> dict[str, Any]:
    """Returns how much of a transfer is hidden behind the computation, sent layer by layer and, in turns, all at the
    end."""
    layers, pages = plan.layered_layers, plan.layered_pages
    case = Case(plan.layered_bytes // pages, CONTIGUOUS, SERIAL, 1, plan.layered_bytes)
    await stage.lay_out(case.page_bytes, pages, layers)
    await stage.prepare(case)
    tell("layer by layer")
    at_end = [await stage.compute(0.0, trial, as_layers=False) for trial in range(TRIALS)]
    layer_s = statistics.median(at_end) / layers
    compute_s = layer_s * COMPUTE_PER_TRANSFER
    by_layer, at_end = [], []
    for trial in range(TRIALS):
        at_end.append(await stage.compute(compute_s, 2 * trial, as_layers=False))
        by_layer.append(await stage.compute(compute_s, 2 * trial + 1, as_layers=True))
    layer_s = statistics.median(at_end) / layers
    return {
        "bytes": plan.layered_bytes,
        "layers": layers,
        "pages": pages,
        "compute_ms_per_layer": compute_s * 1e3,
        "layer_ms": layer_s * 1e3,
        "at_end_ms": statistics.median(at_end) * 1e3,
        "exposed_ms": statistics.median(by_layer) * 1e3,
        "exposed_layers": statistics.median(by_layer) / layer_s,
        "exposed_ms_by_round": [seconds * 1e3 for seconds in by_layer],
    }
